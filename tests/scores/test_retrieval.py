"""Recall of neighbours: against a loop, unchanged by rotations, and chance for random vectors."""

from __future__ import annotations

import pytest
import torch

from unmask.errors import InputError
from unmask.scores.retrieval import neighbour_recall

VECTORS = torch.randn(60, 16, generator=torch.Generator().manual_seed(0))


def test_it_is_the_slow_obvious_one():
    other = VECTORS + torch.randn(60, 16, generator=torch.Generator().manual_seed(1))
    units = [rows / rows.norm(dim=1, keepdim=True) for rows in (VECTORS, other)]
    shares = []
    for text in range(60):
        near = [
            {other for _, other in sorted((-float(rows[text] @ rows[o]), o) for o in range(60) if o != text)[:5]}
            for rows in units
        ]
        shares.append(len(near[0] & near[1]) / 5)
    assert neighbour_recall(VECTORS, other, 5) == pytest.approx(sum(shares) / 60)


def test_rotations_and_lengths_change_nothing():
    rotation, _ = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(2)))
    assert neighbour_recall(VECTORS, 3 * VECTORS @ rotation) == pytest.approx(1, abs=0.01)


def test_other_vectors_are_chance():
    other = torch.randn(60, 16, generator=torch.Generator().manual_seed(3))
    assert neighbour_recall(VECTORS, other) == pytest.approx(10 / 59, abs=0.05)


@pytest.mark.parametrize(("rows", "count"), [(59, 10), (60, 60), (60, 0)])
def test_what_has_no_recall_is_refused(rows, count):
    with pytest.raises(InputError, match="recall needs"):
        neighbour_recall(VECTORS, VECTORS[:rows], count)
