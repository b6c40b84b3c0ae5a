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


def test_texts_that_a_hidden_prefix_cuts_short_go_on(rounds, batch):
    """Without the prefix before its last token a text seems to end there; the replay of what is left is no matter."""
    rounds.settle()
    text = max(batch, key=len)
    rounds.growth.drop([text[:-1]])
    rounds._read()
    short = [ending for ending in rounds._endings().endings if ending.node[1] != text]
    assert text[:-1] in {ending.node[1] for ending in short}
    assert {ending.node[1] for ending in rounds._lengthen(short)} == set(batch)


def test_whole_texts_do_not_go_on(rounds, batch):
    endings = rounds.settle().endings
    assert rounds._lengthen(endings) == endings


def test_texts_that_go_on_into_more_prefixes_than_spans_can_hold_stay_as_they_are(rounds, batch):
    """Each turn would try more labels behind more prefixes, without an end."""
    rounds.settle()
    text = max(batch, key=len)
    rounds.growth.drop([text[:-1]])
    rounds._read()
    rounds.growth.most = 2
    short = rounds._endings().endings
    assert rounds._lengthen(short) == short
