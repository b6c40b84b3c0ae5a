"""How much states were rounded, and so how far a true candidate's state may be from the one seen.

    storing    states were stored coarsely (bfloat16, float8, int8): the grid shows in the values themselves
    computing  the model ran in another precision: measured by running it in both

Noise that was added on purpose leaves no grid; whiteness.py measures it where a candidate is tested.

Notation: variances are of one coordinate of a state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.linalg.coarse import even_step, storage_variance
from unmask.models.adapter import Model

# Two orders of the same sums differ in float32 by about 1e-6 after thirty blocks; wrong tokens by 1e-1.
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-9}
_SHORTEST = 1e-30  # any other state is longer
_SPREAD = 1.8  # rounding to the nearest level is never off by more than √3 deviations, in no coordinate
_WORSE = 1.35  # times the rounding: seven deviations of 64 entries
_USUAL = 0.1  # of the tolerance without rounding: thirty blocks leave a hundredth
_ON_GRID = 2e-3  # of a step: float32's rounding of 127 steps is 1e-5
_SAMPLE = (4, 40)  # random texts that the error of another precision is measured on


@dataclass(frozen=True)
class StateNoise:
    """For each position the variance of a coordinate, and the relative tolerance that follows from it.

    `unevenness`: the variance of the loudest coordinate by the mean. A likelihood must not count on less noise than
    where tokens differ, and that may be there.
    """

    variances: Float[Tensor, " n"]
    tolerances: Float[Tensor, " n"]
    unevenness: Float[Tensor, " n"]

    def relative(self, states: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """The noise's length by the state's."""
        return _relative(self.variances, states)

    def usual(self, states: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """Relative distances that the right candidate keeps to, as a rule."""
        relative = self.relative(states)
        return torch.where(relative > 0, _WORSE * relative, _USUAL * self.tolerances)

    def scaled(self, factors: Float[Tensor, " n"]) -> StateNoise:
        """The same of states that are multiplied with these numbers."""
        return StateNoise(self.variances * factors.square(), self.tolerances, self.unevenness)


def measure_rounding(
    states: Float[Tensor, "n d"],
    computing_error: float,
    weights: Float[Tensor, "n d"] | None = None,
    widths: tuple[int, ...] = (),
) -> StateNoise:
    """The rounding of a text's states.

    Parts of `widths` are stored each with a scale of its own; with `weights` the noise is that of weighted states.
    """
    parts = [states] if not widths else states.split(widths, dim=1)
    stored = torch.cat([torch.stack([_stored_variances(row) for row in part]) for part in parts], 1)
    if weights is not None:
        stored, states = stored * weights.square(), states * weights
    computed = (computing_error * states.norm(dim=1)).square() / states.shape[1]
    variances = stored.mean(1) + computed
    unevenness = torch.where(variances > 0, (stored.amax(1) + computed) / variances, 1.0)
    tolerances = _ROUNDING.get(states.dtype, 1e-4) + _SPREAD * _relative(variances, states)
    return StateNoise(variances, tolerances, unevenness)


def computing_error(
    model: Model, dtype: torch.dtype, layer: int, read: Callable[[Model, Tensor], Tensor] | None = None
) -> float:
    """How far states of a layer are off where the model runs in `dtype`: the largest relative error of a sample.

    `read`: what is seen of the stream, (batch, length, d) → (batch, length, m).
    """
    if dtype in _ROUNDING:
        return 0.0
    generator = torch.Generator().manual_seed(0)
    few = torch.randint(0, model.vocab_size, _SAMPLE, generator=generator).to(model.device)
    with torch.no_grad():
        coarse, fine = (
            (stream if read is None else read(each, stream)).to(model.dtype)
            for each in (model.to(dtype=dtype), model)
            for stream in each.hidden_states(few, num_blocks=layer)[layer:]
        )
    return float(((coarse - fine).norm(dim=2) / lengths_of(fine)).max())


def _relative(variances: Float[Tensor, " n"], states: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    return (variances * states.shape[1]).sqrt() / lengths_of(states)


def lengths_of(states: Float[Tensor, "*n d"]) -> Float[Tensor, "*n"]:
    """Norms to divide by. A state may be zero: tokens for padding often have zero rows."""
    return states.norm(dim=-1).clamp_min(_SHORTEST)


def _stored_variances(row: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
    """The variances of a state's rounding."""
    spacing = stored_spacing(row)
    return torch.zeros_like(row) if spacing is None else spacing.square().to(row) / 12


def stored_spacing(row: Float[Tensor, " d"]) -> Float[Tensor, " d"] | None:
    """Distances of neighbouring levels at each number: of an even grid, float8's with its own scale, or few digits.

    None for ordinary floats.
    """
    values = row.double()
    step = (even_step(values) or _int8_step(values)) if bool(values.any()) else None
    spacing = _float8_spacing(values)
    if step is not None or spacing is not None:
        # Small numbers of float8 lie on an even grid too, and few levels are numbers of float8: the coarser one holds.
        even = torch.full_like(values, step or 0.0)
        return even if spacing is None or float(even.norm()) >= float(spacing.norm()) else spacing
    variance = storage_variance(row[None])
    return None if variance is None else (12 * variance[0]).sqrt()


def _int8_step(values: Float[Tensor, " d"]) -> float | None:
    """The step of a grid whose 127th level is the largest value: few values need not have neighbours on it."""
    step = float(values.abs().max()) / 127
    return step if float((values / step - (values / step).round()).abs().max()) <= _ON_GRID else None


def _float8_spacing(values: Float[Tensor, " d"]) -> Float[Tensor, " d"] | None:
    """Distances of neighbouring float8 numbers (e4m3) at each value; the largest is 448, or there is no scale."""
    for scale in (float(values.abs().max()) / torch.finfo(torch.float8_e4m3fn).max, 1.0):
        scaled = values / scale if scale > 0 else values
        rounded = scaled.float().to(torch.float8_e4m3fn).double()
        if float((scaled - rounded).abs().max()) <= _ON_GRID * 2.0**-9:
            exponents = rounded.abs().clamp_min(2.0**-6).log2().floor()
            return 2 ** (exponents - 3) * scale
    return None
