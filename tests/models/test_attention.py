"""The one softmax: against sums over heads and keys that are written out, and each way against the other."""

from __future__ import annotations

import math

import pytest
import torch

from unmask.models.attention import Scores, attend, attend_behind

H, G, E = 4, 2, 3


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_it_is_the_sum_that_it_stands_for():
    queries, keys, values = random(5, H, E), random(6, G, E, seed=1), random(6, G, E, seed=2)
    visible = torch.ones(5, 6, dtype=torch.bool).tril(1)
    ours = attend(queries, keys, values, visible, Scores(0.7))
    assert ours.shape == (5, H * E)
    for i in range(5):
        for h in range(H):
            g = h * G // H
            seen = [j for j in range(6) if visible[i, j]]
            weights = [math.exp(0.7 * float(queries[i, h] @ keys[j, g])) for j in seen]
            slow = sum(w * values[j, g] for w, j in zip(weights, seen, strict=True)) / sum(weights)
            torch.testing.assert_close(ours[i, h * E : (h + 1) * E], slow)


def test_keys_that_are_not_visible_do_not_matter():
    queries, keys, values = random(2, 3, H, E), random(2, 4, G, E, seed=1), random(2, 4, G, E, seed=2)
    visible = torch.ones(2, 3, 4, dtype=torch.bool)
    visible[:, :, 2] = False
    before = attend(queries, keys, values, visible, Scores(1.0))
    keys[:, 2], values[:, 2] = 9.0, -9.0
    torch.testing.assert_close(attend(queries, keys, values, visible, Scores(1.0)), before)


@pytest.mark.parametrize("length", [0, 1, 4])
def test_candidates_behind_prefixes_are_the_last_rows_of_whole_texts(length):
    """A cached extension is what attention over prefix and candidate together gives."""
    queries, own_keys, own_values = random(3, H, E), random(3, G, E, seed=1), random(3, G, E, seed=2)
    keys, values = random(2, length, G, E, seed=3), random(2, length, G, E, seed=4)
    fast = attend_behind(queries, own_keys, own_values, keys, values, Scores(0.5))
    assert fast.shape == (2, 3, H * E)
    for s in range(2):
        for c in range(3):
            whole = torch.cat([keys[s], own_keys[c][None]]), torch.cat([values[s], own_values[c][None]])
            slow = attend(queries[c][None], *whole, torch.ones(1, length + 1, dtype=torch.bool), Scores(0.5))[0]
            torch.testing.assert_close(fast[s, c], slow)
    matrix = random(H * E, 5, seed=5)
    through = attend_behind(queries, own_keys, own_values, keys, values, Scores(0.5), through=matrix)
    torch.testing.assert_close(through, fast @ matrix)


def test_scores_are_bounded_shifted_and_may_go_to_a_sink():
    queries, keys, values = random(1, H, E), random(4, H, E, seed=1), random(4, H, E, seed=2)
    rule, bias = Scores(0.7, softcap=2.0, sinks=(0.1, 0.2, 0.3, 0.4)), random(H, 1, 4, seed=3)
    ours = attend(queries, keys, values, torch.ones(1, 4, dtype=torch.bool), rule, bias)
    for h in range(H):
        scores = 2 * torch.tanh(0.7 * keys[:, h] @ queries[0, h] / 2) + bias[h, 0]
        weights = torch.cat([scores, torch.tensor([rule.sinks[h]], dtype=torch.float64)]).softmax(0)[:-1]
        torch.testing.assert_close(ours[0, h * E : (h + 1) * E], weights @ values[:, h])
    behind = attend_behind(queries, keys[3:], values[3:], keys[None, :3], values[None, :3], rule, bias[:, 0])
    torch.testing.assert_close(behind[0], ours)
