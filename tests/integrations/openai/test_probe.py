"""What the probe finds out, and what it makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.integrations.openai_server import serving, small_model

from unmask.errors import NoAnswerError
from unmask.evidence.logits import LogitView
from unmask.integrations.openai.client import OpenAIClient
from unmask.integrations.openai.probe import Bias, Support, probe_server

USUAL = Support(
    chat=False,
    largest_top=20,
    shows_all=False,
    full_logits=False,
    bias=Bias.BEFORE,
    max_bias=100.0,
    vocab_size=500,
    names_ids=True,
    takes_tokens=True,
    prompts_a_request=64,
    takes_long_prompts=True,
    spread=0.0,
    num_requests=60,
)


@pytest.fixture(scope="module")
def small():
    return small_model()


def test_the_best_way_that_is_open_is_taken():
    assert USUAL.view == LogitView(20, 100.0, constant_per_answer=True)
    assert replace(USUAL, full_logits=True).view == LogitView(500)
    assert replace(USUAL, shows_all=True, names=("a", "b", "c")).view == LogitView(3)
    assert replace(USUAL, bias=Bias.AFTER).view == LogitView(1, 100.0)
    assert replace(USUAL, largest_top=100_000).view.num_tokens == 1000


@pytest.mark.parametrize(
    "support",
    [
        *(replace(USUAL, bias=bias) for bias in (Bias.AFTER_HIDDEN, Bias.IGNORED, Bias.REFUSED)),
        replace(USUAL, largest_top=1),
        replace(USUAL, largest_top=0),
        replace(USUAL, vocab_size=None),
    ],
    ids=["after", "ignored", "refused", "top 1", "no top", "no vocabulary"],
)
def test_a_closed_way_says_why(support):
    assert "cannot be read" in support.view.closed


def test_the_support_is_a_table_for_people(small):
    with serving(small, max_logprobs=5) as (client, backend):
        support = probe_server(client)
    rows = dict(support.describe())
    assert rows["log-probabilities in one answer, at most"] == "5"
    assert rows["logit bias"].startswith("applied before")
    assert rows["same question, same answer"] == "yes"
    assert rows["tokens that take a bias"] == "500"
    assert backend.num_answers <= support.num_requests + 64 + 8


def test_noise_shows_as_different_answers(small):
    with serving(small, noise=0.1) as (client, _):
        assert 0.01 < probe_server(client).spread < 1


@pytest.mark.parametrize("ignored", [True, False], ids=["ignored", "refused"])
def test_a_bias_without_effect_is_told_from_a_refused_one(small, ignored):
    with serving(small) as (client, backend):
        backend._bias = (lambda given: {}) if ignored else (lambda given: given and int("no"))
        assert probe_server(client).bias is (Bias.IGNORED if ignored else Bias.REFUSED)


def test_of_a_server_that_is_not_there_nothing_is_said():
    with pytest.raises(NoAnswerError, match="connection failed"):
        probe_server(OpenAIClient("http://127.0.0.1:9", "m", api_key_env=None, retries=0))
