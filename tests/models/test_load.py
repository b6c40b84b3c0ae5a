"""From a transformers model, or something else, to its adapter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from tests.tiny_models import gpt2_config

import unmask
from unmask.errors import EvidenceError, InputError, UnsupportedModelError
from unmask.models.load import FAMILIES, adapt, require_model


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        (SimpleNamespace(config=SimpleNamespace(model_type="mamba")), "a model of type 'mamba'"),
        (torch.nn.Linear(2, 2), "an object of type Linear"),
        (None, "an object of type NoneType"),
    ],
)
def test_an_unsupported_family_is_told_what_is_supported(source, seen):
    with pytest.raises(UnsupportedModelError) as error:
        unmask.load_model(source)
    message = str(error.value)
    assert message.startswith(seen)
    assert "bert, gpt2, llama, mistral, qwen2" in message
    assert "docs/adding-a-model.md" in message


def test_a_model_in_memory_is_used_as_it_is(tiny_gpt2):
    model = unmask.load_model(tiny_gpt2.hf)
    assert model.hf is tiny_gpt2.hf
    assert type(model) is type(tiny_gpt2) is FAMILIES["gpt2"]
    assert model.adapters is None


def test_what_is_no_adapter_is_refused_with_the_callers_error():
    bare = transformers.GPT2Model(gpt2_config())
    for error in (InputError, EvidenceError):
        with pytest.raises(error, match=r"load_model.*got GPT2Model"):
            require_model(bare, error)
    require_model(adapt(bare))
