"""Scores of rows: the model's prediction and the table; rows that are kept are those that would be made anew."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.outputs.prompts import row_scores
from unmask.attacks.outputs.prompts.continuation import Continuation
from unmask.attacks.outputs.prompts.equal_tokens import equal_tokens
from unmask.attacks.outputs.prompts.position_search import SearchSettings
from unmask.attacks.outputs.prompts.reader import PromptReader
from unmask.attacks.outputs.prompts.row_scores import RowScores
from unmask.attacks.outputs.prompts.seen_text import TextProgress
from unmask.attacks.outputs.prompts.templates import templates_for
from unmask.models import Model
from unmask.models.readouts import STREAM

LAYER, TEXT = 2, [5, 17, 99, 17, 250, 8, 3]


@pytest.fixture(params=["tiny_gpt2", "tiny_llama"])
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


@torch.no_grad()
def begun(model: Model) -> tuple[RowScores, TextProgress]:
    """A text whose first token is known."""
    templates = templates_for(model, LAYER)
    reader = PromptReader(model, LAYER, STREAM, templates, SearchSettings(), 0.0, equal_tokens(model))
    seen = reader.see(model.hidden_states(torch.tensor([TEXT]), num_blocks=LAYER)[LAYER][0], 0)
    start = Continuation.start(model, LAYER)
    text = TextProgress(seen, start, start, (), *reader.scores.predictions(seen))
    text.continuation = start.advance(start.run(torch.tensor(TEXT[:1])), 1)
    return reader.scores, text


@torch.no_grad()
def test_the_prior_is_the_models_prediction_and_an_even_chance(model):
    scores, text = begun(model)
    prior = scores(text, slice(1, 4)).prior.exp()
    said = model.hf(torch.tensor([TEXT])).logits[0, :3].softmax(-1)
    torch.testing.assert_close(prior, 0.9 * said + 0.1 / model.vocab_size, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(prior.sum(1), torch.ones(3))


@torch.no_grad()
@pytest.mark.parametrize("kept", [0, 2**20])
def test_kept_rows_are_those_that_would_be_made_anew(model, monkeypatch, kept):
    monkeypatch.setattr(row_scores, "_KEPT", kept)
    scores, text = begun(model)
    for where in (slice(1, 3), slice(2, 3), slice(3, 7), slice(6, 7), slice(1, 2)):
        ours, fresh = scores(text, where), scores._score(text, where)
        assert ours.first == where.start
        torch.testing.assert_close(ours.scores, fresh.scores, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.prior, fresh.prior, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_first_token_has_a_table_of_its_own(model):
    scores, text = begun(model)
    assert scores.metric_at(text) is scores.metric
    text.continuation = text.start
    assert scores.metric_at(text) is scores.first_metric
    scores(text, slice(0, 1))
    assert text.scored is None
