"""Caches of keys and values: a prompt is read once, and whoever gets hold of the cache reads it again."""

from __future__ import annotations

from collections.abc import Sequence

from unmask.attacks.table import Secret
from unmask.audit.cases.case import Case
from unmask.audit.channels import axes
from unmask.audit.channels.channel_audit import ChannelAudit, Spec, WorkerContext
from unmask.audit.channels.outputs import read_layer
from unmask.audit.channels.seen_texts import audit_seen_texts
from unmask.audit.findings.finding import Finding
from unmask.defences.table import parse_defence
from unmask.evidence.caches import CacheEvidence
from unmask.models.adapter import Model
from unmask.models.outline import Outline
from unmask.protocols.caches import PARTS, STORAGES, observe_cache


def audit_caches(case: Case, context: WorkerContext) -> Finding:
    """A user's prompts, the cache that a service keeps of them, and the prompts that it gives away."""

    def observe(model: Model, texts: Sequence[str], max_length: int | None) -> CacheEvidence:
        layer = model.num_blocks - 1 if case["layer"] == "last" else case["layer"]
        settings = {"parts": case["part"], "dtype": case["storage"], "max_length": max_length}
        return observe_cache(model, texts, layer=layer, **settings)

    return audit_seen_texts(case, context, observe, parse_defence)


def find_fault(spec: Spec) -> str | None:
    """A defence that caches do not have."""
    withheld = [text for text in spec["defences"] if parse_defence(text).name == "withhold"]
    return f"the defence '{withheld[0]}' has no meaning for caches: choose `parts` instead" if withheld else None


def find_model_fault(spec: Spec, model: Outline) -> str | None:
    """A block that the model lacks, or a model that keeps no cache."""
    if not model.causal:
        return f"'{spec['model']}' has no cache, because it is not a causal model"
    if spec["layer"] == "last" or int(spec["layer"]) < model.num_blocks:
        return None
    return f"'{spec['model']}' has no block {spec['layer']}; use 0 to {model.num_blocks - 1}"


CACHES = ChannelAudit(
    axes={
        "models": axes.MODELS,
        "dtypes": axes.DTYPES,
        "data": axes.DATA,
        "batch_sizes": axes.Axis("batch_size", axes.whole_number(1), (1,)),
        "max_lengths": axes.MAX_LENGTHS,
        "layers": axes.Axis("layer", read_layer, ("last",)),
        "parts": axes.Axis("part", axes.one_of(*PARTS), ("both",)),
        "storages": axes.Axis("storage", axes.one_of(*STORAGES), ("float32",)),
        "defences": axes.DEFENCES,
        "attacks": axes.Axis("attack", axes.attack_axis("caches", Secret.TEXTS, Secret.TOKENS), (axes.DEFAULT,)),
        "efforts": axes.EFFORTS,
        "seeds": axes.SEEDS,
    },
    run=audit_caches,
    find_fault=find_fault,
    find_model_fault=find_model_fault,
)
