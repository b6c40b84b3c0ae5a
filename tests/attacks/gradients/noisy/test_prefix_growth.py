"""Prefixes that grow at blurred spans: those of the batch, and what labels add or take away."""

import pytest
import torch

from unmask.attacks.gradients.noisy.prefix_growth import PrefixGrowth, nearest_tokens, noisy_sites
from unmask.attacks.run import Run, silent


@pytest.fixture
def growth(tiny_llama, rounded):
    tokens = torch.tensor(nearest_tokens(rounded, tiny_llama))
    return PrefixGrowth(Run(0, silent), tiny_llama, noisy_sites(rounded, tiny_llama), tokens)


def test_the_tokens_of_the_batch_are_among_the_nearest(tiny_llama, rounded, batch):
    assert {token for text in batch for token in text[:-1]} <= set(nearest_tokens(rounded, tiny_llama))


def test_the_prefixes_of_the_batch_grow(growth, prefixes):
    assert growth.grow()
    assert set(growth.scores) == prefixes
    assert max(growth.scores.values()) < growth.cut
    assert {tokens for _, tokens in growth.forest.leaves} == {(5, 17, 99, 17, 250, 8), (400, 3, 8, 21, 11)}


def test_a_prefix_can_be_added_and_dropped_with_all_behind_it(growth, prefixes):
    growth.grow()
    growth.add((400, 3), 77)
    assert growth.scores[400, 3, 77] > growth.cut
    assert growth.worst((400, 3, 77, 5)) == growth.scores[400, 3, 77]
    growth.drop([(400, 3)])
    assert set(growth.scores) == {tokens for tokens in prefixes if tokens[:2] != (400, 3)}


def test_an_empty_or_a_full_span_is_no_site(tiny_llama, rounded):
    generator = torch.Generator().manual_seed(0)
    shapes = {name: g.shape for name, g in rounded.gradients.items()}
    noise = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    assert all(site.span.rank <= 2 for site in noisy_sites(rounded.with_tensors(noise), tiny_llama))
    full = {name: g.bfloat16().float() for name, g in noise.items()}
    assert not noisy_sites(rounded.with_tensors(full), tiny_llama)


def test_a_growth_that_tells_nothing_apart_ends_early(growth, monkeypatch):
    monkeypatch.setattr(PrefixGrowth, "cut", property(lambda self: float("inf")))
    assert not growth.grow()
    assert len(growth.scores) <= growth.most + len(growth.tokens)


def test_a_score_is_measured_once(growth, monkeypatch):
    growth.grow()
    first = growth.score((400, 3), [77, 78])
    monkeypatch.setattr(growth, "_score", None)
    assert growth.score((400, 3), [78, 77]) == first[::-1]
