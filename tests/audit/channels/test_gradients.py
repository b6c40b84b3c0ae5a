"""Clients' updates on small models: open ones leak, destroyed ones do not, and what does not go together is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.audit.channels.stories import NO_LEAK, group, tell
from tests.audit.made import WORDS, make_plan, spec

from unmask.audit.channels import gradients
from unmask.audit.channels.channel_audit import WorkerContext
from unmask.audit.channels.table import CHANNEL_AUDITS
from unmask.audit.findings.finding import Finding, Outcome
from unmask.models import Model


@pytest.fixture(scope="module", autouse=True)
def small_layers(one_thread: None) -> None:
    """Threads on busy cores wait for each other, and sums in another order have other last digits."""


@pytest.fixture(params=["bert_folder", "llama_folder"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_an_open_update_leaks_its_texts(tmp_path, folder):
    (found,) = tell(make_plan(tmp_path, group("gradients", folder)))
    assert found.outcome is Outcome.LEAK
    assert found.metrics["exact_texts"] == found.metrics["certain_texts"] == 2
    assert found.metrics["cosine"] == 1.0
    assert "epsilon" not in found.metrics
    assert {"".join(piece for piece, _ in pair.true or ()) for pair in found.texts} <= set(WORDS)
    assert found.certificate["holds"]
    assert found.used
    assert found.model_fingerprint
    assert found.chance["exact_texts"] == 0
    assert found == Finding.from_json(found.to_json())


def test_the_task_of_a_model_is_what_it_is_trained_for(tmp_path, bert_folder, llama_folder, monkeypatch):
    tasks = {}

    def remember(model: Model, *arguments: Any, task: str, **options: Any) -> Any:
        tasks[model.family] = task
        return observe(model, *arguments, task=task, **options)

    observe = gradients.observe_update
    monkeypatch.setattr(gradients, "observe_update", remember)
    tell(make_plan(tmp_path, group("gradients", bert_folder), group("gradients", llama_folder)))
    assert list(tasks.values()) == ["classification", "next_token"]


def test_the_attack_of_the_paper(tmp_path, bert_folder):
    (found,) = tell(make_plan(tmp_path, group("gradients", bert_folder, 'attacks = ["dager"]')))
    assert found.metrics["exact_texts"] == 2
    assert "block 1" in found.reason


def test_evidence_that_was_destroyed_never_leaks(tmp_path, folder):
    """The negative control: noise that is far larger than the update, rounded or not."""
    plan = make_plan(
        tmp_path,
        group("gradients", folder, 'defences = ["noise:sigma=1e6", ["noise:sigma=1e6", "int8"]]\nseeds = [0, 1]'),
    )
    for found in tell(plan):
        assert found.outcome in NO_LEAK, found.reason
        assert found.metrics["exact_texts"] == found.metrics["certain_texts"] == 0
        assert abs(found.metrics["cosine"]) < 0.1


def test_protocols_of_opacus_and_peft(tmp_path, bert_folder):
    pytest.importorskip("opacus", reason="Opacus is missing: pip install 'unmask[dp]'")
    pytest.importorskip("peft", reason="PEFT is missing: pip install 'unmask[lora]'")
    protocols = ["fedsgd", "dpsgd:noise_multiplier=0", "dpsgd:noise_multiplier=1", "lora:rank=16", "fedsgd"]
    plan = make_plan(tmp_path, group("gradients", bert_folder, f"protocols = {protocols}"))
    plain, clipped, private, adapters = tell(plan)
    assert plain.metrics["exact_texts"] == clipped.metrics["exact_texts"] == 2
    assert "epsilon" not in clipped.metrics  # no noise, no guarantee
    assert 0 < private.metrics["epsilon"] < 100
    assert private.outcome is Outcome.INCONCLUSIVE
    assert adapters.outcome is Outcome.LEAK
    assert adapters.metrics["token_recall"] == 1.0
    assert any("lora" in name for name in adapters.used)
    context = WorkerContext(plan.data)
    for case in reversed(plan.cases):  # whatever ran before, the model is as it was loaded
        again = CHANNEL_AUDITS["gradients"].run(case, context)
        assert (
            again.to_json()
            == next(found for found in (plain, clipped, private, adapters) if found.id == case.id).to_json()
        )


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"clients": 3}, "3 clients cannot share a batch of 2"),
        ({"clients": 2, "protocol": "dpsgd"}, "one client"),
        ({"task": "masked_token", "protocol": "fedavg"}, "do not train for masked_token"),
    ],
)
def test_what_does_not_go_together(changes, part):
    assert part in gradients.find_fault(spec(**changes))
    assert gradients.find_fault(spec()) is None


def test_tasks_that_a_model_cannot_be_trained_for(tiny_bert, tiny_llama):
    for model, task in ((tiny_bert, "next_token"), (tiny_llama, "masked_token")):
        assert task in gradients.find_model_fault(spec(task=task), model)
    for model, task in ((tiny_llama, "next_token"), (tiny_bert, "masked_token"), (tiny_bert, "default")):
        assert gradients.find_model_fault(spec(task=task), model) is None
