"""Texts to vectors, as the service embeds them: the exact model, and a fast copy of it that the search runs on."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from unmask.attacks.outputs.vectors.edits import TextBatch
from unmask.models.adapter import Model
from unmask.models.fingerprint import copy_module
from unmask.models.inputs import no_cache
from unmask.models.pooling import EmbeddingRecipe

# cuDNN's attention is compiled for every new shape of a batch, and every batch of a search has a new one.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 262_144}


@dataclass
class Embedder:
    """A model with the recipe of its vectors; counts the texts that went through."""

    model: Model
    recipe: EmbeddingRecipe
    body: torch.nn.Module = field(init=False)
    frame: tuple[tuple[int, ...], tuple[int, ...]] = field(init=False)
    num_texts: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.frame = self.recipe.frame_of(self.model)
        self.body = _fast_copy(self.model) if self.model.device.type == "cuda" else self.model.body

    @property
    def is_exact(self) -> bool:
        """Whether the search runs on the model itself."""
        return self.body is self.model.body

    def __call__(self, texts: TextBatch) -> Float[Tensor, "k d"]:
        """Vectors of texts of any lengths, by the fast copy, in float32."""
        self.num_texts += len(texts)
        return self._embed(texts, self.body).float()

    def exact(self, texts: TextBatch) -> Float[Tensor, "k d"]:
        """The same by the model itself, in its own precision."""
        return self._embed(texts, self.model.body)

    @torch.no_grad()
    def _embed(self, texts: TextBatch, body: torch.nn.Module) -> Float[Tensor, "k d"]:
        """Texts of one length go through together, so that nothing is padded; one without any token is zero."""
        lengths = texts.lengths
        order = lengths.argsort()
        parts, start = [], 0
        for length, count in enumerate(torch.bincount(lengths).tolist()):
            rows = texts.tokens[order[start : start + count], :length]
            start += count
            at_once = max(1, _TOKENS_AT_ONCE.get(rows.device.type, 4096) // (length + 2))
            if count and not length and not any(self.frame):
                parts.append(
                    torch.zeros(count, self.recipe.width(self.model), device=rows.device, dtype=self.model.dtype)
                )
            elif count:
                parts += [self._pool(part, body) for part in rows.split(at_once)]
        found = torch.cat(parts)
        return torch.empty_like(found).index_copy_(0, order, found)

    def _pool(self, tokens: Tensor, body: torch.nn.Module) -> Tensor:
        opening, closing = (tokens.new_tensor(end).expand(len(tokens), -1) for end in self.frame)
        framed = torch.cat([opening, tokens, closing], 1)
        with sdpa_kernel(KERNELS):
            states = body(input_ids=framed, **no_cache(body)).last_hidden_state
        precise = torch.promote_types(states.dtype, torch.float32)
        return self.recipe.pool(states.to(precise), torch.ones_like(framed, dtype=torch.bool))


def _fast_copy(model: Model) -> torch.nn.Module:
    copied = copy_module(model.hf, model.device, torch.bfloat16, [])
    copied.set_attn_implementation("sdpa")
    return copied.base_model
