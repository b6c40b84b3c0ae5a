"""What enters block 0: a function of token, position and type alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unmask.models.layernorm_sum import LayerNormOfSum
from unmask.models.layout import POSITION, TOKEN, TYPE
from unmask.models.parts import Parts
from unmask.models.roles import STREAM
from unmask.models.wiring import Sum

_ROWS_AT_ONCE = 16384  # of a vocabulary
_ROWS_IN_CACHE = 1024  # the same on a processor, where norms are quick while rows stay in its cache


class FirstInputs(Parts):
    """The embedding, and what the first block's attention sees of it."""

    def embed(
        self, tokens: Int[Tensor, "*n"], positions: Int[Tensor, "*n"], types: Int[Tensor, "*n"] | None = None
    ) -> Float[Tensor, "*n d"]:
        """The residual stream that enters block 0; `types` where the family tells two texts of a pair apart."""
        layout, find = self.layout.embedding, self.body.get_submodule
        rows = {TOKEN: find(layout.token)(tokens)}
        if layout.position is not None:
            rows[POSITION] = nn.functional.embedding(positions + layout.offset, self.position_table)
        if layout.type is not None:
            kinds = torch.zeros_like(tokens) if types is None else types
            rows[TYPE] = nn.functional.embedding(kinds, find(layout.type).weight)
        return layout.flow.evaluate(layout.output, rows, find)

    def attention_input(self, block: int, states: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """What the query, key and value projections of a block see."""
        return self._rows(block, self._place(block).layout.attention_input, {STREAM: states})

    def first_input(
        self, tokens: Int[Tensor, "*n"], positions: Int[Tensor, "*n"], types: Int[Tensor, "*n"] | None = None
    ) -> Float[Tensor, "*n d"]:
        """The attention input of block 0: a function of token, position and type alone."""
        return self.attention_input(0, self.embed(tokens, positions, types))

    def first_input_parts(
        self, tokens: Int[Tensor, " t"], num_positions: int
    ) -> tuple[Float[Tensor, "t d"], Float[Tensor, "p d"], Float[Tensor, " d"]]:
        """What every first input is a combination of: rows of tokens, of learned positions, and the norm's shift."""
        summed = self.first_input_sum(tokens)
        if summed is not None:
            return summed.parts(num_positions)
        words = self.first_input(tokens, torch.zeros_like(tokens))
        return words, words.new_zeros(0, words.shape[1]), words.new_zeros(words.shape[1])

    def project_first_inputs(
        self, matrix: Float[Tensor, "d k"], positions: Sequence[int]
    ) -> Iterator[Float[Tensor, "vocab k"]]:
        """x(t, p)·M of every token t, one position after the other."""
        summed = self.first_input_sum()
        if summed is not None:
            yield from summed.project_positions(matrix, positions)
            return
        everyone = torch.arange(self.vocab_size, device=self.device)
        for position in positions:
            parts = []
            for some in everyone.split(_ROWS_IN_CACHE if self.device.type == "cpu" else _ROWS_AT_ONCE):
                rows = self.first_input(some, torch.full_like(some, position))
                parts.append(rows @ matrix.to(rows))
            yield torch.cat(parts)

    def first_input_sum(self, tokens: Int[Tensor, " t"] | None = None) -> LayerNormOfSum | None:
        """First inputs of type 0 as the norm of a sum, of all tokens or of some; None where they are not that."""
        path, layout = self._first_path, self.layout.embedding
        if path is None or layout.position is None:
            return None
        words = self.body.get_submodule(layout.token)
        if type(words).forward is not nn.Embedding.forward:  # a scaled one
            tokens = torch.arange(self.vocab_size, device=self.device) if tokens is None else tokens
            rows = words(tokens)
        else:
            rows = words.weight if tokens is None else words.weight[tokens]
        if layout.type is not None:
            rows = rows + self.body.get_submodule(layout.type).weight[0]
        return LayerNormOfSum(rows, self.position_table[layout.offset :], *path)

    @cached_property
    def _first_path(self) -> tuple[nn.LayerNorm, nn.Linear | None] | None:
        """The LayerNorm, and the projection behind it, that lead from the sum of embeddings to first inputs.

        None where something else happens on the way: there first inputs are asked for one by one.
        """
        embedding, block = self.layout.embedding, self._place(0).layout
        summed = {TOKEN, POSITION, TYPE} if embedding.type is not None else {TOKEN, POSITION}
        modules: list[nn.Module] = []
        parts = ((block.attention_input, block.flow, self._block(0), {STREAM}),)
        for wanted, flow, owner, start in (*parts, (embedding.output, embedding.flow, self.body, summed)):
            while wanted is not None and set(wanted.factors) != start:
                name = next(iter(wanted.factors))
                modules.insert(0, owner.get_submodule(name) if name in flow.steps else nn.Identity())
                wanted = flow.steps.get(name) if len(wanted.factors) == 1 and wanted.factors[name] == 1 else None
            if wanted is None or set(wanted.factors.values()) != {1.0}:
                return None
        norm, *rest = modules or [nn.Identity()]
        if not isinstance(norm, nn.LayerNorm) or norm.bias is None or len(rest) > 1:
            return None
        projection = rest[0] if rest else None
        return (norm, projection) if isinstance(projection, nn.Linear | None) else None

    # ---- pairs of texts

    @property
    def _sum_of_one(self) -> LayerNormOfSum | None:
        """The sum of one token: what types add does not depend on the others of the vocabulary."""
        return self.first_input_sum(torch.zeros(1, dtype=torch.long, device=self.device))

    @property
    def token_type_differences(self) -> Float[Tensor, "k d"]:
        """What token types but 0 add to a first input, up to the norm's scale; no row where there is one type."""
        summed = self._sum_of_one
        if summed is None or self.layout.embedding.type is None:
            return torch.zeros(0, self.width, dtype=self.dtype, device=self.device)
        kinds = self.body.get_submodule(self.layout.embedding.type).weight
        return summed.scale_rows(kinds[1:] - kinds[0])

    @property
    def token_type_directions(self) -> Float[Tensor, "k d"]:
        """All that first inputs of other types than 0 hold beyond those of type 0, as rows."""
        summed = self._sum_of_one
        if self.num_token_types < 2 or summed is None:
            return torch.zeros(0, self.width, dtype=self.dtype, device=self.device)
        return torch.cat([self.token_type_differences, summed.shift[None]]).detach()

    def _rows(self, block: int, wanted: Sum | None, given: dict[str, Tensor]) -> Tensor:
        assert wanted is not None
        return self._place(block).layout.flow.evaluate(wanted, given, self._block(block).get_submodule)
