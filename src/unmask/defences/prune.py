"""Sparse updates: only a share of the entries is sent, the others are zero."""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.defences.tensorwise import AnyTensors, change_tensors
from unmask.errors import InputError


def keep_largest(evidence: AnyTensors, share: float) -> AnyTensors:
    """Keep the k = round(share·N) entries of largest magnitude among all N entries of the update; zero the others.

    One threshold holds for the whole update. Of entries that tie at it, the first are kept, in the order of names and
    then of positions. Promises to send no more than k non-zero entries; it saves bandwidth and was not made to hide
    anything. What is kept is kept exactly, and where it lies tells too: rows of embeddings name tokens.
    Limits: ranks and spans are those of the sparse tensor. Cost: linear time, two copies of the magnitudes.
    """
    _require_share(share)
    tensors = evidence.named_tensors()
    names = sorted(tensors)
    magnitudes = [tensors[name].detach().abs().flatten().cpu() for name in names]
    kept = _largest(torch.cat([torch.empty(0), *magnitudes]), share)  # float32 at least, and never an empty list
    parts = dict(zip(names, kept.split([len(part) for part in magnitudes]), strict=True))
    return change_tensors(evidence, lambda name, gradient: _only(gradient, parts[name]))


def keep_random(evidence: AnyTensors, share: float, generator: torch.Generator) -> AnyTensors:
    """Keep each entry with probability `share`, independently; zero the others.

    Kept entries are sent as they are: they are *not* divided by the share, so the expected update is share·G. Promises
    no count, only its expectation, and hides nothing by a proof: what is kept is exact. With the same seed a larger
    share keeps all that a smaller one keeps.
    """
    _require_share(share)

    def prune_tensor(_: str, gradient: Tensor) -> Tensor:
        return _only(gradient, torch.rand(gradient.shape, generator=generator) < share)

    return change_tensors(evidence, prune_tensor)


def _require_share(share: float) -> None:
    if not 0 <= share <= 1:
        raise InputError(f"the share of entries to keep must be from 0 to 1, got {share}")


def _largest(magnitudes: Tensor, share: float) -> Tensor:
    """Which of the entries are the round(share·N) largest; the first of those that tie."""
    num_kept = round(share * len(magnitudes))
    if num_kept == 0:
        return torch.zeros_like(magnitudes, dtype=torch.bool)
    ranked = magnitudes.numpy().copy()
    ranked.partition(len(ranked) - num_kept)  # unlike topk, it carries no indices along
    threshold = float(ranked[len(ranked) - num_kept])
    kept = magnitudes > threshold
    if threshold > 0:  # zeros are zero, kept or not
        ties = (magnitudes == threshold).nonzero().flatten()
        kept[ties[: num_kept - int(kept.sum())]] = True
    return kept


def _only(gradient: Tensor, kept: Tensor) -> Tensor:
    return gradient.masked_fill(~kept.view(gradient.shape).to(gradient.device), 0)
