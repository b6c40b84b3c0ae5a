"""A tree that is mended by its labels: missing prefixes come back, wrong ones go."""

import pytest
import torch

from unmask.attacks.gradients.noisy.label_rounds import LabelRounds
from unmask.attacks.gradients.noisy.prefix_growth import PrefixGrowth, nearest_tokens, noisy_sites
from unmask.attacks.run import Run, silent
from unmask.models.linear import Role


@pytest.fixture
def rounds(tiny_llama, rounded):
    run = Run(0, silent)
    tokens = torch.tensor(nearest_tokens(rounded, tiny_llama))
    growth = PrefixGrowth(run, tiny_llama, noisy_sites(rounded, tiny_llama), tokens)
    growth.grow()
    return LabelRounds(run, rounded, tiny_llama, growth, Role.MLP_OUT, 2**28)


def texts(read):
    return {ending.node[1] for ending in read.endings}


def test_a_whole_tree_is_left_as_it_is(rounds, batch, prefixes):
    assert texts(rounds.settle()) == set(batch)
    assert set(rounds.growth.scores) == prefixes


def test_what_is_missing_comes_back_by_labels_though_the_bag_lacks_it(rounds, batch, prefixes):
    rounds.growth.drop([(5, 17, 99)])
    rounds.growth.tokens = rounds.growth.tokens[rounds.growth.tokens != 99]
    assert texts(rounds.settle()) == set(batch)
    assert set(rounds.growth.scores) == prefixes


def test_a_wrong_prefix_goes(rounds, batch, prefixes):
    rounds.growth.add((400, 3), 77)
    assert texts(rounds.settle()) == set(batch)
    assert set(rounds.growth.scores) == prefixes
