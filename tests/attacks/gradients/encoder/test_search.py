"""The search: what it finds and refuses, when it ends, and what its own measures rest on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.attacks.gradients.encoder_batches import (
    BATCH,
    END,
    IN_SPAN,
    OUT_OF_SPAN,
    START,
    Texts,
    as_places,
    classified,
    classified_pairs,
    problem_of,
)

from unmask.attacks.gradients.encoder.problem import Problem
from unmask.attacks.gradients.encoder.search import EncoderSearch
from unmask.attacks.run import Progress, Run, silent
from unmask.models import Model

NUM_ROWS = sum(map(len, BATCH))


@torch.no_grad()
def search_of(
    problem: Problem, num_texts: int | None = len(BATCH), seed: int = 0, progress: Progress = silent, **changes: Any
) -> EncoderSearch:
    settings = {"num_equations": 192, "max_steps": 8, "max_anchors": None} | changes
    return EncoderSearch(Run(seed, progress), problem, num_texts=num_texts, **settings)


@torch.no_grad()
def searched(model: Model, texts: Texts, keep: Sequence[str] | None = None, **changes: Any) -> EncoderSearch:
    evidence = classified(model, texts, parameters=keep)
    search = search_of(problem_of(model, evidence), len(texts), **changes)
    search.search()
    return search


def found(search: EncoderSearch) -> set[tuple[int, ...]]:
    return {search.problem.places.tokens_of(text) for text in search.found}


@pytest.fixture(scope="module")
def problem(tiny_bert) -> Problem:
    return problem_of(tiny_bert, classified(tiny_bert))


@pytest.fixture(scope="module")
def finished(tiny_bert) -> EncoderSearch:
    return searched(tiny_bert, BATCH)


# ---- what a finished search holds


def test_it_finds_the_batch(finished):
    assert found(finished) == set(BATCH)
    assert finished.num_rows == finished.problem.rank == NUM_ROWS
    assert finished.is_done
    assert finished.is_complete
    assert not finished.is_out_of_budget


def test_distances_are_those_of_the_problem(finished):
    for text, distance in finished.found.items():
        assert distance == finished.problem.distance(text) < IN_SPAN
    for text, (_, distance) in finished.refused.items():
        assert distance == finished.problem.distance(text) > OUT_OF_SPAN


def test_accepted_and_refused_are_told_apart(finished):
    assert max(finished.found.values()) < finished.accepted_below < finished.nearest_refused
    assert finished.nearest_refused == min(distance for _, distance in finished.refused.values())


def test_each_text_found_has_a_runner_up_that_was_refused(finished):
    """Texts that differ in one token are the hardest to tell apart: the gap of the certificate rests on them."""
    for text in finished.found:
        neighbours = [
            other
            for other in finished.refused
            if len(other) == len(text) and sum(a != b for a, b in zip(text, other, strict=True)) == 1
        ]
        assert neighbours


def test_places_of_texts_found_are_explained(finished):
    for text in finished.found:
        assert bool(finished.explained[list(text)].all())
    assert int(finished.explained.sum()) == len({place for text in finished.found for place in text})


@pytest.mark.parametrize("keep", [["layer.0.attention"], ["layer.0.attention.self", "layer.0.output.dense"]])
def test_one_layer_is_enough(tiny_bert, keep):
    assert found(searched(tiny_bert, BATCH, keep)) == set(BATCH)


def test_pairs_are_found(tiny_bert):
    pairs = [(START, 17, 99, END, 250, END), (START, 400, 3, END, 21, 33, END)]
    search = search_of(problem_of(tiny_bert, classified_pairs(tiny_bert, pairs)), 2)
    with torch.no_grad():
        search.search()
    assert found(search) == set(pairs)


# ---- texts that have much in common


def test_texts_that_differ_in_one_token_are_both_found(tiny_bert):
    """The runner-up of the first one found *is* the other one: it is no text to be refused."""
    texts = [(START, 17, 99, 250, 33, END), (START, 17, 99, 251, 33, END)]
    search = searched(tiny_bert, texts)
    assert found(search) == set(texts)
    assert search.nearest_refused > OUT_OF_SPAN


def test_a_text_whose_places_other_texts_have_used_is_found(tiny_bert):
    """Each place of the third text occurs in one of the others."""
    texts = [(START, 17, 99, 5, 6, END), (START, 18, 98, 7, 8, END), (START, 17, 98, 5, 8, END)]
    assert found(searched(tiny_bert, texts)) == set(texts)


@pytest.mark.parametrize(
    "texts",
    [
        [(START, 17, 99, 250, 33, END), (START, 17, 98, 250, 34, END)],
        [(START, 17, 99, 250, 33, END), (START, 17, 99, END)],
        [(START, 10, END), (START, 10, 12, 12, END)],
        [(START, 17, 99, 250, 33, END), (START, 33, 250, 99, 17, END)],
        [(START, 17, 17, 17, 99, END), (START, 17, 99, END)],
    ],
    ids=["equal places", "a beginning", "one word", "another order", "repetitions"],
)
def test_common_words_are_told_apart(tiny_bert, texts):
    assert found(searched(tiny_bert, texts)) == set(texts)


# ---- when it ends


def test_a_known_number_of_texts_ends_it(problem):
    search = search_of(problem, num_texts=1)
    with torch.no_grad():
        search.search()
    assert len(search.found) == 1
    assert found(search) < set(BATCH)
    assert search.is_done
    assert not search.is_complete


def test_an_unknown_number_of_texts_is_ended_by_the_rank(problem):
    search = search_of(problem, num_texts=None)
    with torch.no_grad():
        search.search()
    assert found(search) == set(BATCH)
    assert search.is_complete


@pytest.mark.parametrize("max_anchors", [0, 1, 2])
def test_a_budget_is_kept(problem, max_anchors):
    search = search_of(problem, max_anchors=max_anchors)
    with torch.no_grad():
        search.search()
    assert search.num_anchors == max_anchors
    assert search.is_out_of_budget
    assert not search.is_done
    assert found(search) < set(BATCH)


def test_steps_are_counted_and_limited(problem):
    search = search_of(problem, max_steps=1, max_anchors=2)
    with torch.no_grad():
        search.search()
    # One for each anchor, and one for each time that a nearly right text is tried again with more places.
    assert search.num_anchors <= search.num_steps <= 3 * search.num_anchors


def test_progress_is_told_in_rows_of_the_rank(problem):
    told: list[tuple[str, int, int]] = []
    search = search_of(problem, progress=lambda *news: told.append(news))
    with torch.no_grad():
        search.search()
    rows = [done for _, done, _ in told]
    assert rows[0] == 0
    assert rows == sorted(rows)
    assert {total for _, _, total in told} == {NUM_ROWS}


def test_the_same_seed_gives_the_same_search(problem):
    def run(seed: int) -> tuple[dict[Any, Any], dict[Any, Any], int]:
        search = search_of(problem, seed=seed)
        with torch.no_grad():
            search.search()
        return search.found, search.refused, search.num_steps

    assert run(0) == run(0)
    assert set(run(0)[0]) == set(run(1)[0])  # another seed has other probes, and the same texts


# ---- what its measures rest on


def test_random_texts_are_texts(problem):
    search = search_of(problem)
    for _ in range(30):
        text = search._random_text()
        tokens = problem.places.tokens_of(text)
        assert problem.places.position[list(text)].tolist() == list(range(len(text)))
        assert (tokens[0], tokens[-1]) == (START, END)
        assert not {START, END} & set(tokens[1:-1])


@torch.no_grad()
def test_what_a_random_text_costs_lies_far_above_the_batch(problem):
    search = search_of(problem)
    assert search.random_distance > OUT_OF_SPAN
    for text in BATCH:
        assert search._cost(as_places(problem.places, text)) < 1e-6 * search.random_cost


@pytest.mark.parametrize("seed", range(8))
def test_a_single_word_is_found_whatever_random_texts_were_drawn(tiny_bert, seed):
    """Of this batch's tokens two texts can be made, and one is the batch: a random text may be the true one."""
    texts = [(START, 10, END)]
    search = searched(tiny_bert, texts, seed=seed)
    assert found(search) == set(texts)
    assert search.accepted_below > IN_SPAN


