"""What attacks need of a model, and nothing else: its parts, found by asking it, as functions of rows.

Rows are tokens; leading axes are free, so `(n, d)` and `(batch, length, d)` both work. No family is known here: modules
are the model's own, and so are the sums between them (`layout.py`, `roles.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unmask.errors import InputError
from unmask.models.blocks import Attended, Blocks
from unmask.models.check_blocks import check_blocks, check_text
from unmask.models.fingerprint import copy_module, fingerprint_of
from unmask.models.inputs import training_mode
from unmask.models.layout import ModelLayout, ask_model
from unmask.models.linear import TokenHead
from unmask.models.parts import find_body
from unmask.models.peft_adapters import Adapters, Scale, scale_at
from unmask.models.record import input_of
from unmask.models.roles import STREAM
from unmask.shapes import MaskBatch, States, TokenBatch

__all__ = ["Attended", "Model"]
_SHORTEST_CHECK = 64


def _in_half_precision(hf: nn.Module) -> Tensor | None:
    """A weight of fewer digits than float32, if there is one."""
    return next((each for each in hf.parameters() if each.is_floating_point() and each.dtype.itemsize < 4), None)


class Model(Blocks):
    """A transformer with the parts that attacks use."""

    def __init__(
        self, hf: Any, tokenizer: Any = None, adapters: Adapters | None = None, *, layout: ModelLayout | None = None
    ) -> None:
        passes: list[tuple[Tensor, Tensor]] = []
        if layout is None and (half := _in_half_precision(hf)) is not None:
            # Rounding hides which rows are sums of which: a precise copy tells what the model is made of.
            layout = Model(copy_module(hf, half.device, torch.float32)).layout
        elif layout is None:
            layout, passes = ask_model(hf, find_body(hf))
        super().__init__(hf, tokenizer, adapters, layout=layout)
        self._problems: dict[int, str] = {}
        if passes:
            with training_mode(hf, False):
                self.layout = check_blocks(self, passes)

    def __repr__(self) -> str:
        kind = "decoder" if self.causal else "encoder"
        sizes = f"{self.num_blocks} blocks, width {self.width}, {self.vocab_size:,} tokens"
        where = f"{str(self.dtype).removeprefix('torch.')} on {self.device}"
        return f"Model({self.family}, {kind}, {sizes}, {where})"

    def problem_at(self, length: int) -> str:
        """`problem`, or what is wrong with texts of some length and twice that, which asking could not show."""
        asked = min(self.max_positions, max(_SHORTEST_CHECK, 2 ** math.ceil(math.log2(2 * max(1, length)))))
        if not self.problem and asked not in self._problems:
            self._problems[asked] = check_text(self, asked)
        return self.problem or self._problems[asked]

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

    def final_norm(self, states: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """What the head sees, given the stream that leaves the last block."""
        return self.layout.final_flow.evaluate(self.layout.final, {STREAM: states}, self.body.get_submodule)

    def after_last_sum(self, sums: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """What the head sees, given the `mlp_sum` of the last block."""
        return self.final_norm(self.after_sum(sums))

    def after_sum(self, sums: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """The stream that leaves the last block, given its `mlp_sum`."""
        last = self.num_blocks - 1
        found = self._place(last).layout.mlp_sum
        assert found is not None
        rows = sums * found.factor if found.factor != 1 else sums
        for name in found.behind:
            rows = self._module(last, name)(rows)
        return rows

    @property
    def token_head(self) -> TokenHead | None:
        """What predicts tokens from the stream that leaves the last block, where the model has a language head."""
        head, layer = self.layout.head, self.hf.get_output_embeddings()
        if layer is None and not self.causal:
            return TokenHead(self.final_norm, self.parameter(self.token_embedding))
        if head is None or layer is None:
            return None

        def features(states: Tensor) -> Tensor:
            rows = self.final_norm(states)
            if head.input is not None:
                return head.flow.evaluate(head.input, {STREAM: rows}, self.hf.get_submodule)
            return input_of(layer, lambda: self.hf.get_submodule(head.module)(rows))

        return TokenHead(features, layer.weight, getattr(layer, "bias", None), head.scale, head.softcap)

    def fingerprint(self) -> str:
        """A hash of the body's shapes and of a sample of its weights, the same in every float type."""
        named = self.body.named_parameters()
        return fingerprint_of(self.family, (pair for pair in named if not pair[0].startswith(self.layout.beside)))

    def to(
        self, device: str | torch.device | None = None, dtype: torch.dtype | None = None, num_blocks: int | None = None
    ) -> Model:
        """A copy on another device or in another precision; with `num_blocks`, later blocks cannot be used."""
        blocks = [self._block(block) for block in range(self.num_blocks)]
        kept = blocks[: num_blocks or self.num_blocks]
        left_out = [block for block in blocks if block not in kept]
        copied = copy_module(self.hf, torch.device(device or self.device), dtype or self.dtype, left_out)
        return Model(copied, self.tokenizer, self.adapters, layout=self.layout)

    def with_factors(self, factors: Mapping[str, Tensor], scale: Scale | None) -> Model:
        """A copy whose weights are W + scale·B·A, by LoRA factors '<module>.lora_A.weight' and '….lora_B.weight'.

        An output layer that is tied to the token embedding gets weights of its own: LoRA changes the layer alone.
        """
        copied = self.to()
        with torch.no_grad():
            for name, down in factors.items():
                if name.endswith(".lora_A.weight"):
                    path = name.removesuffix(".lora_A.weight")
                    module: Any = copied.module(path)
                    change = scale_at(scale, path) * factors[name.replace(".lora_A.", ".lora_B.")] @ down
                    change = change if isinstance(module, nn.Linear) else change.T
                    module.weight = nn.Parameter(module.weight + change.to(module.weight))
        return copied
