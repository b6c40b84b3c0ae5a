"""DAGER's spans and its distance, against singular values and projections that are written out."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.baselines.dager_spans import (
    SequenceCheck,
    cut,
    query_layers,
    span_distance,
    take_ranks,
    take_spans,
)
from unmask.models import Role
from unmask.protocols import observe_gradients

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8]]
NUM_ROWS = 8  # of both texts


def spans_of(evidence, model, rank_margin=20, seed=0):
    layers = query_layers(evidence, model)
    return take_spans(evidence, layers, rank_margin=rank_margin, rank_tolerance=None, seed=seed)


def test_the_distance_is_that_of_the_projection():
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(6, 2, generator=generator, dtype=torch.float64))[0]
    rows = 7 * torch.randn(3, 6, generator=generator, dtype=torch.float64)
    unit = rows / rows.norm(dim=1, keepdim=True)
    slow = torch.stack([(row - basis @ torch.linalg.lstsq(basis, row).solution).norm() for row in unit])
    torch.testing.assert_close(span_distance(rows, basis), slow)
    inside = (basis @ torch.randn(2, 4, generator=generator, dtype=torch.float64)).T
    assert float(span_distance(inside, basis).max()) < 1e-14


def test_theorem_5_1_the_rank_is_the_number_of_distinct_rows(tiny_bert):
    evidence = observe_gradients(tiny_bert, TEXTS, task="classification")
    spans = spans_of(evidence, tiny_bert)
    assert (spans.rank, spans.is_cut) == (NUM_ROWS, False)
    assert spans.first.shape == spans.second.shape == (tiny_bert.width, NUM_ROWS)
    tokens, positions = torch.tensor(TEXTS[0]), torch.arange(5)
    with torch.no_grad():
        rows = tiny_bert.first_input(tokens, positions)
    assert float(span_distance(rows, spans.first).max()) < 1e-4
    assert float(span_distance(tiny_bert.first_input(tokens + 1, positions).detach(), spans.first).min()) > 0.1


def test_a_sequence_is_checked_by_its_rows_in_block_1(tiny_bert):
    evidence = observe_gradients(tiny_bert, TEXTS, task="classification")
    check = SequenceCheck(tiny_bert, spans_of(evidence, tiny_bert).second, num_unchecked=1)
    with torch.no_grad():
        right, wrong = check.distances(torch.tensor([TEXTS[0], [5, 17, 98, 17, 250]]))
    assert len(right) == len(TEXTS[0]) - 1
    assert float(right.max()) < 1e-3 < 1e-2 < float(wrong.min())  # in an encoder every row sees the wrong token


@pytest.mark.parametrize(("rank", "kept"), [(5, 5), (44, 44), (64, 44), (0, 1)])
def test_the_papers_cut(rank, kept):
    assert cut(rank, 64, rank_margin=20) == kept


def test_spans_that_are_cut_say_so_and_seeds_repeat(tiny_bert):
    evidence = observe_gradients(tiny_bert, TEXTS, task="classification")
    assert spans_of(evidence, tiny_bert, rank_margin=60).is_cut
    assert torch.equal(spans_of(evidence, tiny_bert).second, spans_of(evidence, tiny_bert).second)


def test_a_tolerance_counts_singular_values_and_missing_layers_are_none(tiny_llama):
    evidence = observe_gradients(tiny_llama, TEXTS, task="classification")
    layers = query_layers(evidence, tiny_llama)
    values = [torch.linalg.svdvals(evidence.linear(tiny_llama, Role.QUERY, block)) for block in range(3)]
    middle = float(values[0][2])
    assert take_ranks(evidence, layers, [middle]) == [max(int((each > middle).sum()) for each in values)]
    assert query_layers(evidence.only("layers.1."), tiny_llama)[0] is None
