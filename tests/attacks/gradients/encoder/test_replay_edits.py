"""Edits lead from nearly right texts to the batch."""

from __future__ import annotations

import pytest
import torch
from tests.attacks.gradients.encoder_batches import BATCH, FRAME, candidates_of, classified

from unmask.attacks.gradients.encoder.input_gradients import InputGradients
from unmask.attacks.gradients.encoder.problem import Problem, set_up
from unmask.attacks.gradients.encoder.replay_edits import ReplayEdits, _reorder
from unmask.attacks.run import Run


def edits_of(model) -> ReplayEdits:
    evidence = classified(model)
    with torch.no_grad():
        problem = set_up(evidence, model, candidates_of(model, evidence), FRAME)
    assert isinstance(problem, Problem), problem
    gradients, places = InputGradients.of(evidence, problem), problem.places
    assert gradients is not None
    return ReplayEdits(gradients, (places.is_possible & ~places.is_frame).view(places.num_positions, -1))


@pytest.mark.parametrize(
    "what", ["right", "replaced", "swapped", "between", "too long", "one too many", "one too few", "none of a text"]
)
def test_a_nearly_right_batch_becomes_the_batch(tiny_bert, what):
    texts = [list(text) for text in BATCH]
    if what == "replaced":
        texts[0][1] = BATCH[1][2]
    if what == "swapped":
        texts[0][1], texts[0][2] = texts[0][2], texts[0][1]
    if what == "between":
        texts[0][1], texts[1][1] = texts[1][1], texts[0][1]
    if what == "too long":
        shortest = min(range(len(texts)), key=lambda index: len(texts[index]))
        texts[shortest].insert(-1, BATCH[shortest][1])
    if what == "one too many":
        shortest = min(range(len(texts)), key=lambda index: len(texts[index]))
        texts[shortest].insert(2, BATCH[shortest][1])
    if what == "one too few":
        del texts[1][4]
    if what == "none of a text":
        texts[1] = [BATCH[1][0], BATCH[0][1], BATCH[1][-1]]
    found, left = edits_of(tiny_bert).improve(Run(), [tuple(text) for text in texts])
    assert found == list(BATCH)
    assert left < 1e-5


def test_all_orders_of_near_tokens():
    texts = [edit[0][1] for edit in _reorder([(1, 5, 6, 7, 8, 9, 2)])]
    assert len(set(texts)) == len(texts)
    assert {(1, 6, 5, 7, 8, 9, 2), (1, 7, 6, 5, 8, 9, 2), (1, 8, 6, 7, 5, 9, 2), (1, 6, 7, 5, 8, 9, 2)} <= set(texts)
    assert (1, 9, 6, 7, 8, 5, 2) not in texts
    assert all((text[0], text[-1]) == (1, 2) for text in texts)
    assert (1, 5, 6, 8, 9, 2) in texts
    assert all(sorted(text[1:-1]) == [5, 6, 7, 8, 9] for text in texts if len(text) == 7)
    assert list(_reorder([(1, 5, 2)])) == []
