"""Few atoms behind Adam's steps: a Gaussian model of sparse combinations, seen through `adam_channel.py`.

    u_ij = Σ_{t in S} x_ti·c_tj + what S does not hold,   c_tj ~ N(0, γ_t·σ_j²·Ω_j),   D_ij = F(u_ij) + e_ij

The part not held yet has the dictionary's second moments: ρ of its white part, and its first axes as atoms.

    sites      ← D_ij replaced by a Gaussian measurement of u_ij, by its moments under the cavity (EP)
    posterior  ← of the coefficients c_j in n·P dimensions for each column j; ψ_j = K_j⁻¹·y_j, K_j the covariance of y_j
    γ, ρ, σ, Ω ← fixed points of the evidence
    rank       ← the gradient of the evidence by γ_t: |x_tᵀψ|² over x_tᵀ·(Σ_j K_j⁻¹)·x_t is χ² if t does not occur

Notation: dictionary (v, d); m columns, P profiles, n atoms chosen; tensors are (m, d, P) and (m, d, P, P) in units of
σ_j; G the sites' information in coordinates where Ω is 1.
Limits: n·P well below d. EP has no guarantee: what is found must be judged by what it leaves of D (`misfit`).
Cost: v·d·(d + m·P) for a ranking, m·(n·P)³ + m·d·(n·P)² for a posterior; memory m·(n·P)². In float64.
Source: expectation propagation, Minka 2001; fixed points as in Tipping, Sparse Bayesian learning, JMLR 2001.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from unmask.linalg.adam_channel import AdamSteps, guess_scales, posterior_moments
from unmask.linalg.atoms import chi_square_score

_NUM_AXES = 16  # of the dictionary's second moments that are not white
_NUM_SAMPLED = 8  # columns that the mean of K⁻¹ is taken over
_ENOUGH = 24  # atoms from which scales, and what is not explained, are learnt for each column
_NEIGHBOURS = 16  # atoms nearest to a chosen one that may stand in its place
_AT_ONCE = 2**14  # atoms of the dictionary: a temporary of (2**14, d)
_COLUMNS_AT_ONCE = 4
_LIKELY, _SKETCH = 2**11, 64  # atoms ranked exactly; directions of a sketch, which errs by a sixth
_MEDIAN = 0.6745  # of a normal variable's size
_JITTER = 1e-14  # of a covariance, so that its root exists
_FIRST_NODES = (48, 32, 32)
_WORSE = 2.0  # times the misfit of the better columns
_DOUBT = 0.3  # what is not explained at least, when sites are forgotten


class SparsePosterior:
    """The atoms chosen, their weights, the sites and the posterior. `layers` are the columns of each layer."""

    def __init__(
        self,
        dictionary: Float[Tensor, "v d"],
        measured: Float[Tensor, "d m"],
        sigma: Float[Tensor, "d m"],
        steps: AdamSteps,
        layers: Sequence[slice],
    ) -> None:
        self.steps, self.layers, self.num_atoms = steps, layers, len(dictionary)
        self.measured, self.sigma = measured.T.contiguous(), sigma.T.contiguous()
        self.sizes = (
            torch.linalg.vector_norm(dictionary, dim=0, dtype=torch.float64).clamp_min(1e-30) / len(dictionary) ** 0.5
        )
        common = self._split_moments(dictionary)
        self.dictionary = torch.cat([dictionary, common.to(dictionary)])
        self._axes = list(range(self.num_atoms, self.num_atoms + len(common)))
        self.chosen: list[int] = []
        self.weights = self.measured.new_ones(len(common))  # γ of the axes, then of the atoms
        self.unexplained = self.measured.new_ones(len(self.measured))
        self._begin_scales(guess_scales(steps, measured, sigma, self.sizes, layers))
        self._mean = self.measured.new_zeros(*self.measured.shape, steps.num_profiles)
        self._cov = self._mean.new_zeros(*self._mean.shape, steps.num_profiles)
        self._precision, self._shift = torch.zeros_like(self._cov), self._mean.clone()
        self._begin_sites(torch.ones_like(self.unexplained, dtype=torch.bool))

    def _split_moments(self, dictionary: Float[Tensor, "v d"]) -> Float[Tensor, "a d"]:
        """The axes of the dictionary's moments beyond a white part, whose size is kept."""
        moments = (dictionary.T @ dictionary).double() / len(dictionary)
        values, axes = torch.linalg.eigh(moments / self.sizes[:, None] / self.sizes)
        count = min(_NUM_AXES, len(values) // 4)
        self._white = float(values[:-count].mean())
        return (axes[:, -count:] * (values[-count:] - self._white).clamp_min(0).sqrt()).T * self.sizes

    def _begin_scales(self, scales: Float[Tensor, "m 3"]) -> None:
        drift = self.steps.drift
        self.scales = scales[:, 0].clone()
        self.profile_cov = scales.new_zeros(len(scales), len(drift) + 1, len(drift) + 1)
        shape, lean = 0.2 ** torch.arange(len(drift)).to(drift), scales[:, 1] / drift[0]
        self.profile_cov[:, 0, 0] = 1
        self.profile_cov[:, 1, 0] = self.profile_cov[:, 0, 1] = lean
        self.profile_cov[:, 1:, 1:] = torch.diag_embed((scales[:, 2:] / (drift * shape).norm() * shape).square())
        self.profile_cov[:, 1, 1] += lean.square()
        self._root = self._root_of_profiles()

    def _begin_sites(self, is_new: Bool[Tensor, " m"]) -> None:
        """Sites of some columns from the prior of what is chosen."""
        held = self.dictionary[self._axes + self.chosen].double().T * self.weights.sqrt()
        self._mean[is_new] = 0
        self._cov[is_new] = held.square().sum(1)[:, None, None] * self.profile_cov[is_new, None]
        sites = self._precision, self._shift
        self.update_sites(_FIRST_NODES, 1.0)
        self._precision[~is_new], self._shift[~is_new] = (part[~is_new] for part in sites)
        self.solve()

    def _root_of_profiles(self) -> Float[Tensor, "m p p"]:
        return torch.linalg.cholesky(
            self.profile_cov + _JITTER * torch.eye(self.steps.num_profiles).to(self.profile_cov)
        )

    def _not_held(self) -> Float[Tensor, "m d p p"]:
        """The variance of what no chosen atom explains."""
        white = self.unexplained[:, None] * self._white * self.sizes.square()
        return white[..., None, None] * self.profile_cov[:, None]

    def update_sites(self, nodes: Sequence[int], damping: float) -> None:
        """Gaussian measurements anew from the moments under the cavities, in coordinates where the cavity is white."""
        m, d, p = self._mean.shape
        prior, unit = self._cov + self._not_held(), self.scales[:, None, None]
        mean, cov = posterior_moments(
            self.steps,
            self.measured.flatten(),
            self.sigma.flatten(),
            (self._mean * unit).reshape(-1, p),
            (prior * unit[..., None].square()).reshape(-1, p, p),
            nodes,
        )
        mean, cov = mean.reshape(m, d, p) / unit, cov.reshape(m, d, p, p) / unit[..., None].square()
        whiten = torch.linalg.inv(torch.linalg.cholesky(prior))
        values, axes = _diagonalise(whiten @ cov @ whiten.mT)
        values = values.clamp_min(1e-13)
        gain = (1 / values - 1).clamp_min(1e-6)  # the channel may widen a direction: then it tells nothing
        moved = (axes.mT @ whiten @ (mean - self._mean)[..., None])[..., 0]
        moved = (moved / values / gain).clamp(-50, 50) * (gain > 1e-5)
        frame = whiten.mT @ axes
        precision = (frame * gain[..., None, :]) @ frame.mT
        shift = (precision @ self._mean[..., None])[..., 0] + (frame @ (gain * moved)[..., None])[..., 0]
        self._precision = damping * precision + (1 - damping) * self._precision
        self._shift = damping * shift + (1 - damping) * self._shift

    def solve(self) -> None:
        """The posterior of the coefficients given the sites, the cavities, and ψ."""
        (m, d, p), root = self._mean.shape, self._root[:, None]
        eye = torch.eye(p).to(root)
        right = torch.cat([self._precision, self._shift[..., None]], -1)
        both = torch.linalg.solve(eye + self._precision @ self._not_held(), right)
        information, pull = _symmetric(both[..., :p]), both[..., p:]
        self._held = held = self.dictionary[self._axes + self.chosen].double().T * self.weights.sqrt()
        self._information = root.mT @ information @ root
        n = held.shape[1]
        system = held.new_empty(m, p, n, p, n)
        for i in range(p):
            for j in range(i, p):
                system[:, i, :, j] = system[:, j, :, i] = (held.T * self._information[:, None, :, i, j]) @ held
        factor = torch.linalg.cholesky(system.reshape(m, p * n, p * n) + torch.eye(p * n).to(held))
        right = (held.T @ (root.mT @ pull)[..., 0]).mT.reshape(m, p * n, 1)
        self._coefficients = torch.cholesky_solve(right, factor).reshape(m, p, n)
        self._spread = torch.cholesky_inverse(factor).reshape(m, p, n, p, n)
        fit = root @ (held @ self._coefficients.mT)[..., None]
        held_cov = held.new_empty(m, d, p, p)
        for i in range(p):
            for j in range(i, p):
                held_cov[..., i, j] = held_cov[..., j, i] = ((held @ self._spread[:, i, :, j]) * held).sum(-1)
        held_cov = root @ held_cov @ root.mT
        cavity = torch.linalg.solve(eye - held_cov @ information, torch.cat([held_cov, fit - held_cov @ pull], -1))
        self._cov, self._mean = _symmetric(cavity[..., :p]) + _JITTER * eye, cavity[..., p]
        self._fit, self._psi = fit[..., 0], (pull - information @ fit)[..., 0]
        self._inner = information - information @ held_cov @ information

    def learn(self) -> None:
        """ρ of layers, later of columns, and the weights γ by the evidence; the tokens' sum to what is explained."""
        unit = (self._white * self.sizes.square())[:, None, None] * self.profile_cov[:, None]
        used = torch.einsum("mdp,mdpq,mdq->m", self._psi, unit, self._psi)
        room = torch.einsum("mdpq,mdqp->m", self._inner, unit).clamp_min(1e-12)
        for layer in self.layers:
            grow = (used[layer].sum() / room[layer].sum()).sqrt().clamp(0.2, 2)
            if len(self.chosen) >= _ENOUGH:  # a column whose signs are wrong must not hold back the others
                grow = (used[layer] / room[layer]).sqrt().clamp(0.2, 2)
            self.unexplained[layer] = (self.unexplained[layer] * grow).clamp(1e-9, 1.5)
        known = 1 - self._spread.flatten(1, 2).flatten(2).diagonal(dim1=1, dim2=2)
        known = known.sum(0).reshape(-1, len(self.weights)).sum(0).clamp_min(1e-9)
        grow = (self._coefficients.square().sum((0, 1)) / known).clamp(0.1, 10)
        self.weights = (self.weights * grow).clamp_min(1e-8)
        first = len(self._axes)
        if self.chosen:
            share = max(0.05, 1 - float(self.unexplained.mean()))
            self.weights[first:] *= share / self.weights[first:].sum()
        if len(self.chosen) >= _ENOUGH:
            self._learn_scales(first)

    def _learn_scales(self, first: int) -> None:
        """σ_j of each column, and Ω, changed alike in all columns of a layer, by EM over the atoms."""
        ours = self._coefficients[..., first:]
        variance = self._spread.diagonal(dim1=2, dim2=4)[..., first:].mean(-1)
        moments = variance + torch.einsum("mpn,mqn->mpq", ours, ours) / ours.shape[2]
        grow = moments[:, 0, 0].sqrt().clamp(0.5, 2)
        for layer in self.layers:
            mean = (moments[layer] / moments[layer, :1, :1]).mean(0)
            self.profile_cov[layer] = self._root[layer] @ mean @ self._root[layer].mT
        self._root = self._root_of_profiles()
        self.scales, grow = self.scales * grow, grow[:, None, None]
        self._mean, self._shift = self._mean / grow, self._shift * grow
        self._cov, self._precision = self._cov / grow[..., None].square(), self._precision * grow[..., None].square()

    def rank(self) -> Float[Tensor, " v"]:
        """Scores of the likely atoms by the evidence's gradient: about normal if an atom does not occur; others −∞."""
        m, p = len(self.measured), self.steps.num_profiles
        pull = (self._root[:, None].mT @ self._psi[..., None])[..., 0]
        pull = pull.permute(1, 0, 2).flatten(1).to(self.dictionary)  # (d, m·p)
        some = range(0, m, max(1, m // _NUM_SAMPLED))
        inverse = sum((self._inverse(j, range(p)) for j in some), self.measured.new_zeros(())) * (m / len(some))
        likely = self._find_likely(pull, inverse)
        rows = self.dictionary[likely]
        gains = (rows @ pull).square().sum(1).double()
        sizes = ((rows @ inverse.to(rows)) * rows).sum(1).double().clamp_min(1e-30)
        scores = self.measured.new_full((self.num_atoms,), -torch.inf)
        scores[likely] = chi_square_score(gains / sizes * m, m)
        scores[self.chosen] = -torch.inf
        return scores

    def _find_likely(self, pull: Float[Tensor, "d k"], inverse: Float[Tensor, "d d"]) -> Int[Tensor, " l"]:
        """Atoms whose rank may be high, by a sketch of the inverse: its quadratic form costs d/`_SKETCH` times more."""
        if self.num_atoms <= _LIKELY:
            return torch.arange(self.num_atoms, device=self.dictionary.device)
        values, axes = torch.linalg.eigh(inverse)
        draw = torch.randn(len(values), _SKETCH, generator=torch.Generator().manual_seed(0)).to(inverse)
        sketch = ((axes * values.clamp_min(0).sqrt()) @ draw).to(pull)
        parts = self.dictionary[: self.num_atoms].split(_AT_ONCE)
        ratios = [(rows @ pull).square().sum(1) / (rows @ sketch).square().sum(1).clamp_min(1e-30) for rows in parts]
        return torch.cat(ratios).topk(_LIKELY).indices

    def _inverse(self, column: int, profiles: Sequence[int] = (0,)) -> Float[Tensor, "d d"]:
        """K⁻¹ of a column, summed over some profiles of it."""
        factor = torch.linalg.cholesky(self._spread[column].flatten(0, 1).flatten(1))
        total = torch.diag(self._information[column].diagonal(dim1=1, dim2=2)[:, list(profiles)].sum(1))
        for profile in profiles:
            information = self._information[column, :, profile]
            held = torch.cat([information[:, i, None] * self._held for i in range(self.steps.num_profiles)], 1) @ factor
            total -= held @ held.T
        return total

    def own_scores(self) -> Float[Tensor, " n"]:
        """Of each chosen atom, all others given: its pull b/v on u_0, where the data's precision is 1/v − 1."""
        first, m = len(self._axes), len(self.measured)
        variance = self._spread[:, 0, :, 0].diagonal(dim1=1, dim2=2)[:, first:]
        pull = self._coefficients[:, 0, first:] / variance
        return chi_square_score((pull.square() / (1 / variance - 1).clamp_min(1e-9)).sum(0), m)

    def compare_rivals(self) -> tuple[Float[Tensor, " n"], Int[Tensor, " n"]]:
        """The log-evidence of each chosen atom less that of the best atom near it in its place, and which that is."""
        taken = torch.tensor(self.chosen, dtype=torch.long, device=self.dictionary.device)
        near = torch.cat([taken[:, None], self._neighbours(taken)], 1)  # itself first
        rows, weights = self.dictionary[near].double(), self.weights[len(self._axes) :, None]
        total = rows.new_zeros(near.shape)
        for column in range(len(self.measured)):
            pulls = rows @ (self._root[column].T @ self._psi[column].T)[0]
            seen = rows @ self._inverse(column)
            own, cross = (seen * rows).sum(-1), (seen @ rows[:, 0, :, None])[..., 0]
            without = cross / (1 / weights - own[:, :1]).clamp_min(1e-9)  # the chosen one taken out
            pulls, own = pulls + without * pulls[:, :1], own + without * cross
            total += 0.5 * (pulls.square() / (1 / weights + own) - torch.log1p(weights * own))
        best = total[:, 1:].max(1)
        return total[:, 0] - best.values, near[:, 1:].gather(1, best.indices[:, None])[:, 0]

    def _neighbours(self, atoms: Int[Tensor, " n"]) -> Int[Tensor, "n k"]:
        """The atoms nearest in direction that are not chosen, coordinates brought to one size."""
        sizes = self.sizes.to(self.dictionary)
        ours = normalize(self.dictionary[atoms] / sizes, dim=1)
        parts = self.dictionary[: self.num_atoms].split(_AT_ONCE)
        nearness = torch.cat([ours @ normalize(rows / sizes, dim=1).T for rows in parts], 1)
        nearness[:, atoms] = -1.0
        return nearness.topk(min(_NEIGHBOURS, self.num_atoms - len(atoms)), dim=1).indices

    def misfit(self) -> float:
        """What the chosen atoms leave of the steps: the median of |D − F(u)| over its error, 1 if it is normal."""
        return float(self._left().median()) / _MEDIAN

    def column_misfits(self) -> Float[Tensor, " m"]:
        """The same for each column."""
        return self._left().median(1).values / _MEDIAN

    def _left(self) -> Float[Tensor, "m d"]:
        predicted, _ = self.steps(self._fit * self.scales[:, None, None])
        return ((self.measured - predicted) / self.sigma).abs()

    def largest_unexplained(self) -> float:
        """ρ of the layer that is explained least."""
        return max(float(self.unexplained[layer].mean()) for layer in self.layers)

    def replace_atoms(self, kept: Sequence[int], added: Sequence[int]) -> None:
        """Keep the atoms at these places of `chosen`, add others at half the usual weight, and solve."""
        first = len(self._axes)
        usual = float(self.weights[first:].median()) if len(self.chosen) > 8 else 0.03
        places = [*range(first), *(first + place for place in kept)]
        self.weights = torch.cat([self.weights[places], self.weights.new_full((len(added),), 0.5 * usual)])
        self.chosen = [self.chosen[place] for place in kept] + list(added)
        self.solve()

    def begin_again(self, kept: Sequence[int]) -> None:
        """Keep the atoms at these places of `chosen` and forget sites that may have settled at wrong signs.

        Those are the sites of columns that are explained worse than others, or all if none is.
        """
        misfits = self.column_misfits()
        is_bad = misfits > _WORSE * misfits.quantile(0.25)
        is_bad = is_bad | ~is_bad.any()
        self.replace_atoms(kept, ())
        self.unexplained[is_bad] = self.unexplained[is_bad].clamp_min(_DOUBT)
        self._begin_sites(is_bad)


def _diagonalise(matrices: Float[Tensor, "m d p p"]) -> tuple[Float[Tensor, "m d p"], Float[Tensor, "m d p p"]]:
    """Eigenvalues and axes, some columns at a time: for all at once CUDA asks for gigabytes."""
    if matrices.device.type == "cpu":
        values, axes = torch.linalg.eigh(matrices)
        return values, axes
    parts = [torch.linalg.eigh(part) for part in matrices.split(_COLUMNS_AT_ONCE)]
    return torch.cat([values for values, _ in parts]), torch.cat([axes for _, axes in parts])


def _symmetric(matrices: Float[Tensor, "*n p p"]) -> Float[Tensor, "*n p p"]:
    return 0.5 * (matrices + matrices.mT)
