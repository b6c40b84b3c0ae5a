import math

import pytest
import torch
from tests.attacks.queries.layers import generator, vector_layer
from tests.attacks.queries.random_heads import oracle_of, random_head, repeating, rounded
from tests.attacks.queries.random_networks import even_layers, evidence_of, random_layers, random_transformer

from unmask.attacks.queries.profile import probe_oracle
from unmask.evidence.oracles import Refused
from unmask.linalg.heads import HeadWeights

WIDTH, BOUND = 8, 50.0
HEADS = random_head(WIDTH, num_heads=3)


def in_dtype(dtype):
    inside = HeadWeights(W=HEADS.W.to(dtype), v=HEADS.v.to(dtype))
    return lambda X: inside(X.to(dtype))


def noisy(deviation=0.0, relative=0.0, seed=0):
    chance = generator(seed)
    return lambda X: (
        HEADS(X) * (1 + relative * torch.randn(len(X), generator=chance))
        + deviation * torch.randn(len(X), generator=chance)
    )


def refusing(function, bound=BOUND):
    return lambda X: torch.where(X.norm(dim=2).amax(1) <= bound, function(X), torch.nan)


def projecting(function, bound=BOUND):
    return lambda X: function(X * (bound / X.norm(dim=2, keepdim=True)).clamp(max=1))


def probed(function, seed=0, width=WIDTH):
    return probe_oracle(evidence_of(function, width), generator(seed))


def within(factor, value):
    return lambda seen: value / factor <= seen <= value * factor


def is_tiny(seen):
    return seen < 1e-15


ANY, NONE = (lambda seen: True), (lambda seen: seen == 0)
NUMBERS = {
    "num_outputs": NONE,
    "signs_only": NONE,
    "is_linear": lambda seen: seen,
    "is_odd": lambda seen: seen,
    "noise": NONE,
    "step": NONE,
    "precision": is_tiny,
    "max_norm": math.isinf,
    "repeats": NONE,
}
NO_LAYER = NUMBERS | {"is_linear": lambda seen: not seen, "is_odd": ANY, "precision": ANY, "max_norm": ANY}
NOT_ODD = {"is_odd": lambda seen: not seen}
BOUNDED = NUMBERS | {"max_norm": lambda seen: 0.9 * BOUND < seen <= BOUND}
TABLE = {
    "float64": (HEADS, NUMBERS),
    "float32": (in_dtype(torch.float32), NUMBERS | {"precision": within(4, 5e-8)}),
    "bfloat16": (in_dtype(torch.bfloat16), NUMBERS | {"precision": lambda seen: 1e-4 < seen < 1e-2}),
    "2 decimals": (lambda X: HEADS(X).round(decimals=2), NUMBERS | {"step": lambda seen: seen == 0.01}),
    "4 decimals": (lambda X: HEADS(X).round(decimals=4), NUMBERS | {"step": lambda seen: seen == 0.0001}),
    "additive noise": (noisy(1e-3), NUMBERS | {"noise": within(3, 1e-3)}),
    "noise that repeats": (
        lambda X: repeating(1e-3)(HEADS(X)),
        NUMBERS | {"noise": within(3, 6e-4), "repeats": lambda seen: seen},
    ),
    "relative noise": (noisy(relative=1e-3), NUMBERS | {"precision": within(3, 1e-3)}),
    "signs": (lambda X: HEADS(X).sign(), NUMBERS | {"signs_only": lambda seen: seen}),
    "bounded by refusing": (refusing(HEADS), BOUNDED),
    "bounded by projecting": (projecting(HEADS), BOUNDED),
    "rounded, bounded by refusing": (
        refusing(lambda X: HEADS(X).round(decimals=2)),
        BOUNDED | {"step": lambda seen: seen == 0.01, "precision": ANY},
    ),
    # Chance cannot be told from a layer that answers 0 under noise: that is what is said of it.
    "random": (lambda X: torch.randn(len(X), generator=CHANCE), NUMBERS | {"noise": within(3, 1.0)}),
    "hash": (lambda X: torch.sin(1e4 * X.sum((1, 2))), NO_LAYER),
    "tanh": (lambda X: HEADS(X).tanh(), NO_LAYER),
    "a constant besides": (lambda X: HEADS(X) + 1, NO_LAYER),
    "zero": (lambda X: 0 * HEADS(X), NUMBERS),
    "a network behind": (random_transformer(1, WIDTH, random_layers(WIDTH, 8)), NUMBERS | NOT_ODD),
    "a network of one neuron": (random_transformer(1, WIDTH, random_layers(WIDTH, 1)), NUMBERS | NOT_ODD),
    "an even network": (random_transformer(1, WIDTH, even_layers(WIDTH, 8)), NUMBERS | NOT_ODD),
    "vector": (vector_layer(2, WIDTH, 3), NUMBERS | {"num_outputs": lambda seen: seen == 3}),
}
CHANCE = generator(7)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("function", "expected"), TABLE.values(), ids=TABLE)
def test_every_kind_of_oracle_is_told(function, expected, seed):
    profile = probed(function, seed)
    wrong = {name: getattr(profile, name) for name, fits in expected.items() if not fits(getattr(profile, name))}
    assert not wrong
    assert profile.num_queries <= 80


