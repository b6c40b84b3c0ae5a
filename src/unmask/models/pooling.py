"""One vector for a text: how an embedding model pools the states of its tokens, and what it does with the sum.

    h = the states behind the final norm, one row a token of [opening, prefix, text, closing]
    mean  e = Σ_i h_i/n        weighted mean  e = Σ_i i·h_i / Σ_i i  (i from 1)
    cls   e = h_1              last           e = h_n
    then  e/‖e‖ if normalised, the first k numbers if cut, and length 1 again if renormalised

A sentence-transformers folder states all of it: modules.json, 1_Pooling/config.json, the prompts. Its truncation cuts
behind the Normalize module, so that a cut vector is shorter than 1; many users scale it again.

Notation: n tokens, d the width of the states, k numbers of the vector.
Limits: poolings that are not here (max, several at once), dense layers behind the pooling and prompts that are left out
of the pooling are refused by name.
Cost: one forward pass a text.
Source: Reimers, Gurevych, arXiv 1908.10084; the weighted mean is SGPT's (Muennighoff, arXiv 2202.08904); cut vectors
are Matryoshka embeddings (arXiv 2205.13147).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, overload

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.arguments import require_count, require_member
from unmask.errors import InputError, UnsupportedModelError
from unmask.models.adapter import Model
from unmask.shapes import MaskBatch, States, TokenBatch


class Pooling(Enum):
    """How the states of a text's tokens become one vector."""

    MEAN = "mean"
    CLS = "cls"  # the first token's
    LAST = "last"
    WEIGHTED_MEAN = "weighted_mean"  # weights 1, 2, …, n


Vectors = Float[Tensor, "batch k"]


@dataclass(frozen=True)
class EmbeddingRecipe:
    """From the states of tokens to the vector that is stored; `prefix` are known tokens in front of every text."""

    pooling: Pooling = Pooling.MEAN
    normalise: bool = True
    dimensions: int | None = None  # only so many numbers are kept, the first ones
    renormalise: bool = False  # what the cut leaves is scaled to length 1 again
    prefix: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "pooling", require_member(Pooling, "pooling", self.pooling))
        object.__setattr__(self, "prefix", tuple(int(token) for token in self.prefix))
        require_count("dimensions", self.dimensions)

    def pool(self, states: States, mask: MaskBatch) -> Vectors:
        """Vectors of texts whose states behind the final norm these are; padding may stand on any side."""
        vectors = self._pool(states, mask)
        if self.normalise:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        if self.dimensions is not None:
            vectors = vectors[:, : self.dimensions]
        return torch.nn.functional.normalize(vectors, dim=-1) if self.renormalise else vectors

    def _pool(self, states: States, mask: MaskBatch) -> Vectors:
        if self.pooling in (Pooling.CLS, Pooling.LAST):
            place = mask.int().argmax(1) if self.pooling is Pooling.CLS else _last(mask)
            return states[torch.arange(len(states), device=states.device), place]
        weights = mask.to(states.dtype)
        if self.pooling is Pooling.WEIGHTED_MEAN:
            weights = weights * weights.cumsum(1)
        return torch.einsum("bn,bnd->bd", weights, states) / weights.sum(1, keepdim=True)

    def embed(self, model: Model, tokens: TokenBatch, mask: MaskBatch | None = None) -> Vectors:
        """Vectors of whole texts, which `frame` makes; one forward pass."""
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        return self.pool(model.final_norm(model.hidden_states(tokens, mask)[-1]), mask)

    @overload
    def frame(self, model: Model, tokens: Tensor) -> Tensor: ...

    @overload
    def frame(self, model: Model, tokens: Sequence[int]) -> list[int]: ...

    def frame(self, model: Model, tokens: Tensor | Sequence[int]) -> Tensor | list[int]:
        """A text with the tokenizer's special tokens and the prefix around it; of a tensor along its last axis."""
        opening, closing = self.frame_of(model)
        if not isinstance(tokens, Tensor):
            return [*opening, *tokens, *closing]
        ends = (tokens.new_tensor(end).expand(*tokens.shape[:-1], len(end)) for end in (opening, closing))
        return torch.cat([next(ends), tokens, next(ends)], -1)

    def frame_of(self, model: Model) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What stands in front of every text (special tokens, then the prefix), and what stands behind it."""
        opening, closing = model.special_frame
        return (*opening, *self.prefix), closing

    def width(self, model: Model) -> int:
        """Numbers of a vector."""
        return min(self.dimensions or model.final_width, model.final_width)


def _last(mask: MaskBatch) -> Tensor:
    """Index of each text's last real token."""
    return mask.shape[1] - 1 - mask.flip(1).int().argmax(1)


