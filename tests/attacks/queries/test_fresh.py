"""Services that are another function at other lengths: nothing of them is RECOVERED, whoever learned it."""

import pytest
import torch
from tests.attacks.queries.layers import generator
from tests.attacks.queries.random_heads import added, random_head
from tests.attacks.queries.random_networks import random_layers, random_transformer

import unmask
from unmask.attacks.queries.fresh import FRESH_LENGTH, draw_lengths
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Status

WIDTH = 4
HEAD = random_head(WIDTH)
DOUBLED = HeadWeights(W=2 * HEAD.W, v=HEAD.v)


def doubled_at_odd_lengths(X):
    return DOUBLED(X) if X.shape[1] % 2 else HEAD(X)


def window(length):
    """Attention to the last tokens only."""
    return lambda X: HEAD(X[:, -length:])


def top(k):
    """Attention to the k tokens of the largest scores."""

    def answer(X):
        scores = torch.einsum("bnd,bd->bn", X, X[:, -1] @ HEAD.W[0].T)
        least = scores.topk(min(k, X.shape[1]), dim=1).values[:, -1:]
        return torch.einsum("bn,bnd->bd", scores.masked_fill(scores < least, -torch.inf).softmax(1), X) @ HEAD.v[0]

    return answer


def limited(length, function=HEAD):
    """No sequence is longer."""

    def answer(X):
        if X.shape[1] > length:
            raise ValueError(f"a sequence has at most {length} tokens")
        return function(X)

    return answer


def recover(function, **options):
    return unmask.recover_weights(unmask.FunctionOracle(function), width=WIDTH, **options)


def test_lengths_are_drawn_anew_and_reach_from_1_to_128():
    one, other = draw_lengths(generator(1)), draw_lengths(generator(2))
    assert one != other
    assert {*range(1, 17), 128} - {FRESH_LENGTH} <= set(one) & set(other)
    assert len(set(one)) == len(one) == 39
    assert FRESH_LENGTH not in one


@pytest.mark.parametrize(
    "function",
    [doubled_at_odd_lengths, window(8), window(100), top(8), top(32)],
    ids=["odd", "window 8", "window 100", "top 8", "top 32"],
)
def test_another_function_at_other_lengths_is_not_recovered(function):
    recovery = recover(function)
    assert recovery.status is Status.PARTIAL  # a sequence of six tokens is answered as these heads do
    assert "another function at other lengths" in recovery.reason
    assert "other lengths" not in recovery.certificate.claim


@pytest.mark.parametrize("noise", [1e-3, 1e-2])
def test_noise_excuses_no_other_function(noise):
    after = added(noise)
    assert recover(lambda X: after(doubled_at_odd_lengths(X)), max_norm=8.0).status is Status.PARTIAL
    assert recover(lambda X: after(HEAD(X)), max_norm=8.0).status is Status.RECOVERED


def test_signs_are_asked_at_other_lengths():
    assert recover(lambda X: window(8)(X).sign()).status is Status.PARTIAL
    recovery = recover(lambda X: HEAD(X).sign())
    assert recovery.status is Status.RECOVERED
    assert recovery.certificate.details["longest_checked"] == 128


def test_a_transformer_is_asked_at_other_lengths():
    transformer = random_transformer(1, 8, random_layers(8, 8))
    for length, expected in ((128, Status.RECOVERED), (8, Status.PARTIAL)):
        oracle = unmask.FunctionOracle(lambda X, length=length: transformer(X[:, -length:]))
        recovery = unmask.recover_weights(oracle, width=8, attack="transformer")
        assert recovery.status is expected
        assert ("another function at other lengths" in recovery.reason) is (length == 8)


@pytest.mark.parametrize("length", [6, 20])
def test_a_service_that_limits_the_length_says_up_to_which_it_was_checked(length):
    recovery = recover(limited(length))
    assert recovery.status is Status.RECOVERED
    checked = int(recovery.certificate.details["longest_checked"])
    assert length - 5 < checked <= length
    assert f"checked up to {checked} tokens" in recovery.reason
    assert recover(limited(length, window(5))).status is not Status.RECOVERED


def test_every_length_is_named_where_all_agree():
    recovery = recover(HEAD)
    assert recovery.status is Status.RECOVERED
    assert "39 other lengths, up to 128 tokens" in recovery.certificate.claim
    assert recovery.certificate.details["longest_checked"] == 128
