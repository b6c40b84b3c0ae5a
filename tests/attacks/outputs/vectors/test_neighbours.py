"""Neighbours of a text hold the edits that are hardest to see, and never the text itself."""

from __future__ import annotations

from unmask.attacks.outputs.vectors.neighbours import near_texts


def test_neighbours_are_edits_of_the_text(minilm, effects):
    text = tuple(minilm.encode("a man sold the cars.")[1:-1])
    found = near_texts(text, effects, 6).as_tuples()
    assert text not in found
    assert text[1:] in found  # taken out
    assert (text[1], text[0], *text[2:]) in found  # another order
    (cars,) = minilm.encode("car")[1:-1]
    assert any(other[:4] == text[:4] and other[4] == cars for other in found)  # the nearest word
    (comma,) = minilm.encode(",")[1:-1]
    assert (*text[:1], comma, *text[1:]) in found


def test_a_text_of_one_token_has_neighbours_too(minilm, effects):
    found = near_texts((2158,), effects, 3).as_tuples()
    assert found
    assert () not in found
