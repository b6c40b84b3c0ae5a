"""One case from texts to a finding: defences in their order and by the case's seed, before the attack sees anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.audit.channels.stories import group, tell
from tests.audit.made import make_plan

from unmask.audit.channels import seen_texts
from unmask.audit.findings.finding import Outcome
from unmask.audit.running.worker import Worker


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the attack of every case was given."""
    recover, given = seen_texts.recover_text, []

    def call(evidence: Any, *arguments: Any, **options: Any) -> Any:
        given.append(evidence)
        return recover(evidence, *arguments, **options)

    monkeypatch.setattr(seen_texts, "recover_text", call)
    return given


def test_defences_come_one_after_the_other(tmp_path, llama_folder, seen):
    tell(make_plan(tmp_path, group("outputs", llama_folder, 'layers = [1]\ndefences = [["noise:sigma=1e-4", "bf16"]]')))
    tell(make_plan(tmp_path, group("outputs", llama_folder, 'layers = [1]\ndefences = [["bf16", "noise:sigma=1e-4"]]')))
    rounded, noisy = (evidence.states.float() for evidence in seen)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert not torch.equal(noisy, noisy.bfloat16().float())


def test_the_same_case_is_defended_by_the_same_noise(tmp_path, llama_folder, seen):
    for _ in range(2):
        tell(make_plan(tmp_path, group("outputs", llama_folder, 'layers = [1]\ndefences = ["noise:sigma=1e-4"]')))
    assert torch.equal(seen[0].states, seen[1].states)


@pytest.mark.parametrize("channel", ["outputs", "caches", "gradients"])
def test_texts_are_cut_for_the_service_and_for_the_score(tmp_path, llama_folder, channel):
    whole, cut = tell(make_plan(tmp_path, group(channel, llama_folder, 'max_lengths = ["model", 3]')))
    assert len(cut.texts[0].true) == 3 < len(whole.texts[0].true)
    assert cut.metrics["exact_texts"] == len(cut.texts)


def test_the_effort_reaches_the_attack(tmp_path, llama_folder, monkeypatch):
    given = []

    def call(evidence: Any, model: Any, **options: Any) -> Any:
        given.append(options["effort"])
        return recover(evidence, model, **options)

    recover = seen_texts.recover_text
    monkeypatch.setattr(seen_texts, "recover_text", call)
    tell(make_plan(tmp_path, group("gradients", llama_folder, "efforts = [1, 3]")))
    assert given == [1, 3]


@pytest.mark.parametrize("norm", ["1e-17", "1e-40", "1e-60"])
def test_an_update_of_which_next_to_nothing_is_left_is_no_error(tmp_path, llama_folder, norm):
    plan = make_plan(tmp_path, group("gradients", llama_folder, f'defences = ["clip:norm={norm}"]'))
    (case,) = plan.cases
    found = Worker(plan.data, "cpu", threads=1).work(case)
    assert found.outcome is Outcome.INCONCLUSIVE, found.reason
    assert not found.looked_for


@pytest.mark.parametrize("channel", ["outputs", "caches"])
def test_states_near_zero_are_states_in_other_units(tmp_path, llama_folder, channel):
    """At 1e-40 they used to hold gates over texts, as their squares are lost in float32."""
    rest = 'layers = [1]\nmax_lengths = [8]\ndefences = ["clip:norm=1e-36"]'
    (found,) = tell(make_plan(tmp_path, group(channel, llama_folder, rest)))
    assert found.metrics["exact_texts"] == 2, found.reason
    assert "near zero" in found.reason
