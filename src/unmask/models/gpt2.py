"""GPT-2: learned positions, pre-norm LayerNorm, queries, keys and values in one Conv1D."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from unmask.models.adapter import Model
from unmask.models.layernorm_sum import LayerNormOfSum
from unmask.models.linear import LinearLayer, Role


class GPT2(Model):
    """Conv1D stores (d_in, d_out), so nothing is transposed."""

    family = "gpt2"
    causal = True
    learned_positions = True
    token_embedding = "wte.weight"
    position_embedding = "wpe.weight"

    def _block(self, block: int) -> Any:
        return self.body.h[block]

    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        return self.body.wte(tokens) + self.body.wpe(positions)

    def attention_input(self, block: int, states: Tensor) -> Tensor:
        return self._block(block).ln_1(states)

    def queries_keys_values(self, block: int, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = self._block(block).attn.c_attn(rows).split(self.width, dim=-1)
        queries, keys, values = (part.unflatten(-1, (self.num_heads, self.head_width)) for part in parts)
        return queries, keys, values

    def scores_scale(self, block: int) -> float:
        return float(self._block(block).attn.scaling)

    def after_attention(self, block: int, states: Tensor, mixed: Tensor) -> Tensor:
        return states + self._block(block).attn.c_proj(mixed)

    def mlp_input(self, block: int, states: Tensor) -> Tensor:
        return self._block(block).ln_2(states)

    def mlp_hidden(self, block: int, states: Tensor) -> Tensor:
        mlp = self._block(block).mlp
        return mlp.act(mlp.c_fc(self.mlp_input(block, states)))

    def after_mlp(self, block: int, states: Tensor, hidden: Tensor) -> Tensor:
        return states + self._block(block).mlp.c_proj(hidden)

    def final_norm(self, states: Tensor) -> Tensor:
        return self.body.ln_f(states)

    def linear(self, role: Role, block: int) -> LinearLayer | None:
        d = self.width
        attention, mlp = f"h.{block}.attn", f"h.{block}.mlp"
        match role:
            case Role.QUERY:
                return LinearLayer(f"{attention}.c_attn.weight", False, (0, d))
            case Role.KEY:
                return LinearLayer(f"{attention}.c_attn.weight", False, (d, 2 * d))
            case Role.VALUE:
                return LinearLayer(f"{attention}.c_attn.weight", False, (2 * d, 3 * d))
            case Role.ATTENTION_OUT:
                return LinearLayer(f"{attention}.c_proj.weight", False)
            case Role.MLP_IN:
                return LinearLayer(f"{mlp}.c_fc.weight", False)
            case Role.MLP_OUT:
                return LinearLayer(f"{mlp}.c_proj.weight", False)
            case Role.MLP_GATE:
                return None

    def first_input_parts(self, tokens: Tensor, num_positions: int) -> tuple[Tensor, Tensor, Tensor]:
        words = self.body.wte.weight[tokens]
        return LayerNormOfSum(words, self.body.wpe.weight, self.body.h[0].ln_1).parts(num_positions)

    def project_first_inputs(self, matrix: Tensor, positions: Sequence[int]) -> Iterator[Tensor]:
        rows = LayerNormOfSum(self.body.wte.weight, self.body.wpe.weight, self.body.h[0].ln_1)
        yield from rows.project_positions(matrix, positions)
