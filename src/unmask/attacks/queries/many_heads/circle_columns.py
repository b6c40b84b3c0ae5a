"""Columns of W from heads at one y: each by least squares beside y, then all of them and v together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.many_heads.circle_point import SPARE, Asked, EvenPart, PointHeads
from unmask.attacks.queries.resolution import NoPlane
from unmask.attacks.run import Run
from unmask.linalg.least_squares import Equations, polish_equations

_MORE = 1.3  # queries for each unknown of a fit
_SCORE = 2.0  # deviation of the scores of probes
_MOVED = 1.0  # of a score: what a step of y may change, so that Newton's method finds the way
_NUM_TRIES = 5
_FROM_V = 30.0  # times the noise of a value: what errors of v add to what a fit leaves
_NUM_FIRST = 4  # times as many values at y as at another token: its error is in every column
_NUM_TOGETHER = 2


@dataclass(eq=False)
class CircleColumns:
    """W_h p_j for an orthonormal basis p that begins with y.

        W_h p_j = (W_h(y + δ·p_j) − W_h y)/δ

    W_h(y + δ·p_j) has H·d unknowns, and is fitted to 1.3·H·d values at points where every score is of the order of
    two and u is long, from W_h y as a start. A second pass has δ = 1 and starts from what is known.

    Notation: `blocks` holds, for every j, δ, the scale of y + δ·p_j, what was asked there, and the fit; j = 0 is y.
    Limits: δ is such that scores move by about one, so the first pass loses 1/δ, a digit or two.
    Cost: 1.3·H·d queries for each column and pass.
    """

    even: EvenPart
    point: PointHeads
    run: Run
    frame: Float[Tensor, "d d"] = field(init=False)
    blocks: list[_Block] = field(init=False)

    def __post_init__(self) -> None:
        y, width = self.point.y, len(self.point.y)
        aside = torch.randn(width, width - 1, generator=self.run.generator, dtype=torch.float64)
        frame = torch.linalg.qr(torch.cat([y[:, None].cpu(), aside], dim=1)).Q.T.to(y)
        frame[0] = y
        self.frame = frame
        self.blocks = [_Block(1.0, 1.0, self.point.asked, self.point.w)]

    @property
    def W(self) -> Float[Tensor, "h d d"]:
        """From images of the basis."""
        w0 = self.blocks[0].w
        images = [w0, *((block.norm * block.w - w0) / block.step for block in self.blocks[1:])]
        return torch.stack(images, dim=2) @ self.frame

    def learn(self) -> None:
        """All columns, one after the other."""
        size = self.point.longest * float(self.point.w.norm(dim=1).max()) / math.sqrt(len(self.point.y))
        for j in range(1, len(self.frame)):
            self.run.progress("columns of W", j, len(self.frame))
            self.blocks.append(self._follow(self.frame[j], min(1.0, _MOVED / size)))

    def learn_again(self) -> None:
        """The same at y + p_j, where scores are predicted, and at y; a column that does not fit stays as it was."""
        W = self.W
        first = self.blocks[0]
        U = torch.cat([choose_probes(self.run, first.w, self.point.longest) for _ in range(_NUM_FIRST)])
        U, values = torch.cat([first.asked.U, U]), torch.cat([first.asked.values, self.even(U, self.point.y)])
        self.blocks[0] = _Block(1.0, 1.0, Asked(U, values), first.w)
        for j in range(1, len(self.frame)):
            self.run.progress("columns of W again", j, len(self.frame))
            block, explains = self._fit(self.point.y + self.frame[j], W @ (self.point.y + self.frame[j]), 1.0)
            self.blocks[j] = block if explains else self.blocks[j]

    def refine_together(self) -> Float[Tensor, "h d"]:
        """v and all W_h y_j from all values at once; no further query.

            min over v and all w_j of Σ_j ‖G(U_j; v, w_j) − values_j‖²

        Each Gauss–Newton step solves for v what the w_j leave of it (the Schur complement), then for the w_j.
        """
        v, left = self.point.v, self._left(self.point.v, self.blocks)
        for _ in range(_NUM_TOGETHER):
            moved_v, moved = self._step(v)
            after = self._left(moved_v, moved)
            if not after < left:  # the start was too far away for a whole step
                break
            v, self.blocks, left = moved_v, moved, after
        return v

    def _left(self, v: Float[Tensor, "h d"], blocks: list[_Block]) -> float:
        """The sum of squares of what all values leave."""
        return sum(float(_residual(block, v).square().sum()) for block in blocks)

    def _step(self, v: Float[Tensor, "h d"]) -> tuple[Float[Tensor, "h d"], list[_Block]]:
        """One Gauss–Newton step."""
        gram = torch.zeros(v.numel(), v.numel(), dtype=v.dtype, device=v.device)
        slope = torch.zeros(v.numel(), dtype=v.dtype, device=v.device)
        parts = []
        for block in self.blocks:
            by_v, by_w = _derivatives(block, v)
            rest = _residual(block, v)
            Q, R = torch.linalg.qr(by_w)
            left_v = by_v - Q @ (Q.T @ by_v)
            gram += left_v.T @ left_v
            slope += left_v.T @ rest
            parts.append((R, Q.T @ rest, Q.T @ by_v))
        step = -torch.linalg.lstsq(gram, slope[:, None], driver="gelsd", rcond=1e-14).solution[:, 0]
        moves = [-torch.linalg.solve_triangular(R, (r + G @ step)[:, None], upper=True)[:, 0] for R, r, G in parts]
        moved = [block.moved(move) for block, move in zip(self.blocks, moves, strict=True)]
        return v + step.reshape(v.shape), moved

    def _follow(self, p: Float[Tensor, " d"], step: float) -> _Block:
        for _ in range(_NUM_TRIES):
            block, explains = self._fit(self.point.y + step * p, self.point.w, step)
            if explains:
                return block
            step *= -0.4
        raise NoPlane("a column of W cannot be followed from one token to the next")

    def _fit(self, y: Float[Tensor, " d"], w: Float[Tensor, "h d"], step: float) -> tuple[_Block, bool]:
        """The heads at y/|y|, from directions w at about y; and whether they explain the values."""
        norm = float(y.norm())
        U = choose_probes(self.run, w / norm, self.point.longest)
        values = self.even(U, y / norm)
        start = (w / norm).flatten()
        found = polish_equations(_direction_equations(U, values, self.point.v), start, max_steps=15, damping=1e-4)
        explains = found.deviation <= SPARE * _FROM_V * self.even.noise(U, values)
        return _Block(step, norm, Asked(U, values), found.x.reshape(w.shape)), explains


@dataclass(frozen=True, eq=False)
class _Block:
    step: float
    norm: float  # of y + δ·p
    asked: Asked
    w: Float[Tensor, "h d"]

    def moved(self, by: Float[Tensor, " x"]) -> _Block:
        return _Block(self.step, self.norm, self.asked, self.w + by.reshape(self.w.shape))


def choose_probes(run: Run, w: Float[Tensor, "h d"], longest: float, num: int | None = None) -> Float[Tensor, "q d"]:
    """Points at which all scores are of the order of two, and which are otherwise as long as they may be."""
    num = int(_MORE * w.numel()) + 48 if num is None else num
    drawn = torch.randn(num, len(w) + w.shape[1], generator=run.generator, dtype=torch.float64).to(w)
    U = _SCORE * drawn[:, : len(w)] @ torch.linalg.pinv(w, rtol=1e-6).T
    aside = drawn[:, len(w) :]
    _, values, right = torch.linalg.svd(w, full_matrices=False)
    span = right[values > 1e-6 * values[0]]
    aside = aside - (aside @ span.T) @ span
    size = aside.norm(dim=1, keepdim=True)
    room = ((0.9 * longest) ** 2 - U.square().sum(1, keepdim=True)).clamp_min(0).sqrt()
    U = U + aside / size.clamp_min(1e-12) * room * (size > 1e-6)
    return U * (0.99 * longest / U.norm(dim=1, keepdim=True)).clamp(max=1)


def _direction_equations(U: Float[Tensor, "q d"], values: Float[Tensor, " q"], v: Float[Tensor, "h d"]) -> Equations:
    """Unknowns: w (heads, d), where v is known."""
    c = U @ v.T

    def equations(x: Float[Tensor, " x"]) -> tuple[Tensor, Tensor]:
        share = 0.5 * torch.tanh(U @ x.reshape(v.shape).T / 2)
        slope = c * (0.25 - share.square())
        return (c * share).sum(1) - values, (slope[:, :, None] * U[:, None]).flatten(1)

    return equations


def _residual(block: _Block, v: Float[Tensor, "h d"]) -> Float[Tensor, " q"]:
    """G − values at one y."""
    U, values = block.asked
    return ((U @ v.T) * 0.5 * torch.tanh(U @ block.w.T / 2)).sum(1) - values


def _derivatives(block: _Block, v: Float[Tensor, "h d"]) -> tuple[Float[Tensor, "q x"], Float[Tensor, "q x"]]:
    """∂G/∂v and ∂G/∂w at one y."""
    U = block.asked.U
    share, c = 0.5 * torch.tanh(U @ block.w.T / 2), U @ v.T
    by_v = (share[:, :, None] * U[:, None]).flatten(1)
    by_w = ((c * (0.25 - share.square()))[:, :, None] * U[:, None]).flatten(1)
    return by_v, by_w
