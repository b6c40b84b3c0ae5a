"""The auditor's numbers for texts: right ones score, wrong ones do not, and chance is measured, not assumed."""

from __future__ import annotations

import pytest
import transformers
from tests.audit.made import WORDS
from tests.tiny_models import bert_config, random_model, word_tokenizer

from unmask.audit.channels.text_scores import in_latin, text_result
from unmask.models import Model, adapt
from unmask.protocols.batch import make_batch
from unmask.recovery import (
    Ambiguity,
    AmbiguityKind,
    Certificate,
    Cost,
    RecoveredText,
    RecoveredTexts,
    Recovery,
    Status,
)
from unmask.scores.reading import normalise_text

TEXTS, OTHERS = WORDS[:2], WORDS[2:4]


@pytest.fixture(scope="module")
def model() -> Model:
    return adapt(random_model(transformers.BertForMaskedLM, bert_config()), word_tokenizer())


def recovery_of(texts: list[list[int]], bag: set[int] = frozenset(), certain: bool = True) -> Recovery[RecoveredTexts]:
    value = RecoveredTexts(tuple(RecoveredText(tuple(text), "", certain, 0.0) for text in texts), frozenset(bag))
    return Recovery(value, Status.PARTIAL, "", Certificate("", 0.0, 1.0), Cost())


def test_everything_recovered(model):
    result = text_result(recovery_of([model.encode(text) for text in TEXTS]), TEXTS, OTHERS, model)
    assert result["metrics"] == {
        "exact_texts": 2,
        "exact_rate": 1.0,
        "near_exact_texts": 2,
        "certain_texts": 2,
        "false_texts": 0,
        "rouge1": 1.0,
        "rouge2": 1.0,
        "rougeL": 1.0,
        "token_recall": 1.0,
        "token_precision": 1.0,
    }
    assert [pair.exact for pair in result["texts"]] == [pair.near_exact for pair in result["texts"]] == [True, True]
    assert result["tokens"] == ()


def test_nothing_recovered(model):
    result = text_result(recovery_of([]), TEXTS, OTHERS, model)
    assert result["metrics"]["exact_texts"] == result["metrics"]["token_recall"] == result["metrics"]["rouge1"] == 0
    assert [pair.recovered for pair in result["texts"]] == [None, None]


def test_frames_are_nobodys_secret(model):
    """[CLS] and [SEP] are in every text; having them is having nothing."""
    result = text_result(recovery_of([], bag=set(model.special_tokens)), TEXTS, OTHERS, model)
    assert result["metrics"]["token_recall"] == 0
    assert "token_precision" not in result["metrics"]  # of nothing
    framed = text_result(recovery_of([model.encode("")]), TEXTS, OTHERS, model)
    assert framed["metrics"]["rouge1"] == framed["metrics"]["rougeL"] == 0
    assert result["chance"]["rouge1"] == 0


def test_a_bag_of_words_counts_tokens_once(model):
    right = [token for token in model.encode(TEXTS[0]) if token not in model.special_tokens]
    result = text_result(recovery_of([], bag={*right, 499}), TEXTS, OTHERS, model)
    held = {token for text in TEXTS for token in model.encode(text)} - model.special_tokens
    assert result["metrics"]["token_recall"] == len(right) / len(held)
    assert result["metrics"]["token_precision"] == len(right) / (len(right) + 1)
    assert dict(result["tokens"])["w499"] == "no"
    assert {mark for piece, mark in result["tokens"] if piece != "w499"} == {"bag"}


def test_chance_is_what_the_others_score(model):
    """Somebody who guesses other texts of the same data."""
    result = text_result(recovery_of([]), TEXTS, OTHERS, model)
    assert result["chance"]["token_recall"] == 0  # no two texts of the list share a word
    guess = [TEXTS[0], OTHERS[0]]
    lucky = text_result(recovery_of([]), TEXTS, guess, model)["chance"]
    as_recovered = text_result(recovery_of([model.encode(text) for text in guess]), TEXTS, OTHERS, model)["metrics"]
    del as_recovered["certain_texts"]
    assert lucky == as_recovered
    assert lucky["exact_texts"] == 1


def test_without_anything_to_guess_from_there_is_no_chance(model):
    assert text_result(recovery_of([]), TEXTS, [], model)["chance"] == {}


def test_rouge_reads_every_script():
    assert in_latin("The spare key, 42.") == "The spare key, 42."
    assert in_latin("ключ").split() == ["".join(f"u{ord(letter):x}" for letter in "ключ")]
    assert len(in_latin("鍵の下").split()) == 3  # a script without spaces: every character is a word


