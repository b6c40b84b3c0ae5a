"""What attacks need of a model, and nothing else.

A family's file says where Hugging Face keeps each part; everything that can be said once for all families is said
here. Rows are tokens; leading axes are free, so `(n, d)` and `(batch, length, d)` both work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from unmask.errors import InputError
from unmask.models.attention import attend
from unmask.models.fingerprint import copy_module, fingerprint_of
from unmask.models.linear import LinearLayer, Role, TokenHead
from unmask.models.peft_adapters import Adapters
from unmask.models.vocabulary import Vocabulary
from unmask.shapes import MaskBatch, States, TokenBatch


class Model(Vocabulary, ABC):
    """A transformer with the parts that attacks use.

    Names of parameters are those of the bare transformer, without the prefix that a task's head adds
    ('transformer.h.0…' → 'h.0…'), so evidence from a classifier fits a language model of the same body.
    """

    family: ClassVar[str]
    causal: ClassVar[bool]
    learned_positions: ClassVar[bool]
    beside_the_blocks: ClassVar[tuple[str, ...]] = ()  # parts of the body that only some tasks have (a pooler)

    def __init__(self, hf: Any, tokenizer: Any = None, adapters: Adapters | None = None) -> None:
        self.hf = hf
        self.tokenizer = tokenizer
        self.adapters = adapters  # LoRA factors of a PEFT model; no part of the weights here
        self.body: Any = hf.base_model
        self.config: Any = hf.config

    # ---- what the family must say

    @abstractmethod
    def _block(self, block: int) -> Any:
        """The module of a block."""

    @abstractmethod
    def embed(
        self, tokens: Int[Tensor, "*n"], positions: Int[Tensor, "*n"], types: Int[Tensor, "*n"] | None = None
    ) -> Float[Tensor, "*n d"]:
        """The residual stream that enters block 0; `types` where the family tells two texts of a pair apart."""

    @abstractmethod
    def attention_input(self, block: int, states: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """What the query, key and value projections of a block see."""

    @abstractmethod
    def queries_keys_values(
        self, block: int, rows: Float[Tensor, "*n d"], positions: Int[Tensor, "*n"]
    ) -> tuple[Float[Tensor, "*n h e"], Float[Tensor, "*n g e"], Float[Tensor, "*n g e"]]:
        """Heads of queries, keys and values, with rotary positions applied where the family has them."""

    @abstractmethod
    def after_attention(
        self, block: int, states: Float[Tensor, "*n d"], mixed: Float[Tensor, "*n o"]
    ) -> Float[Tensor, "*n d"]:
        """The residual stream after the output projection, given the mixed values that enter it."""

    @abstractmethod
    def mlp_input(self, block: int, states: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """What the MLP's first projections see, given the stream after attention."""

    @abstractmethod
    def mlp_hidden(self, block: int, states: Float[Tensor, "*n d"]) -> Float[Tensor, "*n f"]:
        """The input of the MLP's down projection, given the stream after attention."""

    @abstractmethod
    def after_mlp(
        self, block: int, states: Float[Tensor, "*n d"], hidden: Float[Tensor, "*n f"]
    ) -> Float[Tensor, "*n d"]:
        """The stream that leaves a block, given the stream after attention and the MLP's hidden row."""

    def attention_sum(
        self, block: int, states: Float[Tensor, "*n d"], mixed: Float[Tensor, "*n o"]
    ) -> Float[Tensor, "*n d"]:
        """The output projection's output with the stream that it is added to, before any norm that follows."""
        return self.after_attention(block, states, mixed)

    def mlp_sum(
        self, block: int, states: Float[Tensor, "*n d"], hidden: Float[Tensor, "*n f"]
    ) -> Float[Tensor, "*n d"]:
        """The down projection's output with the stream that it is added to, before any norm that follows."""
        return self.after_mlp(block, states, hidden)

    @abstractmethod
    def final_norm(self, states: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """What the head sees, given the stream that leaves the last block."""

    @abstractmethod
    def linear(self, role: Role, block: int) -> LinearLayer | None:
        """Where a linear layer lives; None where the family has none (a gate, for instance)."""

    def after_last_sum(self, sums: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """What the head sees, given the `mlp_sum` of the last block."""
        return self.final_norm(sums)

    @property
    @abstractmethod
    def token_embedding(self) -> str:
        """Name of the token embedding's parameter."""

    @property
    def position_embedding(self) -> str | None:
        """Name of the position embedding's parameter, where positions are learned."""
        return None

    # ---- sizes

    @property
    def width(self) -> int:
        """Width d of the residual stream."""
        return int(self.config.hidden_size)

    @property
    def num_blocks(self) -> int:
        """Number of transformer blocks."""
        return int(self.config.num_hidden_layers)

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return int(self.config.num_attention_heads)

    @property
    def num_key_value_heads(self) -> int:
        """Number of key/value heads; fewer than query heads under grouped-query attention."""
        return self.num_heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return int(getattr(self.config, "head_dim", None) or self.width // self.num_heads)

    @property
    def max_positions(self) -> int:
        """The longest text that the model takes."""
        return int(self.config.max_position_embeddings)

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
        return 1

    @property
    def token_type_differences(self) -> Float[Tensor, "k d"]:
        """What token types but 0 add to a first input, up to the norm's scale; no row where there is one type."""
        return self.parameter(self.token_embedding).new_zeros(0, self.width)

    @property
    def token_type_directions(self) -> Float[Tensor, "k d"]:
        """All that first inputs of other types than 0 hold beyond those of type 0, as rows."""
        return torch.zeros(0, self.width, dtype=self.dtype, device=self.device)

    # ---- parameters

    def canonical_name(self, name: str) -> str:
        """A parameter's name without the prefix of the task's model around the body."""
        prefix = f"{self.hf.base_model_prefix}."
        return name[len(prefix) :] if self.body is not self.hf and name.startswith(prefix) else name

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by canonical name; tied ones once."""
        for name, parameter in self.hf.named_parameters():
            yield self.canonical_name(name), parameter

    def parameter(self, name: str) -> Tensor:
        """A parameter by canonical name."""
        owner = self.body if self.body is not self.hf and not name.startswith(self._head_names) else self.hf
        return owner.get_parameter(name)

    @property
    def _head_names(self) -> tuple[str, ...]:
        prefix = self.hf.base_model_prefix
        return tuple(f"{name}." for name, _ in self.hf.named_children() if name != prefix)

    def weight(self, role: Role, block: int) -> Float[Tensor, "d_in d_out"] | None:
        """A linear layer's weight as (d_in, d_out)."""
        layer = self.linear(role, block)
        return None if layer is None else layer.orient(self.parameter(layer.parameter))

    @property
    def unembedding(self) -> Float[Tensor, "vocab d"] | None:
        """Weights of the output layer over the vocabulary; None where the model has no language head."""
        head = self.hf.get_output_embeddings()
        return None if head is None else head.weight

    @property
    def unembedding_name(self) -> str | None:
        """Canonical name of the output layer's parameter; the token embedding's when they are tied."""
        weight = self.unembedding
        if weight is None:
            return None
        return next(name for name, parameter in self.named_parameters() if parameter is weight)

    @property
    def token_head(self) -> TokenHead | None:
        """What predicts tokens from the stream that leaves the last block, where the model has a language head."""
        weight = self.unembedding
        return None if weight is None else TokenHead(self.final_norm, weight)

    def fingerprint(self) -> str:
        """A hash of the body's shapes and of a sample of its weights, the same in every float type."""
        named = self.body.named_parameters()
        return fingerprint_of(self.family, (pair for pair in named if not pair[0].startswith(self.beside_the_blocks)))

    # ---- the forward pass, in parts

    def first_input(
        self, tokens: Int[Tensor, "*n"], positions: Int[Tensor, "*n"], types: Int[Tensor, "*n"] | None = None
    ) -> Float[Tensor, "*n d"]:
        """The attention input of block 0: a function of token, position and type alone."""
        return self.attention_input(0, self.embed(tokens, positions, types))

    def first_input_parts(
        self, tokens: Int[Tensor, " t"], num_positions: int
    ) -> tuple[Float[Tensor, "t d"], Float[Tensor, "p d"], Float[Tensor, " d"]]:
        """What every first input is a combination of: rows of tokens, of learned positions, and the norm's shift."""
        words = self.first_input(tokens, torch.zeros_like(tokens))
        return words, words.new_zeros(0, words.shape[1]), words.new_zeros(words.shape[1])

    def project_first_inputs(
        self, matrix: Float[Tensor, "d k"], positions: Sequence[int]
    ) -> Iterator[Float[Tensor, "vocab k"]]:
        """x(t, p)·M of every token t, one position after the other."""
        everyone = torch.arange(self.vocab_size, device=self.device)
        for position in positions:
            rows = self.first_input(everyone, torch.full_like(everyone, position))
            yield rows @ matrix.to(rows)

    def scores_scale(self, block: int) -> float:
        """The factor on query·key before the softmax."""
        return float(self.head_width**-0.5)

    def mix(
        self,
        block: int,
        queries: Float[Tensor, "*batch q h e"],
        keys: Float[Tensor, "*batch j g e"],
        values: Float[Tensor, "*batch j g e"],
        allowed: Bool[Tensor, "*batch q j"],
    ) -> Float[Tensor, "*batch q o"]:
        """Attention output before the output projection: softmax(q·k/√e)·v, heads side by side."""
        return attend(queries, keys, values, allowed, self.scores_scale(block))

    def mixed_values(
        self, block: int, states: States, positions: TokenBatch, mask: MaskBatch
    ) -> Float[Tensor, "batch length o"]:
        """The rows that enter a block's output projection."""
        rows = self.attention_input(block, states)
        queries, keys, values = self.queries_keys_values(block, rows, positions)
        return self.mix(block, queries, keys, values, self.visible_keys(mask))

    def block_forward(self, block: int, states: States, positions: TokenBatch, mask: MaskBatch) -> States:
        """One block of the residual stream."""
        attended = self.after_attention(block, states, self.mixed_values(block, states, positions, mask))
        return self.after_mlp(block, attended, self.mlp_hidden(block, attended))

    def visible_keys(self, mask: MaskBatch) -> Bool[Tensor, "batch length length"]:
        """Which key each query may see: real tokens, and under a causal mask no later ones."""
        length = mask.shape[1]
        allowed = mask[:, None, :].expand(-1, length, -1)
        if self.causal:
            allowed = allowed & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
        return allowed

    def hidden_states(
        self,
        tokens: TokenBatch,
        mask: MaskBatch | None = None,
        num_blocks: int | None = None,
        positions: TokenBatch | None = None,
        types: TokenBatch | None = None,
    ) -> list[States]:
        """The stream before block 0, after block 0, and so on, without the final norm."""
        if tokens.shape[1] > self.max_positions:
            raise InputError(f"the texts have {tokens.shape[1]} tokens, this model takes {self.max_positions} at most")
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        states = [self.embed(tokens, positions, types)]
        for block in range(self.num_blocks if num_blocks is None else num_blocks):
            states.append(self.block_forward(block, states[-1], positions, mask))
        return states

    def to(
        self, device: str | torch.device | None = None, dtype: torch.dtype | None = None, num_blocks: int | None = None
    ) -> Model:
        """A copy on another device or in another precision; with `num_blocks`, later blocks cannot be used."""
        left_out = [self._block(block) for block in range(num_blocks or self.num_blocks, self.num_blocks)]
        copied = copy_module(self.hf, torch.device(device or self.device), dtype or self.dtype, left_out)
        return type(self)(copied, self.tokenizer, self.adapters)
