"""Refused texts stand in for missing ones."""

from __future__ import annotations

from types import SimpleNamespace

from unmask.attacks.gradients.encoder.drafts import are_alike, list_drafts
from unmask.attacks.gradients.encoder.search_settings import SearchSettings


def test_texts_are_alike_by_their_places():
    assert are_alike((1, 2, 3, 4), (1, 2, 3, 9), 0.6)
    assert not are_alike((1, 2, 3, 4), (1, 2, 8, 9), 0.6)


def test_the_nearest_refused_texts_stand_in_and_no_two_are_alike():
    refused = {(1, 2, 3, 9): (1.0, 0.1), (5, 6, 7): (1.0, 0.3), (8, 9): (1.0, 0.2), (4, 4): (float("inf"), 0.0)}
    search = SimpleNamespace(found={(1, 2, 3, 4): 0.0}, refused=refused, num_texts=3, settings=SearchSettings())
    assert list_drafts(search) == [(1, 2, 3, 4), (8, 9), (5, 6, 7)]
    search.num_texts = None
    assert list_drafts(search) == [(1, 2, 3, 4)]
