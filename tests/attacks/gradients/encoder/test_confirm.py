"""Which proof an encoder's texts have: what arrives, the client run again with fitting labels, later spans, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.attacks.gradients.encoder_batches import (
    BATCH,
    END,
    FRAME,
    START,
    as_places,
    candidates_of,
    classified,
    classified_pairs,
    pair_kinds,
    problem_of,
)

from unmask.attacks.gradients.decoder.confirm import Proof
from unmask.attacks.gradients.encoder.confirm import EncoderConfirmation, confirm_encoder, text_input
from unmask.attacks.gradients.encoder.position_candidates import Text
from unmask.attacks.gradients.encoder.problem import Problem, set_up
from unmask.defences import parse_defence
from unmask.evidence import GradientEvidence
from unmask.models import Model
from unmask.protocols import observe_fedavg

# Words of the batch in another order, so that they are places of its problem.
MADE_UP = (START, 400, 99, 250, END)


def places_of(problem: Problem, texts: Sequence[Sequence[int]]) -> list[Text]:
    return [as_places(problem.places, text) for text in texts]


def confirm(evidence: GradientEvidence, model: Model, texts: Sequence[Sequence[int]]) -> EncoderConfirmation:
    problem = problem_of(model, evidence)
    return confirm_encoder(evidence, problem, places_of(problem, texts))


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_the_right_texts_explain_the_update(tiny_bert, pooling):
    evidence = classified(tiny_bert, pooling=pooling)
    for known in (pooling, None):
        found = confirm(replace(evidence, pooling=known), tiny_bert, BATCH)
        assert found.proof is Proof.ARRIVALS
        assert found.agreement is not None
        assert found.agreement.holds
        assert not found.refuted
        assert found.num_passes > 0


@torch.no_grad()
@pytest.mark.parametrize(
    ("defence", "proof"), [("bf16", Proof.ROUNDED_CLIENT), ("noise:sigma=1e-6", Proof.NOISY_CLIENT)]
)
def test_under_noise_the_client_is_run_again(tiny_bert, defence, proof):
    clean = classified(tiny_bert, labels=[1, 0, 1], num_labels=2)
    evidence = parse_defence(defence)(clean, torch.Generator().manual_seed(0))
    problem = set_up(evidence, tiny_bert, candidates_of(tiny_bert, clean), FRAME, noisy=True)
    assert isinstance(problem, Problem)
    assert confirm_encoder(evidence, problem, places_of(problem, BATCH)).proof is proof
    for wrong in ([*BATCH[:2], MADE_UP], BATCH[:2]):
        found = confirm_encoder(evidence, problem, places_of(problem, wrong))
        assert found.proof is Proof.NONE
        assert found.refuted == set(places_of(problem, wrong))


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_a_text_at_which_nothing_arrives_is_refuted(tiny_bert, pooling):
    evidence = classified(tiny_bert, pooling=pooling)
    problem = problem_of(tiny_bert, evidence)
    texts = places_of(problem, [*BATCH, MADE_UP])
    found = confirm_encoder(evidence, problem, texts)
    assert found.proof is Proof.ARRIVALS
    assert found.refuted == {texts[-1]}


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_with_a_text_missing_later_spans_confirm_the_others(tiny_bert, pooling):
    evidence = classified(tiny_bert, pooling=pooling)
    problem = problem_of(tiny_bert, evidence)
    texts = places_of(problem, [*BATCH[:2], MADE_UP])
    found = confirm_encoder(evidence, problem, texts)
    assert found.proof is Proof.DEEP_SPANS
    assert found.refuted == {texts[-1]}
    assert found.agreement is not None
    assert not found.agreement.holds


def test_texts_that_are_not_there_have_no_proof(tiny_bert):
    assert confirm(classified(tiny_bert), tiny_bert, [MADE_UP]).proof is Proof.NONE


def test_block_0_alone_is_enough_for_arrivals(tiny_bert):
    evidence = classified(tiny_bert, parameters=["layer.0."])
    assert confirm(evidence, tiny_bert, BATCH).proof is Proof.ARRIVALS
    assert confirm(evidence, tiny_bert, BATCH[:2]).proof is Proof.NONE  # no later block that could tell


def test_pairs_are_run_with_their_types(tiny_bert):
    pairs = [(START, 17, 99, END, 250, END), (START, 400, 3, 8, END, 21, 33, END)]
    evidence = classified_pairs(tiny_bert, pairs)
    problem = problem_of(tiny_bert, evidence)
    texts = [as_places(problem.places, pair, pair_kinds(pair)) for pair in pairs]
    inputs = [text_input(problem, text) for text in texts]
    assert [given.types for given in inputs] == [pair_kinds(pair) for pair in pairs]
    assert [given.tokens for given in inputs] == pairs
    assert confirm_encoder(evidence, problem, texts).proof is Proof.ARRIVALS


def test_a_single_text_has_no_types(tiny_bert):
    problem = problem_of(tiny_bert, classified(tiny_bert))
    assert text_input(problem, as_places(problem.places, BATCH[0])).types is None


# ---- local training: the client is run again


def trained(model: Model, texts: Sequence[Sequence[int]] = BATCH, **options: object) -> GradientEvidence:
    settings = {"local_steps": 4, "learning_rate": 1e-3, "labels": [1, 0, 1]} | options
    return observe_fedavg(model, texts, task="classification", **settings)


def confirm_trained(evidence: GradientEvidence, model: Model, texts: Sequence[Sequence[int]]) -> EncoderConfirmation:
    """Places come from the gradient of the same batch, which is sharp where four steps are not."""
    problem = replace(problem_of(model, classified(model)), drifts=True)
    return confirm_encoder(evidence, problem, places_of(problem, texts))


@pytest.mark.parametrize("steps", [1, 4])
def test_local_steps_are_confirmed_with_the_labels_that_fit(tiny_bert, steps):
    for labels in ([1, 0, 1], [0, 0, 0]):
        found = confirm_trained(trained(tiny_bert, local_steps=steps, labels=labels), tiny_bert, BATCH)
        assert found.proof is Proof.CLIENT, found.agreement
        assert not found.refuted


def test_other_texts_of_a_trained_client_are_not_confirmed(tiny_bert):
    evidence = trained(tiny_bert)
    for texts in (BATCH[:2], [*BATCH, MADE_UP], [*BATCH[:2], MADE_UP]):
        found = confirm_trained(evidence, tiny_bert, texts)
        assert found.proof is Proof.NONE
        assert len(found.refuted) == len(texts)


def test_what_cannot_be_run_again_is_not_confirmed(tiny_bert):
    evidence = trained(tiny_bert)
    for change in ({"noise_std": 1e-3}, {"local_batch_size": 2}):
        assert confirm_trained(replace(evidence, **change), tiny_bert, BATCH).proof is Proof.NONE


def test_a_client_that_memory_is_too_small_for_is_not_called_another_one(tiny_bert, monkeypatch):
    evidence = trained(tiny_bert)
    assert not confirm_trained(evidence, tiny_bert, BATCH).stopped
    problem = replace(problem_of(tiny_bert, classified(tiny_bert)), drifts=True)
    monkeypatch.setenv("UNMASK_MEMORY_GB", "1e-6")
    found = confirm_encoder(evidence, problem, places_of(problem, BATCH))
    assert "it was not done" in found.stopped
    assert (found.proof, len(found.refuted)) == (Proof.NONE, len(BATCH))


def test_the_model_is_left_alone(tiny_bert):
    before = {name: p.detach().clone() for name, p in tiny_bert.named_parameters()}
    with torch.no_grad():
        confirm_trained(trained(tiny_bert), tiny_bert, BATCH)
        confirm(classified(tiny_bert), tiny_bert, BATCH)
    assert all(torch.equal(before[name], p) and p.requires_grad for name, p in tiny_bert.named_parameters())
