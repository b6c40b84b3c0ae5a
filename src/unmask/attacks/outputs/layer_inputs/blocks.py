"""A known block, inverted for a whole text: position by position, behind the rows that were recovered before.

    for i = 0, 1, …:  solve φᵢ(x; x̂₀ … x̂ᵢ₋₁) = zᵢ for x,  start x = zᵢ

d equations in d unknowns at each position, as a causal block's output zᵢ depends on rows 0 … i alone. What is proven of
each row is written on it, and it is less than 'this is the input': blocks are not injective on Rᵈ. An exact pre-image
(residual at rounding) whose Jacobian is not singular is the only one *in its neighbourhood* (inverse function theorem),
and errors δ of the output move it by J⁻¹δ to first order. Trained blocks have others, further away.

Notation: φᵢ the block at position i (block_step.py), z its output, x its input; σ singular values of J = ∂φᵢ/∂x.
Limits: finds *a* pre-image, whichever the start leads to; where none is found, later rows cannot be computed and the
text ends there. A residual says nothing about which pre-image it is: only tokens do (stack.py).
Cost a position: one Jacobian and its singular values where the block is close to the identity (random weights); some
tens of Jacobians in trained blocks.
Source: Newton's method and the inverse function theorem; measurements are in docs/outputs-blocks.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.outputs.block_step import BlockStep
from unmask.attacks.run import Progress, silent
from unmask.models.adapter import Model
from unmask.shapes import Rows
from unmask.solvers.chord import Chord
from unmask.solvers.iterate import Ending, iterate
from unmask.solvers.levenberg_marquardt import LevenbergMarquardt

_ABOVE_ROUNDING = 16.0  # a residual of this many measured roundings is still 'zero'
_PROBE = 1e-7  # relative length of the displacements that show rounding: small enough for curvature to vanish
_NUM_PROBES = 3
_CHORD_STEPS = 60
_TINY = 1e-30  # an output of zero has no relative residual: nothing is called exact there


class RowStatus(Enum):
    """What is proven of a row. The value of a member is the sentence that a user reads."""

    ISOLATED = "An exact pre-image, and the only one in its neighbourhood; others may lie elsewhere."
    SINGULAR = "An exact pre-image, but the Jacobian is singular there: it may be one of a continuum."
    NOT_REACHED = "No pre-image was found from the starts that were tried."

    @property
    def is_exact(self) -> bool:
        """Whether the block maps the row to the output, up to rounding."""
        return self is not RowStatus.NOT_REACHED


@dataclass(frozen=True)
class RowPreimage:
    """A row that a block maps to the row that was seen, and what is proven of it.

    `residual` and `tolerance` are relative to ‖z‖; the singular values are those of the Jacobian at `row`.
    """

    row: Float[Tensor, " d"]
    residual: float
    tolerance: float
    smallest_singular_value: float
    largest_singular_value: float
    num_jacobians: int

    @property
    def condition(self) -> float:
        """κ(J)."""
        smallest = self.smallest_singular_value
        return self.largest_singular_value / smallest if smallest > 0 else float("inf")

    @property
    def amplification(self) -> float:
        """1/σ_min: by how much an error of the output can grow, to first order."""
        return 1 / self.smallest_singular_value if self.smallest_singular_value > 0 else float("inf")

    @property
    def standing(self) -> RowStatus:
        """Exact if the residual is at rounding; isolated if the Jacobian is not singular up to that."""
        if not self.residual <= self.tolerance:
            return RowStatus.NOT_REACHED
        return RowStatus.ISOLATED if self.condition * self.tolerance < 1 else RowStatus.SINGULAR


@dataclass(frozen=True)
class BlockInversion:
    """Pre-images of one block, position by position; the last one may not have been reached, none comes after it."""

    block: int
    preimages: tuple[RowPreimage, ...]
    length: int  # of the text

    @property
    def num_exact(self) -> int:
        """How many leading rows are exact pre-images."""
        return sum(preimage.standing.is_exact for preimage in self.preimages)

    @property
    def states(self) -> Rows:
        """The exact rows, in order."""
        return torch.stack([preimage.row for preimage in self.preimages[: self.num_exact]])

    @property
    def residual(self) -> float:
        """The worst relative residual."""
        return max(preimage.residual for preimage in self.preimages)

    @property
    def amplification(self) -> float:
        """The worst 1/σ_min."""
        return max(preimage.amplification for preimage in self.preimages)

    @property
    def num_jacobians(self) -> int:
        """Jacobians computed, for solving and for proving."""
        return sum(preimage.num_jacobians for preimage in self.preimages)


@dataclass
class RowSystem:
    """r(x) = φ(x) − z for the solvers, with a count of Jacobians."""

    step: BlockStep
    output: Float[Tensor, " d"]
    num_jacobians: int = field(default=0, init=False)

    def residuals(self, xs: Float[Tensor, "k d"]) -> Float[Tensor, "k d"]:
        """r of many rows."""
        return self.step(xs) - self.output

    def jacobian(self, x: Float[Tensor, " d"]) -> Float[Tensor, "d d"]:
        """∂φ/∂x at a row."""
        self.num_jacobians += 1
        return self.step.jacobian(x)


@dataclass(frozen=True)
class BlockInverter:
    """Settings: steps of the damped method for each start, where Newton's steps do not get through."""

    max_steps: int = 40

    def invert_block(
        self,
        model: Model,
        block: int,
        outputs: Rows,
        positions: Sequence[int] | None = None,
        progress: Progress = silent,
    ) -> BlockInversion:
        """Rows that the block maps to `outputs`, one text; the recovered ones are the prefix of the next."""
        places = list(range(len(outputs))) if positions is None else list(positions)
        step, preimages, jacobian = BlockStep.first(model, block, places[0]), list[RowPreimage](), None
        for index, output in enumerate(outputs.to(model.dtype)):
            progress(f"inverting block {block}", index, len(places))
            preimage, jacobian = self.invert_row(step, output, output, jacobian)
            preimages.append(preimage)
            if not preimage.standing.is_exact or index + 1 == len(places):
                break
            stepped = step.run(preimage.row[None])
            step = step.following(stepped.keys, stepped.values, places[index + 1])
        return BlockInversion(block, tuple(preimages), len(places))

    def invert_row(
        self,
        step: BlockStep,
        output: Float[Tensor, " d"],
        start: Float[Tensor, " d"],
        jacobian: Float[Tensor, "d d"] | None = None,
    ) -> tuple[RowPreimage, Float[Tensor, "d d"]]:
        """A pre-image of one row, and the Jacobian there; `jacobian` is one to begin with, of a position nearby."""
        system, size = RowSystem(step, output), max(float(output.norm()), _TINY)
        tolerance = _ABOVE_ROUNDING * rounding(step, start)
        x = self._solve(system, start, tolerance * size, jacobian)
        jacobian = system.jacobian(x)
        x = _polish(system, x, jacobian)
        residual = float(system.residuals(x[None]).double().norm()) / size
        values = torch.linalg.svdvals(jacobian.double())
        ends = float(values[-1]), float(values[0])
        return RowPreimage(x, residual, tolerance, *ends, system.num_jacobians), jacobian

    def _solve(self, system: RowSystem, start: Tensor, tolerance: float, jacobian: Tensor | None) -> Tensor:
        """Newton's steps with a kept Jacobian; where they fail, damped steps from the same start."""
        chord = iterate(Chord(tolerance, jacobian), system, start, max_steps=_CHORD_STEPS)
        if chord.ending is Ending.CONVERGED:
            return chord.state.x
        damped = iterate(LevenbergMarquardt(tolerance), system, start, max_steps=self.max_steps)
        return damped.state.x if damped.state.value < chord.state.value else chord.state.x


def rounding(step: BlockStep, row: Float[Tensor, " d"]) -> float:
    """The relative rounding of a block at a row, measured, as some norms compute in less precision than the model.

    ‖φ(x + δ) − 2φ(x) + φ(x − δ)‖ / ‖φ(x)‖ with δ so short that the curvature of φ does not show.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(_NUM_PROBES, len(row), generator=generator, dtype=torch.float64).to(row)
    deltas = noise * (_PROBE * row.norm() / noise.norm(dim=1, keepdim=True))
    ahead, here, behind = (step(rows).double() for rows in (row + deltas, row[None], row - deltas))
    bends = (ahead - 2 * here + behind).norm(dim=1) / here.norm()
    return max(float(bends.max()), torch.finfo(row.dtype).eps)


def _polish(system: RowSystem, x: Float[Tensor, " d"], jacobian: Float[Tensor, "d d"]) -> Float[Tensor, " d"]:
    """One Newton step more, kept if it does not make the residual larger."""
    before = system.residuals(x[None])[0]
    step, info = torch.linalg.solve_ex(jacobian, -before)
    if info or not step.isfinite().all():
        return x
    return x + step if system.residuals((x + step)[None]).norm() <= before.norm() else x
