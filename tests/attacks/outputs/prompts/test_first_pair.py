"""A first token that its own row hides: found together with the second one, or not at all."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.outputs.prompts import first_pair
from unmask.attacks.outputs.prompts.continuation import Continuation
from unmask.attacks.outputs.prompts.first_pair import find_first_again
from unmask.attacks.outputs.prompts.seen_text import ReadToken, SeenText, TextProgress
from unmask.proof.state_noise import StateNoise

TEXT, LAYER, WRONG = [5, 17, 99], 2, 6


@pytest.fixture
def text(tiny_llama) -> TextProgress:
    """A text whose first row lies halfway between its token and another one, which was taken."""
    start = Continuation.start(tiny_llama, LAYER)
    rows = start.run(torch.tensor(TEXT)).states
    rows = torch.cat([(rows[:1] + start.run(torch.tensor([WRONG])).states) / 2, rows[1:]])
    off = float((rows[0] - start.run(torch.tensor([WRONG])).states[0]).square().mean())
    noise = StateNoise(torch.tensor([off, 1e-8, 1e-8]), torch.tensor([1.0, 1e-3, 1e-3]), torch.ones(3))
    seen = SeenText(rows, rows, torch.ones_like(rows), rows, 0, noise)
    taken = [ReadToken(WRONG, True, 0.0, 1.0)]
    return TextProgress(seen, start, start, (), None, torch.zeros(3, dtype=torch.bool), tokens=taken)


def scores(tiny_llama, *likely: int) -> torch.Tensor:
    even = torch.zeros(tiny_llama.vocab_size)
    even[list(likely)] = 1.0
    return even


def test_the_pair_is_found(text, tiny_llama):
    assert find_first_again(text, scores(tiny_llama, 8, 17, 40, 41), {})
    (token,) = text.tokens
    assert token.token == TEXT[0]
    assert WRONG in token.rivals
    assert text.continuation.num_known == 1
    assert text.unpredicted == TEXT[:1]


def test_no_pair_agrees_where_the_second_token_is_another_one(text, tiny_llama, monkeypatch):
    monkeypatch.setattr(first_pair, "_MOST_SECOND", 4)
    assert not find_first_again(text, scores(tiny_llama, 8, 18, 40, 41), {})
    assert text.tokens[0].token == WRONG


def test_too_many_first_tokens_are_left_alone(text, tiny_llama, monkeypatch):
    monkeypatch.setattr(first_pair, "_MOST_FIRST", 1)
    assert not find_first_again(text, scores(tiny_llama, 17), {})


def test_equal_tokens_do_not_compete(text, tiny_llama):
    assert find_first_again(text, scores(tiny_llama, 17), {TEXT[0]: (TEXT[0], WRONG)})
    assert text.tokens[0].equals == (TEXT[0], WRONG)
    assert WRONG not in text.tokens[0].rivals
