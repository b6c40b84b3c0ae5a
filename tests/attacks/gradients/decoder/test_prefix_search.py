"""Growing prefixes with cached keys and values, against every sequence sent through transformers' forward pass."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tests.reference.layer_inputs import exhaustive_prefixes, layer_inputs

from unmask.attacks.gradients.bag_of_words.token_filter import Candidates
from unmask.attacks.gradients.decoder import prefix_search
from unmask.attacks.gradients.decoder.prefix_search import Forest, PrefixSearch
from unmask.attacks.gradients.sites import SpanSite, down_site, prefix_sites
from unmask.attacks.run import Run
from unmask.linalg.gap import Gap
from unmask.models import Model
from unmask.protocols import observe_gradients

DECODERS = ("tiny_gpt2", "tiny_llama", "tiny_qwen2", "tiny_mistral")
WORDS = (5, 17, 99, 250, 400, 8)
TEXTS = [[5, 17, 99], [5, 17, 250, 8], [400, 99, 17, 8], [8, 5]]
# Rounding leaves rows of the batch about 1e-6 outside their own span, other prefixes are 0.01 and more away.
IN_SPAN = 1e-4


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def sites_of(model: Model, texts: list[list[int]], **options: str) -> list[SpanSite]:
    """Sites of a classification batch: there, every token has its row."""
    return list(prefix_sites(observe_gradients(model, texts, task="classification", **options), model))


def everywhere(model: Model, words: tuple[int, ...], length: int = 8) -> Candidates:
    positions = range(length) if model.learned_positions else [-1]
    return Candidates({position: torch.tensor(words) for position in positions}, Gap(0.0, 1.0), 0)


def search(model: Model, site: SpanSite, words: tuple[int, ...], budget: int = 2**30, seed: int = 0) -> Forest:
    return PrefixSearch(Run(seed), model, site, everywhere(model, words), 32, budget).search()


def prefixes_of(texts: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(text[:length]) for text in texts for length in range(1, len(text) + 1)}


def test_it_accepts_what_the_exhaustive_search_accepts(decoder):
    for site in sites_of(decoder, TEXTS):
        rows = torch.cat([layer_inputs(decoder, torch.tensor([text]), site.parameters[0])[0] for text in TEXTS])
        slow = exhaustive_prefixes(decoder, rows, site.parameters[0], WORDS, longest=5, tolerance=IN_SPAN)
        forest = search(decoder, site, WORDS)
        # 't t' has the row of 't' in a rotary model; the search counts such a prefix only once something follows.
        slow = {prefix for prefix in slow if decoder.learned_positions or len(prefix) == 1 or len(set(prefix)) > 1}
        assert {tokens for _, tokens in forest.nodes} == slow == prefixes_of(TEXTS)


def test_the_forest_of_a_batch(decoder):
    for site in sites_of(decoder, TEXTS):
        forest = search(decoder, site, WORDS)
        assert {start for start, _ in forest.nodes} == {0}
        assert {tokens for _, tokens in forest.leaves} == {tuple(text) for text in TEXTS}
        assert len(forest.leaves) == len(TEXTS)
        assert max(forest.nodes.values()) <= forest.gap.accepted < forest.gap.rejected
        assert forest.gap.decades > 2  # from about 1e-6 to 0.01, see IN_SPAN
        assert not forest.overflow
        assert forest.num_tested >= len(WORDS) * len(forest.nodes)


def test_words_that_do_not_occur_are_refused(decoder):
    site = sites_of(decoder, TEXTS)[0]
    strangers = tuple(random.Random(0).sample([w for w in range(500) if w not in WORDS], 60))
    assert search(decoder, site, WORDS + strangers).nodes.keys() == search(decoder, site, WORDS).nodes.keys()
    assert not search(decoder, site, strangers).nodes


def test_texts_that_start_later_are_found_where_they_start(tiny_gpt2):
    """Padding on the left: learned positions tell where a text begins."""
    site = sites_of(tiny_gpt2, TEXTS, padding_side="left")[0]
    forest = search(tiny_gpt2, site, WORDS)
    longest = max(map(len, TEXTS))
    assert set(forest.leaves) == {(longest - len(text), tuple(text)) for text in TEXTS}


def test_a_small_budget_and_another_seed_accept_the_same(decoder):
    site = sites_of(decoder, TEXTS)[0]
    large = search(decoder, site, WORDS)
    for other in (search(decoder, site, WORDS, budget=1), search(decoder, site, WORDS, seed=5)):
        assert other.nodes.keys() == large.nodes.keys()
        assert other.num_tested == large.num_tested


def test_a_repeated_first_token_counts_once_something_follows(tiny_llama):
    (site, *_) = sites_of(tiny_llama, [[17, 17, 17, 5], [99, 8]])
    nodes = {tokens for _, tokens in search(tiny_llama, site, WORDS).nodes}
    assert nodes == prefixes_of([[17, 17, 17, 5], [99, 8]])
    (site, *_) = sites_of(tiny_llama, [[17, 17, 17], [99, 8]])
    forest = search(tiny_llama, site, WORDS)
    assert {tokens for _, tokens in forest.leaves} == {(17,), (99, 8)}


def test_a_span_in_which_everything_lies_overflows(tiny_gpt2):
    """One direction short of full: prefixes pass by the hundred, and the search stops by itself."""
    rng = random.Random(3)
    texts = [[rng.randrange(500) for _ in range(7)] for _ in range(9)]
    site = sites_of(tiny_gpt2, texts)[0]
    forest = search(tiny_gpt2, site, WORDS)
    assert len(forest.nodes) <= 2 * site.span.rank + 2 + len(WORDS) * site.span.rank
    assert forest.overflow or forest.gap.decades < 2 or not forest.nodes


def test_some_hidden_units_refuse_what_all_of_them_refuse(decoder, monkeypatch):
    evidence = observe_gradients(decoder, TEXTS, task="classification")
    site = down_site(evidence, decoder)
    assert site is not None
    whole = search(decoder, replace(site, layers=()), WORDS)
    monkeypatch.setattr(prefix_search, "_SPARE_UNITS", 40)
    screened = PrefixSearch(Run(0), decoder, site, everywhere(decoder, WORDS), 32, 2**30)
    found = screened.search()
    assert screened.screening.row_width == site.span.rank + 40 < site.span.width
    assert set(found.nodes) == set(whole.nodes)
    assert found.leaves == whole.leaves
    assert found.gap.accepted == pytest.approx(whole.gap.accepted, abs=1e-5)
