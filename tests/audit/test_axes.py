"""The axes of a plan: what a list may hold, and the one text that each entry is written with."""

from __future__ import annotations

import pytest

from unmask.audit.axes import AXES
from unmask.audit.channels import STORIES
from unmask.errors import InputError
from unmask.metrics import METRICS


def read(channel: str, name: str, value: object) -> object:
    return AXES[channel][name].read(value)


def test_every_channel_has_axes_metrics_and_a_story():
    assert set(AXES) == {name for metric in METRICS.values() for name in metric.channels} == set(STORIES)


@pytest.mark.parametrize("channel", AXES)
def test_defaults_can_be_read_and_keys_are_unique(channel):
    axes = AXES[channel]
    for axis in axes.values():
        assert all(axis.read(entry) is not None for entry in axis.default)
    assert len({axis.key for axis in axes.values()}) == len(axes)


def test_only_what_cannot_be_guessed_must_be_given():
    required = {channel: [name for name, axis in axes.items() if not axis.default] for channel, axes in AXES.items()}
    assert required == {"gradients": ["models"], "outputs": ["models"], "queries": ["secrets"]}


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