@pytest.mark.parametrize("bound", [refusing, projecting])
@pytest.mark.parametrize("deviation", [1e-3, 0.01])
def test_noise_under_a_bound_does_not_hide_that_answers_grow(bound, deviation):
    for seed in range(20):
        profile = probed(bound(noisy(deviation, seed=seed)), seed)
        assert profile.is_linear
        assert 0.8 * BOUND < profile.max_norm <= BOUND * 1.02
        assert profile.precision < 0.01  # answers at the bound are about 15, and six deviations of noise 0.06
        assert profile.num_queries <= 60


@pytest.mark.parametrize("bound", [1e-6, 0.03, 1.0])
def test_an_oracle_that_refuses_a_unit_token_is_asked_shorter_ones(bound):
    profile = probed(refusing(HEADS, bound))
    assert 0.9 * bound < profile.max_norm <= bound
    assert profile.is_linear


def test_an_oracle_that_refuses_everything_says_so():
    with pytest.raises(Refused):
        probed(refusing(HEADS, 0.0))


def test_a_bound_that_is_known_is_kept():
    """`oracle_of` fails a test that asks with a longer token."""
    profile = probe_oracle(oracle_of(HEADS, max_norm=3.7), generator())
    assert profile.max_norm == 3.7
    assert probe_oracle(oracle_of(HEADS, after=torch.sign, max_norm=3.7), generator()).max_norm == 3.7


def test_queries_are_counted():
    evidence = oracle_of(HEADS, after=rounded(2))
    assert probe_oracle(evidence, generator()).num_queries == evidence.ledger.num_asked <= 50


@pytest.mark.parametrize("bound", [math.inf, 7.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coarse_arithmetic_is_no_noise_that_repeats(dtype, bound):
    profile = probed(refusing(in_dtype(dtype), bound))
    assert not profile.repeats
    assert profile.noise == 0


@pytest.mark.parametrize(("after", "wanted"), [(None, 1.0), (rounded(2), 1e12)])
def test_the_boost_makes_added_errors_as_small_as_those_of_the_arithmetic(after, wanted):
    profile = probe_oracle(oracle_of(HEADS, after), generator())
    boost = profile.boost(1.0, token_norm=1.0)
    assert wanted <= boost <= 1e3 * wanted
    assert profile.absolute_error / boost <= 1e-14
    short = probe_oracle(oracle_of(HEADS, after, max_norm=20.0), generator())
    assert short.boost(1.0, token_norm=2.0) == (10 if after else 1)


def test_a_person_is_told_in_sentences():
    lines = probed(refusing(lambda X: HEADS(X).round(decimals=2))).describe()
    assert lines[0] == "answers: numbers"
    assert "answers are rounded to multiples of 0.01" in lines
    assert lines[-1].startswith("largest token norm that is answered faithfully: 4")
    assert "signs only" in probed(lambda X: HEADS(X).sign()).describe()[0]
    assert "vectors of 3" in probed(vector_layer(2, WIDTH, 3)).describe()[0]
    assert any("noise that repeats" in line for line in probed(lambda X: repeating(1e-3)(HEADS(X))).describe())
    assert any("noise of a repeated answer" in line for line in probed(noisy(1e-3)).describe())
