"""The three stories of an audit: a secret, what is observed of it, an attack that sees only that, and a score."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from unmask.attacks.progress import Progress, silent
from unmask.attacks.recover import recover_text
from unmask.audit.axes import DEFAULT
from unmask.audit.case import Case
from unmask.audit.data import DataSet
from unmask.audit.finding import Finding
from unmask.audit.observation import observe_update
from unmask.audit.result import finding_of
from unmask.audit.services import interrogate
from unmask.audit.text_result import text_result
from unmask.defences.table import defend_states, parse_defence
from unmask.evidence.gradients import Task
from unmask.models.adapter import Model
from unmask.models.load import load_model
from unmask.protocols.hidden import observe_hidden
from unmask.protocols.table import parse_protocol


@dataclass
class WorkerContext:
    """What cases are worked on with: the data, a device, and the model that was loaded last."""

    data: Mapping[str, DataSet]
    device: str = "cpu"
    progress: Progress = silent
    _loaded: dict[tuple[str, str], Model] = field(default_factory=dict)

    def model(self, name: str, dtype: str = "float32") -> Model:
        """A model; it stays loaded until another one is asked for."""
        if (name, dtype) not in self._loaded:
            self._loaded.clear()
            self._loaded[name, dtype] = load_model(name, dtype=getattr(torch, dtype), device=self.device)
        return self._loaded[name, dtype]


def audit_gradients(case: Case, desk: WorkerContext) -> Finding:
    """A client's texts, the update that the server sees, and what the server makes of it."""
    model = desk.model(case["model"], case["dtype"])
    texts, others = desk.data[case["data"]["name"]].draw(case["batch_size"], case["seed"])
    task = case["task"] if case["task"] != DEFAULT else _natural_task(model)
    seen = observe_update(
        model,
        texts,
        parse_protocol(case["protocol"]),
        [parse_defence(text) for text in case["defences"]],
        num_clients=case["clients"],
        generator=torch.Generator().manual_seed(case.seed),
        task=task,
        seed=case["seed"],
    )
    recovery = recover_text(seen.evidence, model, attack=_attack_of(case), progress=desk.progress)
    scores = text_result(recovery, texts, others, model)
    scores["metrics"]["cosine"] = seen.cosine
    if math.isfinite(seen.epsilon):
        scores["metrics"].update(epsilon=seen.epsilon, delta=seen.delta)
    return finding_of(case, model, recovery, scores)


def audit_outputs(case: Case, desk: WorkerContext) -> Finding:
    """A user's prompts, the hidden states that a service hands out, and the prompts that these give away."""
    model = desk.model(case["model"], case["dtype"])
    texts, others = desk.data[case["data"]["name"]].draw(case["batch_size"], case["seed"])
    layer = None if case["layer"] == "last" else case["layer"]
    states = observe_hidden(model, texts, layer=layer, site=case["site"])
    generator = torch.Generator().manual_seed(case.seed)
    defences = [parse_defence(text) for text in case["defences"]]
    states = functools.reduce(lambda seen, defence: defend_states(seen, defence, generator), defences, states)
    recovery = recover_text(states, model, attack=_attack_of(case), progress=desk.progress)
    return finding_of(case, model, recovery, text_result(recovery, texts, others, model))


def audit_queries(case: Case, desk: WorkerContext) -> Finding:
    """Weights, a service that answers with them, and the weights that its answers give away."""
    model = desk.model(case["model"]) if case["model"] else None
    recovery, scores = interrogate(case, model, _attack_of(case), desk.progress)
    return finding_of(case, model, recovery, scores)


STORIES: Mapping[str, Callable[[Case, WorkerContext], Finding]] = {
    "gradients": audit_gradients,
    "outputs": audit_outputs,
    "queries": audit_queries,
}


def _attack_of(case: Case) -> str | None:
    """The attack that a case names; None for the one that fits."""
    return None if case["attack"] == DEFAULT else str(case["attack"])


def _natural_task(model: Model) -> str:
    """What a model is trained for as a rule: the next token where it can predict one, else classification."""
    can_predict = model.causal and model.unembedding is not None
    return (Task.NEXT_TOKEN if can_predict else Task.CLASSIFICATION).value
