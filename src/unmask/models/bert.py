"""The BERT family: learned positions and token types, post-norm LayerNorm, attention in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from unmask.models.adapter import Model
from unmask.models.layernorm_sum import LayerNormOfSum
from unmask.models.linear import LinearLayer, Role, TokenHead


class Bert(Model):
    """nn.Linear stores (d_out, d_in). The embeddings end in a LayerNorm, so block 0 sees the stream as it is."""

    family = "bert"
    causal = False
    learned_positions = True
    beside_the_blocks = ("pooler.",)
    token_embedding = "embeddings.word_embeddings.weight"
    position_embedding = "embeddings.position_embeddings.weight"

    def _block(self, block: int) -> Any:
        return self.body.encoder.layer[block]

    @property
    def num_token_types(self) -> int:
        return int(self.config.type_vocab_size)

    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        parts = self.body.embeddings
        total = parts.word_embeddings(tokens) + parts.position_embeddings(positions)
        return parts.LayerNorm(
            total + parts.token_type_embeddings(torch.zeros_like(tokens) if types is None else types)
        )

    def first_input_parts(self, tokens: Tensor, num_positions: int) -> tuple[Tensor, Tensor, Tensor]:
        """Vectors that every first input of type 0 is a combination of: of tokens, of positions, and the shift."""
        parts = self.body.embeddings
        words = parts.word_embeddings.weight[tokens] + parts.token_type_embeddings.weight[0]
        return LayerNormOfSum(words, parts.position_embeddings.weight, parts.LayerNorm).parts(num_positions)

    @property
    def first_input_sum(self) -> LayerNormOfSum:
        """Block 0's inputs of type 0 as what they are: the norm of a sum."""
        parts = self.body.embeddings
        tokens = parts.word_embeddings.weight + parts.token_type_embeddings.weight[0]
        return LayerNormOfSum(tokens, parts.position_embeddings.weight, parts.LayerNorm)

    @property
    def token_type_differences(self) -> Tensor:
        parts = self.body.embeddings
        kinds = parts.token_type_embeddings.weight
        rows = kinds[1:] - kinds[0]
        return parts.LayerNorm.weight * (rows - rows.mean(1, keepdim=True))

    @property
    def token_type_directions(self) -> Tensor:
        return torch.cat([self.token_type_differences, self.body.embeddings.LayerNorm.bias[None]]).detach()

    def attention_input(self, block: int, states: Tensor) -> Tensor:
        return states

    def queries_keys_values(self, block: int, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self._block(block).attention.self
        parts = (attention.query(rows), attention.key(rows), attention.value(rows))
        queries, keys, values = (part.unflatten(-1, (self.num_heads, self.head_width)) for part in parts)
        return queries, keys, values

    def after_attention(self, block: int, states: Tensor, mixed: Tensor) -> Tensor:
        return self._block(block).attention.output.LayerNorm(self.attention_sum(block, states, mixed))

    def attention_sum(self, block: int, states: Tensor, mixed: Tensor) -> Tensor:
        return self._block(block).attention.output.dense(mixed) + states

    def mlp_input(self, block: int, states: Tensor) -> Tensor:
        return states

    def mlp_hidden(self, block: int, states: Tensor) -> Tensor:
        intermediate = self._block(block).intermediate
        return intermediate.intermediate_act_fn(intermediate.dense(states))

    def after_mlp(self, block: int, states: Tensor, hidden: Tensor) -> Tensor:
        return self._block(block).output.LayerNorm(self.mlp_sum(block, states, hidden))

    def mlp_sum(self, block: int, states: Tensor, hidden: Tensor) -> Tensor:
        return self._block(block).output.dense(hidden) + states

    def after_last_sum(self, sums: Tensor) -> Tensor:
        return self._block(self.num_blocks - 1).output.LayerNorm(sums)

    def final_norm(self, states: Tensor) -> Tensor:
        return states

    @property
    def token_head(self) -> TokenHead:
        """The model's own head for masked tokens; where it has none, its token embeddings (a tied output layer)."""
        own = getattr(getattr(self.hf, "cls", None), "predictions", None)
        if own is None:
            return TokenHead(self.final_norm, self.parameter(self.token_embedding))
        return TokenHead(own.transform, own.decoder.weight, own.decoder.bias)

    def linear(self, role: Role, block: int) -> LinearLayer | None:
        names = {
            Role.QUERY: "attention.self.query",
            Role.KEY: "attention.self.key",
            Role.VALUE: "attention.self.value",
            Role.ATTENTION_OUT: "attention.output.dense",
            Role.MLP_IN: "intermediate.dense",
            Role.MLP_OUT: "output.dense",
        }
        if role not in names:
            return None
        return LinearLayer(f"encoder.layer.{block}.{names[role]}.weight", stored_transposed=True)

    def project_first_inputs(self, matrix: Tensor, positions: Sequence[int]) -> Iterator[Tensor]:
        yield from self.first_input_sum.project_positions(matrix, positions)
