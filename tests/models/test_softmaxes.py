"""From what a softmax is given to a rule: scales, bounds, biases, windows and sinks; none for other scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from unmask.models.attention import Scores
from unmask.models.record import record_pass
from unmask.models.softmaxes import Heads, find_heads, find_scores, is_causal

LENGTH, LOWEST = 7, torch.finfo(torch.float32).min
LATER, NEAR = (torch.ones(LENGTH, LENGTH).triu(first).bool() for first in (1, -2))
SLOPES = 0.5 ** torch.arange(1.0, 5.0)[:, None, None]
SINKS = (0.5, -1.0, 0.25, 2.0)
ROWS = torch.randn(2, LENGTH, 64, generator=torch.Generator().manual_seed(0))
MAPS = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(1)) / 8


class Attention(nn.Module):
    """Four heads of queries; what becomes of products of queries and keys is given, or torch does all of it."""

    def __init__(self, change: Callable[[Tensor], Tensor] | None, groups: int = 4) -> None:
        super().__init__()
        self.change, self.groups = change, groups

    def forward(self, rows: Tensor) -> Tensor:
        q, k, v = ((rows @ each).unflatten(-1, (4, 16)).transpose(1, 2) for each in MAPS)
        k, v = (part[:, : self.groups].repeat_interleave(4 // self.groups, dim=1) for part in (k, v))
        if self.change is None:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        return self.change(q @ k.transpose(-1, -2)).softmax(-1)[..., :LENGTH] @ v


def heads_of(*settings: Callable[[Tensor], Tensor] | int | None) -> Heads:
    record = record_pass(Attention(*settings), rows=ROWS)
    (heads,) = find_heads(record, record.calls[0])
    return heads


def causal(scores: Tensor, lowest: float = LOWEST) -> Tensor:
    return scores.masked_fill(LATER, lowest)


RULES = {
    "a scale": (lambda s: causal(0.17 * s), Scores(0.17)),
    "both ways": (lambda s: s / 4, Scores(0.25)),
    "a bound": (lambda s: causal(2 * torch.tanh(s / 8)), Scores(0.25, softcap=2.0)),
    "ALiBi": (lambda s: causal(s / 4 + SLOPES * torch.arange(LENGTH)), Scores(0.25, has_bias=True)),
    "a window": (lambda s: causal(s / 4).where(NEAR, LOWEST), Scores(0.25, has_bias=True)),
    "one call": (None, Scores(0.3)),
    "a power": (lambda s: causal(s * s.abs()), None),
    "a scale for each head": (lambda s: causal(s * SLOPES), None),
    "what the text adds": (lambda s: causal(s / 4 + s.roll(1, dims=-1)), None),
}


@pytest.mark.parametrize(("change", "expected"), RULES.values(), ids=RULES)
def test_scores_have_a_rule_if_they_are_scaled_products(change, expected):
    found = find_scores(heads_of(change))
    assert found == (None if expected is None else replace(expected, scale=found.scale))
    assert expected is None or found.scale == pytest.approx(expected.scale, rel=1e-6)


def test_sinks_are_found_although_row_maxima_are_subtracted():
    def add_sinks(scores: Tensor) -> Tensor:
        scores = torch.cat([causal(scores / 4), torch.tensor(SINKS).view(4, 1, 1).expand(2, 4, LENGTH, 1)], dim=-1)
        return scores - scores.amax(-1, keepdim=True)

    heads = heads_of(add_sinks)
    assert find_scores(heads).sinks == pytest.approx(SINKS, abs=1e-5)
    heads.scores[1, :, :, -1] += 0.1
    assert find_scores(heads) is None


@pytest.mark.parametrize(("lowest", "expected"), [(LOWEST, True), (-1e4, True), (-torch.inf, True), (-1.0, False)])
def test_a_mask_may_be_any_number_that_leaves_no_weight(lowest, expected):
    assert is_causal(heads_of(lambda scores: causal(scores / 4, lowest))) == expected


def test_keys_that_heads_share_are_told_once():
    heads = heads_of(causal, 2)
    assert (heads.queries.shape[1], heads.keys.shape[1], heads.values.shape[1]) == (4, 2, 2)
    assert find_scores(heads) == Scores(1.0)
    assert find_scores(replace(heads, keys=heads.keys.flip(1))) is None
