"""Arguments of the wrong kind end in a sentence, not in a traceback from the depths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from tests.tiny_models import bert_config, random_model

from unmask import (
    observe_cache,
    observe_dpsgd,
    observe_fedavg,
    observe_gradients,
    observe_hidden,
    observe_lora,
    observe_next_token,
    observe_vectors,
    recover_text,
)
from unmask.arguments import require_count, require_float_type, require_member, require_number, require_token_ids
from unmask.errors import EvidenceError, InputError
from unmask.evidence import Task

TEXTS = [[5, 6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", [1]])
def test_counts_are_whole_numbers(value):
    with pytest.raises(InputError, match="steps must be a whole number from 1 on, or None, got"):
        require_count("steps", value)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, "2", 0])
def test_numbers_are_finite(value):
    with pytest.raises(EvidenceError, match="rate must be a finite number above 0, or None, got"):
        require_number("rate", value, positive=True, error=EvidenceError)


def test_what_is_right_passes():
    require_count("steps", None)
    require_count("layer", 0, least=0)
    require_number("rate", 0.5, positive=True)
    require_number("decay", 0, positive=False)
    assert require_member(Task, "task", "next_token") is require_member(Task, "task", Task.NEXT_TOKEN)


@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16", "bf16", torch.bfloat16])
def test_float_types_have_names(name):
    assert require_float_type("dtype", name) is torch.bfloat16


@pytest.mark.parametrize("name", ["int8", "bf17", 3])
def test_what_is_no_float_type_is_refused(name):
    with pytest.raises(InputError, match="dtype must be a float type of torch or its name, as 'bfloat16', got"):
        require_float_type("dtype", name)


def test_names_are_listed():
    with pytest.raises(InputError, match=r"task must be one of 'next_token', .* got 'other'"):
        require_member(Task, "task", "other")


@pytest.mark.parametrize("observe", [observe_gradients, observe_fedavg, observe_hidden, observe_dpsgd, observe_lora])
def test_a_model_of_transformers_is_named(observe):
    hf = random_model(transformers.BertForMaskedLM, bert_config())
    with pytest.raises(InputError, match=r"got BertForMaskedLM; call load_model\(model\) first"):
        observe(hf, TEXTS)


@pytest.mark.parametrize(
    "observe", [observe_gradients, observe_hidden, observe_cache, observe_vectors, observe_next_token]
)
def test_one_string_is_no_list_of_texts(tiny_gpt2, observe):
    with pytest.raises(InputError, match="texts must be a list of texts, got one string; put it into a list"):
        observe(tiny_gpt2, "hello")


def test_recovery_wants_a_loaded_model(tiny_gpt2):
    evidence = observe_gradients(tiny_gpt2, TEXTS)
    with pytest.raises(InputError, match=r"got GPT2LMHeadModel; call load_model\(model\) first"):
        recover_text(evidence, tiny_gpt2.hf)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head": torch.zeros(2, 7)}, "the head has width 7, the model has"),
        ({"head": np.zeros((2, 7))}, "the head must be a matrix of torch"),
        ({"head": torch.zeros(7)}, "the head must be a matrix of torch"),
        ({"num_labels": "three"}, "num_labels must be a whole number"),
        ({"labels": ["a", "b"]}, "labels must be whole numbers"),
        ({"max_length": 1.5}, "max_length must be a whole number"),
        ({"max_length": "9"}, "max_length must be a whole number"),
        ({"task": 3}, "task must be one of"),
        ({"task": "classify"}, "task must be one of"),
    ],
)
def test_options_of_clients(tiny_bert, options, words):
    with pytest.raises(InputError, match=words):
        observe_gradients(tiny_bert, TEXTS, **{"task": "classification", **options})
    with pytest.raises(InputError, match=words):
        observe_fedavg(tiny_bert, TEXTS, **{"task": "classification", **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"local_steps": 1.5}, "local_steps must be a whole number"),
        ({"local_steps": "4"}, "local_steps must be a whole number"),
        ({"batch_size": True}, "batch_size must be a whole number"),
        ({"learning_rate": "0.1"}, "learning_rate must be a finite number"),
        ({"weight_decay": "0.1"}, "weight_decay must be a finite number"),
        ({"momentum": 1.0}, "momentum must be below 1"),
        ({"max_grad_norm": "1"}, "max_grad_norm must be a finite number"),
    ],
)
def test_options_of_local_training(tiny_gpt2, options, words):
    with pytest.raises(InputError, match=words):
        observe_fedavg(tiny_gpt2, TEXTS, **options)


@pytest.mark.parametrize("text", [[1.5, 2.5], [None, 3], [True, False], ["a", 3]])
def test_tokens_are_whole_numbers(tiny_gpt2, text):
    with pytest.raises(InputError, match=r"token ids must be whole numbers|a text must be a string"):
        observe_gradients(tiny_gpt2, [text])


@pytest.mark.parametrize("options", [{"layer": "1"}, {"layer": 0.5}, {"site": "x"}, {"site": None}])
def test_states_of_places_that_are_none(tiny_gpt2, options):
    with pytest.raises(InputError, match=r"layer must be a whole number|site must be one of"):
        observe_hidden(tiny_gpt2, TEXTS, **options)


@pytest.mark.parametrize("texts", [None, 3, [None], [3]])
def test_texts_that_are_none(tiny_gpt2, texts):
    with pytest.raises(InputError, match=r"texts must be a list of texts|a text must be a string"):
        observe_gradients(tiny_gpt2, texts)


def test_token_ids_are_whole_numbers():
    assert require_token_ids("known", torch.tensor([3, 4])) == require_token_ids("known", [3, 4]) == (3, 4)
    batch = np.array([[3, 4]])  # of one text, as tokenizers give it
    assert [type(token) for token in require_token_ids("known", list(batch[0]))] == [int, int]
    assert require_token_ids("known", batch) == (3, 4)
    for wrong in ([-1], [[1], [2]], ["a"], [1.5], [True], 7, "text"):
        with pytest.raises(InputError, match="known must be a list of token ids"):
            require_token_ids("known", wrong)
