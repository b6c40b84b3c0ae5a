"""Texts to vectors, as the service embeds them: the exact model, and a fast copy of it that the search runs on."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from unmask.attacks.outputs.vectors.edits import EMPTY, TextBatch, squeeze
from unmask.models.adapter import Model
from unmask.models.fingerprint import copy_module
from unmask.models.inputs import no_cache, usual_tokens
from unmask.models.pooling import EmbeddingRecipe

# cuDNN's attention is compiled for every new shape of a batch, and every batch of a search has a new one.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_PADDING = 1.2  # longest by shortest text of a batch, on a GPU: most of its time goes by batches, not by texts
_SAME = 0.02  # of the vectors' length, by which the fast copy may differ with padding
_TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 262_144}  # on a CPU as many as its caches hold


@dataclass
class Embedder:
    """A model with the recipe of its vectors; counts the texts that went through."""

    model: Model
    recipe: EmbeddingRecipe
    frame: tuple[tuple[int, ...], tuple[int, ...]] = field(init=False)
    num_texts: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.frame = self.recipe.frame_of(self.model)

    @cached_property
    def fast(self) -> torch.nn.Module:
        """A copy of the model with fused attention; on a GPU in bfloat16."""
        is_gpu = self.model.device.type == "cuda"
        return fused_copy(self.model, torch.bfloat16 if is_gpu else self.model.dtype).base_model

    @cached_property
    def pads(self) -> bool:
        """Whether texts of nearly one length go through the fast copy together: on a GPU, if their vectors stay."""
        return self.model.device.type == "cuda" and self.may_pad()

    def __call__(self, texts: TextBatch) -> Float[Tensor, "k d"]:
        """Vectors of texts of any lengths, by the fast copy, in float32."""
        self.num_texts += len(texts)
        return self._embed(texts, self.fast, _PADDING if self.pads else 1.0).float()

    def exact(self, texts: TextBatch) -> Float[Tensor, "k d"]:
        """The same by the model itself, in its own precision."""
        return self._embed(texts, self.model.body)

    def precise(self, texts: TextBatch) -> Float[Tensor, "k d"]:
        """By the model itself, in fewer and larger batches: `exact` but for the last digits."""
        return self._embed(texts, self.model.body, _PADDING if self.pads else 1.0)

    @torch.no_grad()
    def _embed(self, texts: TextBatch, body: torch.nn.Module, padding: float = 1.0) -> Float[Tensor, "k d"]:
        """Texts of lengths up to `padding` times the shortest one go through together; one without tokens is zero."""
        lengths = texts.lengths
        order = lengths.argsort()
        parts, start = [], 0
        for longest, count in _group(torch.bincount(lengths).tolist(), padding):
            rows = texts.tokens[order[start : start + count], :longest]
            start += count
            at_once = max(1, _TOKENS_AT_ONCE.get(rows.device.type, 2048) // (longest + 2))
            if not longest and not any(self.frame):
                parts.append(
                    torch.zeros(count, self.recipe.width(self.model), device=rows.device, dtype=self.model.dtype)
                )
            else:
                parts += [self._pool(part, body, padding > 1) for part in rows.split(at_once)]
        found = torch.cat(parts)
        return torch.empty_like(found).index_copy_(0, order, found)

    def _pool(self, tokens: Tensor, body: torch.nn.Module, may_pad: bool) -> Tensor:
        opening, closing = (torch.tensor(end, dtype=tokens.dtype).expand(len(tokens), -1) for end in self.frame)
        opening, closing = (end.to(tokens.device, non_blocking=True) for end in (opening, closing))
        framed = torch.cat([opening, tokens, closing], 1)
        mask, options = torch.ones_like(framed, dtype=torch.bool), no_cache(body)
        if may_pad:
            framed = squeeze(framed).tokens
            mask = framed >= 0
            framed = framed.masked_fill(~mask, self.model.hf.config.get_text_config().pad_token_id or 0)
            options = {**options, "attention_mask": mask.long()}
        with sdpa_kernel(KERNELS):
            states = body(input_ids=framed, **options).last_hidden_state
        precise = torch.promote_types(states.dtype, torch.float32)
        return self.recipe.pool(states.to(precise), mask)

    def may_pad(self) -> bool:
        """Whether texts with padding behind them have the vectors that they have alone."""
        tokens = usual_tokens(self.model.hf, 12).to(self.model.device).view(2, 6)
        tokens[0, 5] = EMPTY
        alone, padded = (self._embed(TextBatch(tokens), self.fast, padding) for padding in (1.0, 2.0))
        return bool((alone - padded).norm() < _SAME * alone.norm())


def fused_copy(model: Model, dtype: torch.dtype) -> Any:
    """The transformers model with fused attention, where its family has one."""
    copied = copy_module(model.hf, model.device, dtype)
    with contextlib.suppress(ValueError):
        copied.set_attn_implementation("sdpa")
    return copied


def _group(counts: list[int], padding: float) -> list[tuple[int, int]]:
    """Texts of each length to groups: the longest one's length, and how many they are."""
    groups: list[tuple[int, int]] = []
    shortest = 0
    for length, count in enumerate(counts):
        if not count:
            continue
        if groups and length <= padding * shortest:
            groups[-1] = (length, groups[-1][1] + count)
        else:
            groups.append((length, count))
            shortest = length
    return groups
