"""Sequences of two tokens in many proportions, and the equations that heads satisfy on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.profile import OracleProfile
from unmask.evidence.oracles import OracleEvidence
from unmask.linalg.rational import fit_sigmoids
from unmask.solvers.iterate import iterate
from unmask.solvers.levenberg_marquardt import LevenbergMarquardt

_NUMBERS_AT_ONCE = 2**22  # in one question: 32 MB
# An answer sums 64 tokens of several heads, which may cancel; each carries the error that a single token shows.
_SUMMED_ERROR = 32.0
_MAX_STEPS, _LEAST_DECREASE = 60, 1e-11
_NUM_RIVALS = 8
_BEST_SCORE = 2.0  # |t| at which sigmoids differ most from each other and still lie between ratios of 1/63 and 63
_SATURATED = 10.0  # |t| that cannot be told from more, by a fit at ratios between 1/63 and 63
_NUM_PILOTS = 8
FAR = 1e6  # norms that are never needed: beyond, rounding of the arithmetic is what is left of an added error


@dataclass(frozen=True, eq=False)
class RepeatedTokens:
    """F at several ratios: k copies of y + u, then n − k copies of y, of which the last asks.

        F(ρ) = f − (Σ_h v_h)ᵀ y = Σ_h (v_hᵀu)·ρ/(ρ + exp(−uᵀW_h y)),    ρ = k/(n − k)

    The last value of each row is that of ρ = ∞, (Σ_h v_h)ᵀ u, which needs no query.
    Notation: n the length of all sequences; `copies` the values of k; `sum_v` = Σ_h v_h.
    Source: Kim, Kim, Guo, arXiv 2608.03294 (its abstract; not read further).
    """

    evidence: OracleEvidence
    profile: OracleProfile
    sum_v: Float[Tensor, " d"]
    length: int
    copies: tuple[int, ...]

    @property
    def rho(self) -> Float[Tensor, " k"]:
        """The ratios, ∞ the last."""
        k = torch.tensor(self.copies, dtype=torch.float64, device=self.sum_v.device)
        return torch.cat([k / (self.length - k), k.new_full((1,), math.inf)])

    def __call__(self, U: Float[Tensor, "b d"], y: Float[Tensor, " d"]) -> tuple[Float[Tensor, "b k"], float]:
        """F of each row of U at one y, and the standard deviation of a value."""
        place = torch.arange(self.length, device=U.device)
        is_first = place < torch.tensor(self.copies, device=U.device)[:, None]  # (ratios, length)
        rows = max(1, _NUMBERS_AT_ONCE // (is_first.numel() * len(y)))
        answers = torch.cat([self._ask(part, y, is_first) for part in U.split(rows)])
        values = torch.cat([answers - y @ self.sum_v, (U @ self.sum_v)[:, None]], dim=1)
        # Beside added errors the precision of the arithmetic is known only as a part of them.
        factor = 1.0 if self.profile.absolute_error else _SUMMED_ERROR
        # In a single answer heads may cancel; their errors do not, and the largest answer tells what these are.
        lost = factor * self.profile.precision * float(answers.abs().max())
        return values, max(lost, self.profile.absolute_error)

    def _ask(self, U: Float[Tensor, "b d"], y: Float[Tensor, " d"], is_first: Tensor) -> Float[Tensor, "b k"]:
        sequences = torch.where(is_first[None, :, :, None], (y + U)[:, None, None], y)
        return self.evidence.ask(sequences.flatten(0, 1)).reshape(len(U), -1)


def choose_copies(length: int, num: int) -> tuple[int, ...]:
    """At most `num` numbers of copies whose ratios k/(length − k) are evenly spread on a logarithmic scale."""
    reach = math.log(length - 1)
    wanted = torch.linspace(-reach, reach, num, dtype=torch.float64)
    copies = set((torch.sigmoid(wanted) * length).round().long().clamp(1, length - 1).tolist())
    spare = sorted(set(range(1, length)) - copies, key=lambda k: abs(2 * k - length))
    return tuple(sorted([*copies, *spare[: num - len(copies)]]))


@dataclass(frozen=True)
class TokenNorms:
    """Norms of u and y. Their product sets the scores; what the oracle adds is smallest beside the largest u."""

    u_norm: float
    y_norm: float

    @classmethod
    def within(cls, product: float, bound: float, is_exact: bool) -> TokenNorms:
        """Norms with this product and a sum within the bound: equal, or u the longer where errors are added."""
        longest = 2 * math.sqrt(product) if is_exact else bound
        u_norm = (longest + math.sqrt(max(0.0, longest**2 - 4 * product))) / 2
        return cls(u_norm, product / u_norm)

    @property
    def boost(self) -> float:
        """R, as against two tokens of equal norm."""
        return math.sqrt(self.u_norm / self.y_norm)


def choose_norms(ask: RepeatedTokens, max_heads: int, bound: float, generator: torch.Generator) -> TokenNorms:
    """Norms at which a typical score is `_BEST_SCORE`, or comes as close to it as the bound allows."""
    U, Y = (torch.nn.functional.normalize(random_vectors(_NUM_PILOTS, ask, generator), dim=1) for _ in range(2))
    product, is_exact = min(1.0, bound**2 / 4), ask.profile.absolute_error == 0
    for _ in range(20):  # each step is up to a factor of 16, so 20 reach any scale
        tokens = TokenNorms.within(product, bound, is_exact)
        rows = [ask(tokens.u_norm * u[None], tokens.y_norm * y) for u, y in zip(U, Y, strict=True)]
        fit = fit_sigmoids(ask.rho, torch.cat([values for values, _ in rows]), max_heads, max(part for _, part in rows))
        t = fit.t[fit.t_error < 1]  # where heads are too close, or their t out of reach, it may be anything
        size = float(t.abs().clamp(max=_SATURATED).mean()) if len(t) else _SATURATED if fit.t.numel() else 0.0
        following = min(product * min(16.0, max(1 / 16, _BEST_SCORE / max(size, 1e-9))), bound**2 / 4)
        if _BEST_SCORE / 1.4 <= size <= 1.4 * _BEST_SCORE or following == product or following > FAR**2:
            break
        product = following
    return tokens


def random_vectors(num: int, ask: RepeatedTokens, generator: torch.Generator) -> Float[Tensor, "b d"]:
    """Gaussian vectors of the width that is asked about."""
    return torch.randn(num, len(ask.sum_v), generator=generator, dtype=torch.float64).to(ask.sum_v.device)


@dataclass(frozen=True, eq=False)
class HeadEquations:
    """r(v, W) = Σ_h (v_hᵀu)·σ(log ρ + uᵀW_h y) − F over many (u, y), divided by the size of F; a `System`.

    Notation: x = (v, W) flat, v (heads, d), W (heads, d, m). m is d, or 1 where all questions share one y: then W_h is
    the vector W_h y, and Y is a column of ones.
    """

    log_rho: Float[Tensor, " k"]
    U: Float[Tensor, "q d"]
    Y: Float[Tensor, "q m"]
    values: Float[Tensor, "q k"]
    num_heads: int

    @property
    def size(self) -> float:
        """The rms of F, which heights are divided by."""
        return float(self.values.square().mean().sqrt().clamp_min(1e-300))

    def residuals(self, xs: Float[Tensor, "p x"]) -> Float[Tensor, "p e"]:
        """r at p points."""
        return torch.stack([(self._sum(x) - self.values / self.size).flatten() for x in xs])

    def jacobian(self, x: Float[Tensor, " x"]) -> Float[Tensor, "e x"]:
        """∂r/∂x."""
        c, sigmoids = self._parts(x)
        slopes = c[:, :, None] * sigmoids * (1 - sigmoids)
        by_v = torch.einsum("hqk,qi->qkhi", sigmoids, self.U)
        by_W = torch.einsum("hqk,qi,qj->qkhij", slopes, self.U, self.Y)
        return torch.cat([by_v.flatten(2), by_W.flatten(2)], dim=2).flatten(0, 1)

    def pack(self, v: Float[Tensor, "h d"], W: Float[Tensor, "h d m"]) -> Float[Tensor, " x"]:
        """The unknowns as one vector."""
        return torch.cat([(v / self.size).flatten(), W.flatten()])

    def unpack(self, x: Float[Tensor, " x"]) -> tuple[Float[Tensor, "h d"], Float[Tensor, "h d m"]]:
        """v and W."""
        num_v = self.num_heads * self.U.shape[1]
        v, W = x[:num_v].reshape(self.num_heads, -1), x[num_v:]
        return v * self.size, W.reshape(self.num_heads, self.U.shape[1], self.Y.shape[1])

    def polish(self, v: Float[Tensor, "h d"], W: Float[Tensor, "h d m"]) -> Solution:
        """The nearest least-squares solution, with its covariance σ²·(JᵀJ)⁻¹; σ from what is left."""
        # Until rounding stops it: badly conditioned directions still move while ‖r‖, mostly noise, hardly falls.
        solver = LevenbergMarquardt(tolerance=0.0, least_decrease=_LEAST_DECREASE)
        outcome = iterate(solver, self, self.pack(v, W), max_steps=_MAX_STEPS)
        x = outcome.state.x
        v, W = self.unpack(x)
        freedom = max(1, self.values.numel() - len(x))
        residual = self.size * outcome.state.value / math.sqrt(freedom)
        J = self.jacobian(x)
        R = torch.linalg.qr(J).R
        R.diagonal().masked_fill_(R.diagonal() == 0, 1e-300)
        inverse = torch.linalg.solve_triangular(R, torch.eye(len(R), dtype=R.dtype, device=R.device), upper=True)
        spread = inverse * (outcome.state.value / math.sqrt(freedom))
        W_error = self.unpack(spread.square().sum(1))[1].flatten(1).sum(1).sqrt()
        draws = torch.randn(len(x), _NUM_RIVALS, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
        rivals = tuple(self.unpack(rival) for rival in (x[:, None] + spread @ draws.to(x.device)).mT)
        return Solution(v, W, residual, W_error, rivals)

    def _parts(self, x: Float[Tensor, " x"]) -> tuple[Float[Tensor, "h q"], Float[Tensor, "h q k"]]:
        v, W = self.unpack(x)
        t = torch.einsum("qi,hij,qj->hq", self.U, W, self.Y)
        return v / self.size @ self.U.mT, torch.sigmoid(self.log_rho + t[:, :, None])

    def _sum(self, x: Float[Tensor, " x"]) -> Float[Tensor, "q k"]:
        return torch.einsum("hq,hqk->qk", *self._parts(x))


@dataclass(frozen=True, eq=False)
class Solution:
    """Heads that satisfy equations up to `residual` (rms).

    `W_error` is the expected ‖Ŵ_h − W_h‖; `rivals` are random (v, W) that the answers allow about as well.
    """

    v: Float[Tensor, "h d"]
    W: Float[Tensor, "h d m"]
    residual: float
    W_error: Float[Tensor, " h"]
    rivals: tuple[tuple[Float[Tensor, "h d"], Float[Tensor, "h d m"]], ...]
