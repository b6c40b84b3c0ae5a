"""The pool of an attempt: nothing twice, the most promising first, wider when it is in vain."""

from __future__ import annotations

import torch

from unmask.attacks.outputs.vectors.attempts import Attempt, AttemptSettings
from unmask.attacks.outputs.vectors.edits import TextBatch, TextHash

PRIOR = torch.tensor([-1.0, -2.0, -3.0, -4.0])


def begin(**settings) -> Attempt:
    return Attempt(torch.tensor([1.0, 0.0]), AttemptSettings(**settings), PRIOR)


def add(attempt: Attempt, texts: list[tuple[int, ...]], distances: list[float]) -> None:
    batch = TextBatch.of(texts)
    attempt.add(batch, torch.tensor(distances), TextHash(4)(batch))


def test_the_empty_text_comes_first_and_then_the_closest():
    attempt = begin()
    assert attempt.choose() == [(0, 1)]
    add(attempt, [(0,), (1,), (0, 1)], [0.5, 0.2, 0.4])
    ((row, width),) = attempt.choose()
    assert (attempt.texts.as_tuples()[row], width) == ((1,), 1)


def test_rare_tokens_cost_something():
    attempt = begin(weight=0.1)
    add(attempt, [(3,), (0,)], [0.50, 0.55])
    attempt.choose()
    attempt.widths.clear()
    ((row, _),) = attempt.choose()
    assert attempt.texts.as_tuples()[row] == (0,)


def test_in_vain_the_closest_text_is_expanded_again_and_wider():
    attempt = begin(widen_after=2)
    add(attempt, [(1,)], [0.2])
    attempt.choose()
    for _ in range(3):
        attempt.note_closest(0.2)
    ((row, width),) = attempt.choose()
    assert (attempt.texts.as_tuples()[row], width) == ((1,), 4)


def test_it_ends_when_it_is_stuck_or_has_spent_its_budget():
    attempt = begin(patience=2, max_texts=3)
    attempt.note_closest(0.2)
    assert not attempt.has_ended
    for _ in range(2):
        attempt.note_closest(0.2)
    assert attempt.has_ended
    other = begin(max_texts=1)
    other.num_texts = 1
    assert other.has_ended


def test_a_language_model_changes_the_order():
    attempt = begin(weight=0.01, nats=0.0)
    add(attempt, [(0,), (1,)], [0.30, 0.31])
    rows = attempt.unread()
    pairs = zip(attempt.hashes.tolist(), attempt.texts.as_tuples(), strict=True)
    losses = {h: 50.0 if text == (0,) else 1.0 for h, text in pairs}
    attempt.read({h: losses[h] for h in attempt.hashes[rows].tolist()})
    assert not len(attempt.unread())
    ((row, _),) = attempt.choose()
    assert attempt.texts.as_tuples()[row] == (1,)


def test_the_pool_stays_small_and_keeps_the_closest():
    attempt = begin(pool=4, shortlist=2)
    texts = [(a, b, c) for a in range(4) for b in range(4) for c in range(4)]
    add(attempt, texts, torch.linspace(0.9, 0.1, len(texts)).tolist())
    assert len(attempt.texts) <= 8
    assert texts[-1] in attempt.texts.as_tuples()
