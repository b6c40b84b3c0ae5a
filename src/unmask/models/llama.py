"""The Llama family: rotary positions, RMSNorm, grouped-query attention, a gated MLP.

Llama, Mistral, Qwen2 and SmolLM share this layout; biases are whatever their modules hold. Texts longer than a sliding
window are refused: within it, all of them attend alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unmask.models.adapter import Model
from unmask.models.linear import LinearLayer, Role


class Llama(Model):
    """nn.Linear stores (d_out, d_in), so every weight is transposed at the door."""

    family = "llama"
    causal = True
    learned_positions = False
    token_embedding = "embed_tokens.weight"

    def _block(self, block: int) -> Any:
        return self.body.layers[block]

    @property
    def num_key_value_heads(self) -> int:
        return int(self.config.num_key_value_heads)

    @property
    def max_positions(self) -> int:
        windowed = getattr(self.config, "use_sliding_window", True) and getattr(self.config, "sliding_window", None)
        longest = int(self.config.max_position_embeddings)
        return min(longest, int(windowed)) if windowed else longest

    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        return self.body.embed_tokens(tokens)

    def attention_input(self, block: int, states: Tensor) -> Tensor:
        return self._block(block).input_layernorm(states)

    def queries_keys_values(self, block: int, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self._block(block).self_attn
        queries = attention.q_proj(rows).unflatten(-1, (self.num_heads, self.head_width))
        keys = attention.k_proj(rows).unflatten(-1, (self.num_key_value_heads, self.head_width))
        values = attention.v_proj(rows).unflatten(-1, (self.num_key_value_heads, self.head_width))
        cos, sin = self.body.rotary_emb(rows, positions.reshape(1, -1))
        cos, sin = (part.reshape(*positions.shape, 1, self.head_width) for part in (cos, sin))
        return _rotate(queries, cos, sin), _rotate(keys, cos, sin), values

    def after_attention(self, block: int, states: Tensor, mixed: Tensor) -> Tensor:
        return states + self._block(block).self_attn.o_proj(mixed)

    def mlp_input(self, block: int, states: Tensor) -> Tensor:
        return self._block(block).post_attention_layernorm(states)

    def mlp_hidden(self, block: int, states: Tensor) -> Tensor:
        mlp, rows = self._block(block).mlp, self.mlp_input(block, states)
        return mlp.act_fn(mlp.gate_proj(rows)) * mlp.up_proj(rows)

    def after_mlp(self, block: int, states: Tensor, hidden: Tensor) -> Tensor:
        return states + self._block(block).mlp.down_proj(hidden)

    def final_norm(self, states: Tensor) -> Tensor:
        return self.body.norm(states)

    def linear(self, role: Role, block: int) -> LinearLayer | None:
        names = {
            Role.QUERY: "self_attn.q_proj",
            Role.KEY: "self_attn.k_proj",
            Role.VALUE: "self_attn.v_proj",
            Role.ATTENTION_OUT: "self_attn.o_proj",
            Role.MLP_IN: "mlp.up_proj",
            Role.MLP_GATE: "mlp.gate_proj",
            Role.MLP_OUT: "mlp.down_proj",
        }
        return LinearLayer(f"layers.{block}.{names[role]}.weight", stored_transposed=True)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in the half-split layout of Hugging Face: x∘cos + (−x₂, x₁)∘sin."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin
