"""Hidden states of small models: open ones leak, destroyed ones do not, and layers that are not there are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.audit.channels.stories import NO_LEAK, group, tell
from tests.audit.made import make_plan

from unmask.audit.channels import outputs
from unmask.audit.findings.finding import Outcome
from unmask.errors import InputError


@pytest.fixture(scope="module", autouse=True)
def small_layers(one_thread: None) -> None:
    """Threads on busy cores wait for each other, and sums in another order have other last digits."""


@pytest.fixture(params=["bert_folder", "llama_folder"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("rest", ["", "layers = [1]", 'sites = ["attention"]', 'sites = ["final_norm"]'])
def test_open_states_leak_their_prompts(tmp_path, folder, rest):
    (found,) = tell(make_plan(tmp_path, group("outputs", folder, rest)))
    assert found.outcome is Outcome.LEAK
    assert found.metrics["exact_texts"] == 2
    assert "cosine" not in found.metrics


def test_states_that_were_destroyed_never_leak(tmp_path, folder):
    plan = make_plan(
        tmp_path, group("outputs", folder, 'layers = [0, "last"]\ndefences = ["noise:sigma=1e3,relative=true"]')
    )
    for found in tell(plan):
        assert found.outcome in NO_LEAK
        assert found.metrics["exact_texts"] == 0


@pytest.mark.parametrize(
    ("site", "layer", "fault"),
    [
        ("stream", "last", None),
        ("stream", 3, None),
        ("stream", 4, "use 0 to 3"),
        ("attention", 2, None),
        ("attention", 3, "use 0 to 2"),  # a module stands behind each layer but the last
        ("final_norm", 3, None),
        ("final_norm", 2, "use 3"),
    ],
)
def test_layers_that_a_model_of_three_blocks_has(tiny_gpt2, site, layer, fault):
    found = outputs.find_model_fault({"model": "m", "layer": layer, "site": site}, tiny_gpt2)
    assert found is None if fault is None else fault in found


def test_states_have_no_names_to_withhold():
    assert outputs.find_fault({"defences": ["int8"]}) is None
    assert "no meaning" in outputs.find_fault({"defences": ["int8", "withhold:pattern=wte"]})


def test_a_layer_is_a_number_or_the_last():
    assert [outputs.read_layer(value) for value in ("last", 0, 7)] == ["last", 0, 7]
    for wrong in (-1, "first", 1.5):
        with pytest.raises(InputError, match="whole number"):
            outputs.read_layer(wrong)
