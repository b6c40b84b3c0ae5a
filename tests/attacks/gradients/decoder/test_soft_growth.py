"""The soft score: rows of the batch keep less outside the gradient's span than others do, and known rows sharpen it."""

from __future__ import annotations

import pytest
import torch
from tests.wide_models import wide_model

from unmask.attacks.gradients.bag_of_words.token_filter import Candidates
from unmask.attacks.gradients.decoder import soft_growth
from unmask.attacks.gradients.decoder.beyond_width import wide_site
from unmask.attacks.gradients.decoder.prefix_rows import Growth
from unmask.attacks.gradients.decoder.soft_growth import SoftGrowth
from unmask.linalg.gap import Gap
from unmask.models import Model
from unmask.protocols import observe_gradients

WIDTH, VOCAB, LENGTH = 32, 200, 6


@pytest.fixture(scope="module")
def model() -> Model:
    return wide_model("llama", WIDTH, vocab=VOCAB, num_heads=4, length=32)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """More distinct prefixes than the width: 8 · 6 = 48."""
    return (
        (torch.randperm(VOCAB - 1, generator=torch.Generator().manual_seed(1))[: 8 * LENGTH] + 1).view(8, -1).tolist()
    )


@pytest.fixture(scope="module")
def soft(model: Model, texts: list[list[int]]) -> SoftGrowth:
    site = wide_site(observe_gradients(model, texts, task="classification", pooling="mean"), model)
    words = torch.tensor(sorted(token for text in texts for token in text))
    growth = Growth(model, site.rows, site.span.width, 2**28)
    generator = torch.Generator().manual_seed(0)
    return SoftGrowth(growth, site.span.basis, Candidates({-1: words}, Gap(0.0, 1.0), 0), len(texts), generator)


@torch.no_grad()
def test_rows_of_random_prefixes_are_white(soft):
    """W has what it promises: rows of prefixes that it did not see have about unit variance in its coordinates."""
    tokens = torch.tensor(sorted(soft.candidates.searched))
    first = soft.growth.at(0, tokens)
    prefixes = soft.growth.begin(first, torch.arange(len(tokens)))
    prefixes = soft.growth.extend(prefixes, soft.growth.at(1, tokens.flip(0)), *2 * [torch.arange(len(tokens))])
    white = soft.growth.rows_of_prefixes(prefixes).double() @ soft.whiten
    assert 0.3 < float(white.square().mean()) < 3


@torch.no_grad()
def test_known_rows_sharpen_the_score(soft, texts):
    """The ratio of first tokens of the batch falls as others are known, and beats that of other tokens."""
    firsts = [text[0] for text in texts]
    following = soft.growth.at(0, soft.candidates.at(0))
    is_first = torch.isin(following.tokens, torch.tensor(firsts))
    plain = soft._ratios(None, following, soft._test_matrix({})).values[0]
    assert float(plain[is_first].mean()) < float(plain[~is_first].mean())
    rows = soft.growth.first_rows(following)
    others = {(int(t),): row for t, row in zip(following.tokens, rows, strict=True) if int(t) in firsts[1:]}
    sharper = soft._ratios(None, following, soft._test_matrix(others)).values[0]
    one = following.tokens == firsts[0]
    assert float(sharper[one] - sharper[~is_first].mean()) < float(plain[one] - plain[~is_first].mean())


@torch.no_grad()
def test_the_first_level_takes_first_tokens(soft, texts):
    taken = next(soft.levels({}))
    firsts = {(text[0],) for text in texts}
    assert all(len(prefix) == 1 for prefix in taken)
    assert len(firsts & taken.keys()) >= len(firsts) // 2  # of 48 tokens, of which 8 come first
    again = next(soft.levels(dict(taken)))
    assert again.keys() >= taken.keys()  # what is known stays


def test_scores_are_deviations_from_the_median_behind_the_same_prefix():
    ratios = torch.tensor([[0.0, 1.0, 2.0, -9.0], [5.0, 6.0, 7.0, 6.0]])
    scores = soft_growth._Ratios(ratios, ratios).standardise()
    slow = ratios - ratios.median(1, keepdim=True).values
    torch.testing.assert_close(scores, slow / (1.4826 * slow.abs().median() + 1e-6))
    assert int(scores.argmin()) == 3
    torch.testing.assert_close(soft_growth._Ratios(ratios + 3, ratios + 3).standardise(), scores)


@torch.no_grad()
def test_a_sketch_rules_out_only_tokens_that_are_far(soft, texts, monkeypatch):
    """The best tokens behind a prefix, and what is usual, are those that every token measured in full gives."""
    prefixes = soft.growth.begin(soft.growth.at(0, soft.candidates.at(0)), torch.arange(4))
    following = soft.growth.at(1, soft.candidates.at(1))
    matrix = soft._test_matrix({})
    whole = soft._ratios(prefixes, following, matrix)
    monkeypatch.setattr(soft_growth, "_SKETCH", 12)
    monkeypatch.setattr(soft_growth, "_MEASURED", 12)
    monkeypatch.setattr(soft, "num_texts", 4)
    quick = soft._ratios(prefixes, following, matrix)
    measured = quick.values.isfinite()
    assert measured.sum(1).tolist() == [12] * 4  # of 48
    torch.testing.assert_close(quick.values[measured], whole.values[measured])
    assert bool(measured[torch.arange(4), whole.values.argmin(1)].all())
    torch.testing.assert_close(quick.sample, whole.values[:, ::4])


def test_behind_each_prefix_the_best_is_worth_keeping():
    scores = torch.tensor([[-9.0, -8.5, -1.0], [-2.0, -7.0, 0.0]])
    assert soft_growth._worth_keeping(scores).tolist() == [[True, True, False], [False, True, False]]
    assert soft_growth._worth_keeping(scores[:1]).all()  # first tokens: as many as there are texts
