"""What all channels keep: attacks never see the secret, and no two cases have the same noise."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.audit.channels.stories import group, tell
from tests.audit.made import WORDS, make_plan

from unmask.audit.cases.case import Case
from unmask.audit.channels import gradients, outputs, queries, seen_texts
from unmask.audit.channels.channel_audit import WorkerContext
from unmask.audit.channels.table import CHANNEL_AUDITS
from unmask.audit.findings.finding import Outcome
from unmask.defences import parse_defence
from unmask.evidence.gradients import GradientEvidence
from unmask.evidence.outputs import HiddenEvidence
from unmask.models import Model


@pytest.fixture(scope="module", autouse=True)
def small_layers(one_thread: None) -> None:
    """Threads on busy cores wait for each other, and sums in another order have other last digits."""


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

    recover = seen_texts.recover_text
    monkeypatch.setattr(seen_texts, "recover_text", spy)
    plan = make_plan(tmp_path, group(channel, bert_folder))
    (found,) = tell(plan)
    assert found.metrics["exact_texts"] == 2
    ((arguments, options),) = calls
    evidence, model = arguments
    assert isinstance(evidence, kind)
    assert isinstance(model, Model)
    assert (options.keys(), options["attack"]) == ({"attack", "effort"}, "default")
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
    assert options == {
        "width": 4,
        "seed": 2,
        "attack": "default",
    }


# ---- noise


def test_noise_is_the_case_s_own(tmp_path, llama_folder, monkeypatch):
    """Defences draw by the id of a case, so that no two cases have the same noise."""
    seeds = []

    def update(*arguments: Any, generator: torch.Generator, **options: Any) -> Any:
        seeds.append(generator.initial_seed())
        return observe(*arguments, generator=generator, **options)

    def parse(text: str) -> Any:
        def defend(evidence: Any, generator: torch.Generator) -> Any:
            seeds.append(generator.initial_seed())
            return parse_defence(text)(evidence, generator)

        return defend

    observe = gradients.observe_update
    monkeypatch.setattr(gradients, "observe_update", update)
    noise = 'defences = ["noise:sigma=1e6"]'
    plan = make_plan(tmp_path, group("gradients", llama_folder, noise), group("outputs", llama_folder, noise))
    monkeypatch.setattr(outputs, "parse_defence", parse)
    tell(plan)
    assert seeds == [case.seed for case in plan.cases]
    assert len(set(seeds)) == 2
