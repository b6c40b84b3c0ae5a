"""Models by name, so that a process that knows nothing else can make them again."""

from __future__ import annotations

from functools import cache

import torch
import transformers
from tests.tiny_models import bart_config, bert_config, gpt2_config, llama_sizes, random_model

import unmask
from unmask.models import Model, adapt

REAL = {"smollm2": "smollm2-135m", "minilm": "minilm-l6"}  # fixtures of conftest.py → names of the catalogue


@cache
def make_model(name: str) -> Model:
    """The model of a name that is also a fixture of conftest.py. Changes are made on a copy (`model.to()`)."""
    match name:
        case "tiny_gpt2":
            return adapt(random_model(transformers.GPT2LMHeadModel, gpt2_config()))
        case "tiny_llama":
            return adapt(random_model(transformers.LlamaForCausalLM, transformers.LlamaConfig(**llama_sizes())))
        case "tiny_bert":
            return adapt(random_model(transformers.BertForMaskedLM, bert_config()))
        case "tiny_bart":
            return unmask.load_encoder_decoder(random_model(transformers.BartForConditionalGeneration, bart_config()))
        case _:
            return unmask.load_model(REAL[name])


def stranger(model: Model, seed: int) -> Model:
    """Another random model of the same shape: every parameter is noise of the same mean and deviation."""
    twin = model.to()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in twin.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter.mean() + parameter.std(correction=0) * noise)
    return twin
