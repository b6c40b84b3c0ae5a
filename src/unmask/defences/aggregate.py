"""Secure aggregation: the server sees the sum of several updates and none of them alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from unmask.defences.tensorwise import change_tensors
from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence


def secure_aggregate(updates: Sequence[GradientEvidence]) -> GradientEvidence:
    """G₁ + … + G_k, tensor by tensor; added in float64, sent in the tensors' own type. The sum, not the mean.

    Promises that the server learns nothing *but* the sum, if the k clients are honest and it cannot choose them: one
    client among k − 1 of the server's own is alone. It promises nothing about the sum, which is what one client with
    all the texts would send, up to the weight of each client's texts. `num_texts` is the sum where all are known, else
    None; the task is None where clients differ.
    Limits: the protocol's fixed-point numbers and masks are not modelled, they leave the sum as it is up to rounding.
    Source: Bonawitz et al., CCS 2017.
    """
    if not updates:
        raise InputError("secure aggregation needs at least one update, got none")
    first = updates[0]
    for number, other in enumerate(updates[1:], start=2):
        difference = _difference(first, other)
        if difference:
            raise InputError(f"update {number} cannot be added to update 1: {difference}; sum updates of one round")
    counts = [update.num_texts for update in updates if update.num_texts is not None]
    return replace(
        change_tensors(first, lambda name, _: _sum(updates, name)),
        num_texts=sum(counts) if len(counts) == len(updates) else None,
        num_clients=None if len(updates) == 1 and first.num_clients is None else _num_clients(updates),
        task=first.task if all(update.task is first.task for update in updates) else None,
    )


def _num_clients(updates: Sequence[GradientEvidence]) -> int:
    return sum(update.num_clients or 1 for update in updates)


def _sum(updates: Sequence[GradientEvidence], name: str) -> Tensor:
    total = updates[0].gradients[name].detach().double()
    for update in updates[1:]:
        total = total + update.gradients[name].detach().to(total)
    return total


def _difference(one: GradientEvidence, other: GradientEvidence) -> str | None:
    """What keeps two updates from being added, in words; None if nothing does."""
    if one.model_fingerprint != other.model_fingerprint:
        return f"its model has fingerprint {other.model_fingerprint[:12]}, not {one.model_fingerprint[:12]}"
    if one.update is not other.update:
        return f"it is a {other.update.value}, not a {one.update.value}"
    if one.compute_dtype is not other.compute_dtype:
        return f"its client computed in {other.compute_dtype}, not in {one.compute_dtype}"
    missing = [name for name in one.gradients if name not in other.gradients]
    extra = [name for name in other.gradients if name not in one.gradients]
    if missing or extra:
        lacks = f"lacks {len(missing)} tensors (first: '{missing[0]}')" if missing else ""
        has = f"has {len(extra)} others (first: '{extra[0]}')" if extra else ""
        return f"it {' and '.join(filter(None, (lacks, has)))}"
    for name, tensor in one.gradients.items():
        seen = other.gradients[name]
        if tensor.shape != seen.shape:
            return f"'{name}' has shape {tuple(seen.shape)}, not {tuple(tensor.shape)}"
        if tensor.dtype != seen.dtype:
            return f"'{name}' is of {seen.dtype}, not of {tensor.dtype}"
    return None
