"""Pairs of texts from an update of an encoder–decoder."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from tests.models.families import build

import unmask
from unmask.attacks.gradients.pairs.attack import PairAttack
from unmask.errors import InputError
from unmask.recovery import Status

FRAME = (0, 2)
PAIRS = [
    ((0, 11, 12, 13, 2), (0, 51, 52, 53, 54, 2)),
    ((0, 21, 22, 2), (0, 61, 62, 2)),
    ((0, 31, 32, 33, 34, 2), (0, 71, 72, 73, 2)),
    ((0, 41, 42, 43, 2), (0, 81, 2)),
]


def found_pairs(recovery):
    sides = [recovery.value.texts[i::2] for i in (0, 1)]
    assert {text.side for text in sides[0]} <= {"encoder"}
    assert {text.side for text in sides[1]} <= {"decoder"}
    return Counter({(s.tokens, t.tokens): s.count for s, t in zip(*sides, strict=True)})


@pytest.fixture(scope="module")
def model():
    return unmask.load_encoder_decoder(build("Bart"))


def test_all_pairs_are_found_and_certain(model):
    recovery = unmask.recover_text(unmask.observe_gradients(model, PAIRS), model, attack=PairAttack(frame=FRAME))
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert found_pairs(recovery) == Counter(PAIRS)
    assert all(text.certain for text in recovery.value.texts)


def test_texts_that_were_read_or_written_twice(model):
    pairs = [*PAIRS[:2], (PAIRS[0][0], PAIRS[2][1]), (PAIRS[3][0], PAIRS[1][1]), PAIRS[0]]
    recovery = PairAttack(frame=FRAME)(unmask.observe_gradients(model, pairs), model)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert found_pairs(recovery) == Counter(pairs)


def test_how_often_all_pairs_occur_is_open_where_nobody_says(model):
    evidence = replace(unmask.observe_gradients(model, PAIRS[:2] * 2), num_texts=None)
    recovery = PairAttack(frame=FRAME)(evidence, model)
    assert recovery.status is Status.PARTIAL
    assert set(found_pairs(recovery)) == set(PAIRS[:2])
    assert all(text.ambiguities for text in recovery.value.texts)


def test_weights_of_pairs_in_a_mean_of_their_own_means_are_no_counts(model):
    """The shorter of two pairs that occur once used to occur 'at least' twice."""
    parts = [unmask.observe_gradients(model, [pair]) for pair in PAIRS[:4:3]]
    mean = {name: sum(part.gradients[name] for part in parts) / 2 for name in parts[0].gradients}
    recovery = PairAttack(frame=FRAME)(replace(parts[0], gradients=mean, num_texts=None), model)
    assert found_pairs(recovery) == Counter(PAIRS[:4:3])


def test_a_text_that_does_not_end_with_the_end_token_is_not_certain(model):
    pairs = [(read, written[:-1]) for read, written in PAIRS]
    recovery = PairAttack(frame=FRAME)(unmask.observe_gradients(model, pairs), model)
    assert recovery.status is Status.PARTIAL
    assert not recovery.value.certain


def test_noise_claims_nothing(model):
    evidence = unmask.observe_gradients(model, PAIRS)
    generator = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(g.shape, generator=generator) * g.std() for name, g in evidence.gradients.items()}
    recovery = PairAttack(frame=FRAME)(evidence.with_tensors(noise), model)
    assert not recovery.value.certain
    assert recovery.status is not Status.RECOVERED


def test_of_t5_the_tokens_of_both_sides_and_guesses_at_what_was_written():
    model = unmask.load_encoder_decoder(build("T5"))
    pairs = [(read[1:], written[1:]) for read, written in PAIRS]
    recovery = unmask.recover_text(unmask.observe_gradients(model, pairs), model)
    assert recovery.status is Status.PARTIAL
    assert not recovery.value.certain
    assert {text.tokens for text in recovery.value.texts if text.side == "decoder"} == {w for _, w in pairs}
    assert recovery.value.token_set == {token for pair in pairs for text in pair for token in text}


def test_equal_tokens_are_open_where_the_embedding_is_not_seen():
    hf = build("Bart")
    with torch.no_grad():
        hf.model.shared.weight[5] = hf.model.shared.weight[12]
    model = unmask.load_encoder_decoder(hf)
    whole = unmask.observe_gradients(model, PAIRS)
    assert not any({5, 12} & set(text.tokens) for text in PairAttack(frame=FRAME)(whole, model).value.certain)
    part = whole.with_tensors({name: g for name, g in whole.gradients.items() if "shared" not in name})
    recovery = PairAttack(frame=FRAME)(part, model)
    assert recovery.status is Status.PARTIAL
    open_texts = [text for text in recovery.value.texts if not text.certain]
    assert [text.covers(PAIRS[0][0]) for text in open_texts] == [True]
    assert not recovery.value.token_set & {5, 12}


def test_the_start_token_is_in_no_text():
    hf = build("T5")
    hf.config.decoder_start_token_id = 9
    model = unmask.load_encoder_decoder(hf)
    pairs = [(read[1:], written[1:]) for read, written in PAIRS]
    recovery = unmask.recover_text(unmask.observe_gradients(model, pairs), model)
    assert 9 not in recovery.value.token_set


def test_a_model_of_one_side_is_refused(tiny_gpt2):
    evidence = unmask.observe_gradients(tiny_gpt2, [(5, 6, 7)])
    with pytest.raises(InputError, match="load_encoder_decoder"):
        PairAttack()(evidence, tiny_gpt2)
