"""A service keeps embeddings of texts: a vector database, or an embedding API's responses, in some storage type."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.arguments import require_count
from unmask.errors import InputError
from unmask.evidence.vectors import VectorEvidence, half_steps_of
from unmask.models.adapter import Model
from unmask.models.load import require_model
from unmask.models.pooling import EmbeddingRecipe, Pooling, max_length_of, prefix_tokens, prompt_of, recipe_of
from unmask.protocols.batch import Texts, make_batch, require_texts

STORAGES = ("float32", "float16", "bfloat16", "int8")
_TEXTS_AT_ONCE = 64


@torch.no_grad()
def observe_vectors(
    model: Model,
    texts: Texts,
    *,
    pooling: Pooling | str | None = None,
    normalise: bool | None = None,
    dimensions: int | None = None,
    prefix: str = "",
    dtype: torch.dtype | str | None = None,
    max_length: int | None = None,
) -> VectorEvidence:
    """Embeddings of texts as the model's own recipe makes them, or one that is given, stored as `dtype`.

    `dtype` is float32, float16, bfloat16 or int8 (a scale for each vector); None leaves them as they are. The prefix is
    put in front of texts (the folder's own by default); token ids are taken as they are. Texts are cut to
    `max_length` tokens, or to what the folder states where that is less.
    """
    require_model(model)
    require_texts(texts)
    require_count("dimensions", dimensions)
    prefix = prefix or prompt_of(model)
    recipe = recipe_of(model) if pooling is None else EmbeddingRecipe(pooling)  # type: ignore[arg-type]
    if dimensions is not None and dimensions > model.final_width:
        raise InputError(f"dimensions must be at most {model.final_width}, the width of this model, got {dimensions}")
    recipe = replace(
        recipe,
        normalise=recipe.normalise if normalise is None else normalise,
        dimensions=None if dimensions == model.final_width else dimensions,
        prefix=prefix_tokens(model, prefix),
    )
    whole = [prefix + text if isinstance(text, str) else text for text in texts]
    vectors = embed_texts(model, whole, recipe, max_length)
    steps = None
    if dtype is not None:
        vectors, steps = store(vectors, dtype)
    return VectorEvidence(vectors, recipe, model.fingerprint(), model.dtype, steps)


@torch.no_grad()
def embed_texts(
    model: Model, texts: Texts, recipe: EmbeddingRecipe, max_length: int | None = None
) -> Float[Tensor, "texts k"]:
    """Vectors of texts, cut to `max_length` and to the length that the model's folder states, some at a time."""
    require_count("max_length", max_length)
    longest = max_length_of(model) if max_length is None else min(max_length, max_length_of(model))
    parts = []
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        batch = make_batch(model, texts[start : start + _TEXTS_AT_ONCE], max_length=longest)
        parts.append(recipe.embed(model, batch.tokens, batch.mask))
    if not parts:
        raise InputError("the batch is empty: give at least one text")
    return torch.cat(parts)


def store(vectors: Float[Tensor, "texts k"], dtype: torch.dtype | str) -> tuple[Tensor, Tensor | None]:
    """Vectors as a store gives them back, and half of a step of each number; int8 has steps of max|x|/127 a vector."""
    name = str(dtype).removeprefix("torch.")
    if name not in STORAGES:
        raise InputError(f"dtype must be one of {', '.join(STORAGES)}, got {dtype!r}")
    if name != "int8":
        stored = vectors.to(getattr(torch, name))
        return stored.to(vectors.dtype), half_steps_of(stored)
    scale = vectors.abs().amax(1, keepdim=True).clamp_min(torch.finfo(vectors.dtype).tiny) / 127
    return (vectors / scale).round() * scale, (scale / 2).expand_as(vectors).contiguous()
