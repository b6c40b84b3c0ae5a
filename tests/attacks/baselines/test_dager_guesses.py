"""DAGER's best effort: which of the sequences that failed are returned."""

from __future__ import annotations

import torch

from unmask.attacks.baselines.dager_guesses import FailedSequences, add_nearest, choose_guesses

SEQUENCES = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5], [6, 7, 3, 5]])
DISTANCES = torch.tensor([0.3, 0.1, 0.2], dtype=torch.float64)


def test_of_similar_sequences_the_nearest_is_kept():
    assert add_nearest([], SEQUENCES, DISTANCES, None, 0.7) == [(0.1, (1, 2, 3, 5)), (0.2, (6, 7, 3, 5))]
    assert add_nearest([], SEQUENCES, DISTANCES, 1, 0.7) == [(0.1, (1, 2, 3, 5))]


def test_what_was_kept_gives_way_to_what_is_nearer():
    kept = [(0.15, (1, 2, 3, 9)), (0.25, (8, 8, 8, 8))]
    assert add_nearest(kept, SEQUENCES, DISTANCES, 2, 0.7) == [(0.1, (1, 2, 3, 5)), (0.2, (6, 7, 3, 5))]
    near = [(0.01, (1, 2, 3, 9)), (0.02, (8, 8, 8, 8))]
    assert add_nearest(near, SEQUENCES, DISTANCES, 2, 0.7) == near
    assert add_nearest(near, SEQUENCES[:0], DISTANCES[:0], 2, 0.7) == near


def test_chunks_give_what_one_piece_gives():
    whole = add_nearest([], SEQUENCES, DISTANCES, 2, 0.7)
    kept = []
    for i in range(3):
        kept = add_nearest(kept, SEQUENCES[i : i + 1], DISTANCES[i : i + 1], 2, 0.7)
    assert kept == whole


def test_failed_sequences_are_kept_length_by_length():
    failed = FailedSequences(most=1, fraction=0.7)
    failed.offer(SEQUENCES, DISTANCES)
    failed.offer(SEQUENCES[:, :2], DISTANCES)
    assert failed.prefixes(4).tolist() == [[1, 2, 3, 5]]
    assert failed.prefixes(2).tolist() == [[1, 2]]
    assert failed.prefixes(3).shape == (0, 3)
    assert sorted(failed.list_all()) == [(0.1, (1, 2)), (0.1, (1, 2, 3, 5))]
    none = FailedSequences(most=0, fraction=0.7)
    none.offer(SEQUENCES, DISTANCES)
    assert not none.of_length


def test_guesses_are_unlike_what_was_found_and_unlike_one_another():
    failed = [(0.1, (1, 2, 3, 4)), (0.2, (1, 2, 3, 5)), (0.3, (7, 8, 9)), (0.4, (5, 5, 5))]
    assert choose_guesses([], failed, 9, 0.7) == [(1, 2, 3, 4), (7, 8, 9), (5, 5, 5)]
    assert choose_guesses([(1, 2, 3, 4)], failed, 1, 0.7) == [(7, 8, 9)]
    assert choose_guesses([], failed, 0, 0.7) == []


def test_a_guess_goes_on_as_long_as_it_stays_near():
    failed = [(1e-3, (1, 2)), (1.5e-3, (1, 2, 3)), (0.2, (1, 2, 3, 4))]
    assert choose_guesses([], failed, 1, 0.7) == [(1, 2, 3)]
