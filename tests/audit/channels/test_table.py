"""The stories of the channels on small models: what leaks, what does not, and that attacks never see the secret."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.audit.made import WORDS, make_plan

from unmask.audit.cases.case import Case
from unmask.audit.channels import gradients, outputs, queries
from unmask.audit.channels.channel_audit import WorkerContext
from unmask.audit.channels.table import CHANNEL_AUDITS
from unmask.audit.findings.finding import Finding, Outcome
from unmask.audit.plan import Plan
from unmask.evidence.gradients import GradientEvidence
from unmask.evidence.outputs import HiddenEvidence
from unmask.models import Model

NO_LEAK = (Outcome.NO_LEAK, Outcome.INCONCLUSIVE)


@pytest.fixture(scope="module", autouse=True)
def small_layers(one_thread: None) -> None:
    """Threads on busy cores wait for each other, and sums in another order have other last digits."""


def tell(plan: Plan) -> list[Finding]:
    context = WorkerContext(plan.data)
    return [CHANNEL_AUDITS[case["channel"]].run(case, context) for case in plan.cases]


def group(channel: str, folder: Path, rest: str = "") -> str:
    return f'[[{channel}]]\nmodels = ["{folder}"]\ndata = ["notes"]\nbatch_sizes = [2]\n{rest}\n'


@pytest.fixture(params=["bert_folder", "llama_folder"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


# ---- gradients


def test_an_open_update_leaks_its_texts(tmp_path, folder):
    (found,) = tell(make_plan(tmp_path, group("gradients", folder)))
    assert found.outcome is Outcome.LEAK
    assert found.metrics["exact_texts"] == found.metrics["certain_texts"] == 2
    assert found.metrics["cosine"] == 1.0
    assert "epsilon" not in found.metrics
    assert {"".join(piece for piece, _ in pair.true or ()) for pair in found.texts} <= {
        f"[CLS] {text} [SEP]" for text in WORDS
    }
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


# ---- outputs


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


# ---- the fence


def values_of(thing: object, depth: int = 0) -> list[str]:
    """Every text that can be reached from an object through fields, tables and lists."""
    if isinstance(thing, str):
        return [thing]
    if depth > 6 or isinstance(thing, (torch.Tensor, torch.nn.Module, Model)):
        return []
    parts: list[object] = []
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        parts = [getattr(thing, field.name) for field in dataclasses.fields(thing)]
    elif isinstance(thing, dict):
        parts = [*thing.keys(), *thing.values()]
    elif isinstance(thing, (list, tuple, set, frozenset)):
        parts = list(thing)
    return [text for part in parts for text in values_of(part, depth + 1)]


@pytest.mark.parametrize(("channel", "kind"), [("gradients", GradientEvidence), ("outputs", HiddenEvidence)])
def test_the_attack_gets_evidence_and_model_and_nothing_else(tmp_path, bert_folder, monkeypatch, channel, kind):
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def spy(*arguments: Any, **options: Any) -> Any:
        calls.append((arguments, options))
        return recover(*arguments, **options)

    module = {"gradients": gradients, "outputs": outputs}[channel]
    recover = module.recover_text
    monkeypatch.setattr(module, "recover_text", spy)
    plan = make_plan(tmp_path, group(channel, bert_folder))
    (found,) = tell(plan)
    assert found.metrics["exact_texts"] == 2
    ((arguments, options),) = calls
    evidence, model = arguments
    assert isinstance(evidence, kind)
    assert isinstance(model, Model)
    assert (options.keys(), options["attack"]) == ({"progress", "attack"}, None)
    assert not any(word in text for text in values_of(evidence) for word in " ".join(WORDS).split())
    assert "texts" not in vars(model)


def test_the_service_is_all_that_an_attack_on_weights_gets(monkeypatch):
    calls = []

    def spy(oracle: Any, **options: Any) -> Any:
        calls.append(options)
        return recover(oracle, **options)

    recover = queries.recover_weights
    monkeypatch.setattr(queries, "recover_weights", spy)
    spec = {"channel": "queries", "model": "", "secret": "random:heads=1,width=4", "defences": [], "seed": 2}
    case = Case({**spec, "attack": "default"})
    assert CHANNEL_AUDITS["queries"].run(case, WorkerContext({})).outcome is Outcome.LEAK
    (options,) = calls
    assert {name: options[name] for name in options if name != "progress"} == {"width": 4, "seed": 2, "attack": None}


# ---- the context


def test_one_model_stays_loaded(bert_folder, llama_folder):
    context = WorkerContext({})
    first = context.model(str(bert_folder))
    assert context.model(str(bert_folder)) is first
    assert context.model(str(bert_folder), "bfloat16").dtype is torch.bfloat16
    assert context.model(str(llama_folder)) is context.model(str(llama_folder))
    assert context.model(str(bert_folder)) is not first


def test_noise_is_the_case_s_own(tmp_path, llama_folder, monkeypatch):
    """Defences draw by the id of a case, so that no two cases have the same noise."""
    seeds = []

    def update(*arguments: Any, generator: torch.Generator, **options: Any) -> Any:
        seeds.append(generator.initial_seed())
        return observe(*arguments, generator=generator, **options)

    def states(evidence: Any, defence: Any, generator: torch.Generator) -> Any:
        seeds.append(generator.initial_seed())
        return defend(evidence, defence, generator)

    observe, defend = gradients.observe_update, outputs.defend_states
    monkeypatch.setattr(gradients, "observe_update", update)
    monkeypatch.setattr(outputs, "defend_states", states)
    noise = 'defences = ["noise:sigma=1e6"]'
    plan = make_plan(tmp_path, group("gradients", llama_folder, noise), group("outputs", llama_folder, noise))
    tell(plan)
    assert seeds == [case.seed for case in plan.cases]
    assert len(set(seeds)) == 2
