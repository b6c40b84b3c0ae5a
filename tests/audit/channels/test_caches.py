"""Caches of small models: open ones leak, cloaked ones do not, and blocks that are not there are refused."""

from __future__ import annotations

import pytest
from tests.audit.channels.stories import NO_LEAK, group, tell
from tests.audit.made import make_plan

from unmask.audit.channels import caches
from unmask.audit.findings.finding import Outcome


@pytest.fixture(scope="module", autouse=True)
def small_layers(one_thread: None) -> None:
    """Threads on busy cores wait for each other, and sums in another order have other last digits."""


@pytest.mark.parametrize("rest", ["", 'layers = [0]\nparts = ["keys"]', 'storages = ["int8"]\nparts = ["values"]'])
def test_open_caches_leak_their_prompts(tmp_path, llama_folder, rest):
    (found,) = tell(make_plan(tmp_path, group("caches", llama_folder, rest)))
    assert found.outcome is Outcome.LEAK
    assert found.metrics["exact_texts"] == 2


def test_cloaked_and_destroyed_caches_never_leak(tmp_path, llama_folder):
    rest = 'layers = [0, "last"]\ndefences = ["cloak", "noise:sigma=1e3,relative=true"]'
    for found in tell(make_plan(tmp_path, group("caches", llama_folder, rest))):
        assert found.outcome in NO_LEAK
        assert found.metrics["exact_texts"] == 0


def test_what_does_not_go_together_is_said(tiny_llama, tiny_bert):
    assert caches.find_fault({"defences": ["int8", "cloak"]}) is None
    assert "no meaning" in caches.find_fault({"defences": ["withhold:pattern=wte"]})
    assert caches.find_model_fault({"model": "m", "layer": 2}, tiny_llama) is None
    assert caches.find_model_fault({"model": "m", "layer": "last"}, tiny_llama) is None
    assert "use 0 to 2" in caches.find_model_fault({"model": "m", "layer": 3}, tiny_llama)
    assert "no cache" in caches.find_model_fault({"model": "m", "layer": 0}, tiny_bert)
