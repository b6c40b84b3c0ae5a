"""One block at one position, as a function of that position's row alone.

In a causal model the keys and values of earlier positions do not depend on the row x at position i, so they are
computed once and shared by all candidates for x:

    m(x) = ⊕ₕ [ Σ_{j<i} fₕⱼ(x)·vⱼ + fₕᵢ(x)·v(x) ],    fₕ = softmax(qₕ(x)·[k₀ … k_{i−1}, k(x)] / √e)
    y(x) = x + m(x)·W_O + b_O,    φ(x) = y + a(y)·W_D + b_D

and its Jacobian ∂φ/∂x (row: output coordinate) is two pulled-back matrices, from the top down:

    U = I + W_Dᵀ·∂a/∂y,    ∂φ/∂x = U + (U·W_Oᵀ)·∂m/∂x

A product of a matrix with ∂a/∂y or ∂m/∂x is a batch of vector–Jacobian products of the adapter's own functions, so a
norm costs a rank-one update, a rotation a rotation, and no family has a formula of its own here.

Notation: d width, h query heads in g key/value groups of width e, o = h·e; a(y) the MLP's hidden row of width f.
Limits: causal models whose sub-layers are added to the stream (all decoders here); scores are dot products.
Cost: k candidates: 2k(2do + 2d·g·e + c·df) flops, c = 2 or 3 projections of the MLP, and 4k·o·i of attention. Jacobian:
2d²((c − 1)f + 2o + 2g·e) flops, 16·d³ in the shape of GPT-2.
Source: the chain rule; the derivative of softmax is in linalg/softmax_attention.py, which these products agree with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import vjp, vmap

from unmask.errors import InputError
from unmask.models.adapter import Model


@dataclass(frozen=True)
class Prefix:
    """Keys and values of the positions before the one that is asked for."""

    keys: Float[Tensor, "j g e"]
    values: Float[Tensor, "j g e"]

    @classmethod
    def empty(cls, model: Model, block: int) -> Prefix:
        """Nothing came before."""
        nothing = torch.zeros(0, model.width, dtype=model.dtype, device=model.device)
        _, keys, values = model.queries_keys_values(block, nothing, torch.zeros(0, dtype=torch.long))
        return cls(keys, values)

    def extend(self, keys: Float[Tensor, "n g e"], values: Float[Tensor, "n g e"]) -> Prefix:
        """The prefix with further positions behind it."""
        return Prefix(torch.cat([self.keys, keys]), torch.cat([self.values, values]))

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class AttentionStep:
    """What candidate rows make of the prefix: the input of the output projection, and their own keys and values."""

    mixed: Float[Tensor, "k o"]
    keys: Float[Tensor, "k g e"]
    values: Float[Tensor, "k g e"]


@dataclass(frozen=True)
class BlockOutput:
    """What leaves the block, and the keys and values that a chosen row adds to the prefix."""

    outputs: Float[Tensor, "k d"]
    keys: Float[Tensor, "k g e"]
    values: Float[Tensor, "k g e"]


@dataclass(frozen=True)
class BlockStep:
    """A block at a position behind a prefix; rows are candidates for the stream that enters there."""

    model: Model
    block: int
    position: int
    prefix: Prefix

    def __post_init__(self) -> None:
        if not self.model.causal:
            raise InputError(
                f"a block can be run position by position in causal models only; in the family '{self.model.family}' "
                "every row depends on the whole text"
            )

    @classmethod
    def first(cls, model: Model, block: int, position: int = 0) -> BlockStep:
        """The block at the first position of a text."""
        return cls(model, block, position, Prefix.empty(model, block))

    def __call__(self, rows: Float[Tensor, "k d"]) -> Float[Tensor, "k d"]:
        """What leaves the block, for each candidate row."""
        return self.run(rows).outputs

    @torch.no_grad()
    def run(self, rows: Float[Tensor, "k d"]) -> BlockOutput:
        """What leaves the block, and each candidate's keys and values."""
        attended = self._attend(rows)
        return BlockOutput(self._leave(rows, attended.mixed), attended.keys, attended.values)

    @torch.no_grad()
    def attend(self, rows: Float[Tensor, "k d"]) -> AttentionStep:
        """The attention module alone, before its output projection."""
        return self._attend(rows)

    def following(
        self, keys: Float[Tensor, "1 g e"], values: Float[Tensor, "1 g e"], position: int | None = None
    ) -> BlockStep:
        """The block at the next position (or a later one, where padding lies between), once this row is known."""
        position = self.position + 1 if position is None else position
        return BlockStep(self.model, self.block, position, self.prefix.extend(keys, values))

    def jacobian(self, row: Float[Tensor, " d"]) -> Float[Tensor, "d d"]:
        """∂φ/∂x at one row: entry (i, j) is the derivative of output i by input j."""
        every = torch.eye(len(row), dtype=row.dtype, device=row.device)
        return self.differentiate(row[None])[1](every)

    def differentiate(self, row: Float[Tensor, "1 d"]) -> tuple[Float[Tensor, "1 d"], Pull]:
        """φ at one row, and what pulls a matrix back through it: M ↦ M·∂φ/∂x."""
        return differentiate(lambda rows: self._leave(rows, self._attend(rows).mixed), row.detach())

    def _leave(self, rows: Tensor, mixed: Tensor) -> Tensor:
        """What leaves the block, given what attention read."""
        return self.model.after_mlp(self.block, self.model.after_attention(self.block, rows, mixed))

    def _attend(self, rows: Tensor) -> AttentionStep:
        """Scores against the shared prefix and against the row itself, one softmax over both."""
        model, prefix = self.model, self.prefix
        positions = torch.full((len(rows),), self.position, device=rows.device)
        heads, keys, values = model.queries_keys_values(self.block, model.attention_input(self.block, rows), positions)
        mixed = model.mix_behind(self.block, heads, keys, values, prefix.keys[None], prefix.values[None])[0]
        return AttentionStep(mixed, keys, values)


Pull = Callable[[Float[Tensor, "m p"]], Float[Tensor, "m d"]]


def differentiate(function: Callable[[Tensor], Tensor], at: Float[Tensor, "1 d"]) -> tuple[Float[Tensor, "1 p"], Pull]:
    """A function of one row, and M ↦ M·J: a vector–Jacobian product for each row of M, all in one batch.

    Functions that torch.func cannot take (Bloom's activation) are pulled back row by row.
    """

    def pull_slowly(matrix: Tensor) -> Tensor:
        with torch.enable_grad():
            start = at.detach().clone().requires_grad_()
            end = function(start)
            rows = [torch.autograd.grad(end, start, row[None], retain_graph=True)[0][0] for row in matrix]
        return torch.stack(rows)

    def pull_rows(matrix: Tensor) -> Tensor:
        try:
            return vmap(lambda row: pull(row[None])[0][0])(matrix).detach()
        except RuntimeError as error:
            _check_unsupported(error)
            return pull_slowly(matrix)

    try:
        value, pull = vjp(function, at)  # type: ignore[misc]
        return value.detach(), pull_rows
    except RuntimeError as error:
        _check_unsupported(error)
        return function(at).detach(), pull_slowly


def _check_unsupported(error: RuntimeError) -> None:
    """Raise what is no complaint of torch.func about a function that it cannot take."""
    if "setup_context" not in str(error):
        raise error
