"""The numbers of the encoder search: in an order that makes sense, and a search obeys them."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.attacks.gradients.encoder_batches import classified, problem_of

from unmask.attacks.gradients.encoder.search import EncoderSearch
from unmask.attacks.gradients.encoder.search_settings import SearchSettings
from unmask.attacks.run import Run


def test_costs_and_shares_are_in_order():
    s = SearchSettings()
    assert 0 < s.zero_cost < s.promising_cost < s.near_cost < s.hopeless_cost < 1
    assert 0 < s.least_anchor < s.spread_share < s.clear_anchor < s.unique_share < 1
    assert s.right_distance < s.drift_distance < s.wrong_distance


@torch.no_grad()
def test_a_search_that_gives_up_at_once_claims_no_text(tiny_bert):
    evidence = classified(tiny_bert, [(1, 5, 6, 7, 2), (1, 8, 9, 10, 2)])
    settings = replace(SearchSettings(), most_in_vain_at_first=0)
    options = {"num_texts": 2, "num_equations": 192, "max_steps": 8, "max_anchors": None}
    search = EncoderSearch(Run(), problem_of(tiny_bert, evidence), settings=settings, **options)
    assert search.is_hopeless
