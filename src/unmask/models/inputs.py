"""What a model is run on when it is asked: texts of usual tokens, without a cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unmask.errors import UnsupportedModelError


def short_texts(hf: Any, count: int, length: int) -> dict[str, Any]:
    """Some texts of usual tokens, as a model takes them."""
    embedding = hf.get_input_embeddings()
    if embedding is None or getattr(embedding, "weight", None) is None:
        raise UnsupportedModelError(f"{type(hf).__name__} has no token embedding, so there is no text to recover")
    tokens = usual_tokens(hf, count * length).view(count, length)
    return {"input_ids": tokens.to(embedding.weight.device), **no_cache(hf)}


def usual_tokens(hf: Any, count: int) -> Tensor:
    """Random tokens that are neither padding nor special, as far as the configuration says; unlike, if possible."""
    settings = {**vars(hf.config), **vars(hf.config.get_text_config())}
    special = {value for name, value in settings.items() if name.endswith("_token_id") and isinstance(value, int)}
    everyone = torch.arange(hf.get_input_embeddings().weight.shape[0])
    usual = everyone[~torch.isin(everyone, torch.tensor(sorted(special), dtype=torch.long))]
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randperm(len(usual), generator=generator) for _ in range(count // max(1, len(usual)) + 1)]
    return usual[torch.cat(draws)[:count]]


def no_cache(hf: Any) -> dict[str, Any]:
    """The option that keeps a model from filling a cache, where it has one."""
    parameters = inspect.signature(hf.forward).parameters
    passes_on = any(each.kind is each.VAR_KEYWORD for each in parameters.values()) and hasattr(hf.config, "use_cache")
    return {"use_cache": False} if "use_cache" in parameters or passes_on else {}


@contextmanager
def training_mode(hf: nn.Module, on: bool) -> Iterator[None]:
    """Dropout on or off for a while; afterwards every module is as it was, frozen ones included."""
    before = {module: module.training for module in hf.modules()}
    hf.train(on)
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
