"""Batches: padding on either side, masks, limits, and what a caller may get wrong."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny_models import NUM_POSITIONS, VOCAB, bert_config, random_model, word_tokenizer

import unmask
from unmask.attacks.recover import recover_text
from unmask.cli.words import say_as_options
from unmask.errors import InputError
from unmask.models import adapt
from unmask.protocols import observe_gradients
from unmask.protocols.batch import Batch, TruncationWarning, least_bytes, make_batch

quick = settings(max_examples=50)
texts = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10), min_size=1, max_size=5)
sides = st.sampled_from(["left", "right"])


@pytest.fixture(scope="module")
def padded(tiny_gpt2):
    """The padding token of the model, and a batch on each side."""
    sequences = [[5, 6, 7], [8]]
    return tiny_gpt2.pad_token, {
        side: make_batch(tiny_gpt2, sequences, padding_side=side) for side in ("left", "right")
    }


def test_padding_on_the_right(padded):
    pad, batches = padded
    assert batches["right"].tokens.tolist() == [[5, 6, 7], [8, pad, pad]]
    assert batches["right"].mask.tolist() == [[True, True, True], [True, False, False]]
    assert batches["right"].last.tolist() == [2, 0]


def test_padding_on_the_left(padded):
    pad, batches = padded
    assert batches["left"].tokens.tolist() == [[5, 6, 7], [pad, pad, 8]]
    assert batches["left"].mask.tolist() == [[True, True, True], [False, False, True]]
    assert batches["left"].last.tolist() == [2, 2]


def test_types(padded):
    for batch in padded[1].values():
        assert batch.tokens.dtype == torch.int64
        assert batch.mask.dtype == torch.bool


@quick
@given(texts=texts, side=sides)
def test_the_mask_gives_the_texts_back(tiny_llama, texts, side):
    batch = make_batch(tiny_llama, texts, padding_side=side)
    assert batch.tokens.shape == batch.mask.shape == (len(texts), max(map(len, texts)))
    rows = zip(batch.tokens, batch.mask, strict=True)
    assert [tokens[mask].tolist() for tokens, mask in rows] == texts
    assert (batch.tokens[~batch.mask] == tiny_llama.pad_token).all()


@quick
@given(texts=texts, side=sides)
def test_last_is_the_last_real_token(tiny_llama, texts, side):
    batch = make_batch(tiny_llama, texts, padding_side=side)
    lasts = batch.tokens[torch.arange(len(texts)), batch.last]
    assert lasts.tolist() == [text[-1] for text in texts]


def test_last_of_a_mask_with_holes_is_the_rightmost():
    mask = torch.tensor([[False, True, False, True, False]])
    assert Batch(torch.zeros(1, 5, dtype=torch.long), mask).last.tolist() == [3]


def test_texts_are_encoded_as_the_tokenizer_does(minilm):
    sentences = ["hello there", "good morning, all of you"]
    batch = make_batch(minilm, sentences)
    expected = minilm.tokenizer(sentences, padding=True, return_tensors="pt")
    assert torch.equal(batch.tokens, expected["input_ids"])
    assert torch.equal(batch.mask, expected["attention_mask"].bool())


def test_token_ids_may_be_tensors(tiny_gpt2):
    batch = make_batch(tiny_gpt2, [torch.tensor([1, 2]), torch.tensor([3])])
    assert batch.tokens[0].tolist() == [1, 2]


# Lengths


def test_long_texts_are_cut_at_the_end(tiny_gpt2):
    batch = make_batch(tiny_gpt2, [list(range(9)), [1]], max_length=4)
    assert batch.tokens[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("max_length", [None, NUM_POSITIONS, 10 * NUM_POSITIONS])
def test_no_text_is_longer_than_the_model_takes(tiny_gpt2, max_length):
    batch = make_batch(tiny_gpt2, [[3] * (NUM_POSITIONS + 5)], max_length=max_length)
    assert batch.tokens.shape == (1, NUM_POSITIONS)


@pytest.mark.parametrize("max_length", [0, -1])
def test_a_length_that_leaves_nothing_is_refused(tiny_gpt2, max_length):
    """A negative limit would cut from the wrong end without a word."""
    with pytest.raises(InputError, match="max_length"):
        make_batch(tiny_gpt2, [[1, 2, 3]], max_length=max_length)


# Callers' mistakes


def test_an_empty_batch_is_refused(tiny_gpt2):
    with pytest.raises(InputError, match="batch is empty: give at least one text"):
        make_batch(tiny_gpt2, [])


def test_an_empty_text_is_refused_by_its_number(tiny_gpt2):
    with pytest.raises(InputError, match="text 1 has no tokens"):
        make_batch(tiny_gpt2, [[1], []])


@pytest.mark.parametrize("side", ["centre", "", None, "LEFT"])
def test_an_unknown_padding_side_is_refused(tiny_gpt2, side):
    with pytest.raises(InputError, match="padding_side must be 'left' or 'right'"):
        make_batch(tiny_gpt2, [[1]], padding_side=side)


@pytest.mark.parametrize("token", [-1, VOCAB, 10**9])
def test_tokens_outside_the_vocabulary_are_refused(tiny_gpt2, token):
    with pytest.raises(InputError, match=f"token ids must lie in 0…{VOCAB - 1}, got"):
        make_batch(tiny_gpt2, [[1, token]])


def test_text_without_a_tokenizer_is_refused(tiny_gpt2):
    with pytest.raises(InputError, match="without a tokenizer"):
        make_batch(tiny_gpt2, ["hello"])


def test_one_text_instead_of_a_list_is_refused(minilm):
    """A string is a sequence of strings, so it would become a batch of single letters."""
    with pytest.raises(InputError):
        make_batch(minilm, "hello there")


# Pairs


def test_pairs_are_encoded_as_the_tokenizer_does(minilm):
    pairs = [("who is there?", "nobody"), ("a man plays", "someone makes music on a stage")]
    batch = make_batch(minilm, pairs)
    expected = minilm.tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt")
    assert torch.equal(batch.tokens, expected["input_ids"])
    assert torch.equal(batch.types, expected["token_type_ids"])
    assert torch.equal(batch.mask, expected["attention_mask"].bool())


@pytest.mark.parametrize("side", ["right", "left"])
def test_pairs_of_tokens_are_taken_as_they_are(tiny_bert, side):
    batch = make_batch(tiny_bert, [([1, 7, 2], [8, 9, 2]), ([1, 5, 2], [6, 2])], padding_side=side)
    expected = [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0] if side == "right" else [0, 0, 0, 0, 1, 1]]
    assert batch.types.tolist() == expected
    assert batch.tokens[1][batch.mask[1]].tolist() == [1, 5, 2, 6, 2]


def test_a_batch_without_pairs_has_no_types(tiny_bert):
    batch = make_batch(tiny_bert, [(5, 6), [7, 8, 9]])
    assert batch.types is None
    assert set(batch.inputs) == {"input_ids", "attention_mask"}


def test_single_texts_beside_pairs_have_type_0(tiny_bert):
    batch = make_batch(tiny_bert, [[1, 5, 6, 2], ([1, 7, 2], [8, 2])])
    assert batch.types.tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]
    assert torch.equal(batch.inputs["token_type_ids"], batch.types)


def test_pairs_of_tensors_are_pairs_and_tuples_of_two_tokens_are_texts(tiny_bert):
    assert make_batch(tiny_bert, [(torch.tensor([1, 2]), torch.tensor([3]))]).types.tolist() == [[0, 0, 1]]
    assert make_batch(tiny_bert, [(torch.tensor(1), torch.tensor(2))]).tokens.tolist() == [[1, 2]]
    assert make_batch(tiny_bert, [(1, 2)]).types is None


# Long texts are cut as transformers cuts them

LONG = "the committee met again on tuesday and decided nothing at all about the bridge over the river"


@pytest.mark.parametrize("max_length", [3, 8, 15])
@pytest.mark.parametrize("pair", [(LONG, "and why?"), ("and why?", LONG), (LONG, LONG), None])
def test_long_texts_are_cut_as_transformers_cuts_them(minilm, max_length, pair):
    text = LONG if pair is None else pair
    if pair is not None and max_length == 3:
        with pytest.raises(InputError, match="max_length must be above 3, the special tokens"):
            make_batch(minilm, [text], max_length=max_length)
        return
    with pytest.warns(TruncationWarning, match=f"cut 1 of 1 text to {max_length} tokens?, as asked"):
        batch = make_batch(minilm, [text], max_length=max_length)
    parts = (text,) if pair is None else pair
    expected = minilm.tokenizer(*parts, truncation=True, max_length=max_length, return_tensors="pt")
    assert torch.equal(batch.tokens, expected["input_ids"])
    assert batch.types is None or torch.equal(batch.types, expected["token_type_ids"])
    assert int(batch.tokens[0, -1]) == minilm.frame_tokens[1]


@pytest.mark.parametrize("max_length", [6, 7, 8, 11])
@pytest.mark.parametrize("lengths", [(2, 12), (12, 2), (9, 9), (5, 6), (6, 5)])
def test_pairs_of_tokens_are_cut_as_pairs_of_texts(lengths, max_length):
    hf = random_model(transformers.BertForMaskedLM, bert_config())
    model = adapt(hf, word_tokenizer())
    words = [" ".join(f"w{10 + number}" for number in range(length)) for length in lengths]
    tokens = [[10 + number for number in range(length)] + [2] for length in lengths]
    with pytest.warns(TruncationWarning):
        of_words = make_batch(model, [tuple(words)], max_length=max_length)
    with pytest.warns(TruncationWarning):
        of_tokens = make_batch(model, [([1, *tokens[0]], tokens[1])], max_length=max_length)
    assert int(of_tokens.tokens[0, -1]) == 2
    # The frame counts as part of a text that comes as tokens, so the parts may differ by one.
    assert abs(int(of_words.types.sum()) - int(of_tokens.types.sum())) <= 1
    assert (of_tokens.tokens == 2).sum() == 2


def test_token_ids_keep_their_last_special_token(minilm):
    tokens = minilm.encode(LONG)
    with pytest.warns(TruncationWarning):
        batch = make_batch(minilm, [tokens], max_length=8)
    assert batch.tokens[0].tolist() == minilm.encode(LONG, 8)


def test_token_ids_without_a_tokenizer_are_cut_at_the_end(tiny_bert):
    with pytest.warns(TruncationWarning):
        batch = make_batch(tiny_bert, [([1, 5, 2], [6, 7, 2])], max_length=4)
    assert (batch.tokens.tolist(), batch.types.tolist()) == ([[1, 5, 6, 7]], [[0, 0, 1, 1]])


def test_it_is_said_how_many_texts_were_cut(tiny_gpt2):
    with pytest.warns(TruncationWarning, match="cut 2 of 3 texts to 4 tokens, as asked"):
        make_batch(tiny_gpt2, [[1] * 5, [2] * 4, [3] * 9], max_length=4)
    with pytest.warns(TruncationWarning, match=f"to {NUM_POSITIONS} tokens, the longest that this gpt2 model"):
        make_batch(tiny_gpt2, [[1] * (NUM_POSITIONS + 1)])


def test_texts_that_fit_are_not_talked_about(tiny_gpt2, recwarn):
    make_batch(tiny_gpt2, [[1] * 4, [2] * 3], max_length=4)
    assert not recwarn.list


def test_truncated_texts_are_recovered(minilm):
    """Cut without [SEP], no text could be found: the tokens that frame a text were not in the bag."""
    with pytest.warns(TruncationWarning, match="cut 1 of 1 text to 8 tokens"):
        evidence = observe_gradients(minilm, [LONG], task="classification", max_length=8)
    recovery = recover_text(evidence, minilm)
    assert [text.tokens for text in recovery.value.texts if text.certain] == [tuple(minilm.encode(LONG, 8))]


def test_a_part_of_a_batch_keeps_its_types(tiny_bert):
    batch = make_batch(tiny_bert, [[1, 5, 2], ([1, 2], [8, 2]), [1, 2]])
    part = batch.part(1, 3)
    assert torch.equal(part.tokens, batch.tokens[1:])
    assert torch.equal(part.mask, batch.mask[1:])
    assert torch.equal(part.types, batch.types[1:])
    assert make_batch(tiny_bert, [[1], [2]]).part(0, 1).types is None


def test_pairs_need_token_types(tiny_gpt2):
    with pytest.raises(InputError, match="gpt2 model has no token types, so it takes no pairs"):
        make_batch(tiny_gpt2, [([1, 2], [3])])


def test_half_a_pair_of_text_is_refused(minilm):
    with pytest.raises(InputError, match="two strings or two lists of token ids"):
        make_batch(minilm, [("who is there?", [5, 6])])


def test_pairs_of_text_without_a_tokenizer_are_refused(tiny_bert):
    with pytest.raises(InputError, match="without a tokenizer"):
        make_batch(tiny_bert, [("a", "b")])


def test_a_list_of_strings_is_no_text(minilm):
    with pytest.raises(InputError, match="a text must be a string, a tuple of two strings or token ids"):
        make_batch(minilm, [["who is there?", "nobody"]])


def test_tokens_of_pairs_outside_the_vocabulary_are_refused(tiny_bert):
    with pytest.raises(InputError, match="token ids must lie in"):
        make_batch(tiny_bert, [([1, 2], [VOCAB])])


@pytest.mark.parametrize("observe", [unmask.observe_gradients, unmask.observe_fedavg, unmask.observe_hidden])
def test_texts_that_do_not_fit_into_memory_are_refused_before_they_run(tiny_llama, monkeypatch, observe):
    """The control: with the memory that there is, and as long as the sentence says, they run."""
    text = list(range(5, 5 + 60))
    observe(tiny_llama, [text])
    monkeypatch.setenv("UNMASK_MEMORY_GB", str(least_bytes(tiny_llama, 1, 60, backward=False) / 2e9))
    with monkeypatch.context() as never:
        never.setattr(type(tiny_llama.hf), "forward", None)
        with pytest.raises(InputError, match="max_length must be lower here: 1 text of 60 tokens") as why:
            observe(tiny_llama, [text])
    length = int(re.search(r"try max_length=(\d+)", str(why.value))[1])
    assert 1 < length < 60
    assert "--max-length must be lower here" in say_as_options(str(why.value))
    assert f"try --max-length {length}" in say_as_options(str(why.value))
    observe(tiny_llama, [text[:length]])
