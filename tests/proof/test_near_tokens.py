"""Texts in which another token could stand: told apart while digits and noise allow it, and named where they do not."""

from itertools import product

import pytest
import torch
import transformers
from tests.conftest import adapt
from tests.sampling import in_turn, sample
from tests.tiny_models import llama_sizes, random_model

from unmask import recover_text
from unmask.defences import parse_defence
from unmask.proof.near_tokens import ReplayedTexts, find_confusable
from unmask.proof.noisy_agreement import Loss
from unmask.protocols import observe_gradients

TEXTS = [(5, 17, 99, 250, 8), (400, 3, 21, 11)]
TWIN = 77  # of token 17


def twins(difference: float):
    """A model in which two tokens are nearly the same, as inputs and as labels."""
    config = transformers.LlamaConfig(**llama_sizes())
    hf = random_model(transformers.LlamaForCausalLM, config)
    with torch.no_grad():
        for rows in (hf.model.embed_tokens.weight, hf.lm_head.weight):
            rows[TWIN] = rows[17] + difference * torch.randn(rows[17].shape, generator=torch.Generator().manual_seed(0))
    return adapt(hf)


def confusable(model, defence, loss, shares=(4 / 7, 3 / 7), part=""):
    clean = observe_gradients(model, [list(text) for text in TEXTS]).only(part)
    seen = parse_defence(defence)(clean, torch.Generator().manual_seed(1))
    return find_confusable(seen, model, ReplayedTexts(TEXTS, shares, clean.gradients), loss)


@pytest.mark.parametrize(("defence", "loss"), [("bf16", Loss.DIGITS), ("noise:sigma=1e-5", Loss.NOISE)])
def test_tokens_that_differ_are_told_apart_and_twins_are_not(defence, loss):
    assert confusable(twins(1e-1), defence, loss) == set()
    assert confusable(twins(1e-9), defence, loss) == {0}


@pytest.mark.parametrize(("defence", "loss"), [("int8", Loss.DIGITS), ("noise:sigma=1e-5", Loss.NOISE)])
def test_a_text_that_leaves_next_to_nothing_is_doubtful(defence, loss):
    """The model was sure of its label: any other text in its place gave the same update in 8 bits."""
    assert confusable(twins(1e-1), defence, loss, shares=(4 / 7, 1e-9)) == {1}


def test_other_matrices_tell_as_well_and_without_any_all_texts_are_doubtful():
    model = twins(1e-1)
    assert confusable(model, "noise:sigma=1e-5", Loss.NOISE, part="self_attn") == set()
    assert confusable(model, "noise:sigma=1e-5", Loss.NOISE, part="norm") == {0, 1}


def test_a_text_whose_neighbour_fits_better_is_doubtful():
    model = twins(3e-3)
    clean = observe_gradients(model, [list(text) for text in TEXTS])
    wrong = [tuple(TWIN if token == 17 else token for token in TEXTS[0]), TEXTS[1]]
    again = observe_gradients(model, [list(text) for text in wrong]).gradients
    assert find_confusable(clean, model, ReplayedTexts(wrong, [4 / 7, 3 / 7], again), Loss.NOISE) == {0}


DIFFERENCES, DEFENCES = (1e-2, 1e-4, 1e-6), ("bf16", "noise:sigma=1e-5", "int8")


@sample("difference, defence", product(DIFFERENCES, DEFENCES), in_turn(DIFFERENCES, DEFENCES))
def test_nothing_certain_is_false_where_two_tokens_are_nearly_the_same(difference, defence):
    model = twins(difference)
    evidence = observe_gradients(model, [list(text) for text in TEXTS])
    recovery = recover_text(parse_defence(defence)(evidence, torch.Generator().manual_seed(1)), model)
    assert {text.tokens for text in recovery.value.certain} <= set(TEXTS)
