"""One text from its states: read to the end, stopped where a state is foreign, and never proven behind a doubt."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.outputs.prompts.equal_tokens import equal_tokens
from unmask.attacks.outputs.prompts.position_search import SearchSettings
from unmask.attacks.outputs.prompts.reader import PromptReader, ReadText, ReadToken
from unmask.attacks.outputs.prompts.row_scores import RowScores
from unmask.attacks.outputs.prompts.seen_text import ScoredRows
from unmask.attacks.outputs.prompts.templates import templates_for
from unmask.attacks.run import silent
from unmask.models import Model
from unmask.models.readouts import STREAM

LAYER, TEXT = 2, [5, 17, 99, 17, 250, 8, 3]
YES, NO = ReadToken(5, True, 0.0, 1.0), ReadToken(5, False, 0.0, 1.0)


@pytest.fixture(params=["tiny_gpt2", "tiny_llama"])
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def reader_of(model: Model) -> PromptReader:
    return PromptReader(model, LAYER, STREAM, templates_for(model, LAYER), SearchSettings(), 0.0, equal_tokens(model))


@torch.no_grad()
def states_of(model: Model, text=TEXT, position: int = 0) -> torch.Tensor:
    positions = position + torch.arange(len(text))[None]
    return model.hidden_states(torch.tensor([text]), num_blocks=LAYER, positions=positions)[LAYER][0]


def test_a_text_is_read_to_the_end(model):
    told = []
    read = reader_of(model).read(states_of(model), 0, lambda stage, done, total: told.append((done, total)))
    assert [token.token for token in read.tokens] == TEXT
    assert read.certain
    assert read.noise == 0
    assert told[0] == (0, len(TEXT))
    assert read.num_candidates < len(TEXT) * model.vocab_size


def test_it_stops_where_no_token_agrees(model):
    states = states_of(model).clone()
    states[3] = torch.randn(model.width, generator=torch.Generator().manual_seed(0))
    read = reader_of(model).read(states, 0, silent)
    assert read.stopped == 3
    assert [token.token for token in read.tokens[:3]] == TEXT[:3]
    assert [token.certain for token in read.tokens] == [True] * 3 + [False] * (len(TEXT) - 3)
    assert not read.proven


def test_a_state_that_is_a_little_off_is_not_skipped(model, monkeypatch):
    """Every guess is right. Those around it agree; it does not, and once positions have agreed, noise is no excuse."""
    right = torch.nn.functional.one_hot(torch.tensor(TEXT), model.vocab_size).float()
    monkeypatch.setattr(
        RowScores, "__call__", lambda self, text, where: ScoredRows(where.start, right[where], right[where])
    )
    states = states_of(model).clone()
    states[2] *= 1.01  # inside of the first window of guesses
    read = reader_of(model).read(states, 0, silent)
    assert read.stopped == 2
    assert [token.certain for token in read.tokens] == [True] * 2 + [False] * (len(TEXT) - 2)
    assert [token.token for token in read.tokens] == TEXT  # by their directions, which a factor leaves


def test_a_text_may_begin_later(tiny_gpt2):
    """Left padding: with learned positions, the place of the first token matters."""
    states = states_of(tiny_gpt2, position=4)
    assert reader_of(tiny_gpt2).read(states, 4, silent).certain
    assert not reader_of(tiny_gpt2).read(states, 0, silent).proven


def test_coarse_states_are_read_with_wider_tolerances(model):
    read = reader_of(model).read(states_of(model).bfloat16().float(), 0, silent)
    assert [token.token for token in read.tokens] == TEXT
    assert min(token.tolerance for token in read.tokens) > 1e-3


@pytest.mark.parametrize(
    ("tokens", "length", "proven"), [((YES, YES), 2, True), ((YES, NO), 2, False), ((YES,), 2, False), ((), 0, True)]
)
def test_a_text_is_proven_if_every_position_is(tokens, length, proven):
    assert ReadText(tokens, length, 0.0, 0, 0).proven is proven


def test_a_token_with_others_like_it_is_proven_and_not_certain():
    twin = ReadToken(5, True, 0.0, 1.0, equals=(5, 6))
    assert ReadText((twin,), 1, 0.0, 0, 0).proven
    assert not ReadText((twin,), 1, 0.0, 0, 0).certain
