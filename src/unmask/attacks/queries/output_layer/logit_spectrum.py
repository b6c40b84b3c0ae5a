"""Where the singular values of logits end: the dimension of the space that they span, and what it is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.linalg.noise import estimate_noise, noise_edge
from unmask.recovery import Certificate

_SPARE = 16  # prompts and tokens beyond the rank, so that what is noise can be seen to be noise
_LEAST_FALL = 0.1  # decades: singular values of noise that are neighbours differ by less than 0.02 from 64 prompts on
_STANDS_OUT = 3.0  # the fall at the rank against those before it: an end of the spectrum, not its slope
_FALLS_BEFORE = 32
_OWN_ROUNDING = 1e-14  # float64's own, relative to the largest singular value; below it falls mean nothing


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """What logits tell of the output layer.

    `hidden_size` is the dimension that logits span; None where its end was not seen, and then it is `at_least` so
    large. `affine_size` is the dimension after the mean over prompts was taken away. `W` has a row for each of
    `tokens`: the output layer times an unknown invertible matrix, with the mean over tokens taken away, which no
    probability depends on. The certificate's `relative_residual` is the share of fresh logits that it does not explain;
    the error of W itself is a few times larger where some directions are weak, as in trained models.
    """

    hidden_size: int | None
    at_least: int
    affine_size: int | None
    tokens: Int[Tensor, " m"]
    W: Float[Tensor, "m r"]
    singular_values: Float[Tensor, " k"]
    num_prompts: int

    def describe(self) -> str:
        """What the dimension means, in a sentence."""
        if self.hidden_size is None:
            return f"the hidden size is at least {self.at_least}"
        if self.affine_size == self.hidden_size:
            return (
                f"the hidden size is {self.hidden_size} (as after RMSNorm; after a LayerNorm without bias it would be "
                f"{self.hidden_size + 1})"
            )
        return (
            f"the hidden size is {self.hidden_size} (as after LayerNorm with bias; with RMSNorm and a bias on the "
            f"logits it would be {self.hidden_size - 1})"
        )

    @classmethod
    def unknown(cls) -> OutputLayer:
        """Of which nothing is known."""
        empty = torch.zeros(0, 0, dtype=torch.float64)
        return cls(None, 0, None, torch.zeros(0, dtype=torch.int64), empty, empty.flatten(), 0)


class LogitSpectrum:
    """Singular values of a sample, how many of them noise does not explain, and whether they end.

    `evened` are logits in coordinates of even noise, from which the rank is read; `logits` are the same as they were
    read, from which the output layer is.
    """

    def __init__(self, evened: Float[Tensor, "n m"], logits: Float[Tensor, "n m"], tokens: Int[Tensor, " m"]) -> None:
        self.matrix, self.logits, self.tokens = evened, logits, tokens
        self.rank, self.ends, self.fall, self.edge = 0, False, 0.0, 0.0
        self.values = torch.linalg.svdvals(evened) if min(evened.shape) else torch.zeros(0, dtype=torch.float64)
        if min(evened.shape) < _SPARE or not self.values.any():
            return
        noise = estimate_noise(evened)
        self.rank = min(noise.rank, len(self.values) - 1)
        self.edge = noise_edge(min(evened.shape), max(evened.shape), noise.sigma)
        if self.rank == 0:
            return
        falls = -self.values.clamp_min(_OWN_ROUNDING * float(self.values[0])).log10().diff()
        first = max(0, self.rank // 2 - 1)
        end = first + int(falls[first : self.rank].argmax())
        before = falls[max(0, end - _FALLS_BEFORE) : end]
        steepest = float(before.max()) if len(before) else 0.0
        self.fall = float(falls[end])
        spare = min(evened.shape) - (end + 1)
        self.ends = spare >= _SPARE and self.fall >= max(_LEAST_FALL, _STANDS_OUT * steepest)
        if self.ends:
            self.rank = end + 1

    @property
    def sigma(self) -> float:
        """The noise of one logit, from what lies outside of the span."""
        n, m = self.matrix.shape
        free = max(1, (n - self.rank) * (m - self.rank))
        return float(self.values[self.rank :].square().sum() / free) ** 0.5

    def certify(self, fresh: Float[Tensor, "f m"]) -> Certificate:
        """Prompts that were not used: nothing outside of the span, and something along every direction of it.

            residual = ‖F − F V Vᵀ‖ / √(f·(m − r)),   rejected = ‖F v_r‖ / √f,   tolerance = (ν·rejected)^½

        Notation: F (f, m) fresh logits; V (m, r) the span, v_r its weakest direction; ν = σ·√(n/(n − r)) what a span
        learned from n rows of noise σ leaves of a fresh row. Both numbers are root mean squares along one direction.
        With a direction less, `rejected` would be outside of the span.
        """
        n, m = self.matrix.shape
        V = self._factors[1]
        outside = fresh - (fresh @ V) @ V.T
        residual = float(outside.norm()) / math.sqrt(max(1, len(fresh)) * (m - self.rank))
        weakest = float((fresh @ V[:, -1]).norm()) / math.sqrt(max(1, len(fresh)))
        floor = _OWN_ROUNDING * float(self.values[0])  # an exact service leaves float64's own rounding
        left = max(self.sigma, floor) * math.sqrt(n / (n - self.rank))
        claim = (
            f"Logits of {len(fresh)} fresh prompts lie in a space of {self.rank} dimensions (residual: logits, along a "
            "direction outside), and use its weakest one (rejected)."
        )
        details = {
            "noise_of_a_logit": self.sigma,
            "fall_decades": self.fall,
            "relative_residual": float(outside.norm() / fresh.norm().clamp_min(1e-300)),
            "prompts": n,
            "tokens": m,
        }
        return Certificate(claim, residual, math.sqrt(left * weakest), weakest, details)

    def bound(self) -> Certificate:
        """That there are so many directions at least: noise reaches `residual` once in a thousand times."""
        claim = (
            f"{self.rank} singular values of the logits exceed what noise explains (residual: its edge; tolerance: the "
            "weakest of them)."
        )
        weakest = float(self.values[self.rank - 1]) if self.rank else 0.0
        return Certificate(claim, self.edge, weakest, details={"noise_of_a_logit": self.sigma})

    def layer(self, is_whole: bool) -> OutputLayer:
        """The directions above the noise, as an output layer: Zᵀ·U/√n, the regression of logits on states."""
        affine = None
        if is_whole:
            middle = float((self.values[self.rank - 1] * self.values[self.rank]).sqrt())
            affine = int((torch.linalg.svdvals(self.matrix - self.matrix.mean(0)) > middle).sum())
        centred = self.logits - self.logits.mean(dim=1, keepdim=True)
        W = centred.T @ self._factors[0] / math.sqrt(len(self.matrix))
        size = self.rank if is_whole else None
        return OutputLayer(size, self.rank, affine, self.tokens, W, self.values, len(self.matrix))

    @cached_property
    def _factors(self) -> tuple[Float[Tensor, "n r"], Float[Tensor, "m r"]]:
        left, _, right = torch.linalg.svd(self.matrix, full_matrices=False)
        return left[:, : self.rank], right[: self.rank].T
