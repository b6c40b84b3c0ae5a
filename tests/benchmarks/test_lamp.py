"""LAMP: its moves, its priors, and words and order of a small client's text."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from tests.benchmarks.rivals import CASES, head_of, padded

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def lamp(monkeypatch: pytest.MonkeyPatch, one_thread: None):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("baselines.lamp")


@pytest.fixture
def priors(lamp):
    return importlib.import_module("baselines.lamp_priors")


def test_moves_are_orders_of_the_words_alone(lamp):
    order = list(range(8))
    found = list(lamp.moves([1, 2, 3, 4], order, 200, torch.Generator().manual_seed(0)))
    assert len(found) == 200
    assert all(sorted(one) == order and one[0] == 0 and one[5:] == [5, 6, 7] for one in found)
    assert len(set(map(tuple, found))) > 10


@pytest.mark.parametrize("kind", ["encoder", pytest.param("decoder", marks=pytest.mark.slow)])
def test_a_text_is_read(lamp, priors, kind):
    matching = importlib.import_module("baselines.gradient_matching")
    make, texts = CASES[kind]
    model, text = make(), texts[:1]
    client = matching.Client.of_batch(model, head_of(model), text, [0])
    update = matching.client_update(client, padded(text))
    prior = priors.BigramPrior(text, model.vocab_size)
    attack = lamp.Lamp(num_steps=60, num_candidates=20, num_moves=16, move_every=20, rates=(0.03,))
    found = attack(client, update, prior)
    assert len(found[0]) == len(text[0])
    assert len(set(found[0]) & set(text[0])) >= len(text[0]) - 1


def test_batches_of_several_texts_keep_their_lengths(lamp, priors):
    matching = importlib.import_module("baselines.gradient_matching")
    make, texts = CASES["encoder"]
    model = make()
    client = matching.Client.of_batch(model, head_of(model), texts, [0, 1])
    update = matching.client_update(client, padded(texts))
    attack = lamp.Lamp(num_steps=6, num_candidates=4, num_moves=8, move_every=2, burn_in=0)
    found = attack(client, update, priors.BigramPrior(texts, model.vocab_size))
    assert [len(text) for text in found] == [5, 4]
    assert all(text[0] == 1 and text[-1] == 2 for text in found)
    assert found == attack(client, update, priors.BigramPrior(texts, model.vocab_size))


def test_bigrams_prefer_the_order_that_they_saw(priors):
    prior = priors.BigramPrior([[5, 6, 7], [6, 7, 8]], vocab_size=10)
    seen, turned = prior([[5, 6, 7, 8], [8, 7, 6, 5]])
    assert seen < turned
    assert prior([[3]]) == [0.0]


def test_a_language_model_scores_like_transformers_loss(priors):
    make, texts = CASES["decoder"]
    model = make()
    scores = priors.ModelPrior(model)(texts)
    for text, score in zip(texts, scores, strict=True):
        tokens = torch.tensor([text])
        assert score == pytest.approx(model.hf(input_ids=tokens, labels=tokens).loss.item(), rel=1e-4)
