"""A client's texts, the update that the server sees, and what the server makes of it."""

from __future__ import annotations

import math
from typing import Any

import torch

from unmask.attacks.table import Secret
from unmask.audit.cases.case import Case
from unmask.audit.channels import axes
from unmask.audit.channels.channel_audit import ChannelAudit, Spec, WorkerContext
from unmask.audit.channels.seen_texts import recover_case
from unmask.audit.channels.text_scores import text_result
from unmask.audit.findings.finding import Finding
from unmask.audit.findings.result import finding_of
from unmask.defences.table import parse_defence
from unmask.evidence.gradients import Task
from unmask.models.outline import Outline
from unmask.observe import observe_update
from unmask.protocols.client import usual_task
from unmask.protocols.table import parse_protocol


def read_task(value: Any) -> str:
    """A task, with hyphens or underscores."""
    allowed = axes.one_of(axes.DEFAULT, *(task.value for task in Task))
    return allowed(value.replace("-", "_") if isinstance(value, str) else value)


def audit_gradients(case: Case, context: WorkerContext) -> Finding:
    """A client's texts, the update that the server sees, and what the server makes of it."""
    model = context.model(case["model"], case["dtype"])
    texts, others = context.data[case["data"]["name"]].draw(case["batch_size"], case["seed"])
    task = case["task"] if case["task"] != axes.DEFAULT else usual_task(model).value
    seen = observe_update(
        model,
        texts,
        parse_protocol(case["protocol"]),
        [parse_defence(text) for text in case["defences"]],
        num_clients=case["clients"],
        generator=torch.Generator().manual_seed(case.seed),
        task=task,
        seed=case["seed"],
        max_length=case.spec.get("max_length"),
    )
    recovery = recover_case(case, seen.evidence, model)
    scores = text_result(recovery, texts, others, model, case.spec.get("max_length"))
    scores["metrics"]["cosine"] = seen.cosine
    if math.isfinite(seen.epsilon):
        scores["metrics"].update(epsilon=seen.epsilon, delta=seen.delta)
    return finding_of(case, model, recovery, scores)


def find_fault(spec: Spec) -> str | None:
    """What does not go together in a case."""
    protocol = parse_protocol(spec["protocol"]).name
    if any(parse_defence(text).name == "cloak" for text in spec["defences"]):
        return "the defence 'cloak' is one of caches, and has no meaning for updates"
    if spec["clients"] > spec["batch_size"]:
        return f"{spec['clients']} clients cannot share a batch of {spec['batch_size']} texts"
    if spec["clients"] > 1 and protocol == "dpsgd":
        return "with dpsgd there must be one client, as those of one seed would draw the same noise"
    if spec["task"] == Task.MASKED_TOKEN.value and protocol != "fedsgd":
        return f"clients of {protocol} do not train for masked_token yet; those of fedsgd do"
    return None


def find_model_fault(spec: Spec, model: Outline) -> str | None:
    """A task that the model cannot be trained for."""
    name, task = spec["model"], spec["task"]
    if task == Task.NEXT_TOKEN.value and (not model.causal or not model.has_language_head):
        return f"'{name}' cannot be trained for next_token: it is no causal model with a language head"
    if task == Task.MASKED_TOKEN.value and model.causal:
        return f"'{name}' cannot be trained for masked_token: it is no encoder"
    return None


GRADIENTS = ChannelAudit(
    axes={
        "models": axes.MODELS,
        "dtypes": axes.DTYPES,
        "data": axes.DATA,
        "batch_sizes": axes.Axis("batch_size", axes.whole_number(1), (4,)),
        "max_lengths": axes.MAX_LENGTHS,
        "tasks": axes.Axis("task", read_task, (axes.DEFAULT,)),
        "protocols": axes.Axis("protocol", lambda value: str(parse_protocol(axes.read_name(value))), ("fedsgd",)),
        "clients": axes.Axis("clients", axes.whole_number(1), (1,)),
        "defences": axes.DEFENCES,
        "attacks": axes.Axis("attack", axes.attack_axis("gradients", Secret.TEXTS, Secret.TOKENS), (axes.DEFAULT,)),
        "efforts": axes.EFFORTS,
        "seeds": axes.SEEDS,
    },
    run=audit_gradients,
    find_fault=find_fault,
    find_model_fault=find_model_fault,
)
