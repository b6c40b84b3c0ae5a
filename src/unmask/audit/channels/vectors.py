"""Texts, the vectors that a database keeps of them, and the texts that these give away."""

from __future__ import annotations

import functools

import torch

from unmask.attacks.recover import recover_text
from unmask.attacks.table import Secret
from unmask.audit.cases.case import Case
from unmask.audit.channels import axes
from unmask.audit.channels.channel_audit import ChannelAudit, Spec, WorkerContext
from unmask.audit.channels.text_scores import text_result
from unmask.audit.findings.finding import Finding
from unmask.audit.findings.result import finding_of
from unmask.defences.vector_table import parse_vector_defence
from unmask.models.outline import Outline
from unmask.models.pooling import Pooling
from unmask.protocols.vectors import STORAGES, observe_vectors


def audit_vectors(case: Case, context: WorkerContext) -> Finding:
    """Texts, the vectors that a database keeps of them, and the texts that these give away."""
    model = context.model(case["model"], case["dtype"])
    texts, others = context.data[case["data"]["name"]].draw(case["batch_size"], case["seed"])
    pooling = None if case["pooling"] == axes.DEFAULT else case["pooling"]
    vectors = observe_vectors(model, texts, pooling=pooling, dtype=case["storage"])
    generator = torch.Generator().manual_seed(case.seed)
    defences = [parse_vector_defence(text) for text in case["defences"]]
    vectors = functools.reduce(lambda seen, defence: defence(seen, generator), defences, vectors)
    recovery = recover_text(vectors, model, attack=case["attack"], progress=context.progress)
    return finding_of(case, model, recovery, text_result(recovery, texts, others, model))


def find_fault(spec: Spec) -> str | None:
    """Nothing here contradicts anything else."""
    return None


def find_model_fault(spec: Spec, model: Outline) -> str | None:
    """A pooling that no text of the model can have."""
    if spec["pooling"] == Pooling.CLS.value and model.causal:
        return f"'{spec['model']}' is a decoder: its first token sees no other, so the pooling 'cls' says nothing"
    return None


VECTORS = ChannelAudit(
    axes={
        "models": axes.MODELS,
        "dtypes": axes.DTYPES,
        "data": axes.DATA,
        "batch_sizes": axes.Axis("batch_size", axes.whole_number(1), (1,)),
        "poolings": axes.Axis(
            "pooling", axes.one_of(axes.DEFAULT, *(pooling.value for pooling in Pooling)), (axes.DEFAULT,)
        ),
        "storages": axes.Axis("storage", axes.one_of(*STORAGES), ("float32",)),
        "defences": axes.Axis("defences", axes.list_of_defences(parse_vector_defence), (axes.NO_DEFENCE,)),
        "attacks": axes.Axis("attack", axes.attack_axis("vectors", Secret.TEXTS, Secret.TOKENS), (axes.DEFAULT,)),
        "seeds": axes.SEEDS,
    },
    run=audit_vectors,
    find_fault=find_fault,
    find_model_fault=find_model_fault,
)
