"""A user's prompts, the hidden states that a service hands out, and the prompts that these give away."""

from __future__ import annotations

import functools
from typing import Any

from unmask.attacks.table import Secret
from unmask.audit.cases.case import Case
from unmask.audit.channels import axes
from unmask.audit.channels.channel_audit import ChannelAudit, Spec, WorkerContext
from unmask.audit.channels.seen_texts import audit_seen_texts
from unmask.audit.findings.finding import Finding
from unmask.defences.table import parse_defence
from unmask.evidence.outputs import Site
from unmask.models.outline import Outline
from unmask.protocols.hidden import observe_hidden


def read_layer(value: Any) -> int | str:
    """The number of a layer, or 'last'."""
    return "last" if value == "last" else axes.whole_number(0)(value)


def audit_outputs(case: Case, context: WorkerContext) -> Finding:
    """A user's prompts, the hidden states that a service hands out, and the prompts that these give away."""
    layer = None if case["layer"] == "last" else case["layer"]
    observe = functools.partial(observe_hidden, layer=layer, site=case["site"])
    return audit_seen_texts(case, context, observe, parse_defence)


def find_fault(spec: Spec) -> str | None:
    """A defence that states do not have."""
    names = {parse_defence(text).name: text for text in spec["defences"]}
    if "withhold" in names:
        return f"the defence '{names['withhold']}' has no meaning for states, which have no names"
    return "the defence 'cloak' is one of caches, and has no meaning for states" if "cloak" in names else None


def find_model_fault(spec: Spec, model: Outline) -> str | None:
    """A layer that the model lacks."""
    layer, site = spec["layer"], Site(spec["site"])
    last = model.num_blocks - (site is Site.ATTENTION)
    if layer == "last" or (int(layer) <= last and site is not Site.FINAL_NORM) or layer == last:
        return None
    allowed = str(last) if site is Site.FINAL_NORM else f"0 to {last}"
    return f"'{spec['model']}' has no layer {layer} at '{site.value}'; use {allowed}"


OUTPUTS = ChannelAudit(
    axes={
        "models": axes.MODELS,
        "dtypes": axes.DTYPES,
        "data": axes.DATA,
        "batch_sizes": axes.Axis("batch_size", axes.whole_number(1), (1,)),
        "max_lengths": axes.MAX_LENGTHS,
        "layers": axes.Axis("layer", read_layer, ("last",)),
        "sites": axes.Axis("site", axes.one_of(*(site.value for site in Site)), (Site.STREAM.value,)),
        "defences": axes.DEFENCES,
        "attacks": axes.Axis("attack", axes.attack_axis("outputs", Secret.TEXTS, Secret.TOKENS), (axes.DEFAULT,)),
        "efforts": axes.EFFORTS,
        "seeds": axes.SEEDS,
    },
    run=audit_outputs,
    find_fault=find_fault,
    find_model_fault=find_model_fault,
)
