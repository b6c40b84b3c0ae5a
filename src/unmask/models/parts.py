"""Where a model keeps what: sizes, parameters by canonical name, and the linear layers by their roles."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unmask.models.layout import BlockPlace, ModelLayout, table_of
from unmask.models.linear import LinearLayer, Role
from unmask.models.peft_adapters import Adapters
from unmask.models.vocabulary import Vocabulary

_WINDOWS = ("sliding_window", "local_attention", "window_size", "attention_chunk_size")  # as configurations call them
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_NO_LIMIT = 2048  # positions of models that name no limit


def find_body(hf: Any) -> Any:
    """The transformer inside a model for a task; the model itself where there is nothing around it."""
    body = hf.base_model
    if body is hf and hf.get_output_embeddings() is not None:  # classes that do not say where it is
        tokens = hf.get_input_embeddings()
        body = next((child for child in hf.children() if tokens in child.modules() and child is not tokens), hf)
    return body


class Parts(Vocabulary):
    """The parts of a transformer.

    Names of parameters are those of the bare transformer, without the prefix that a task's head adds
    ('transformer.h.0…' → 'h.0…'), so evidence from a classifier fits a language model of the same body.
    """

    def __init__(
        self, hf: Any, tokenizer: Any = None, adapters: Adapters | None = None, *, layout: ModelLayout
    ) -> None:
        self.hf = hf
        self.tokenizer = tokenizer
        self.adapters = adapters  # LoRA factors of a PEFT model; no part of the weights here
        self.body: Any = find_body(hf)
        self.config: Any = hf.config
        self.layout = layout

    @property
    def family(self) -> str:
        """Its kind, as transformers calls it."""
        return str(self.config.model_type)

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return self.layout.causal

    @property
    def learned_positions(self) -> bool:
        """Whether positions are rows of a table that are added to tokens."""
        return self.layout.embedding.position is not None

    @property
    def token_embedding(self) -> str:
        """Name of the token embedding's parameter."""
        return f"{self.layout.embedding.token}.weight"

    @property
    def position_embedding(self) -> str | None:
        """Name of the position embedding's parameter, where positions are learned (sinusoids are not)."""
        name = self.layout.embedding.position
        return f"{name}.weight" if name is not None and isinstance(self.position_table, nn.Parameter) else None

    @property
    def position_table(self) -> Float[Tensor, "rows d"]:
        """The rows that positions add to tokens, where there are any, those in front of position 0 included."""
        table = table_of(self.body.get_submodule(self.layout.embedding.position or ""))
        assert table is not None
        return table

    def _place(self, block: int) -> BlockPlace:
        return self.layout.blocks[block]

    def _block(self, block: int) -> Any:
        return self.body.get_submodule(self._place(block).name)

    def block_module(self, block: int) -> nn.Module:
        """A block as transformers runs it."""
        found: nn.Module = self._block(block)
        return found

    def _module(self, block: int, name: str) -> nn.Module:
        return self._block(block).get_submodule(name)

    # ---- sizes

    @property
    def width(self) -> int:
        """Width d of the residual stream."""
        return self.layout.width

    @property
    def final_width(self) -> int:
        """Width of the last hidden states, behind the final norm; d but where a projection follows."""
        return self.layout.final_width

    @property
    def num_blocks(self) -> int:
        """Number of transformer blocks."""
        return len(self.layout.blocks)

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self._place(0).layout.num_heads

    @property
    def num_key_value_heads(self) -> int:
        """Number of key/value heads; fewer than query heads under grouped-query attention."""
        return self._place(0).layout.num_key_value_heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self._place(0).layout.head_width

    @property
    def value_width(self) -> int:
        """Width of one head's values; that of its queries and keys may be another one."""
        return self._place(0).layout.value_width

    @property
    def max_positions(self) -> int:
        """The longest text that the model takes."""
        if self.learned_positions:
            return len(self.position_table) - self.layout.embedding.offset
        limits = (getattr(self.config.get_text_config(), name, None) for name in _LIMITS)
        return next((int(limit) for limit in limits if isinstance(limit, int)), _NO_LIMIT)

    @property
    def shortest_window(self) -> int:
        """How many tokens every query surely sees back; longer texts ask the model itself."""
        named = (getattr(self.config.get_text_config(), name, None) for name in _WINDOWS)
        return min((int(each) // 2 for each in named if isinstance(each, int)), default=sys.maxsize)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.parameter(self.token_embedding).device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights."""
        return self.parameter(self.token_embedding).dtype

    @property
    def num_token_types(self) -> int:
        """How many token types a pair of texts may use; 1 where the family has none."""
        kind = self.layout.embedding.type
        return 1 if kind is None else int(self.body.get_submodule(kind).weight.shape[0])

    # ---- parameters

    def canonical_name(self, name: str) -> str:
        """A parameter's name without the prefix of the task's model around the body."""
        return name.removeprefix(self._body_prefix)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by canonical name; tied ones once."""
        for name, parameter in self.hf.named_parameters():
            yield self.canonical_name(name), parameter

    def parameter(self, name: str) -> Tensor:
        """A parameter by canonical name."""
        owner = self.hf if name.startswith(self._head_names) else self.body
        return owner.get_parameter(name)

    def module(self, name: str) -> nn.Module:
        """A module by canonical name, of the body or of the head beside it."""
        owner: nn.Module = self.hf if f"{name}.".startswith(self._head_names) else self.body
        return owner.get_submodule(name)

    @cached_property
    def _body_prefix(self) -> str:
        return next(f"{name}." if name else "" for name, module in self.hf.named_modules() if module is self.body)

    @cached_property
    def _head_names(self) -> tuple[str, ...]:
        return tuple(f"{name}." for name, _ in self.hf.named_children() if f"{name}." != self._body_prefix)

    def weight(self, role: Role, block: int) -> Float[Tensor, "d_in d_out"] | None:
        """A linear layer's weight as (d_in, d_out)."""
        layer = self.linear(role, block)
        return None if layer is None else layer.orient(self.parameter(layer.parameter))

    def linear(self, role: Role, block: int) -> LinearLayer | None:
        """Where a linear layer lives; None where the model has none (a gate), or none was found."""
        place = self._place(block)
        layer = place.layout.linear.get(role)
        return None if layer is None else replace(layer, parameter=f"{place.name}.{layer.parameter}")

    @property
    def problem(self) -> str:
        """Why rows inside the model cannot be computed from its parts; empty where they can."""
        return next((place.problem for place in self.layout.blocks if place.problem), "")

    def is_shared(self, block: int) -> bool:
        """Whether other blocks have the same weights: their gradients come in one sum."""
        return sum(place.name == self._place(block).name for place in self.layout.blocks) > 1

    @property
    def classifier(self) -> Any:
        """The classification head that the model has itself, if any."""
        return getattr(self.hf, "score", None) or getattr(self.hf, "classifier", None)

    @property
    def unread_end(self) -> int | None:
        """The token that transformers' classifiers take for padding at the end of a text, though it is not masked.

        Those of decoders read the last token that is not this one.
        """
        if not self.causal:
            return None
        token = self.config.get_text_config().pad_token_id
        return token if isinstance(token, int) and 0 <= token < self.vocab_size else None

    @property
    def unembedding(self) -> Float[Tensor, "vocab d"] | None:
        """Weights of the output layer over the vocabulary; None where the model has no language head."""
        head = self.hf.get_output_embeddings()
        return None if head is None else head.weight

    @property
    def has_language_head(self) -> bool:
        """Whether it predicts tokens with an output layer over the vocabulary."""
        return self.unembedding is not None

    @property
    def unembedding_name(self) -> str | None:
        """Canonical name of the output layer's parameter; the token embedding's when they are tied."""
        weight = self.unembedding
        if weight is None:
            return None
        return next(name for name, parameter in self.named_parameters() if parameter is weight)
