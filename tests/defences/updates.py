"""Small updates to defend, and what every defence must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from unmask.evidence import GradientEvidence, Task, Update

SHAPES = {"wte.weight": (6, 4), "h.0.attn.c_attn.weight": (4, 12), "h.0.attn.c_attn.bias": (12,), "ln_f.bias": (4,)}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
quick = settings(max_examples=40)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def evidence_of(gradients: dict[str, Tensor], **side_knowledge: Any) -> GradientEvidence:
    known = {"task": Task.NEXT_TOKEN, "num_texts": 3, "update": Update.DELTA, "compute_dtype": torch.bfloat16}
    return GradientEvidence(gradients, "f" * 64, **{**known, **side_knowledge})


def random_update(seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0, **known: Any):
    generator = seeded(seed)
    gradients = {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return evidence_of({name: gradient.to(dtype) for name, gradient in gradients.items()}, **known)


# Far from both ends of float32: its subnormal numbers are a coarser grid than any promise made here.
sizes = st.floats(2.0**-100, 2.0**100, width=32)
entries = st.one_of(st.just(0.0), sizes, sizes.map(lambda size: -size))
tensors = st.lists(entries, max_size=12).map(torch.tensor)
updates = st.dictionaries(st.sampled_from(sorted(SHAPES)), tensors, max_size=4).map(evidence_of)


def flat(evidence: GradientEvidence) -> Tensor:
    """All entries, in the order of names, in float64."""
    parts = [evidence.gradients[name].double().flatten() for name in sorted(evidence.gradients)]
    return torch.cat([*parts, torch.empty(0, dtype=torch.float64)])


def same(one: GradientEvidence, other: GradientEvidence) -> bool:
    """Equal in everything, tensors entry by entry."""
    if replace(one, gradients={}) != replace(other, gradients={}) or list(one.gradients) != list(other.gradients):
        return False
    pairs = [(one.gradients[name], other.gradients[name]) for name in one.gradients]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def copied(evidence: GradientEvidence) -> GradientEvidence:
    return replace(evidence, gradients={name: tensor.clone() for name, tensor in evidence.gradients.items()})


def check_contract(defend: Callable[[GradientEvidence], GradientEvidence], evidence: GradientEvidence) -> None:
    """Input unchanged; names, their order, shapes, dtypes and side knowledge kept; nothing but finite numbers."""
    before = copied(evidence)
    after = defend(evidence)
    assert same(evidence, before)
    assert replace(after, gradients={}) == replace(evidence, gradients={})
    assert list(after.gradients) == list(evidence.gradients)
    for name, tensor in evidence.gradients.items():
        assert after.gradients[name].shape == tensor.shape
        assert after.gradients[name].dtype == tensor.dtype
        assert torch.isfinite(after.gradients[name]).all()
