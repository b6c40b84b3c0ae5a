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
from unmask.linalg import quick_products
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
    white = soft.growth.rows_of_prefixes(prefixes) @ soft.whiten
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


def test_what_is_usual_of_a_prefix_and_of_a_token_is_taken_out():
    """A sum of effects of rows and of columns leaves nothing; one pair that stands out is left alone."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.randn(9, 1, generator=generator), torch.randn(1, 30, generator=generator)
    noise = 0.01 * torch.randn(9, 30, generator=generator)
    values = rows + columns + noise
    values[4, 7] -= 0.5
    ratios = soft_growth._Ratios.of(values)
    assert float(ratios.unexpected.abs().median()) < 0.02
    assert divmod(int(ratios.unexpected.argmin()), 30) == (4, 7)
    assert float(ratios.standardise()[4, 7]) < -20
    shifted = soft_growth._Ratios.of(values + 3).standardise()
    torch.testing.assert_close(shifted, ratios.standardise(), rtol=0.01, atol=0.01)  # medians round


def test_few_prefixes_do_not_tell_what_is_usual_of_a_token():
    ratios = soft_growth._Ratios.of(torch.tensor([[0.0, 1.0, 2.0, -9.0], [5.0, 6.0, 7.0, 6.0]]))
    assert not ratios.of_token.any()
    assert int(ratios.standardise().argmin()) == 3


@torch.no_grad()
def test_a_sketch_rules_out_only_tokens_that_are_far(soft, texts, monkeypatch):
    """The best tokens behind a prefix, and what is usual, are those that every token measured in full gives."""
    monkeypatch.setattr(quick_products, "_has_tiles", lambda: False)
    prefixes = soft.growth.begin(soft.growth.at(0, soft.candidates.at(0)), torch.arange(4))
    following = soft.growth.at(1, soft.candidates.at(1))
    matrix = soft._test_matrix({})
    whole = soft._ratios(prefixes, following, matrix)
    monkeypatch.setattr(soft_growth, "_SKETCH", 15)
    monkeypatch.setattr(soft_growth, "_MEASURED", 12)
    monkeypatch.setattr(soft, "num_texts", 4)
    quick = soft._ratios(prefixes, following, matrix)
    measured = quick.values.isfinite()
    assert measured.sum(1).tolist() == [12] * 4  # of 48
    torch.testing.assert_close(quick.values[measured], whole.values[measured])
    assert int(measured[torch.arange(4), whole.unexpected.argmin(1)].sum()) >= 3


@torch.no_grad()
def test_known_prefixes_go_on_and_may_still_branch(soft):
    """A token that is known behind a prefix neither hides another one, nor counts as the best."""
    tokens = soft.candidates.at(1)
    alive = soft.growth.begin(soft.growth.at(0, tokens), torch.arange(9))
    values = 0.1 * torch.randn(9, len(tokens), generator=torch.Generator().manual_seed(0))
    values[0, 3] = values[0, 5] = values[1, 2] = -4.0
    first = tuple(alive.tokens[0].tolist())
    known = {(*first, int(tokens[3])): torch.zeros(1)}
    chosen = soft._choose(soft_growth._Ratios.of(values), torch.zeros(9), alive, tokens, known)
    pairs = set(zip(chosen[0].tolist(), chosen[1].tolist(), strict=True))
    assert pairs == {(0, 3), (0, 5), (1, 2)}
