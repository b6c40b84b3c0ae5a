"""A client's texts, the update that the server sees, and what the server makes of it."""

from __future__ import annotations

import math
from typing import Any

import torch

from unmask.attacks.recover import recover_text
from unmask.attacks.table import Secret
from unmask.audit.cases.case import Case
from unmask.audit.channels.axes import (
    DATA,
    DEFAULT,
    DEFENCES,
    DTYPES,
    MODELS,
    SEEDS,
    Axis,
    attack_axis,
    one_of,
    read_name,
    whole_number,
)
from unmask.audit.channels.channel_audit import ChannelAudit, Spec, WorkerContext, attack_of
from unmask.audit.channels.text_scores import text_result
from unmask.audit.findings.finding import Finding
from unmask.audit.findings.result import finding_of
from unmask.defences.table import parse_defence
from unmask.evidence.gradients import Task
from unmask.models.adapter import Model
from unmask.observe import observe_update
from unmask.protocols.table import parse_protocol


def read_task(value: Any) -> str:
    """A task, with hyphens or underscores."""
    return one_of(DEFAULT, *(task.value for task in Task))(value.replace("-", "_") if isinstance(value, str) else value)


def audit_gradients(case: Case, context: WorkerContext) -> Finding:
    """A client's texts, the update that the server sees, and what the server makes of it."""
    model = context.model(case["model"], case["dtype"])
    texts, others = context.data[case["data"]["name"]].draw(case["batch_size"], case["seed"])
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
    recovery = recover_text(seen.evidence, model, attack=attack_of(case), progress=context.progress)
    scores = text_result(recovery, texts, others, model)
    scores["metrics"]["cosine"] = seen.cosine
    if math.isfinite(seen.epsilon):
        scores["metrics"].update(epsilon=seen.epsilon, delta=seen.delta)
    return finding_of(case, model, recovery, scores)


def find_fault(spec: Spec) -> str | None:
    """What does not go together in a case."""
    protocol = parse_protocol(spec["protocol"]).name
    if spec["clients"] > spec["batch_size"]:
        return f"{spec['clients']} clients cannot share a batch of {spec['batch_size']} texts"
    if spec["clients"] > 1 and protocol == "dpsgd":
        return "with dpsgd there must be one client, as those of one seed would draw the same noise"
    if spec["task"] == Task.MASKED_TOKEN.value and protocol != "fedsgd":
        return f"clients of {protocol} do not train for masked_token yet; those of fedsgd do"
    return None


def find_model_fault(spec: Spec, model: Model) -> str | None:
    """A task that the model cannot be trained for."""
    name, task = spec["model"], spec["task"]
    if task == Task.NEXT_TOKEN.value and (not model.causal or model.unembedding is None):
        return f"'{name}' cannot be trained for next_token: it is no causal model with a language head"
    if task == Task.MASKED_TOKEN.value and (model.causal or model.token_head is None):
        return f"'{name}' cannot be trained for masked_token: it is no encoder with a language head"
    return None


def _natural_task(model: Model) -> str:
    """What a model is trained for as a rule: the next token where it can predict one, else classification."""
    can_predict = model.causal and model.unembedding is not None
    return (Task.NEXT_TOKEN if can_predict else Task.CLASSIFICATION).value


GRADIENTS = ChannelAudit(
    axes={
        "models": MODELS,
        "dtypes": DTYPES,
        "data": DATA,
        "batch_sizes": Axis("batch_size", whole_number(1), (4,)),
        "tasks": Axis("task", read_task, (DEFAULT,)),
        "protocols": Axis("protocol", lambda value: str(parse_protocol(read_name(value))), ("fedsgd",)),
        "clients": Axis("clients", whole_number(1), (1,)),
        "defences": DEFENCES,
        "attacks": Axis("attack", attack_axis("gradients", Secret.TEXTS, Secret.TOKENS), (DEFAULT,)),
        "seeds": SEEDS,
    },
    run=audit_gradients,
    find_fault=find_fault,
    find_model_fault=find_model_fault,
)
