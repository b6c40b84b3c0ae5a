"""Deletions and moves, made by slots, equal those of Python's lists."""

from __future__ import annotations

import torch

from unmask.attacks.outputs.vectors.candidate_edits import Edits, deletions, moves
from unmask.attacks.outputs.vectors.edits import TextBatch

TEXTS = [(1, 2, 3, 4), (5, 6), (7,)]


def made(texts: TextBatch, edits: Edits) -> list[set[tuple[int, ...]]]:
    rows, columns = edits.valid.nonzero(as_tuple=True)
    found = texts.edit(rows, edits.slots[rows, columns], edits.values[rows, columns]).as_tuples()
    return [{text for text, row in zip(found, rows.tolist(), strict=True) if row == own} for own in range(len(texts))]


def test_every_token_is_taken_out_but_the_last_one():
    texts = TextBatch.of(TEXTS)
    assert made(texts, deletions(texts)) == [{(2, 3, 4), (1, 3, 4), (1, 2, 4), (1, 2, 3)}, {(5,), (6,)}, set()]


def test_tokens_go_anywhere_and_change_places():
    texts = TextBatch.of(TEXTS)
    expected = set()
    for place in range(4):
        rest = TEXTS[0][:place] + TEXTS[0][place + 1 :]
        expected |= {(*rest[:gap], TEXTS[0][place], *rest[gap:]) for gap in range(4)}
    expected |= {(3, 2, 1, 4), (4, 2, 3, 1), (1, 4, 3, 2)}
    expected.discard(TEXTS[0])
    assert made(texts, moves(texts, torch.ones(3, dtype=torch.bool), 4)) == [expected, {(6, 5)}, set()]


def test_moves_are_short_if_asked_and_only_of_the_chosen():
    texts = TextBatch.of(TEXTS)
    found = made(texts, moves(texts, torch.tensor([True, False, False]), 1))
    assert found == [{(2, 1, 3, 4), (1, 3, 2, 4), (1, 2, 4, 3)}, set(), set()]


def test_edits_stand_beside_and_above_each_other():
    texts = TextBatch.of(TEXTS)
    both = deletions(texts).beside(moves(texts, torch.ones(3, dtype=torch.bool), 4))
    assert both.slots.shape[1] == both.valid.shape[1] > deletions(texts).valid.shape[1]
    assert both.above(both).valid.shape[0] == 6