def prefix_tokens(model: Model, prefix: str) -> tuple[int, ...]:
    """The tokens that a prefix ('query: ') puts in front of every text, whatever the text is."""
    if not prefix:
        return ()
    opening, _ = model.special_frame
    some = (model.decode([model.vocab_size * part // 8]) for part in range(1, 8))  # a small vocabulary lacks the probes
    whole = [model.encode(prefix + probe) for probe in (*_PROBES, *some)]
    shared = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*whole, strict=False))
    return tuple(column[0] for column in shared)[len(opening) :]


_PROBES = ("a", "The", "1", "we", "Zürich")  # texts that share no beginning


def recipe_of(model: Model) -> EmbeddingRecipe:
    """What the model's folder states, where sentence-transformers wrote it.

    Otherwise the mean for encoders and the last token for decoders, normalised.
    """
    modules = _read(model, "modules.json")
    if modules is None:
        return EmbeddingRecipe(Pooling.LAST if model.causal else Pooling.MEAN)
    kinds = {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in modules}
    if unknown := sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"}):
        raise UnsupportedModelError(
            f"this embedding model ends in the modules {', '.join(unknown)} (modules.json), and only Pooling and "
            "Normalize are known; its vectors cannot be computed here"
        )
    pooling = _pooling_of(_read(model, f"{kinds.get('Pooling', '1_Pooling')}/config.json") or {}, "Normalize" in kinds)
    return EmbeddingRecipe(pooling, "Normalize" in kinds, prefix=prefix_tokens(model, prompt_of(model)))


def states_recipe(model: Model) -> bool:
    """Whether the folder that the model came from says how it makes vectors."""
    return _read(model, "modules.json") is not None


def prompt_of(model: Model) -> str:
    """What the model's folder says stands in front of every text; empty where it says nothing."""
    settings = _read(model, "config_sentence_transformers.json") or {}
    return (settings.get("prompts") or {}).get(settings.get("default_prompt_name")) or ""


def max_length_of(model: Model) -> int:
    """Tokens to which the model's folder says that texts are cut; all that the model takes where it says nothing."""
    stated = (_read(model, "sentence_bert_config.json") or {}).get("max_seq_length")
    return min(stated, model.max_positions) if isinstance(stated, int) else model.max_positions


_NAMES = {"cls": Pooling.CLS, "mean": Pooling.MEAN, "lasttoken": Pooling.LAST, "weightedmean": Pooling.WEIGHTED_MEAN}


def _pooling_of(config: dict[str, Any], normalised: bool) -> Pooling:
    """The pooling that a 1_Pooling/config.json names, in its old form (flags) or its new one."""
    named = config.get("pooling_mode")
    if named is None:
        flags = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
        named = [key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for key in flags]
    names = [named] if isinstance(named, str) else list(named) or ["mean"]
    names = ["mean" if normalised and name.startswith("mean_sqrt_len") else name for name in names]
    if len(names) != 1 or names[0] not in _NAMES:
        raise UnsupportedModelError(
            f"this embedding model pools by {' and '.join(names)}, and only {', '.join(_NAMES)} alone are known; its "
            "vectors cannot be computed here"
        )
    if config.get("include_prompt") is False:
        raise UnsupportedModelError(
            "this embedding model leaves its prompt out of the pooling (include_prompt), which is not supported yet"
        )
    return _NAMES[names[0]]


def _read(model: Model, name: str) -> Any:
    """A JSON file of the folder that the model was loaded from, or of the hub's cache; None where there is none."""
    source = str(getattr(model.config, "_name_or_path", "") or "")
    path: Any = Path(source, name)
    if source and not Path(source).is_dir():
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(source, name) if source.count("/") <= 1 else None
    if not source or not isinstance(path, (str, Path)) or not Path(path).is_file():
        return None
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError:
        raise InputError(f"{path} is no JSON, so how this model embeds is unknown; give the pooling") from None
