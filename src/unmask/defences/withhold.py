"""Withheld layers: part of the update is not sent."""

from __future__ import annotations

from collections.abc import Sequence

from unmask.defences.tensorwise import AnyTensors
from unmask.errors import InputError
from unmask.evidence.caches import CacheEvidence
from unmask.evidence.outputs import HiddenEvidence
from unmask.evidence.vectors import VectorEvidence


def withhold(evidence: AnyTensors, patterns: Sequence[str]) -> AnyTensors:
    """The update without the tensors whose names contain one of the patterns, as if these layers were frozen.

    Promises that nothing is read off these tensors. It promises nothing about the others: tokens that are not named by
    rows of embeddings may still lie in the span of the first block. A tied output layer goes with its embedding.
    A pattern that matches nothing is no error while another one matches, so that one list can serve several families.
    """
    if isinstance(patterns, str) or not patterns or not all(patterns):
        raise InputError(f"withhold needs a list of parts of names, none of them empty, got {patterns!r}")
    if isinstance(evidence, HiddenEvidence | CacheEvidence | VectorEvidence):
        raise InputError("states have no names, so none can be withheld; choose a defence that changes values")
    tensors = evidence.named_tensors()
    names = list(tensors)
    kept = [name for name in names if not any(pattern in name for pattern in patterns)]
    wanted = ", ".join(repr(pattern) for pattern in patterns)
    if len(kept) == len(names):
        raise InputError(
            f"no name of the {len(names)} tensors contains {wanted}, so nothing would be withheld; "
            f"names are {_some(names)}"
        )
    if not kept:
        raise InputError(
            f"each of the {len(names)} tensors has a name that contains one of {wanted}, so nothing would be sent; "
            f"give patterns that leave some of {_some(names)}"
        )
    return evidence.with_tensors({name: tensors[name] for name in kept})


def _some(names: list[str]) -> str:
    first = ", ".join(names[:5])
    return f"{first} … ({len(names)} in all)" if len(names) > 5 else first or "none"
