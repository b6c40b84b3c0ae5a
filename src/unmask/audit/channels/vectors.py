"""Texts, the vectors that a database keeps of them, and the texts that these give away."""

from __future__ import annotations

import functools

from unmask.attacks.table import Secret
from unmask.audit.cases.case import Case
from unmask.audit.channels import axes
from unmask.audit.channels.channel_audit import ChannelAudit, Spec, WorkerContext
from unmask.audit.channels.seen_texts import audit_seen_texts
from unmask.audit.findings.finding import Finding
from unmask.defences.vector_table import parse_vector_defence
from unmask.models.outline import Outline
from unmask.models.pooling import Pooling
from unmask.protocols.vectors import STORAGES, observe_vectors


def audit_vectors(case: Case, context: WorkerContext) -> Finding:
    """Texts, the vectors that a database keeps of them, and the texts that these give away."""
    pooling = None if case["pooling"] == axes.DEFAULT else case["pooling"]
    observe = functools.partial(observe_vectors, pooling=pooling, dtype=case["storage"])
    return audit_seen_texts(case, context, observe, parse_vector_defence)


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
        "max_lengths": axes.MAX_LENGTHS,
        "poolings": axes.Axis(
            "pooling", axes.one_of(axes.DEFAULT, *(pooling.value for pooling in Pooling)), (axes.DEFAULT,)
        ),
        "storages": axes.Axis("storage", axes.one_of(*STORAGES), ("float32",)),
        "defences": axes.Axis("defences", axes.list_of_defences(parse_vector_defence), (axes.NO_DEFENCE,)),
        "attacks": axes.Axis("attack", axes.attack_axis("vectors", Secret.TEXTS, Secret.TOKENS), (axes.DEFAULT,)),
        "efforts": axes.EFFORTS,
        "seeds": axes.SEEDS,
    },
    run=audit_vectors,
    find_fault=find_fault,
    find_model_fault=find_model_fault,
)
