"""Searches of several vectors run together and end at their texts."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.outputs.vectors.attempts import AttemptSettings
from unmask.attacks.outputs.vectors.edits import TextBatch
from unmask.attacks.outputs.vectors.proposals import Proposer
from unmask.attacks.outputs.vectors.search import TextSearch, VectorSearch

SENTENCES = ("The door was open.", "She left early.")


def begin(embedder, texts, *attempts):
    vectors = embedder.exact(TextBatch.of(texts))
    near = [lambda found, own=vector: (found - own).norm(dim=1) < 3e-5 for vector in vectors]
    return [VectorSearch(vector, is_near, attempts) for vector, is_near in zip(vectors, near, strict=True)]


@pytest.mark.slow
def test_short_sentences_are_found_together(embedder, effects):
    texts = [tuple(embedder.model.encode(sentence)[1:-1]) for sentence in SENTENCES]
    searches = begin(embedder, texts, AttemptSettings())
    TextSearch(embedder, Proposer(effects)).run(searches)
    assert [search.text for search in searches] == texts
    assert all(search.has_reached and search.is_done and search.num_texts < 5000 for search in searches)


def test_a_budget_ends_it_with_the_closest_text(embedder, effects):
    texts = [tuple(embedder.model.encode(SENTENCES[0])[1:-1])]
    searches = begin(embedder, texts, AttemptSettings(max_texts=1), AttemptSettings(nats=2.0, max_texts=1))
    TextSearch(embedder, Proposer(effects)).run(searches)  # without a language model
    (search,) = searches
    assert search.number == 2
    assert len(search.text) == 1
    assert search.distance < 1.3
    assert not search.has_reached


def test_whoever_watches_may_stop_it(embedder, effects):
    searches = begin(embedder, [(2158, 2003)], AttemptSettings())
    TextSearch(embedder, Proposer(effects)).run(searches, lambda: False)
    assert not searches[0].is_done


def test_an_attempt_may_begin_where_another_one_ended(embedder, effects):
    text = tuple(embedder.model.encode("The old door was open again.")[1:-1])
    (search,) = begin(embedder, [text], AttemptSettings(dropped=0.3))
    search.ends.by_distance[(*text[:3], text[1], *text[3:])] = 0.1
    TextSearch(embedder, Proposer(effects)).run([search])
    assert search.text == text
    assert search.num_texts < 4000


def test_a_vector_that_comes_later_gets_as_many_first_words(embedder, effects):
    early, late = begin(embedder, [(2158, 2003, 2919), (2016, 2187)], AttemptSettings())
    search = TextSearch(embedder, Proposer(effects))
    early.attempt = search.begin(early, AttemptSettings())
    search.expand([early.attempt])
    alone = early.attempt.num_texts
    late.attempt = search.begin(late, AttemptSettings())
    search.expand([early.attempt, late.attempt])
    assert late.attempt.num_texts == alone >= 200


def test_vectors_wait_for_their_turn(embedder, effects):
    searches = begin(embedder, [(2158, 2003), (2016, 2187)], AttemptSettings(max_texts=1))
    steps = []
    TextSearch(embedder, Proposer(effects)).run(
        searches, lambda: bool(steps.append([s.is_done for s in searches])) or True, at_once=1
    )
    assert steps[0] == [True, False]
    assert steps[-1] == [True, True]


def test_first_attempts_come_first(embedder, effects):
    one = AttemptSettings(max_texts=1)
    searches = begin(embedder, [(2158, 2003, 2919), (2016, 2187, 3835), (2158, 2187, 2003)], one, one)
    steps = []
    TextSearch(embedder, Proposer(effects)).run(
        searches, lambda: bool(steps.append([s.number for s in searches])) or True, at_once=1
    )
    assert steps == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2]]


def test_there_may_be_any_number_of_attempts(embedder, effects):
    (search,) = begin(embedder, [(2158, 2003, 2062)], *[AttemptSettings(max_texts=1)] * 6)
    TextSearch(embedder, Proposer(effects)).run([search])
    assert search.number == 6 or search.has_reached


def test_an_attempt_gets_every_text_once(embedder, effects):
    search = TextSearch(embedder, Proposer(effects))
    vector = VectorSearch(torch.ones(384), lambda found: found[:, 0] > 2, [])
    attempts = [search.begin(vector, AttemptSettings()) for _ in range(2)]
    texts = TextBatch.of([(5, 6), (7,), (5, 6), (5, 6)])
    owners, distances = torch.tensor([0, 0, 0, 1]), torch.tensor([0.5, 0.4, 0.5, 0.5])
    for _ in range(2):
        search._record(attempts, owners, texts, distances)
    assert [sorted(attempt.texts.as_tuples()) for attempt in attempts] == [[(), (5, 6), (7,)], [(), (5, 6)]]
    assert [attempt.num_texts for attempt in attempts] == [6, 2]


def test_texts_are_chosen_before_the_pool_changes(embedder, effects, monkeypatch):
    (one,) = begin(embedder, [(2158, 2003)], AttemptSettings())
    search = TextSearch(embedder, Proposer(effects))
    attempt = one.attempt = search.begin(one, AttemptSettings())
    search.expand([attempt])
    expected, seen = attempt.texts[:2].as_tuples(), []
    monkeypatch.setattr(attempt, "choose", lambda: [(0, 1), (1, 4)])

    def shrink(attempts, owners, texts, width, language):
        seen.extend(texts.as_tuples())
        attempt.texts = attempt.texts[:1]

    monkeypatch.setattr(search, "_test_edits", shrink)
    search.expand([attempt])
    assert sorted(seen) == sorted(expected)
