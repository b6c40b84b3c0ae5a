"""Tokens that one row leaves open: later rows settle them, or they stay open."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from unmask.attacks.outputs.prompts.continuation import Continuation
from unmask.attacks.outputs.prompts.rivals import settle_rivals
from unmask.attacks.outputs.prompts.seen_text import ReadToken, SeenText, TextProgress
from unmask.proof.state_noise import StateNoise

TEXT, LAYER = [5, 17, 99, 8], 2


def progress(model, variance: float, *, rivals=(6, 7), hidden: bool = False) -> TextProgress:
    """A text whose first token has rivals; `hidden`: its own row tells nothing."""
    start = Continuation.start(model, LAYER)
    rows = start.run(torch.tensor(TEXT)).states
    if hidden:
        rows = torch.cat([(rows[:1] + start.run(torch.tensor([6])).states) / 2, rows[1:]])
    noise = StateNoise(torch.full((len(TEXT),), variance), torch.full((len(TEXT),), 0.5), torch.ones(len(TEXT)))
    ones = torch.ones_like(rows)
    seen = SeenText(rows, rows, ones, rows, 0, noise)
    tokens = [ReadToken(token, False, 0.0, 0.5) for token in TEXT]
    tokens[0] = replace(tokens[0], rivals=rivals)
    return TextProgress(seen, start, start, (), None, torch.zeros(len(TEXT), dtype=torch.bool), tokens=tokens)


def test_later_rows_decide(tiny_llama):
    text = progress(tiny_llama, 1e-4, hidden=True)
    settle_rivals(text)
    assert [token.token for token in text.tokens] == TEXT
    assert all(token.certain for token in text.tokens)


def test_rounding_that_hides_everything_leaves_them_open(tiny_llama):
    text = progress(tiny_llama, 1e6)
    settle_rivals(text)
    assert text.tokens[0].equals == (5, 6, 7)
    assert not any(token.certain for token in text.tokens)


@pytest.mark.parametrize("tested", [True, False])
def test_an_open_token_is_proven_only_if_all_tokens_were_tested(tiny_llama, tested):
    """Eight of 481 tokens that agreed used to be a proven class, and the right one was none of them."""
    text = progress(tiny_llama, 1e6)
    text.tokens = [replace(token, proven=True, are_all_rivals=tested) for token in text.tokens]
    settle_rivals(text)
    assert text.tokens[0].proven is tested
    assert not text.tokens[0].certain


def test_too_many_rivals_stay_open(tiny_llama):
    text = progress(tiny_llama, 1e-4, rivals=tuple(range(100, 200)))
    settle_rivals(text)
    assert not text.tokens[0].certain
    assert text.num_candidates == 0


def test_exact_states_have_no_likelihood_to_decide_by(tiny_llama):
    text = progress(tiny_llama, 0.0)
    settle_rivals(text)
    assert not text.tokens[0].certain


def test_without_rivals_nothing_changes(tiny_llama):
    text = progress(tiny_llama, 1e-4, rivals=())
    before = list(text.tokens)
    settle_rivals(text)
    assert text.tokens == before
