"""A text as a weight on every place, found by Gauss–Newton: which places put a row into the gradient's span?

Fix a place of the text, the anchor, and give every place j a weight w_j: 1 if it is in the text, 0 if not. Attention of
row i over the weighted places is o_h = Σ_j w_j·e^{q_i·k_j}·v_j / Σ_j w_j·e^{q_i·k_j}, head by head. From o follow the
rows that enter the output projection and the MLP's down projection, and all probes of these layers' gradients vanish on
them if w is the text. Rows that are surely in the text are the anchor's and the first token's. Relaxed to 0 ≤ w ≤ 1
this is a smooth system of equations in w, and a sparse non-negative solution is unique long before there are as many
equations as places. The down projection alone gives up to d independent equations a row, however full the batch.

Every position is filled once until the text has ended: Σ_{j at p} w_j + Σ_{ends before p} w_j = 1. Of a pair, this
holds for the first text, and the second one starts where the first has ended: Σ_{j of type 1 at p} w_j +
Σ_{ends before p} w_j − Σ_{first ends before p} w_j = 0.

Notation: c chosen places; w (c,) weights; r (i, k) values of k probes at rows i; J = ∂r/∂w.
Limits: at most d rows in the batch. Positions that hardly any row attends to are the last to settle.
Cost: a step costs rows·k·d·(c + f) for J, then a least-squares problem in a box with rows·k + positions equations.
Deviation: DAGER enumerates products of token sets, others optimise embeddings; weights on known places are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unmask.attacks.gradients.encoder.attending_rows import AttendingRows, Jacobian, ProbedLayer
from unmask.attacks.gradients.encoder.position_candidates import PositionCandidates, Text
from unmask.linalg.box_least_squares import box_least_squares
from unmask.models.adapter import Model

_FILL_WEIGHT = 2.0
_FIRST_PRECISION = {"tolerance": 1e-3, "least_gain": 1e-4}  # of a step that is far from linear
_HALVINGS = 4
_NOISE_WEIGHT = 100.0  # how much more noise counts than what a linear step gets wrong
_USUAL_ROWS = 3  # of a descent; with more of them each has fewer equations
_MOST_ROWS = 6  # the start's and five anchors'
_FEWEST_PROBES = 48
_NUM_WHITENING_PLACES = 512
_LEAST_PROGRESS = 1e-2  # of the squared residual; less in a step means that it has settled
_SOLVED = 1e-4  # of the first squared residual: the equations hold, and further steps tell nothing


@dataclass(frozen=True)
class Relaxation:
    """The system over some of the places (`chosen`, in order; the start is among them), in the model's precision."""

    model: Model
    places: PositionCandidates
    chosen: Int[Tensor, " c"]
    probed: Sequence[ProbedLayer]
    max_rows: int = _MOST_ROWS

    @cached_property
    def position(self) -> Int[Tensor, " c"]:
        """The position of each chosen place."""
        return self.places.position[self.chosen]

    @cached_property
    def is_end(self) -> Bool[Tensor, " c"]:
        return self.places.is_end[self.chosen]

    @cached_property
    def kind(self) -> Int[Tensor, " c"]:
        return self.places.kind[self.chosen]

    @cached_property
    def closes(self) -> Bool[Tensor, " c"]:
        return self.places.closes[self.chosen]

    @cached_property
    def _keys(self) -> Float[Tensor, "c h e"]:
        return self.places.keys[self.chosen].to(self.model.dtype)

    @cached_property
    def _values(self) -> Float[Tensor, "c h e"]:
        return self.places.values[self.chosen].to(self.model.dtype)

    @cached_property
    def _fill(self) -> Float[Tensor, "p c"]:
        """Row p, type by type: what stands at position p or has ended before it, less what opened it by ending."""
        positions = torch.arange(self.places.num_positions, device=self.chosen.device)[:, None]
        ended = self.closes & (self.position < positions)
        here = (self.position == positions) | ended
        rows = [
            (here & (self.kind == kind)).to(self.model.dtype) - (ended & (self.kind == kind - 1)).to(self.model.dtype)
            for kind in range(self.places.num_types)
        ]
        return _FILL_WEIGHT * torch.cat(rows)

    @cached_property
    def _fill_values(self) -> Float[Tensor, " p"]:
        """What the rows of `_fill` give of a text: 1 for type 0, and 0 for a type that an end opened."""
        filled = torch.zeros_like(self._fill[:, 0])
        filled[: self.places.num_positions] = _FILL_WEIGHT
        return filled

    def has(self, place: int) -> bool:
        """Whether a place is chosen."""
        return bool((self.chosen == place).any())

    def index_of(self, place: int) -> int:
        """Where a chosen place lies among the chosen."""
        return int((self.chosen == place).nonzero()[0, 0])

    def bounds(
        self, anchors: Sequence[int], removed: Bool[Tensor, " j"]
    ) -> tuple[Float[Tensor, " c"], Float[Tensor, " c"]]:
        """The box of the weights: the anchors and the start are in the text, what excludes an anchor is not."""
        upper = (~removed[self.chosen]).to(self.model.dtype)
        for anchor in anchors:
            here, kind = self.places.position[anchor], self.places.kind[anchor]
            same, before, after = self.kind == kind, self.position < here, self.position > here
            upper[(self.position == here) | (same & self.closes & before)] = 0.0
            upper[(before & (self.kind > kind)) | (after & (self.kind < kind))] = 0.0
            if bool(self.places.closes[anchor]):
                upper[same & after] = 0.0
        lower = torch.zeros_like(upper)
        for place in (self.places.start, *anchors):
            lower[self.index_of(place)] = upper[self.index_of(place)] = 1.0
        return lower, upper

    def descend(
        self,
        anchors: Sequence[int],
        removed: Bool[Tensor, " j"],
        prior: float,
        max_steps: int,
        least_share: float = 1.0,
    ) -> Iterator[tuple[Text, Float[Tensor, " j"]]]:
        """The text and the weights of all places after each Gauss–Newton step, until it settles.

        A place starts from its share of the `prior`, or from `least_share` of it: from all of it where that is 1.
        """
        lower, upper = self.bounds(anchors, removed)
        free = replace(self, chosen=self.chosen[upper > 0])
        shares = self.places.share[self.chosen].to(upper).clamp_min(least_share)
        weights = (prior * shares).clamp(lower, upper)[upper > 0]
        for moved in free._descend(anchors, lower[upper > 0], weights, max_steps):
            everywhere = torch.zeros(self.places.num_candidates).to(moved)
            everywhere[free.chosen] = moved
            yield free.round_to_text(moved), everywhere

    def _descend(
        self, anchors: Sequence[int], lower: Float[Tensor, " c"], weights: Float[Tensor, " c"], max_steps: int
    ) -> Iterator[Float[Tensor, " c"]]:
        places = [self.places.start, *anchors][: self.max_rows]
        rows = self._with_fewer_probes(len(places)).rows(places)
        upper = torch.ones_like(lower)
        solved, precision = 0.0, _FIRST_PRECISION
        for _ in range(max_steps):
            residual, jacobian = rows.linearise_at(weights)
            solved = solved or _SOLVED * float(residual.square().sum())
            unit = jacobian.column_norm
            system = _FilledSystem(jacobian, unit, self._fill)
            wanted = torch.cat([(jacobian.apply(weights) - residual) / unit, self._fill_values])
            aim = box_least_squares(system, wanted, weights, lower, upper, **precision)
            precision = {}
            before = self._cost(residual / unit, weights)
            for halving in range(_HALVINGS):
                moved = weights + 0.5**halving * (aim - weights)
                left = rows.residual(moved)
                after = self._cost(left / unit, moved)
                if after < before:
                    break
            weights = moved
            yield weights
            if before - after < _LEAST_PROGRESS * before or float(left.square().sum()) < solved:
                return

    def _with_fewer_probes(self, num_rows: int) -> Relaxation:
        """The strongest probes of each layer, so that more rows than usual have about as many equations in all."""
        sizes = [max(_FEWEST_PROBES, layer.probes.shape[1] * _USUAL_ROWS // num_rows) for layer in self.probed]
        probed = [replace(layer, probes=layer.probes[:, :n]) for layer, n in zip(self.probed, sizes, strict=True)]
        return replace(self, probed=probed)

    def _cost(self, residual: Float[Tensor, " m"], weights: Float[Tensor, " c"]) -> float:
        return float(residual.square().sum() + (self._fill @ weights - self._fill_values).square().sum())

    def rows(self, places: Sequence[int]) -> AttendingRows:
        """The rows of some places, attending to all chosen ones."""
        own = torch.tensor(list(places), device=self.chosen.device)
        queries = self.places.queries[own].to(self._keys)
        scores = torch.einsum("ihe,che->ihc", queries, self._keys)
        attention = (scores - scores.amax(-1, keepdim=True)).exp()
        return AttendingRows(self.model, self.probed, self._values, self.places.rows[own].to(self._keys), attention)

    def round_to_text(self, weights: Float[Tensor, " c"]) -> Text:
        """The text that the weights say, as places: the heaviest end, and before it the heaviest place a position."""
        first = self.places.frame.end_type == 0
        can_end = self.is_end & (self.position <= self._first_gap)
        can_end = can_end if first else can_end & (self.position > self._first_middle)
        end = int(weights.masked_fill(~can_end, -1.0).argmax())
        length = int(self.position[end])
        heaviest = [self._heaviest(weights, kind) for kind in range(self.places.num_types)]
        best = heaviest[0][1][:length] if first else self._join_pair(weights, heaviest, length)
        return (*self.chosen[best].tolist(), int(self.chosen[end]))

    @cached_property
    def _first_gap(self) -> int:
        """The first position that no inner place can fill: no text is longer."""
        fillable = torch.zeros(self.places.num_positions + 1, dtype=torch.bool, device=self.chosen.device)
        fillable[self.position[~self.is_end]] = True
        return int((~fillable).nonzero()[0, 0])

    @cached_property
    def _first_middle(self) -> int:
        """The first position at which the first text of a pair may end."""
        middles = self.closes & ~self.is_end
        return int(self.position[middles].min()) if bool(middles.any()) else 0

    def _heaviest(self, weights: Float[Tensor, " c"], kind: int) -> tuple[Float[Tensor, " p"], Int[Tensor, " p"]]:
        """The heaviest chosen place of a type at each position that closes nothing, and its weight (−1: none)."""
        by_position = torch.full((self.places.num_positions, len(weights)), -1.0).to(weights)
        inner = weights.masked_fill(self.closes | (self.kind != kind), -1.0)
        by_position[self.position, torch.arange(len(weights), device=weights.device)] = inner
        heaviest = by_position.max(1)
        return heaviest.values, heaviest.indices

    def _join_pair(
        self, weights: Float[Tensor, " c"], heaviest: Sequence[tuple[Tensor, Tensor]], length: int
    ) -> Int[Tensor, " p"]:
        """Two texts of a pair, joined where the first one's places, its end and the second one's weigh most."""
        middles = (self.closes & ~self.is_end & (self.position < length)).nonzero()[:, 0]
        (before, first), (after, second) = heaviest
        if len(middles) == 0:  # no end leaves room for a pair: any text will do, it is refused
            return first[:length]
        totals = [
            before[: self.position[m]].sum() + weights[m] + after[self.position[m] + 1 : length].sum() for m in middles
        ]
        middle = middles[torch.stack(totals).argmax()]
        split = int(self.position[middle])
        return torch.cat([first[:split], middle[None], second[split + 1 : length]])


@dataclass(frozen=True)
class _FilledSystem:
    """The equations of a step: the Jacobian in units of its columns, and below it what fills positions."""

    jacobian: Jacobian
    unit: float
    fill: Float[Tensor, "p c"]

    def apply(self, weights: Float[Tensor, " c"]) -> Float[Tensor, " m"]:
        """A·w."""
        return torch.cat([self.jacobian.apply(weights) / self.unit, self.fill @ weights])

    def pull_back(self, residual: Float[Tensor, " m"]) -> Float[Tensor, " c"]:
        """Aᵀ·r."""
        values, fillings = residual.split([len(residual) - len(self.fill), len(self.fill)])
        return self.jacobian.pull_back(values) / self.unit + fillings @ self.fill

    def columns(self, chosen: Int[Tensor, " s"]) -> Float[Tensor, "m s"]:
        """Some columns of A."""
        return torch.cat([self.jacobian.columns(chosen) / self.unit, self.fill[:, chosen]])


def whiten_probes(relaxation: Relaxation, rows: Sequence[int], prior: float, max_probes: int) -> Relaxation:
    """The same system with combinations of each layer's probes that all tell places apart equally well.

    Second moments of ∂r/∂w over some rows and places; their strongest eigenvectors, scaled to 1. Under noise, what
    it leaves of a probe is added, so that combinations it drowns count for less.
    """
    weights = torch.full((len(relaxation.chosen),), prior).to(relaxation.model.dtype).to(relaxation.chosen.device)
    weights[relaxation.index_of(relaxation.places.start)] = 1.0
    probed = []
    some = torch.arange(0, len(weights), max(1, len(weights) // _NUM_WHITENING_PLACES), device=weights.device)
    for layer in relaxation.probed:
        alone = Relaxation(relaxation.model, relaxation.places, relaxation.chosen, [layer])
        jacobian = alone.rows(rows).linearise_at(weights)[1].columns(some).double()  # (rows·k, some)
        by_probe = jacobian.unflatten(0, (len(rows), -1)).transpose(0, 1).flatten(1)
        eigenvalues, vectors = torch.linalg.eigh(by_probe @ by_probe.T / by_probe.shape[1])
        kept = (eigenvalues > 1e-8 * eigenvalues[-1]).nonzero()[-max_probes:, 0]
        noise = _NOISE_WEIGHT * _noise_of(alone, rows, weights) if layer.site.noise is not None else 0.0
        combine = (vectors[:, kept] / (eigenvalues[kept] + noise).sqrt()).flip(1)
        probed.append(replace(layer, probes=(layer.probes.double() @ combine).to(layer.probes.dtype)))
    return Relaxation(relaxation.model, relaxation.places, relaxation.chosen, probed)


def _noise_of(relaxation: Relaxation, places: Sequence[int], weights: Float[Tensor, " c"]) -> float:
    """The mean square that noise leaves of a probe at rows of the batch."""
    rows, total = relaxation.rows(places), 0.0
    _, mixed = rows.mix(weights)
    for layer in relaxation.probed:
        assert layer.site.noise is not None  # asked of noisy layers alone
        x = layer.site.rows(relaxation.model, rows.states, mixed.flatten(1))
        sizes = layer.site.span.scale(x).square().sum(1) * layer.site.noise.squares(x)[1]
        total += float(sizes.mean()) / layer.probes.shape[1]
    return total