def test_long_texts_are_cut_as_the_client_cuts_them(model):
    """What a model cannot take leaves no trace, so an exact recovery of the rest is exact."""
    long = " ".join(["w7"] * (model.max_positions + 9))
    seen = make_batch(model, [long]).tokens[0].tolist()
    assert len(seen) == model.max_positions
    result = text_result(recovery_of([seen]), [long], [], model)
    assert result["metrics"]["exact_texts"] == 1
    assert result["metrics"]["false_texts"] == 0


def test_an_exact_text_of_one_word_is_exact_in_every_measure(model):
    result = text_result(recovery_of([model.encode("w7")]), ["w7"], [], model)
    assert result["metrics"]["rouge2"] == 1


def test_exact_is_what_a_person_reads(model):
    """Without its frame, with more end tokens, or doubly framed, a text is the same text."""
    words = [token for token in model.encode(TEXTS[0]) if token not in model.special_tokens]
    sep, pad = model.tokenizer.sep_token_id, model.tokenizer.pad_token_id
    for tokens in (words, [*words, sep, sep, pad], [*model.encode(TEXTS[0]), sep]):
        result = text_result(recovery_of([tokens]), TEXTS[:1], OTHERS, model)
        assert result["metrics"]["exact_texts"] == 1
        assert result["metrics"]["false_texts"] == 0
        assert result["texts"][0].exact


def test_case_does_not_count_where_the_model_never_sees_it(model, monkeypatch):
    monkeypatch.setattr(model.tokenizer, "do_lower_case", True, raising=False)
    decode = type(model).decode
    monkeypatch.setattr(
        type(model),
        "decode",
        lambda self, tokens: decode(self, tokens).upper() if 7 in tokens else decode(self, tokens),
    )
    assert normalise_text("W7", ignore_case=True) == "w7"
    assert text_result(recovery_of([[7, 8]]), ["w7 w8"], [], model)["metrics"]["exact_texts"] == 1


def test_a_text_but_for_a_sign_is_near_exact(model):
    true = " ".join(f"w{number}" for number in range(100, 110))
    tokens = [*model.encode(true)[:-2], model.encode("w108")[1]]  # w109 became w108
    result = text_result(recovery_of([tokens], certain=False), [true], OTHERS, model)
    assert result["metrics"]["exact_texts"] == 0
    assert result["metrics"]["near_exact_texts"] == 1
    assert result["chance"]["near_exact_texts"] == 0
    assert (result["texts"][0].exact, result["texts"][0].near_exact) == (False, True)


def test_a_text_up_to_what_nothing_tells_apart_is_near_exact_and_not_false(model):
    true, other = model.encode(TEXTS[0]), model.encode(TEXTS[0])
    other[1], other[2] = 300, 301
    points = tuple(
        Ambiguity(AmbiguityKind.EQUAL_TOKENS, "these look alike", place, (true[place], other[place]))
        for place in (1, 2)
    )
    open_end = Ambiguity(AmbiguityKind.OPEN_END, "it may go on")
    open_beginning = Ambiguity(AmbiguityKind.OPEN_BEGINNING, "and not what comes before")
    for ambiguities, num_near in ((points, 1), ((*points, open_end), 0), ((*points, open_beginning), 0)):
        text = RecoveredText(tuple(other), "", False, 0.0, ambiguities=ambiguities)
        found = Recovery(RecoveredTexts((text,)), Status.PARTIAL, "", Certificate("", 0.0, 1.0), Cost())
        result = text_result(found, TEXTS[:1], OTHERS, model)
        assert result["metrics"]["exact_texts"] == 0
        assert result["metrics"]["near_exact_texts"] == num_near
        assert result["metrics"]["false_texts"] == 1 - num_near
        assert len(result["texts"][0].ambiguities) == len(ambiguities)


def test_a_false_text_is_counted(model):
    result = text_result(recovery_of([model.encode(OTHERS[0])], certain=False), TEXTS, OTHERS, model)
    assert result["metrics"]["false_texts"] == 1
    assert result["metrics"]["certain_texts"] == 0
    assert result["texts"][-1].true is None


def test_a_part_of_a_text_is_neither_exact_nor_near_exact(model):
    tokens = tuple(model.encode(TEXTS[0]))[2:]
    open_beginning = Ambiguity(AmbiguityKind.OPEN_BEGINNING, "and not what comes before")
    text = RecoveredText(tokens, model.decode(tokens), False, 0.0, ambiguities=(open_beginning,))
    found = Recovery(RecoveredTexts((text,), frozenset(tokens)), Status.PARTIAL, "", Certificate("", 0.0, 1.0), Cost())
    metrics = text_result(found, TEXTS[:1], OTHERS, model)["metrics"]
    assert (metrics["exact_texts"], metrics["near_exact_texts"], metrics["certain_texts"]) == (0, 0, 0)
    assert 0 < metrics["token_recall"] < 1
