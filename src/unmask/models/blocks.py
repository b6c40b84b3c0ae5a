"""The blocks of a model as functions of rows: its own modules, and the sums between them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unmask.errors import UnsupportedModelError
from unmask.models.attention import Scores, attend, attend_behind
from unmask.models.attention_calls import (
    Arguments,
    KnownRows,
    block_arguments,
    finish_attention,
    module_arguments,
    read_heads,
    replace_rows,
)
from unmask.models.first_inputs import FirstInputs
from unmask.models.inputs import no_cache
from unmask.models.layout import ask_bias
from unmask.models.linear import Role
from unmask.models.mapped import release
from unmask.models.record import first_tensor, input_of
from unmask.models.roles import ATTENTION, MLP, STREAM
from unmask.shapes import MaskBatch, States, TokenBatch


@dataclass(frozen=True)
class Attended:
    """A block's rows behind attention: the stream that entered the block, and what attention adds to it."""

    stream: Float[Tensor, "*n d"]
    added: Float[Tensor, "*n d"]

    def __getitem__(self, index: Any) -> Attended:
        return Attended(self.stream[index], self.added[index])


class Blocks(FirstInputs):
    """Attention and MLP of every block; leading axes of rows are free."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._given_to_attention: dict[tuple[int, int], Arguments] = {}
        self._given_to_blocks: tuple[tuple[int, ...] | None, list[Arguments]] = (None, [])
        self._biases: dict[int, Tensor] = {}

    # ---- attention

    def queries_keys_values(
        self, block: int, rows: Float[Tensor, "*n d"], positions: Int[Tensor, "*n"], known: KnownRows | None = None
    ) -> tuple[Float[Tensor, "*n h e"], Float[Tensor, "*n g e"], Float[Tensor, "*n g e"]]:
        """Heads of queries, keys and values, with whatever the model does to them before its softmax.

        `known`: of the same rows, if they are asked for at several positions.
        """
        place = self._place(block)
        assert place.layout.attention is not None
        name, where = place.layout.attention
        if not rows.numel():
            layout = place.layout
            shared, width = layout.num_key_value_heads, layout.head_width
            shapes = (layout.num_heads, width), (shared, width), (shared, layout.value_width)
            return tuple(rows.new_zeros(*rows.shape[:-1], *shape) for shape in shapes)  # type: ignore[return-value]
        asked = tuple(positions.flatten().tolist())
        if len(set(asked)) == 1 and not self.scores(block).has_bias:
            asked = asked[:1]  # one text's arguments fit all of them
        arguments = self._attention_arguments(block, asked)
        q, k, v = read_heads(self._module(block, name), where, arguments, rows.flatten(0, -2), known)
        repeats = k.shape[1] // place.layout.num_key_value_heads
        return tuple(part.unflatten(0, rows.shape[:-1]) for part in (q, k[:, ::repeats], v[:, ::repeats]))

    def _attention_arguments(self, block: int, positions: tuple[int, ...]) -> Arguments:
        """What a block's attention module is given at some positions, each in a text of its own."""
        if len(positions) == 1 and (block, positions[0]) in self._given_to_attention:
            return self._given_to_attention[block, positions[0]]
        place = self._place(block)
        nothing = torch.zeros(len(positions), 1, self.width, dtype=self.dtype, device=self.device)
        module = self._module(block, place.layout.attention[0])  # type: ignore[index]
        given = replace_rows(self._block_arguments(positions)[block], place.rows, nothing)
        with torch.no_grad():
            told = module_arguments(self._block(block), module, given)
        if len(positions) == 1:  # small, and asked for again and again
            self._given_to_attention[block, positions[0]] = told
        return told

    def _block_arguments(self, positions: tuple[int, ...]) -> list[Arguments]:
        """What every block is given at some positions."""
        if self._given_to_blocks[0] != positions:
            asked = torch.tensor(positions, device=self.device)[:, None]
            inputs: dict[str, Any] = {"input_ids": torch.zeros_like(asked), **no_cache(self.body)}
            if self.layout.takes_positions:
                inputs["position_ids"] = asked
            self._given_to_blocks = positions, self._ask_arguments(inputs)
        return self._given_to_blocks[1]

    @torch.no_grad()
    def _ask_arguments(self, inputs: Mapping[str, Any]) -> list[Arguments]:
        """What every block is given when the body is given something."""
        blocks = [self._block(index) for index in range(self.num_blocks)]
        returned = [place.returned for place in self.layout.blocks]
        return block_arguments(self.body, blocks, returned, lambda: self.body(**inputs))

    def scores(self, block: int) -> Scores:
        """How scores of a block are made."""
        found = self._place(block).scores
        if found is None:
            raise UnsupportedModelError(
                f"the attention of block {block} cannot be computed apart from its model: its scores are more than "
                "scaled products of queries and keys"
            )
        return found

    def scores_scale(self, block: int) -> float:
        """The factor on query·key before the softmax."""
        return self.scores(block).scale

    def mix(
        self,
        block: int,
        queries: Float[Tensor, "*batch q h e"],
        keys: Float[Tensor, "*batch j g e"],
        values: Float[Tensor, "*batch j g e"],
        allowed: Bool[Tensor, "*batch q j"],
    ) -> Float[Tensor, "*batch q o"]:
        """Attention output before the output projection, heads side by side; the queries are those of the last keys."""
        bias = self.score_bias(block, keys.shape[-3])
        bias = None if bias is None else bias[:, keys.shape[-3] - queries.shape[-3] :]
        return attend(queries, keys, values, allowed, self.scores(block), bias)

    def mix_behind(
        self,
        block: int,
        queries: Float[Tensor, "c h e"],
        own_keys: Float[Tensor, "c g e"],
        own_values: Float[Tensor, "c g e"],
        keys: Float[Tensor, "s j g e"],
        values: Float[Tensor, "s j g e"],
        through: Float[Tensor, "o k"] | None = None,
    ) -> Float[Tensor, "s c o"] | Float[Tensor, "s c k"]:
        """What each of c candidates reads behind each of s prefixes, or that multiplied by a matrix `through`."""
        bias = self.score_bias(block, keys.shape[1] + 1)
        bias = None if bias is None else bias[:, -1]
        return attend_behind(queries, own_keys, own_values, keys, values, self.scores(block), bias, through)

    def score_bias(self, block: int, length: int) -> Float[Tensor, "h length length"] | None:
        """What positions add to the scores of a block (ALiBi, relative ones, a window); None where they add nothing."""
        if not self.scores(block).has_bias and length <= self.shortest_window:
            return None
        known = self._biases.get(block)
        if known is None or known.shape[-1] < length:
            known = self._biases[block] = ask_bias(
                self.body, self._block(block), self.layout, block, min(2 * length, self.max_positions)
            )
        return known[:, :length, :length]

    def mixed_values(
        self, block: int, states: States, positions: TokenBatch, mask: MaskBatch
    ) -> Float[Tensor, "batch length o"]:
        """The rows that enter a block's output projection."""
        rows = self.attention_input(block, states)
        queries, keys, values = self.queries_keys_values(block, rows, positions)
        return self.mix(block, queries, keys, values, self.visible_keys(mask))

    def visible_keys(self, mask: MaskBatch) -> Bool[Tensor, "batch length length"]:
        """Which key each query may see: real tokens, and under a causal mask no later ones."""
        length = mask.shape[1]
        allowed = mask[:, None, :].bool().expand(-1, length, -1)
        if self.causal:
            allowed = allowed & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
        return allowed

    def after_attention(self, block: int, states: Float[Tensor, "*n d"], mixed: Float[Tensor, "*n o"]) -> Attended:
        """The block's rows behind its output projection, given the mixed values that enter it."""
        layout = self._place(block).layout
        if Role.ATTENTION_OUT in layout.linear:
            return Attended(states, self._apply(block, Role.ATTENTION_OUT, mixed))
        assert layout.attention is not None
        name, where = layout.attention
        rows = self.attention_input(block, states)
        arguments = self._attention_arguments(block, (0,))  # positions are in `mixed`
        flat = rows.flatten(0, -2), mixed.flatten(0, -2)
        added = finish_attention(self._module(block, name), where, arguments, *flat)
        return Attended(states, added.unflatten(0, rows.shape[:-1]))

    # ---- the MLP

    def mlp_input(self, block: int, attended: Attended) -> Float[Tensor, "*n d"]:
        """What the MLP's first projections see."""
        wanted = self._place(block).layout.mlp_input
        return self._rows(block, wanted, {STREAM: attended.stream, ATTENTION: attended.added})

    def mlp_hidden(self, block: int, attended: Attended) -> Float[Tensor, "*n f"]:
        """The input of the MLP's down projection."""
        layout, rows = self._place(block).layout, self.mlp_input(block, attended)
        assert layout.mlp is not None
        if layout.mlp.module is None:
            for name in layout.mlp.chain:
                rows = self._module(block, name)(rows)
            return rows
        mlp, down = self._module(block, layout.mlp.module), layout.linear[Role.MLP_OUT]
        flat = rows if rows.dim() == 3 else rows.reshape(1, -1, rows.shape[-1])
        # A module may ask for rows that it adds behind the down projection, where it is stopped.
        needed = sum(each.default is each.empty for each in inspect.signature(mlp.forward).parameters.values())
        hidden = input_of(self._module(block, down.module), lambda: mlp(*[flat] * max(1, needed)))
        return hidden.reshape(*rows.shape[:-1], hidden.shape[-1])

    def mlp_output(self, block: int, hidden: Float[Tensor, "*n f"]) -> Float[Tensor, "*n d"]:
        """What the down projection puts out."""
        return self._apply(block, Role.MLP_OUT, hidden)

    def after_mlp(
        self, block: int, attended: Attended, hidden: Float[Tensor, "*n f"] | None = None
    ) -> Float[Tensor, "*n d"]:
        """The stream that leaves a block; `hidden` if it is known already."""
        layout = self._place(block).layout
        if Role.MLP_OUT in layout.linear:
            added = self.mlp_output(block, self.mlp_hidden(block, attended) if hidden is None else hidden)
        else:  # a mixture of experts: run as it is
            assert layout.mlp is not None
            rows = self.mlp_input(block, attended)
            flat = rows if rows.dim() == 3 else rows.reshape(1, -1, rows.shape[-1])
            added = first_tensor(self._module(block, layout.mlp.module or "")(flat)).reshape(rows.shape)  # type: ignore[union-attr]
        return self.leave_block(block, attended, added)

    def leave_block(self, block: int, attended: Attended, added: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """The stream that leaves a block, given what its MLP puts out."""
        given = {STREAM: attended.stream, ATTENTION: attended.added, MLP: added}
        return self._rows(block, self._place(block).layout.output, given)

    def block_forward(self, block: int, states: States, positions: TokenBatch, mask: MaskBatch) -> States:
        """One block of the residual stream."""
        if not states.numel():
            return states
        if self._place(block).problem:
            return self._run_block(block, states, positions, mask)
        left = self.after_mlp(
            block, self.after_attention(block, states, self.mixed_values(block, states, positions, mask))
        )
        release(self._block(block))
        return left

    def _run_block(self, block: int, states: States, positions: TokenBatch, mask: MaskBatch) -> States:
        """The same by the block as it is, with what the model itself would give it."""
        place = self._place(block)
        inputs = {"input_ids": torch.zeros_like(positions), "attention_mask": mask.long(), **no_cache(self.body)}
        if self.layout.takes_positions:
            inputs["position_ids"] = positions
        given, options = replace_rows(self._ask_arguments(inputs)[block], place.rows, states)
        return first_tensor(self._block(block)(*given, **options))  # type: ignore[return-value]

    # ---- sums that all later rows depend on

    def carries_all(self, role: Role, block: int) -> bool:
        """Whether all that later rows depend on is the sum that a layer's output is added to."""
        layout = self._place(block).layout
        return (layout.attention_sum if role is Role.ATTENTION_OUT else layout.mlp_sum) is not None

    def attention_sum(self, block: int, attended: Attended) -> Float[Tensor, "*n d"]:
        """All that later rows depend on, behind attention, with what attention adds in it once."""
        found = self._place(block).layout.attention_sum
        assert found is not None
        return self._rows(block, found, {STREAM: attended.stream, ATTENTION: attended.added})

    def mlp_sum(self, block: int, attended: Attended, hidden: Float[Tensor, "*n f"]) -> Float[Tensor, "*n d"]:
        """All that later rows depend on, behind the MLP, with what the down projection adds in it once."""
        layout = self._place(block).layout
        assert layout.mlp_sum is not None
        given = {STREAM: attended.stream, ATTENTION: attended.added, MLP: self._apply(block, Role.MLP_OUT, hidden)}
        return self._rows(block, layout.mlp_sum.input, given)

    def _apply(self, block: int, role: Role, rows: Tensor) -> Tensor:
        """A linear layer's output."""
        return self._module(block, self._place(block).layout.linear[role].module)(rows)
