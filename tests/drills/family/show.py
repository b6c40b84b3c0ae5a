"""A family with the layout of one that is known takes one line: its texts are recovered from gradients."""

from __future__ import annotations

import transformers
from tests.drills.shown import texts
from tests.tiny_models import llama_sizes, random_model, word_tokenizer

import unmask


class CousinConfig(transformers.LlamaConfig):
    """The configuration of a model of a new name."""

    model_type = "cousin"


class CousinForCausalLM(transformers.LlamaForCausalLM):
    """A model of a new name."""

    config_class = CousinConfig


model = unmask.load_model(random_model(CousinForCausalLM, CousinConfig(**llama_sizes())), tokenizer=word_tokenizer())
recovery = unmask.recover_text(unmask.observe_gradients(model, texts()), model)
assert recovery.status is unmask.Status.RECOVERED
assert {text.text for text in recovery.value.texts} == set(texts())
