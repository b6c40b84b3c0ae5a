"""One attention layer whose output is seen, and the numbers that were sent into it."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.recover import recover_inputs
from unmask.attacks.table import Secret
from unmask.audit.cases.case import Case
from unmask.audit.cases.secrets import DrawnLayer, parse_layer
from unmask.audit.channels import axes
from unmask.audit.channels.channel_audit import ChannelAudit, Spec, WorkerContext
from unmask.audit.findings.finding import Finding
from unmask.audit.findings.result import finding_of
from unmask.defences.table import parse_defence
from unmask.evidence.outputs import AttentionEvidence
from unmask.linalg.softmax_attention import AttentionMap
from unmask.models.outline import Outline
from unmask.recovery import Status
from unmask.scores.inputs import score_inputs

_FOUND = 0.01  # relative error of the worst row up to which an input counts as found


def audit_inputs(case: Case, context: WorkerContext) -> Finding:
    """A layer's output behind defences, and the input that it gives away."""
    evidence, X = draw_layer(parse_layer(case["secret"]), case["seed"])
    generator = torch.Generator().manual_seed(case.seed)
    for text in case["defences"]:
        evidence = parse_defence(text)(evidence, generator)
    recovery = recover_inputs(evidence, attack=case["attack"], seed=case["seed"])
    found = recovery.value.preimages if recovery.value is not None else ()
    score = score_inputs(found[0].X, X) if found else None
    is_found = score is not None and score.worst_row_error <= _FOUND
    error = min(1.0, score.relative_error) if score is not None else 1.0
    metrics = {
        "inputs_found": int(is_found),
        "inputs_rate": 1 - error,
        "input_error": error,
        "false_inputs": int(recovery.status is Status.RECOVERED and not is_found),
    }
    chance = {"inputs_found": 0, "inputs_rate": 0.0, "input_error": 1.0, "false_inputs": 0}
    return finding_of(case, None, recovery, {"metrics": metrics, "chance": chance})


def draw_layer(layer: DrawnLayer, seed: int) -> tuple[AttentionEvidence, Float[Tensor, "n d"]]:
    """What is seen of a layer, and its input: standard normal rows, W = AAᵀ/d^1.5 or, indefinite, A/d."""
    generator = torch.Generator().manual_seed(seed)
    n, d, causal = (layer.settings[name] for name in ("tokens", "width", "causal"))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    A = draw(d, d)
    W = A @ A.T / d**1.5 if layer.settings["definite"] else A / d
    V, X = draw(d, d) / math.sqrt(d), draw(n, d)
    return AttentionEvidence(W, V, AttentionMap(W, causal)(X) @ V, causal), X


def find_fault(spec: Spec) -> str | None:
    """A model, which drawn layers do not belong to, or a defence that outputs do not have."""
    if spec["model"]:
        return f"layers of this channel are drawn, and belong to no model; leave models out, got '{spec['model']}'"
    names = {parse_defence(text).name: text for text in spec["defences"]}
    meaningless = [names[name] for name in ("withhold", "cloak") if name in names]
    return f"the defence '{meaningless[0]}' has no meaning for the output of a layer" if meaningless else None


def find_model_fault(spec: Spec, model: Outline) -> str | None:
    """Nothing: there is no model."""
    return None


def read_layer_secret(value: Any) -> str:
    """A layer that is drawn, in its canonical text."""
    return str(parse_layer(axes.read_name(value)))


INPUTS = ChannelAudit(
    axes={
        "models": axes.Axis("model", lambda value: value if value == "" else axes.read_name(value), ("",)),
        "secrets": axes.Axis("secret", read_layer_secret),
        "defences": axes.DEFENCES,
        "attacks": axes.Axis("attack", axes.attack_axis("inputs", Secret.INPUTS), (axes.DEFAULT,)),
        "seeds": axes.SEEDS,
    },
    run=audit_inputs,
    find_fault=find_fault,
    find_model_fault=find_model_fault,
)
