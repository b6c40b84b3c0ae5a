"""Words in other forms, cut into tokens as the tokenizer cuts them."""

from __future__ import annotations

from unmask.attacks.outputs.vectors.edits import TextBatch
from unmask.attacks.outputs.vectors.respellings import Respeller, other_forms


def respell(model, text, widely):
    opening = len(model.encode("")) // 2
    tokens = model.encode(text)
    texts = TextBatch.of([tuple(tokens[opening : len(tokens) - opening])])
    _, found = Respeller(model)(texts, widely)
    return {model.decode(text).strip(): text for text in found.as_tuples()}


def test_two_words_become_one(minilm):
    found = respell(minilm, "half over heated,", widely=False)
    assert set(found) == {"halfover heated,", "half overheated,"}
    assert found["half overheated,"] == tuple(minilm.encode("half overheated,")[1:-1])


def test_words_get_other_endings_and_beginnings(minilm):
    found = respell(minilm, "the persona", widely=True)
    assert {"the personas", "thepersona"} <= set(found)
    assert all(text == tuple(minilm.encode(name)[1:-1]) for name, text in found.items())
    assert "the persona" not in found


def test_words_of_a_decoder_keep_their_space(smollm2):
    found = respell(smollm2, "It was over heated", widely=False)
    assert found["It was overheated"] == tuple(smollm2.encode("It was overheated"))


def test_marks_are_no_words_and_without_a_tokenizer_there_are_none(minilm, tiny_bert):
    assert not respell(minilm, ", - .", widely=True)
    rows, _ = Respeller(tiny_bert)(TextBatch.of([(5, 6)]), widely=True)
    assert len(rows) == 0


def test_several_texts_at_once(minilm):
    texts = TextBatch.of([tuple(minilm.encode(text)[1:-1]) for text in ("over heated", "!", "up right now")])
    rows, found = Respeller(minilm)(texts, widely=False)
    assert rows.tolist() == [0, 2, 2]
    assert [minilm.decode(text) for text in found.as_tuples()] == ["overheated", "upright now", "up rightnow"]


def test_forms_of_a_word():
    forms = other_forms("baked")
    assert {"bakeds", "unbaked", "bak", "baking"} <= set(forms)
    assert "baked" not in forms
    assert len(set(forms)) == len(forms)
