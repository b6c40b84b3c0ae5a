"""New attempts begin with a good text, mostly without the tokens that do not belong to it."""

from __future__ import annotations

import pytest
import torch
from tests.sampling import sample

from unmask.attacks.outputs.vectors.edits import TextBatch
from unmask.attacks.outputs.vectors.language_prior import LanguagePrior
from unmask.attacks.outputs.vectors.restarts import Ends, doubt_tokens, drop_doubtful

SENTENCE = "the children built a small boat behind the school."


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def test_the_best_ends_are_chosen_most(generator):
    ends = Ends({(n,): n / 10 for n in range(9)})
    chosen = [ends.choose(generator) for _ in range(200)]
    assert set(chosen) == {(0,), (1,), (2,), (3,)}
    assert chosen.count((0,)) > 100


def test_ends_of_a_language_model_count_too(generator):
    ends = Ends({(1,): 0.1}, {(2,): -0.1})
    assert {ends.choose(generator) for _ in range(50)} == {(1,), (2,)}


def test_without_an_end_there_is_no_text(generator):
    assert Ends().choose(generator) == ()


def test_other_ends_vote_for_tokens():
    ends = Ends({(1, 2, 3): 0.1, (1, 2): 0.2, (1, 5): 0.3})
    assert ends.votes((1, 2, 3)) == [1.0, 0.5, 0.0]
    assert Ends().votes((1,)) == [0.0]


@sample("reads", [False, True], [False])
def test_the_wrong_token_is_the_most_doubtful(embedder, minilm, reads, request):
    tokens = minilm.encode(SENTENCE)[1:-1]
    vector = embedder.exact(TextBatch.of([tuple(tokens)]))[0]
    wrong = TextBatch.of([(*tokens[:4], *minilm.encode("lawyer")[1:-1], *tokens[4:])])
    language = LanguagePrior.of(request.getfixturevalue("smollm2"), minilm) if reads else None
    assert int(doubt_tokens(wrong, vector, embedder, language).argmax()) == 4


def test_some_tokens_are_lost_and_the_rest_keeps_its_order(embedder, minilm, generator):
    text = tuple(minilm.encode(SENTENCE)[1:-1])
    vector = embedder.exact(TextBatch.of([text]))[0]
    for _ in range(8):
        (kept,) = drop_doubtful(text, vector, 0.3, [0.5] * len(text), embedder, None, generator).as_tuples()
        assert 5 <= len(kept) < len(text)
        rest = iter(text)
        assert all(token in rest for token in kept)
