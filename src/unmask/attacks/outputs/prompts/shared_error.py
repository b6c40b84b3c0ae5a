"""Is what a text's tokens leave drawn anew at each position, or the same error at all of them?

Noise that was added to one row says nothing about the noise of another. What another position or other weights leave is
a function of the row, so similar rows have similar residuals: rows x·W against x·(W + ΔW) leave x·ΔW, and keys that
were rotated too far leave k·(R − I). So residuals of pairs of positions are compared as far as their rows are alike:

    z = Σ_{i<j} c_ij ⟨r_i, r_j⟩ / √(Σ_{i<j} c_ij² Σ_p ‖r_ip‖²‖r_jp‖²/n_p),    c_ij = cos(s_i, s_j)

White noise has mean 0 and variance 1 here, whatever its size at each position and in each part. If z > 8, the error is
shared, and nothing is proven. At worst, all rows alike, z is a chi-square of m degrees, centred and by its deviation:
noise gets beyond 8 in fewer than 10⁻⁶ texts for m = 16, in fewer than 10⁻¹¹ for m = 384.

Where reading stops behind a row or two that noise explained, no other row bears that out: it may be a row of another
text, and nothing is proven either.

Notation: s_i the rows that tokens give, r_i what they leave of those seen, both brought to position 0 and each part (a
head's keys, its values) by the norm of s_i's; p the parts, n_p entries each, m in all.
Limits: needs two positions, and says little of two that are not alike. Errors of rounding are no noise: they are the
same for the same row, and are not tested here.
Cost: one pass of the text through l blocks, where noise was found in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.outputs.prompts.seen_text import TextProgress

_LOUD = 8.0  # deviations
_FEWEST = 3  # rows that bear noise out where a later one does not


def doubt_shared_error(text: TextProgress) -> None:
    """Take a noisy text's proofs back if what its tokens leave is no noise, at one position or at all of them."""
    if not text.tokens:
        return  # nothing was read behind the tokens that were given
    is_borne_out = text.done == len(text.seen) or len(text.tokens) >= _FEWEST
    text.is_mismatch |= text.is_noisy and (not is_borne_out or _is_shared(text))
    if text.is_mismatch:
        text.tokens = [replace(token, proven=False) for token in text.tokens]


def _is_shared(text: TextProgress) -> bool:
    """Whether the noise is the same error at all positions that do not agree up to rounding."""
    start, first = text.start, len(text.given)
    model, readout = start.model, start.readout
    rows = start.run(torch.tensor([token.token for token in text.tokens], device=text.seen.stored.device)).states
    part = slice(first, first + len(rows))
    noisy = text.seen.distances(rows, first) > text.seen.noise.tolerances[part]
    if int(noisy.sum()) < 2:
        return False
    rows, stored = rows[noisy], text.seen.stored[part][noisy]
    positions = (start.position + torch.arange(len(noisy), device=rows.device))[noisy]
    weights = readout.weights(model, rows)
    ours = readout.align(model, rows, positions) * weights
    left = readout.align(model, stored - rows, positions) * weights
    return shared_error(ours, left, readout.split(model, rows.shape[1])) > _LOUD


def shared_error(rows: Float[Tensor, "n m"], residuals: Float[Tensor, "n m"], widths: Sequence[int]) -> float:
    """How many deviations residuals of similar rows are more alike than noise."""
    rows, residuals = rows.double(), residuals.double()
    unit = torch.nn.functional.normalize(rows, dim=1)
    alike = (unit @ unit.T).triu(1)
    squares = [(part.square().sum(1), part.shape[1]) for part in residuals.split(list(widths), dim=1)]
    variance = (alike.square() * sum(square[:, None] * square / width for square, width in squares)).sum()
    return float((alike * (residuals @ residuals.T)).sum() / variance.clamp_min(1e-300).sqrt())
