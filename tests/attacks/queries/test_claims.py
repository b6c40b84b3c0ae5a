import math
from dataclasses import replace

import pytest
import torch
from tests.attacks.queries.layers import generator, joined, one, vector_layer
from tests.attacks.queries.random_heads import added, oracle_of, random_head, rounded
from tests.attacks.queries.random_networks import normal

from unmask.attacks.queries.claims import (
    certify,
    is_zero,
    judge_heads,
    measure_shares,
    no_heads,
    refuse,
)
from unmask.attacks.queries.fresh import FRESH_LENGTH, NUM_FRESH, draw_lengths, fresh_sequences
from unmask.attacks.queries.profile import OracleProfile, probe_oracle
from unmask.attacks.queries.query_run import QueryRun
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Status

WIDTH = 8
HEADS = random_head(WIDTH, num_heads=3)


def claim(claimed, true=HEADS, after=None, boost=1.0, **options):
    """The recovery of some heads from an oracle of others."""
    evidence = oracle_of(true, after, **options)
    profile = probe_oracle(evidence, generator())
    run = QueryRun(1, evidence=evidence, unknowns=7)
    run.probe(profile)
    return judge_heads(run, claimed, boost, "Heads.")


def test_the_true_heads_are_certified():
    recovery = claim(HEADS)
    assert recovery.status is Status.RECOVERED
    assert recovery.certificate.residual < 1e-13
    assert recovery.value is HEADS


@pytest.mark.parametrize("share", [1e-3, 1e-7])
def test_a_head_that_is_missing_is_not_certified(share):
    recovery = claim(HEADS, joined(HEADS, one(normal(1)(WIDTH, WIDTH), share * normal(2)(WIDTH))))
    assert recovery.status is Status.NOTHING_FOUND
    assert len(recovery.value) == 0
    assert recovery.certificate.residual > recovery.certificate.tolerance
    assert "it is not a layer of this form, or a head was missed" in recovery.reason


@pytest.mark.parametrize(("share", "after"), [(1e-5, lambda answers: answers.float().double()), (1e-9, None)])
def test_what_learning_may_be_off_by_excuses_no_missed_head(share, after):
    """The tolerance is that of amplified errors; the missed head is smaller, and far above the oracle's own error."""
    recovery = claim(HEADS, joined(HEADS, one(normal(1)(WIDTH, WIDTH), share * normal(2)(WIDTH))), after)
    assert recovery.status is Status.NOTHING_FOUND
    assert "fitted anew in a small subspace" in recovery.reason
    assert not recovery.certificate.holds
    details = recovery.certificate.details
    assert details["learning_queries"] == 0
    assert details["fresh_queries"] > NUM_FRESH


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_weights_that_are_off_by_amplified_errors_are_certified_still(dtype):
    off = HeadWeights(W=HEADS.W * (1 + (1e-10 if dtype is torch.float64 else 1e-5)), v=HEADS.v)
    recovery = claim(off, dtype=dtype)
    assert recovery.status is Status.RECOVERED
    assert recovery.certificate.details["refit_leaves"] < recovery.certificate.residual


def test_a_head_that_is_too_small_to_check_is_not_claimed():
    small, wrong = (one(normal(seed)(WIDTH, WIDTH), 1e-9 * normal(2)(WIDTH)) for seed in (1, 3))
    recovery = claim(joined(HEADS, wrong), joined(HEADS, small))
    assert recovery.status is Status.PARTIAL
    assert torch.equal(recovery.value.W, HEADS.W)
    assert "1 of them are too small to check" in recovery.reason
    assert claim(joined(HEADS, small), joined(HEADS, small)).status is Status.RECOVERED


def test_shares_are_what_answers_lack_without_a_head():
    still = joined(HEADS, HeadWeights(W=0 * HEADS.W[:1], v=1e-3 * HEADS.v[:1]))
    shares = measure_shares(still, fresh_sequences(still, 1.0, math.inf, generator()))
    assert bool((shares[:3] > 0.1).all())
    assert 1e-4 < float(shares[3]) < 1e-1


@pytest.mark.parametrize("wrong", [1e-4, 1e-3])
def test_the_error_of_w_that_fresh_sequences_show(wrong):
    off = HeadWeights(W=HEADS.W * (1 + wrong * normal(5)(3, WIDTH, WIDTH)), v=HEADS.v)
    assert wrong / 2 < claim(off).certificate.details["lasting_error"] < 3 * wrong
    assert claim(HEADS).certificate.details["lasting_error"] == 0
    assert claim(HEADS, after=added(1e-2), max_norm=4.0).certificate.details["lasting_error"] < 0.02


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_a_wrong_w_shows_at_any_scale(scale):
    """Tokens are as long as it takes for every head's scores to be of the order of one."""
    small = HeadWeights(W=scale * HEADS.W, v=HEADS.v)
    assert claim(small, small).status is Status.RECOVERED
    assert claim(HeadWeights(W=1.001 * small.W, v=small.v), small).status is Status.NOTHING_FOUND