def test_one_word_texts_are_found(tiny_bert):
    """Every text of three tokens is in the batch."""
    texts = [(START, 5, END), (START, 6, END)]
    search = searched(tiny_bert, texts)
    assert found(search) == set(texts)
    assert search.nearest_refused > OUT_OF_SPAN


def test_the_prior_is_the_part_of_a_place_that_is_one_texts(problem):
    assert search_of(problem, num_texts=4).prior == 0.25
    unknown = search_of(problem, num_texts=None)
    # Shares at one position add up to the texts that are that long, up to what repeated tokens spread.
    assert 1 / (2 * len(BATCH)) < unknown.prior <= 1


# ---- what goes with an anchor


@torch.no_grad()
def test_companions_are_the_heaviest_clear_places_that_fit(tiny_bert):
    words = classified(tiny_bert, [(START, 17, 99, 3, END), (START, 400, 250, 21, 33, END)])
    search = search_of(problem_of(tiny_bert, words), 2)
    places = search.problem.places
    clear = list(search._anchors(0.8))
    anchor = clear[0]
    weights = torch.zeros(places.num_candidates)
    weights[clear] = torch.linspace(0.6, 0.9, len(clear))
    together = search._companions([anchor], weights, search.narrow)
    assert together[0] == anchor
    assert 1 < len(together) <= 6
    assert len({int(places.position[place]) for place in together}) == len(together)
    assert weights[together[1]] == max(weights[place] for place in clear if places.fit(place, anchor))


@torch.no_grad()
def test_light_places_go_with_no_anchor(problem):
    search = search_of(problem)
    anchor = next(search._anchors(0.8))
    assert search._companions([anchor], torch.full((problem.places.num_candidates,), 0.3), search.narrow) == [anchor]


@torch.no_grad()
def test_weights_of_a_descent_name_places_of_the_anchors_text(problem):
    search = search_of(problem)
    text = as_places(problem.places, BATCH[1])
    anchor = next(place for place in search._anchors(0.8) if place in text)
    _, _, weights = search._descend([anchor], search.narrow, search.removed)
    assert set(search._companions([anchor], weights, search.narrow)) <= set(text)


def test_effort_starts_anew_while_texts_are_missing(problem, monkeypatch):
    """Two searches that find nothing, then one that does; it ends there."""
    search_once, calls = EncoderSearch._search, []

    def third_time(search: EncoderSearch) -> None:
        calls.append(search.narrow)
        if len(calls) == 3:
            search_once(search)

    monkeypatch.setattr(EncoderSearch, "_search", third_time)
    search = search_of(problem)
    with torch.no_grad():
        search.search(effort=9)
    assert found(search) == set(BATCH)
    assert len(calls) == len(set(map(id, calls))) == 3  # each with probes of its own
