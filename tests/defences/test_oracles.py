"""Defences of a service: what each changes, what it leaves alone, and its text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.defences.updates import quick

import unmask.defences.oracles as module
from unmask.attacks.queries.profile import probe_oracle
from unmask.defences.oracles import (
    ORACLE_DEFENCES,
    BoundedNormOracle,
    NoisyOracle,
    OracleDefence,
    RateLimited,
    RateLimitedOracle,
    RoundedOracle,
    SignOracle,
    TopKOracle,
    parse_oracle_defence,
)
from unmask.errors import InputError
from unmask.evidence.oracles import FunctionOracle, OracleEvidence, Refused

V = torch.tensor([[0.3, -1.1, 0.7], [2.0, 0.1, -0.4]], dtype=torch.float64)
NUMBERS = FunctionOracle(lambda X: X.mean(1) @ V[0], "numbers", max_batch=4)
VECTORS = FunctionOracle(lambda X: X.mean(1) @ V.T, "vectors", max_batch=4)
X = torch.randn(10, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def ask(oracle, sequences=X):
    return OracleEvidence(oracle, 3).ask(sequences)


PLAIN, PLAIN_VECTORS = ask(NUMBERS), ask(VECTORS)


# What they change


@pytest.mark.parametrize("decimals", [0, 2, 6])
def test_rounded_answers_are_the_nearest_on_the_grid(decimals):
    answers = ask(RoundedOracle(VECTORS, decimals))
    steps = answers * 10**decimals
    assert torch.allclose(steps, steps.round(), atol=1e-9)  # a few roundings of a number of order 10⁶
    assert float((answers - PLAIN_VECTORS).abs().max()) <= 0.5 * 10**-decimals + 1e-15
    assert not torch.equal(answers, PLAIN_VECTORS)


def test_noise_has_its_level_and_is_new_for_a_repeated_question():
    evidence = OracleEvidence(NoisyOracle(NUMBERS, 0.1), 3)
    noise = torch.cat([evidence.ask(X, repetition) - PLAIN for repetition in range(200)])
    # 2,000 draws: the standard deviation is within 6 of its own standard errors, 0.1/√4000.
    assert abs(float(noise.std()) - 0.1) < 6 * 0.1 / 4000**0.5
    assert abs(float(noise.mean())) < 6 * 0.1 / 2000**0.5
    assert len(noise.unique()) == 2000


def test_noise_is_told_by_its_seed():
    assert torch.equal(ask(NoisyOracle(NUMBERS, 0.1, 5)), ask(NoisyOracle(NUMBERS, 0.1, 5)))
    assert not torch.equal(ask(NoisyOracle(NUMBERS, 0.1, 5)), ask(NoisyOracle(NUMBERS, 0.1, 6)))
    assert torch.equal(ask(NoisyOracle(NUMBERS, 0.0)), PLAIN)


def test_signs():
    assert torch.equal(ask(SignOracle(NUMBERS)), PLAIN.sign())
    assert ask(SignOracle(NUMBERS), torch.zeros(1, 1, 3)).tolist() == [0]


def test_only_the_largest_entries_of_a_vector_are_left():
    answers = ask(TopKOracle(VECTORS, 1))
    largest = PLAIN_VECTORS.argmax(1)
    assert torch.equal(answers.gather(1, largest[:, None]), PLAIN_VECTORS.gather(1, largest[:, None]))
    assert bool((answers.scatter(1, largest[:, None], 0.0) == 0).all())
    assert torch.equal(ask(TopKOracle(VECTORS, 9)), PLAIN_VECTORS)


def test_of_one_number_nothing_can_be_left_out():
    with pytest.raises(InputError, match=r"numbers answers with one number.*drop 'topk:k=1'"):
        ask(TopKOracle(NUMBERS, 1))


def test_a_longer_token_is_refused_before_anything_is_asked():
    calls = []
    counted = FunctionOracle(lambda X: calls.append(len(X)) or X.mean(1) @ V[0])
    oracle = BoundedNormOracle(counted, 2.0)
    token = torch.tensor([[[0.0, 0.0, 1.0]]], dtype=torch.float64)
    assert ask(oracle, 2 * token).tolist() == [1.4]
    for sequences in (torch.cat([token, 2.001 * token]), torch.cat([3 * token, token], dim=1), float("nan") * token):
        with pytest.raises(Refused, match=r"a token has the norm .* tokens up to 2 are taken"):
            ask(oracle, sequences)
    assert calls == [1]


def test_probing_finds_the_defences():
    profile = probe_oracle(OracleEvidence(BoundedNormOracle(RoundedOracle(NUMBERS, 3), 100.0), 3), torch.Generator())
    assert profile.step == 1e-3
    assert 80 <= profile.max_norm <= 100
    assert probe_oracle(OracleEvidence(SignOracle(NUMBERS), 3), torch.Generator()).signs_only
    noise = probe_oracle(OracleEvidence(NoisyOracle(NUMBERS, 1e-2), 3), torch.Generator()).noise
    assert 2e-3 < noise < 5e-2  # six repetitions tell the order


# The rate


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_no_span_of_time_holds_more_queries_than_are_granted(clock):
    times = []
    counted = FunctionOracle(lambda X: times.extend([clock.now] * len(X)) or X.mean(1) @ V[0])
    oracle = RateLimitedOracle(counted, queries=4, seconds=10.0)
    for part in (X[:3], X[3:5], X[5:]):
        ask(oracle, part)
        clock.now += 1.0
    assert len(times) == 10
    assert all(sum(start <= time < start + 10 for time in times) <= 4 for start in times)
    assert clock.slept


def test_answers_behind_a_rate_are_the_same(clock):
    # Sums of a batch that is cut differently differ by roundings.
    assert torch.allclose(ask(RateLimitedOracle(VECTORS, 3, 1.0)), PLAIN_VECTORS, rtol=1e-14, atol=1e-15)


def test_a_rate_may_refuse_instead_and_what_was_granted_is_kept(clock):
    evidence = OracleEvidence(RateLimitedOracle(NUMBERS, 4, 10.0, wait=False), 3)
    with pytest.raises(RateLimited, match=r"4 queries in 10 s are answered.*ask again in 10.0 s"):
        evidence.ask(X)
    assert len(evidence.ledger) == 4
    clock.now += 10.0
    assert torch.allclose(evidence.ask(X[:8]), PLAIN[:8], rtol=1e-14, atol=1e-15)
    assert not clock.slept


# Names and texts

levels = st.floats(0, 1e300, allow_subnormal=False)
above_zero = st.floats(1e-300, 1e300)
SETTINGS = {
    "round": st.fixed_dictionaries({"decimals": st.integers(0, 15)}),
    "noise": st.fixed_dictionaries({"sigma": levels}, optional={"seed": st.integers(0, 2**31)}),
    "norm": st.fixed_dictionaries({"max_norm": above_zero}),
    "topk": st.fixed_dictionaries({"k": st.integers(1, 10**6)}),
    "rate": st.fixed_dictionaries(
        {"queries": st.integers(1, 10**9), "seconds": above_zero}, optional={"wait": st.booleans()}
    ),
    "sign": st.just({}),
}


def test_every_defence_is_tried_here():
    assert set(SETTINGS) == set(ORACLE_DEFENCES)


@quick
@given(st.sampled_from(sorted(SETTINGS)).flatmap(lambda name: SETTINGS[name].map(lambda s: OracleDefence(name, s))))
def test_the_text_gives_the_defence_back(defence):
    again = parse_oracle_defence(str(defence))
    assert again == defence
    assert hash(again) == hash(defence)
    assert again(NUMBERS) == defence(NUMBERS)


@pytest.mark.parametrize("text", ["rate:queries=3906250,seconds=1", "rate:queries=3.90625e+06,seconds=1.0"])
def test_whole_numbers_may_be_written_with_an_exponent(text):
    defence = parse_oracle_defence(text)
    assert defence.settings["queries"] == 3_906_250
    assert parse_oracle_defence(str(defence)) == defence


@pytest.mark.parametrize("kind", ORACLE_DEFENCES.values())
def test_every_example_is_read_and_every_card_says_what_it_stops(kind):
    wrapper = kind.make
    assert type(parse_oracle_defence(kind.example)(VECTORS)) is wrapper
    assert "Stops:" in wrapper.__doc__
    assert "docs/queries.md" in " ".join(wrapper.__doc__.split())


def test_names_tell_defended_answers_from_plain_ones():
    oracle = parse_oracle_defence("round:decimals=2")(parse_oracle_defence("noise:sigma=0.5,seed=3")(NUMBERS))
    assert oracle.name == "numbers behind noise:sigma=0.5,seed=3 behind round:decimals=2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no defence of a service ''"),
        ("ground:decimals=2", "no defence of a service 'ground'.*round:decimals=2, noise:sigma=1e-3"),
        (
            "round",
            "needs 'decimals'; its settings are decimals .a whole number from 0 to 15.",
        ),
        ("round:decimals", "'round'.*decimals"),
        ("round:decimals=2.5", "'decimals' must be a whole number from 0 to 15, got '2.5'"),
        ("round:decimals=-1", "'decimals' must be a whole number from 0 to 15, got '-1'"),
        ("round:digits=2", "has no setting 'digits'. Usage: its settings are decimals"),
        ("round:decimals=2,decimals=3", "given twice"),
        ("noise:sigma=nan", "'sigma' must be a finite number from 0 on, got 'nan'"),
        ("norm:max_norm=0", "'max_norm' must be a finite number above 0"),
        ("topk:k=0", "'k' must be a whole number from 1 on"),
        ("rate:queries=0,seconds=1", "'queries' must be a whole number from 1 on"),
        ("rate:queries=1,seconds=inf", "'seconds' must be a finite number above 0"),
        ("rate:queries=1,seconds=1,wait=perhaps", "'wait' must be true or false, got 'perhaps'"),
        ("sign:sigma=1", "has no setting 'sigma'. Usage: it has no settings"),
    ],
)
def test_a_mistake_is_answered_with_the_settings(text, message):
    with pytest.raises(InputError, match=message):
        parse_oracle_defence(text)
