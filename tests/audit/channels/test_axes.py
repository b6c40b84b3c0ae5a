"""The axes of a plan: what a list may hold, and the one text that each entry is written with."""

from __future__ import annotations

import pytest

from unmask.audit.channels.table import CHANNEL_AUDITS
from unmask.channels import CHANNELS
from unmask.errors import InputError
from unmask.metrics import METRICS


def read(channel: str, name: str, value: object) -> object:
    return CHANNEL_AUDITS[channel].axes[name].read(value)


def test_every_channel_has_metrics_and_an_audit():
    assert set(CHANNEL_AUDITS) == set(CHANNELS)
    assert all(any(metric.is_of(channel) for metric in METRICS.values()) for channel in CHANNELS)
    assert all(any(metric.is_of(channel) for channel in CHANNELS) for metric in METRICS.values())


@pytest.mark.parametrize("channel", CHANNEL_AUDITS)
def test_defaults_can_be_read_and_keys_are_unique(channel):
    axes = CHANNEL_AUDITS[channel].axes
    for axis in axes.values():
        assert all(axis.read(entry) is not None for entry in axis.default)
    assert len({axis.key for axis in axes.values()}) == len(axes)


def test_only_what_cannot_be_guessed_must_be_given():
    required = {
        channel: [name for name, axis in audit.axes.items() if not axis.default]
        for channel, audit in CHANNEL_AUDITS.items()
    }
    of_models = {name: ["models"] for name in ("gradients", "outputs", "caches", "vectors")}
    assert required == {**of_models, "inputs": ["secrets"], "queries": ["secrets"]}


@pytest.mark.parametrize(
    ("channel", "name", "value", "expected"),
    [
        ("gradients", "defences", "none", []),
        ("gradients", "defences", " noise : sigma = 1e-03 ", ["noise:sigma=0.001"]),
        ("gradients", "defences", ["clip:norm=1.0", "none", "int8"], ["clip:norm=1", "int8"]),
        ("gradients", "protocols", "fedavg: local_steps = 4", "fedavg:local_steps=4"),
        ("gradients", "tasks", "next-token", "next_token"),
        ("gradients", "tasks", "default", "default"),
        ("outputs", "layers", "last", "last"),
        ("outputs", "layers", 0, 0),
        ("outputs", "sites", "final_norm", "final_norm"),
        ("vectors", "defences", "private: epsilon = 8.0", ["private:epsilon=8"]),
        ("vectors", "poolings", "cls", "cls"),
        ("vectors", "storages", "int8", "int8"),
        ("queries", "secrets", "random: heads = 2 , width = 8", "random:heads=2,width=8"),
        ("queries", "secrets", "random:width=8,heads=2", "random:heads=2,width=8"),
        ("queries", "defences", "round:decimals=2.0", ["round:decimals=2"]),
        ("queries", "models", "", ""),
    ],
)
def test_an_entry_is_written_one_way(channel, name, value, expected):
    found = read(channel, name, value)
    assert found == expected
    assert read(channel, name, found) == expected


@pytest.mark.parametrize(
    ("channel", "name", "value", "part"),
    [
        *(("gradients", "models", 5, "name"), ("gradients", "models", " ", "name"), ("queries", "models", 0, "name")),
        *(("gradients", "batch_sizes", 0, "from 1"), ("gradients", "batch_sizes", True, "whole")),
        *(("gradients", "batch_sizes", 2.0, "whole"), ("gradients", "seeds", -1, "from 0")),
        *(("gradients", "dtypes", "float16", "bfloat16"), ("gradients", "tasks", "poetry", "next_token")),
        *(("gradients", "tasks", 3, "next_token"), ("gradients", "attacks", "best", "dager")),
        *(("gradients", "defences", 5, "as text"), ("gradients", "defences", [["int8"]], "as text")),
        *(
            ("gradients", "defences", "magic", "no defence 'magic'"),
            ("gradients", "defences", "round:decimals=2", "round"),
        ),
        *(("gradients", "protocols", "fedprox", "fedprox"), ("gradients", "clients", 0, "from 1")),
        *(
            ("outputs", "layers", "first", "whole"),
            ("outputs", "layers", True, "whole"),
            ("outputs", "sites", "x", "mean"),
        ),
        *(("outputs", "attacks", "dager", "default"), ("queries", "defences", "int8", "of a service")),
        *(("queries", "secrets", "weights", "no secret"), ("queries", "secrets", None, "name")),
    ],
)
def test_a_wrong_entry_says_what_was_seen_and_expected(channel, name, value, part):
    with pytest.raises(InputError, match=part):
        read(channel, name, value)
