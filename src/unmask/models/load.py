"""From a name, a folder or a transformers model to an adapter."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from unmask.arguments import require_float_type
from unmask.errors import InputError, UnmaskError, UnsupportedModelError
from unmask.models.adapter import Model
from unmask.models.catalog import load_pretrained
from unmask.models.dequantise import dequantise
from unmask.models.encoder_decoder import EncoderDecoder
from unmask.models.mapped import release_blocks
from unmask.models.peft_adapters import Adapters, split_adapters
from unmask.models.pooling import states_recipe

_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}


def load_model(
    source: str | Path | Any,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str = torch.float32,
    device: str | torch.device = "cpu",
) -> Model:
    """Load a model and put its adapter around it.

    `source` is a catalogue name ('smollm2-135m', 'minilm-l6'), a local folder with safetensors, a Hugging Face name,
    or a transformers model that is already in memory (which is used as it is, not copied; `dtype` and `device` are
    then its own). Of a PEFT model the base is used, and its LoRA factors are kept as `model.adapters`;
    they are copies, so that the PEFT model may be trained on. Of a SentenceTransformer its transformer is used, and how
    it makes vectors is read from the folder that it came from. For encoder–decoders (T5, BART) there is
    `load_encoder_decoder`.
    """
    if isinstance(source, (str, Path)):
        hf, found_tokenizer = load_pretrained(str(source), dtype=require_float_type("dtype", dtype), device=device)
        release_blocks(hf)
        return adapt(hf, tokenizer or found_tokenizer)
    if type(source).__name__ == "SentenceTransformer":
        return _adapt_sentence_transformer(source, tokenizer)
    return adapt(source, tokenizer)


def load_encoder_decoder(
    source: str | Path | Any,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str = torch.float32,
    device: str | torch.device = "cpu",
) -> EncoderDecoder:
    """Load a model that reads one text and writes another (T5, BART) as its two sides; arguments as of `load_model`."""
    if isinstance(source, (str, Path)):
        dtype = require_float_type("dtype", dtype)
        source, found_tokenizer = load_pretrained(str(source), dtype=dtype, device=device)
        tokenizer = tokenizer or found_tokenizer
    hf = with_open_attention(_require_transformer(dequantise(unwrap(source))))
    if not is_encoder_decoder(hf):
        raise InputError(f"{type(hf).__name__} is no encoder–decoder; use load_model")
    return EncoderDecoder.of(hf, tokenizer)


def is_encoder_decoder(hf: Any) -> bool:
    """Whether a model has an encoder and a decoder, and not only one of them."""
    return bool(hf.config.is_encoder_decoder) and hasattr(hf, "lm_head") and hasattr(hf, "get_decoder")


def adapt(hf: Any, tokenizer: Any = None) -> Model:
    """The adapter of a transformers model, or of the base of a PEFT model."""
    hf, adapters = split_adapters(dequantise(unwrap(hf)))
    hf = with_open_attention(_require_transformer(hf))
    if is_encoder_decoder(hf):
        raise UnsupportedModelError(
            f"{type(hf).__name__} has an encoder and a decoder; use load_encoder_decoder, or one side alone "
            "(load_model(hf.get_encoder()))"
        )
    if getattr(hf, "loss_type", "") is None:
        hf.loss_type = "ForCausalLM"  # which transformers takes as well, with a warning
    model = Model(hf, tokenizer)
    if adapters is not None:
        named = {model.canonical_name(name): factor for name, factor in adapters.factors.items()}
        scale = adapters.scale
        if not isinstance(scale, float):
            scale = {model.canonical_name(module): value for module, value in scale.items()}
        model.adapters = Adapters(named, scale)
    return model


def _adapt_sentence_transformer(source: Any, tokenizer: Any) -> Model:
    """The transformer inside; one that came from no folder could make its vectors in any way."""
    hf = getattr(source[0], "auto_model", None)
    if hf is None:
        raise UnsupportedModelError(
            f"this SentenceTransformer begins with {type(source[0]).__name__}, no transformer of transformers; "
            "its vectors cannot be computed here"
        )
    model = adapt(hf, tokenizer or source.tokenizer)
    if not states_recipe(model):
        raise InputError(
            "this SentenceTransformer came from no folder that says how it makes vectors (modules.json); save it, "
            "model.save_pretrained(folder), and load the folder"
        )
    return model


def _require_transformer(hf: Any) -> Any:
    import transformers  # here, as audits of queries start faster without it

    if not isinstance(getattr(hf, "config", None), transformers.PreTrainedConfig):
        raise UnsupportedModelError(
            f"an object of type {type(hf).__name__} is no transformers model; give one, or the name of a folder"
        )
    return hf


def unwrap(hf: Any) -> Any:
    """The model inside wrappers: data-parallel ones, and compiled ones."""
    while True:
        inner = getattr(hf, "_orig_mod", None)
        if inner is None and type(hf).__name__ in _WRAPPERS:
            inner = hf.module
        if inner is None:
            return hf
        hf = inner


def with_open_attention(hf: Any) -> Any:
    """The model if its attention can be watched; else a copy that shares its weights, with eager attention.

    Kernels that compute all of attention at once (flash, flex) show neither scores nor their operands.
    """
    if getattr(hf.config, "_attn_implementation", None) in (None, "eager", "sdpa"):
        return hf
    shared = copy.deepcopy(hf, {id(weight): weight for weight in (*hf.parameters(), *hf.buffers())})
    shared.set_attn_implementation("eager")
    return shared


def require_model(model: Any, error: type[UnmaskError] = InputError) -> None:
    """Refuse what is no adapter, a transformers model above all."""
    if isinstance(model, EncoderDecoder):
        raise error(
            "an encoder–decoder has two sides, and one is needed here: give model.encoder or model.decoder; whole ones "
            "are for observe_gradients and recover_text"
        )
    if not isinstance(model, Model):
        raise error(
            f"the model must come from unmask.load_model, got {type(model).__name__}; call load_model(model) first"
        )
