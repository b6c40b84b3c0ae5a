"""The search under noise and few digits: it finds the batch, and calls nothing certain."""

from __future__ import annotations

import pytest
import torch
from tests.attacks.gradients.encoder_batches import BATCH, FRAME, candidates_of, classified

from unmask.attacks.gradients.encoder.drafts import list_drafts
from unmask.attacks.gradients.encoder.noisy_search import NoisySearch, correct_texts
from unmask.attacks.gradients.encoder.problem import Problem, set_up
from unmask.attacks.run import Run, silent
from unmask.defences import parse_defence


@torch.no_grad()
def searched(model, defence: str, **settings) -> NoisySearch:
    evidence = parse_defence(defence)(classified(model), torch.Generator().manual_seed(0))
    problem = set_up(evidence, model, candidates_of(model, evidence), FRAME, noisy=True)
    assert isinstance(problem, Problem), problem
    options = {"num_texts": len(BATCH), "num_equations": 96, "max_steps": 8, "max_anchors": 30, **settings}
    search = NoisySearch(Run(0, silent), problem, **options)
    search.search()
    return search


@pytest.mark.parametrize("defence", ["bf16", "fp16"])
def test_it_finds_the_batch(tiny_bert, defence):
    search = searched(tiny_bert, defence)
    assert {search.problem.places.tokens_of(text) for text in search.found} == set(BATCH)
    assert search.is_done
    assert max(search.found.values()) <= search.accepted_below == search.settings.noisy_distance


def test_without_the_number_of_texts_the_rank_ends_it(tiny_bert):
    search = searched(tiny_bert, "bf16", num_texts=None)
    assert search.is_done == (search.num_rows >= search.problem.rank)


def test_a_budget_of_anchors_ends_it(tiny_bert):
    assert searched(tiny_bert, "bf16", max_anchors=1).num_anchors == 1


def test_drafts_stand_in_for_missing_texts_and_are_corrected(tiny_bert):
    evidence = parse_defence("bf16")(classified(tiny_bert), torch.Generator().manual_seed(0))
    search = searched(tiny_bert, "bf16")
    text, distance = search.found.popitem()
    first, second = text[1], text[2]
    size = len(search.problem.places.tokens)
    wrong = (text[0], first - first % size + second % size, *text[2:])
    search.refused = {wrong: (1.0, distance)}
    assert wrong in list_drafts(search)
    correct_texts(Run(0, silent), evidence, search)
    assert {search.problem.places.tokens_of(each) for each in search.found} == set(BATCH)


def test_a_missing_text_is_read_anew_and_a_draft_without_words_is_none(tiny_bert):
    evidence = parse_defence("bf16")(classified(tiny_bert), torch.Generator().manual_seed(0))
    search = searched(tiny_bert, "bf16")
    places = search.problem.places
    missing = next(text for text in search.found if places.tokens_of(text) == BATCH[1])
    del search.found[missing]
    search.refused = {missing[:1]: (1.0, 0.1)}
    correct_texts(Run(0, silent), evidence, search)
    assert {places.tokens_of(each) for each in search.found} == set(BATCH)
