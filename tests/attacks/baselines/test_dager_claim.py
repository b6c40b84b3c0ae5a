"""What may be claimed of sequences that DAGER accepts: complete ones are certain, others say what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from unmask.attacks.baselines.dager_claim import (
    AcceptedSequences,
    TokenSets,
    check_sequences,
    claim_sequences,
    tokens_only,
)
from unmask.attacks.baselines.dager_spans import SequenceCheck, query_layers, take_spans
from unmask.attacks.run import Run
from unmask.protocols import observe_gradients
from unmask.recovery import Status

TEXTS = ((5, 17, 99, 21, 250), (400, 3, 8))
SETS = TokenSets([torch.tensor([5, 400]), torch.tensor([17, 3])], [(2, 8)], False, 1e-7, 100)


@pytest.fixture(scope="module")
def observed(tiny_bert):
    evidence = observe_gradients(tiny_bert, [list(text) for text in TEXTS], task="classification")
    spans = take_spans(evidence, query_layers(evidence, tiny_bert), rank_margin=20, rank_tolerance=None, seed=0)
    return evidence, SequenceCheck(tiny_bert, spans.second, 0), spans


@torch.no_grad()
def claim(observed, texts, num_texts=2, **accepted):
    evidence, check, spans = observed
    judgement = check_sequences(check, spans, AcceptedSequences(texts, 50, **accepted), tolerance=1e-3)
    return claim_sequences(replace(evidence, num_texts=num_texts), judgement, SETS, ("a", "b"), Run())


def test_all_texts_are_recovered(observed):
    recovery = claim(observed, TEXTS)
    assert recovery.status is Status.RECOVERED
    assert {text.tokens for text in recovery.value.certain} == set(TEXTS)
    assert recovery.certificate.holds
    assert recovery.certificate.details["rank"] == recovery.certificate.details["explained_rank"] == 8
    assert recovery.cost.candidates == 150


def test_a_missing_text_leaves_gradient_unexplained(observed):
    recovery = claim(observed, TEXTS[:1])
    assert recovery.status is Status.PARTIAL
    assert not recovery.value.certain
    assert "5 rows where the gradient's rank is 8" in recovery.reason
    assert recovery.certificate.details["unexplained_gradient"] > 1e-3


@pytest.mark.parametrize(("num_texts", "part"), [(None, "not known"), (3, "the batch holds 3 texts")])
def test_the_number_of_texts_must_be_known_and_right(observed, num_texts, part):
    recovery = claim(observed, TEXTS, num_texts)
    assert recovery.status is Status.PARTIAL
    assert part in recovery.reason
    assert len(recovery.value.certain) == 2  # each is in the batch; whether they are all is open


def test_guesses_come_last_and_are_never_certain(observed):
    recovery = claim(observed, TEXTS[:1], guesses=[(400, 3, 9)], is_cut=True)
    assert recovery.status is Status.BUDGET_EXHAUSTED
    assert recovery.value.texts[-1].tokens == (400, 3, 9)
    assert recovery.value.texts[-1].residual > 1e-2
    assert "1 more are guesses" in recovery.reason


def test_tokens_without_a_sequence(observed):
    _, check, _ = observed
    with torch.no_grad():
        recovery = tokens_only(SETS, check, AcceptedSequences((), 7), 1e-5, ("a",), Run())
    assert recovery.status is Status.PARTIAL
    assert recovery.value.token_set == {5, 400, 17, 3, 8}
    assert recovery.certificate.holds
    assert SETS.at(1).tolist() == [17, 3]
    assert not len(SETS.at(2))
    assert replace(SETS, everywhere=True).at(9).tolist() == [5, 400]