def test_a_small_w_beside_large_ones_is_looked_at_too():
    W = HEADS.W * torch.tensor([1e-4, 1.0, 1.0]).double()[:, None, None]
    true, wrong = HeadWeights(W=W, v=HEADS.v), HeadWeights(W=W.clone(), v=HEADS.v)
    wrong.W[0] *= 1.001
    assert claim(true, true).status is Status.RECOVERED
    assert claim(wrong, true).status is Status.NOTHING_FOUND


@pytest.mark.parametrize(
    ("precision", "noise", "size", "expected"),
    [
        (1e-16, 0.0, 1.0, 1e-8),  # nobody agrees to eight digits by chance
        (1e-8, 0.0, 1.0, 1e-4),  # amplified by learning
        (1e-4, 0.0, 1.0, 1e-2),  # which excuses no more than a hundredth
        (1e-2, 0.0, 1.0, 0.2),  # unless the oracle's own error is larger: twenty times that
        (1e-16, 1e-3, 1e4, 1e-3),  # what is added counts by the size of answers
    ],
)
def test_the_rule_for_what_is_allowed(precision, noise, size, expected):
    evidence = oracle_of(HeadWeights(W=HEADS.W, v=size * HEADS.v))
    profile = OracleProfile(0, False, True, noise, 0.0, precision, math.inf, 0)
    fresh = fresh_sequences(HEADS, 1.0, math.inf, generator())
    rms = float(HEADS(fresh).square().mean().sqrt())
    certificate = certify(evidence, profile, HEADS, fresh, "With these weights")
    own = precision + noise / (size * rms)
    assert certificate.details["oracle_error"] == pytest.approx(own, rel=1e-9)
    assert certificate.tolerance == pytest.approx(expected if not noise else max(1e-8, 1e4 * own), rel=1e-9)


def test_answers_that_are_all_zero_prove_nothing():
    silent = HeadWeights(W=HEADS.W, v=0 * HEADS.v)
    recovery = claim(silent, silent)
    assert recovery.status is Status.NOTHING_FOUND
    assert not recovery.certificate.holds


@pytest.mark.parametrize("max_norm", [math.inf, 3.0])
@pytest.mark.parametrize("boost", [1.0, 1e4])
def test_fresh_sequences_keep_to_the_bound(max_norm, boost):
    X = fresh_sequences(HEADS, boost, max_norm, generator())
    assert X.shape == (NUM_FRESH, FRESH_LENGTH, WIDTH)
    assert float(X.norm(dim=2).max()) <= max_norm * (1 + 1e-12)
    scores = torch.einsum("bnd,hde,be->bhn", X[:, :-1], HEADS.W, X[:, -1])
    assert 0.05 < float(scores.square().mean().sqrt()) < 10


def test_fresh_sequences_of_no_heads():
    assert fresh_sequences(no_heads(oracle_of(HEADS)), 1.0, math.inf, generator()).isfinite().all()


def test_long_tokens_let_answers_stand_out_from_rounding():
    wrong = HeadWeights(W=1.0001 * HEADS.W, v=HEADS.v)
    assert claim(wrong, after=rounded(2), boost=1e9).status is Status.NOTHING_FOUND
    assert claim(HEADS, after=rounded(2), boost=1e9).status is Status.RECOVERED
    assert claim(wrong, after=rounded(2)).certificate.tolerance > 1e-3


def test_queries_by_purpose_add_up():
    recovery = claim(HEADS)
    details = recovery.certificate.details
    assert details["fresh_queries"] == NUM_FRESH + len(draw_lengths(generator()))
    assert details["learning_queries"] == 0
    assert details["degrees_of_freedom"] == 7
    assert recovery.cost.queries == details["probing_queries"] + details["fresh_queries"]


def test_a_refusal_claims_nothing():
    evidence = oracle_of(HEADS)
    recovery = refuse(QueryRun(evidence=evidence), Status.NOT_APPLICABLE, "Why.")
    assert recovery.value.W.shape == (0, WIDTH, WIDTH)
    assert not recovery.certificate.holds
    assert recovery.reason == recovery.certificate.claim == "Why."


def test_vectors_are_compared_entry_by_entry():
    true = vector_layer(2, WIDTH, 3)
    wrong = replace(true, v=true.v.clone())
    wrong.v[1, :, 2] *= 1.001
    assert claim(true, true).status is Status.RECOVERED
    assert claim(wrong, true).status is Status.NOTHING_FOUND


def test_zero_is_zero_up_to_what_is_added():
    exact, noisy = (probe_oracle(oracle_of(HEADS, after), generator()) for after in (None, added(1e-3)))
    nearly = torch.full((4,), 1e-4).double()
    assert is_zero(0 * nearly, exact)
    assert not is_zero(1e-200 * nearly, exact)
    assert is_zero(nearly, noisy)
    assert not is_zero(1e3 * nearly, noisy)
