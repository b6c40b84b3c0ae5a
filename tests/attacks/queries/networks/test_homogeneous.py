"""W under a network that nobody learned: any homogeneous one, even ones too."""

import pytest
import torch
from tests.attacks.queries.random_networks import even_layers, normal, random_layers, random_transformer, relative

from unmask.attacks.queries.networks.homogeneous import HomogeneousPairs, learn_scores
from unmask.attacks.queries.profile import probe_oracle
from unmask.attacks.run import silent


def learned(evidence, seed=0):
    generator = torch.Generator().manual_seed(seed)
    profile = probe_oracle(evidence, generator)
    before = evidence.ledger.num_asked
    scores = learn_scores(evidence, profile, generator, silent)
    return scores, evidence.ledger.num_asked - before


@pytest.mark.parametrize("layers", [random_layers(64, 256), even_layers(64, 256)], ids=["generic", "even"])
def test_section_4_1_W_by_homogeneity(layers):
    """Also where ℓ = Σ a_j·b_j = 0, at which f(X) − f(−X) is 0."""
    transformer = random_transformer(1, 64, layers)
    scores, num_queries = learned(transformer.evidence())
    assert relative(scores.W, transformer.W[0]) < 1e-13
    assert num_queries < 64**2 + 2 * 64 + 200  # pilots, turned probes and the search for a scale


@pytest.mark.parametrize("layers", [random_layers(64, 256), even_layers(64, 256)], ids=["generic", "even"])
def test_section_4_1_W_by_homogeneity_in_float32(layers):
    transformer = random_transformer(1, 64, layers)
    scores, _ = learned(transformer.evidence(torch.float32))
    # A score is off by 4 roundings of 6e-8, and the solve by the probes makes three times of it.
    assert relative(scores.W, transformer.W[0].float().double()) < 5e-6


@pytest.mark.parametrize("size", [1e-5, 1e-2, 1e3, 1e6])
def test_the_scale_of_W_is_found(size):
    transformer = random_transformer(1, 8, random_layers(8, 16))
    transformer = type(transformer)(size * transformer.W, transformer.V, transformer.layers)
    scores, _ = learned(transformer.evidence())
    assert relative(scores.W, transformer.W[0]) < 1e-12


def test_columns_much_longer_than_others_are_read():
    transformer = random_transformer(1, 8, random_layers(8, 16))
    W = transformer.W * torch.tensor([1.0, 1, 1, 300, 1, 1, 1, 1])
    scores, _ = learned(type(transformer)(W, transformer.V, transformer.layers).evidence())
    assert relative(scores.W, W[0]) < 1e-12


def test_scores_of_zero_are_zero():
    transformer = random_transformer(1, 6, random_layers(6, 8))
    scores, _ = learned(type(transformer)(0 * transformer.W, transformer.V, transformer.layers).evidence())
    assert not scores.W.any()


def test_a_network_that_is_zero_shows_no_scores():
    layers = random_layers(6, 4)
    scores, _ = learned(random_transformer(1, 6, type(layers)(layers.hidden, 0 * layers.output)).evidence())
    assert scores is None


def test_the_limit_is_reached_with_the_square_of_the_reach():
    """f([R·u + y/R; y/R])/R − σ(uᵀWy)·φ(u) falls as 1/R²."""
    transformer = random_transformer(1, 8, random_layers(8, 16))
    evidence, draw = transformer.evidence(), normal(1)
    profile = probe_oracle(evidence, torch.Generator().manual_seed(0))
    U, Y = draw(20, 8), draw(20, 8)
    exact = torch.einsum("bd,de,be->b", U, transformer.W[0], Y)

    class At(HomogeneousPairs):
        R = 1.0

        def reach(self, size):
            return self.R

    pairs, errors = At(evidence, profile), []
    for At.R in (1e2, 1e4):
        scores = pairs.scores(U, evidence.ask(U[:, None]), Y)
        errors.append(float((scores.sigmoid() - exact.sigmoid()).abs().max()))
    assert errors[1] < 2e-4 * errors[0]


def test_new_pairs_are_predicted_and_wrong_weights_are_not():
    transformer = random_transformer(1, 8, random_layers(8, 16))
    scores, _ = learned(transformer.evidence())
    residual, own = scores.predicts(torch.Generator().manual_seed(1), 24)
    assert residual < 1e-13
    assert own < 1e-14
    scores.W[0, 0] += 1e-6
    assert scores.predicts(torch.Generator().manual_seed(1), 24)[0] > 1e-9
