"""Defences of updates, on hidden states: each token's row is one tensor, with a scale and a noise of its own."""

from __future__ import annotations

from dataclasses import replace

import torch

from unmask.defences.specs import Defence
from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence
from unmask.evidence.outputs import HiddenEvidence


def defend_states(evidence: HiddenEvidence, defence: Defence, generator: torch.Generator) -> HiddenEvidence:
    """The states as a service hands them out behind a defence; padding stays zero.

    Promises what the defence promises for tensors: 'int8' has a scale for each token, relative noise is relative to
    each token's own state, 'clip' bounds the norm of all states together.
    """
    if defence.name == "withhold":
        raise InputError("states have no names, so none can be withheld; choose a defence that changes values")
    places = [tuple(place) for place in evidence.mask.nonzero().tolist()]
    rows = {f"{text:06d}/{position:06d}": evidence.states[text, position] for text, position in places}
    changed = defence(GradientEvidence(rows, evidence.model_fingerprint), generator).gradients
    states = torch.zeros_like(evidence.states)
    for (text, position), name in zip(places, rows, strict=True):
        states[text, position] = changed[name]
    return replace(evidence, states=states)
