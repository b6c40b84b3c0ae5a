"""A known beginning: used if its states agree, said to be wrong if they do not, and never counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import unmask
from unmask.attacks.outputs.prompts.seen_text import BeginningStatus, ReadText, ReadToken
from unmask.errors import InputError
from unmask.protocols import observe_cache, observe_gradients, observe_hidden
from unmask.recovery import Status

BEGINNING, TEXT = (7, 9, 30, 12), (5, 17, 99, 17, 250)
WHOLE = (*BEGINNING, *TEXT)


@pytest.fixture(params=["states", "cache"])
def observe(request: pytest.FixtureRequest):
    return observe_hidden if request.param == "states" else observe_cache


@pytest.mark.parametrize("name", ["tiny_gpt2", "tiny_llama"])
def test_what_was_known_is_part_of_the_text_and_not_recovered(request, observe, name):
    model = request.getfixturevalue(name)
    recovery = unmask.recover_text(observe(model, [WHOLE], layer=2), model, known_beginning=BEGINNING)
    (text,) = recovery.value.certain
    assert (text.tokens, text.num_given) == (WHOLE, len(BEGINNING))
    assert recovery.status is Status.RECOVERED
    assert recovery.value.token_set == set(TEXT)
    assert "are not counted: 4" in recovery.reason


def test_a_wrong_beginning_is_said_to_be_wrong_and_not_used(tiny_llama, observe):
    recovery = unmask.recover_text(observe(tiny_llama, [WHOLE], layer=2), tiny_llama, known_beginning=[1, 2, 3])
    (text,) = recovery.value.certain
    assert (text.tokens, text.num_given) == (WHOLE, 0)
    assert "does not start with the known beginning" in recovery.reason


def test_the_last_token_of_a_beginning_may_have_merged(tiny_llama, observe):
    recovery = unmask.recover_text(observe(tiny_llama, [WHOLE], layer=2), tiny_llama, known_beginning=[7, 9, 30, 44])
    (text,) = recovery.value.certain
    assert (text.tokens, text.num_given) == (WHOLE, 3)


def test_a_beginning_that_is_the_whole_text_leaves_nothing_to_find(tiny_llama, observe):
    recovery = unmask.recover_text(observe(tiny_llama, [WHOLE], layer=2), tiny_llama, known_beginning=[*WHOLE, 3])
    assert recovery.status is Status.NOTHING_FOUND
    assert not recovery.value.texts


@pytest.mark.parametrize("defence", ["fp8", "noise:sigma=0.05,relative=true"])
def test_so_it_does_behind_rounding_and_noise(tiny_llama, observe, defence):
    evidence = observe(tiny_llama, [WHOLE], layer=1)
    coarse = unmask.defend_states(evidence, unmask.parse_defence(defence), torch.Generator().manual_seed(0))
    recovery = unmask.recover_text(coarse, tiny_llama, known_beginning=WHOLE)
    assert not recovery.value.certain
    assert not recovery.certificate.holds


def test_a_beginning_behind_noise_is_taken_if_the_noise_is_white(tiny_llama):
    evidence = observe_hidden(tiny_llama, [WHOLE], layer=1)
    noisy = unmask.defend_states(
        evidence, unmask.parse_defence("noise:sigma=0.05,relative=true"), torch.Generator().manual_seed(0)
    )
    recovery = unmask.recover_text(noisy, tiny_llama, known_beginning=BEGINNING)
    assert recovery.value.token_set <= set(WHOLE)
    assert all(text.tokens == WHOLE for text in recovery.value.certain)


def test_it_is_kept_with_the_evidence(tiny_llama, observe, tmp_path):
    evidence = replace(observe(tiny_llama, [WHOLE], layer=2), known_beginning=list(BEGINNING))
    again = unmask.load_evidence(evidence.save(tmp_path / "evidence.safetensors"))
    assert again.known_beginning == BEGINNING
    assert unmask.recover_text(again, tiny_llama).value.texts[0].num_given == len(BEGINNING)


def test_evidence_that_has_no_beginning_refuses_one(tiny_llama, tiny_bert):
    for model, evidence in (
        (tiny_llama, observe_gradients(tiny_llama, [TEXT])),
        (tiny_llama, observe_hidden(tiny_llama, [TEXT], site="mean")),
        (tiny_bert, observe_hidden(tiny_bert, [TEXT], layer=1)),
    ):
        with pytest.raises(InputError, match="known beginning"):
            unmask.recover_text(evidence, model, known_beginning=[5])
    with pytest.raises(InputError, match="list of token ids"):
        unmask.recover_text(observe_hidden(tiny_llama, [TEXT], layer=1), tiny_llama, known_beginning=[-1])
    with pytest.raises(unmask.UnmaskError, match="beyond the vocabulary"):
        unmask.recover_text(observe_hidden(tiny_llama, [TEXT], layer=1), tiny_llama, known_beginning=[10**6])


def test_tokens_that_were_given_complete_a_text():
    token = ReadToken(5, True, 0.0, 1.0)
    assert ReadText((token,), 3, 0.0, 0, 0, (1, 2), BeginningStatus.FITS).certain
    assert not ReadText((token,), 3, 0.0, 0, 0, (1,)).proven
    assert ReadToken(5, False, float("inf"), 0.0).is_guess
