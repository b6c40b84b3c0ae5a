"""The loss whose minimum the paper calls the data, with gradient and Hessian in closed form.

    L(X) = ‖F(X)·X·V − B‖² + γ‖X‖²,   F = D(X)⁻¹ exp(X W Xᵀ),   D(X) = diag(exp(X W Xᵀ)·1)

Names of the paper, a row for each token i: u = exp(X W Xᵀ), α = u·1, f = u/α (the rows of F), h = X V, c = f h − B.

    ∇L  = 2(Fᵀq + E Y + Eᵀ Z + γX)
    ∇²L = 2(JᵀJ + Q + γI),   Q = Σ_i ∇²(q_iᵀx̄_i) with q held still

Both 2JᵀJ and 2Q have one shape, N + Nᵀ, where the block ∂x_m ∂x_l is

    N_ml = Σ_i f_im z_i (s_mil z_i + f_il v_mi)ᵀ  +  terms of the query i = m  +  δ_ml · terms of a block

The first sum is one product of matrices for each m; `_gauss_newton` and `_curvature` say what s, v and the terms are.

Notation: rows are tokens; x̄_i = Σ_k f_ik x_k, r_im = x_m − x̄_i, y_k = W x_k, z_i = Wᵀ x_i, q_i = V c_i, M = V Vᵀ,
e_ik = f_ik q_iᵀr_ik (rows of E add up to 0), ȳ_i = Σ_k f_ik y_k, w_i = Σ_k e_ik y_k, A_i = Cov_i Wᵀ. Blocks are indexed
(m, a; l, b): token, coordinate. vec(X) is X row by row, the paper's vec of its columns.
Limits: L is not convex, and its minimum is the data only where γ is 0 and the pre-image is unique.
Cost: gradient and Hessian-vector product n²d + nd²; Hessian n³d² + nd³ and (nd)² numbers.
Source: arXiv 2310.12462, Definition 4.1 (c), 4.2 (H1 to H4). docs/outputs-paper.md has the formulas by case.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.linalg.softmax_attention import AttentionMap, AttentionPoint

_STRIP = 2**18  # numbers of a right factor at a time: two megabytes stay in the cache
_TILE = 128  # rows and columns that are transposed at a time, for the same reason


@dataclass(frozen=True)
class AttentionLoss:
    """L for one layer (W and the mask in `map`, V) and what was seen of it (B); γ is the paper's regulariser."""

    map: AttentionMap
    V: Float[Tensor, "d e"]
    B: Float[Tensor, "n e"]
    gamma: float = 0.0

    def __call__(self, X: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
        """L at one input or at many."""
        c = self.map(X) @ self.V - self.B
        return c.square().sum((-2, -1)) + self.gamma * X.square().sum((-2, -1))

    def at(self, X: Float[Tensor, "n d"]) -> LossPoint:
        """The loss and its derivatives at one input."""
        return LossPoint(self, X)


@dataclass(frozen=True)
class LossPoint:
    """The loss at X; each part is computed when it is first asked for."""

    loss: AttentionLoss
    X: Float[Tensor, "n d"]

    # The paper's names

    @cached_property
    def attention(self) -> AttentionPoint:
        """The layer without V."""
        return self.loss.map.at(self.X)

    @cached_property
    def u(self) -> Float[Tensor, "n n"]:
        """exp(X W Xᵀ), 0 where masked; overflows for scores above 709, so nothing below uses it."""
        scores = (self.attention.Z @ self.X.mT).exp()
        return scores.tril() if self.loss.map.causal else scores

    @cached_property
    def alpha(self) -> Float[Tensor, " n"]:
        """α = u·1, the diagonal of D(X)."""
        return self.u.sum(-1)

    @property
    def f(self) -> Float[Tensor, "n n"]:
        """α⁻¹u, by a softmax that does not overflow."""
        return self.attention.F

    @cached_property
    def h(self) -> Float[Tensor, "n e"]:
        """X V."""
        return self.X @ self.loss.V

    @cached_property
    def c(self) -> Float[Tensor, "n e"]:
        """f h − B: what the data do not explain."""
        return self.f @ self.h - self.loss.B

    @property
    def rounded_size(self) -> float:
        """The sizes that rounding of ‖c‖ goes with: of B, of the sums f h, and of these times scores, which make f."""
        sizes = self.X.abs()
        scores = (sizes @ self.loss.map.W.abs() @ sizes.mT).amax(-1, keepdim=True)
        return float(((1 + scores) * (self.f @ sizes @ self.loss.V.abs()) + self.loss.B.abs()).norm())

    # Value and gradient

    @cached_property
    def value(self) -> float:
        """L(X)."""
        return float(self.c.square().sum() + self.loss.gamma * self.X.square().sum())

    @cached_property
    def gradient(self) -> Float[Tensor, "n d"]:
        """∇L = 2(Jᵀq + γX)."""
        return 2 * (self.attention.vjp(self.q) + self.loss.gamma * self.X)

    @cached_property
    def q(self) -> Float[Tensor, "n d"]:
        """Rows q_i = V c_i."""
        return self.c @ self.loss.V.mT

    @cached_property
    def E(self) -> Float[Tensor, "n n"]:
        """e_ik = f_ik (q_iᵀx_k − q_iᵀx̄_i): how L moves with the scores, halved."""
        return self.attention.weights_jvp(self.q @ self.X.mT)

    # Second derivatives

    def hessian(self) -> Float[Tensor, "nd nd"]:
        """∇²L."""
        return self._symmetric(_gauss_newton(self) + _curvature(self), self.loss.gamma)

    def gauss_newton(self) -> Float[Tensor, "nd nd"]:
        """2 JᵀJ, the Hessian where c and γ are 0, without J."""
        return self._symmetric(_gauss_newton(self))

    def curvature(self) -> Float[Tensor, "nd nd"]:
        """2 Q = ∇²L − 2JᵀJ − 2γI: what makes L non-convex."""
        return self._symmetric(_curvature(self))

    def _symmetric(self, half: _Half, gamma: float = 0.0) -> Float[Tensor, "nd nd"]:
        """N + Nᵀ + 2γI."""
        H = _add_transpose(_strips(self.attention, half))
        H.diagonal().add_(2 * gamma)
        return H


@dataclass(frozen=True)
class _Half:
    """What N is made of: N_ml = Σ_i f_im z_i (s_mil z_i + f_il v_mi)ᵀ + Σ_t left_t∘right_t + δ_ml block_m.

    A term that is its own transpose is here once, any other one twice, so that N + Nᵀ is twice their sum.
    """

    s: Float[Tensor, "m i l"]
    v: Float[Tensor, "m i d"]
    left: tuple[Tensor, ...]  # of t: (m, a, l), or (m, 1, l) where it is the same for all a
    right: tuple[Tensor, ...]  # of t: (m, a, b), or with 1 for m or a
    block: Float[Tensor, "m d d"]

    def __add__(self, other: _Half) -> _Half:
        left, right = self.left + other.left, self.right + other.right
        return _Half(self.s + other.s, self.v + other.v, left, right, self.block + other.block)


def _gauss_newton(point: LossPoint) -> _Half:
    """JᵀJ, from J_im = f_im (I + r_im z_iᵀ) + δ_im A_i and M between the two."""
    at, F, X, Z = point.attention, point.f, point.X, point.attention.Z
    M = point.loss.V @ point.loss.V.mT
    XM, A = X @ M, at.own_terms
    AM = A.mT @ M  # A_mᵀM
    MR = XM[:, None] - (at.mixed @ M)[None]  # M r_im, as (m, i, d)
    # r_imᵀM r_il = (M r_im)ᵀx_l − (M r_im)ᵀx̄_i
    rMr = MR @ X.mT - (MR * at.mixed).sum(-1, keepdim=True)
    moved = F[:, None] * (AM @ (X.mT[None] - at.mixed[:, :, None]))  # f_ml A_mᵀM r_ml, as (m, a, l)
    return _Half(
        s=rMr * F,
        v=2 * MR,
        left=((F.mT @ F)[:, None], 2 * F[:, None], 2 * moved),
        right=(M[None], AM, Z[:, None]),
        block=AM @ A,  # the query moves twice: A_mᵀM A_m
    )


def _curvature(point: LossPoint) -> _Half:
    """Q by the paper's cases; for a query i, H4 holds for every m and l, the others add to it."""
    F, E, q, Y, Z = point.f, point.E, point.q, point.attention.Y, point.attention.Z
    n, d = point.X.shape
    means, w = F @ Y, E @ Y  # ȳ_i, w_i
    offsets = Y.mT[None] - means[:, :, None]  # y_l − ȳ_m, as (m, a, l)
    return _Half(
        # H4, m ≠ l: −(f_im e_il + e_im f_il) z_i z_iᵀ − f_im f_il (q_i z_iᵀ + z_i q_iᵀ)
        s=(-2 * E).expand(n, n, n),
        v=(-2 * q).expand(n, n, d),
        # H2, m = i, and its transpose H3, l = i: (y_l − ȳ_i)(e_il z_i + f_il q_i)ᵀ − f_il w_i z_iᵀ + e_il W
        left=(2 * (offsets * E[:, None] - w[:, :, None] * F[:, None]), 2 * offsets * F[:, None], 2 * E[:, None]),
        right=(Z[:, None], q[:, None], point.loss.map.W[None]),
        block=(
            # H4, m = l: + Σ_i e_im z_i z_iᵀ + f_im (q_i z_iᵀ + z_i q_iᵀ)
            (E.mT[:, :, None] * Z + 2 * F.mT[:, :, None] * q).mT @ Z
            # H1, m = l = i: + Σ_k e_ik y_k y_kᵀ − ȳ_i w_iᵀ − w_i ȳ_iᵀ
            + (E[:, :, None] * Y).mT @ Y
            - 2 * means[:, :, None] * w[:, None]
        ),
    )


def _strips(at: AttentionPoint, half: _Half) -> Float[Tensor, "nd nd"]:
    """N, a few rows of blocks at a time."""
    n, d = at.X.shape
    N = at.X.new_empty(n, d, n * d)
    queries = at.F.mT[:, None] * at.Z.mT  # f_im z_ia, as (m, a, i)
    left = torch.stack([term.expand(n, d, n) for term in half.left], -1)  # (m, a, l, t)
    right = torch.stack([term.expand(n, d, d) for term in half.right], -2)  # (m, a, t, b)
    for rows in _slices(n, max(1, _STRIP // (n * n * d))):
        keys = half.s[rows, :, :, None] * at.Z[:, None]
        keys.addcmul_(at.F[:, :, None], half.v[rows, :, None])  # (m, i, l, b)
        strip = N[rows]
        torch.bmm(queries[rows], keys.view(len(keys), n, n * d), out=strip)
        strip.view(-1, n, d).baddbmm_(left[rows].flatten(0, 1), right[rows].flatten(0, 1))
    token = torch.arange(n, device=at.X.device)
    N.view(n, d, n, d)[token, :, token] += half.block
    return N.view(n * d, n * d)


def _add_transpose(N: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
    """N + Nᵀ, in place; a tile and its mirror image fit the cache."""
    tiles = _slices(len(N), _TILE)
    for number, rows in enumerate(tiles):
        for columns in tiles[number:]:
            total = N[rows, columns] + N[columns, rows].mT
            N[rows, columns] = total
            N[columns, rows] = total.mT
    return N


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]
