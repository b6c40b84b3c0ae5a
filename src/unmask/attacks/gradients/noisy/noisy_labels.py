"""Which tokens follow each prefix, under noise: as `labels.py`, but weighted, and by tests in place of tolerances.

The gradient of the last block's down projection is G = AᵀΔ + E. With the variance of every entry's error, rows and
columns are scaled so that E is white; least squares over the prefixes' known rows A then gives δ_u with an error κ_u on
each entry, and labels are added one by one while they explain more of δ_u than chance lets any token of the vocabulary:

    gain(y) = ⟨t_uy, rest⟩² / (‖t_uy‖²·κ_u²) > 2·log(vocab / α),   t_uy = Jᵤᵀ(μ_u − e_y)

Notation: as in `endings.py`. Limits: prefixes that are missing leave more than noise; then κ is what they leave.
Cost: a product with the output embedding for every prefix and label.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.gradients.bag_of_words.noisy_tokens import error_variance
from unmask.attacks.gradients.decoder.labels import LabelReader, Labels
from unmask.attacks.gradients.decoder.last_block_rows import LastBlockRows
from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.noise import estimate_noise
from unmask.linalg.whitening import balance
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.proof.near_tokens import gradient_scale

_CHANCE = 1e-3  # of all prefixes: so often the best token of the vocabulary gains this much without being a label
_FINALISTS = 64  # labels that are measured exactly, of all that are ranked without their lengths
_MOST_LABELS = 16  # different ones behind one prefix
_BETTER = 0.7  # of what a replay leaves at a prefix: another label must leave less
_WEAK, _MOST_WEAK = (
    0.2,
    2,
)  # of a typical first label's weight: after so many weaker ones behind a prefix no other comes
_SINGULAR = 1e-7  # of the largest: rows of prefixes that depend on others


class NoisyLabels:
    """The rows of a tree of prefixes at the last block, and what arrives there."""

    def __init__(
        self,
        evidence: GradientEvidence,
        model: Model,
        rows: LastBlockRows,
        role: Role,
        memory_budget_bytes: int,
    ) -> None:
        layer = model.linear(role, model.num_blocks - 1)
        assert layer is not None  # the caller has seen its gradient
        assert model.token_head is not None
        self.layer, self.nodes = layer, rows.nodes
        self.scale = gradient_scale(evidence)
        variance = error_variance(evidence, model, layer.parameter)
        seen = layer.orient(evidence.gradients[layer.parameter]).double()
        variance = torch.ones_like(seen) if variance is None else layer.orient(variance).double()
        self.by_row, self.by_column = balance(variance.clamp_min(1e-60))
        self.rows = rows.hidden.double() * self.by_row
        nothing = seen.new_zeros(len(self.by_column), 0)
        self.arrived, self.kappa, self.excess = self._arrive(seen)
        self.unexplained = self.excess / max(estimate_noise(self._whiten(seen)).sigma, 1e-300)
        self.flat = LabelReader(model.token_head, rows, self.arrived / self.by_column, nothing, memory_budget_bytes)

    def _arrive(self, gradient: Float[Tensor, "f d"]) -> tuple[Tensor, Tensor, float]:
        """Δ in white coordinates, the error of its entries, and the root mean square of what is left."""
        return _least_squares(self.rows, self._whiten(gradient))

    def _whiten(self, gradient: Float[Tensor, "f d"]) -> Float[Tensor, "f d"]:
        return self.by_row[:, None] * gradient * (self.scale * self.by_column)

    @torch.no_grad()
    def read(self) -> list[Labels]:
        """Labels behind every prefix with their weights, the one that explains most first."""
        count = len(self.arrived)
        noise = (self.kappa * self.excess).clamp_min(1e-30)
        least = 2 * math.log(len(self.flat.embedding) / _CHANCE)
        chosen: list[list[int]] = [[] for _ in range(count)]
        towards = [self.arrived.new_zeros(0, self.arrived.shape[1]) for _ in range(count)]
        fits = [self.arrived.new_zeros(0) for _ in range(count)]
        rests = self.arrived.clone()
        active = list(range(count))
        weak, typical = [0] * count, 0.0
        for _ in range(_MOST_LABELS):
            found = self._best(active, rests, chosen)
            going_on = []
            for u, (label, direction) in zip(active, found, strict=True):
                trial = torch.cat([towards[u], direction[None]])
                fit = torch.linalg.lstsq(trial.T, self.arrived[u][:, None]).solution[:, 0]
                rest = self.arrived[u] - fit @ trial
                gain = float(rests[u].square().sum() - rest.square().sum()) / float(noise[u]) ** 2
                if gain < least or float(fit[-1]) <= 0:
                    continue
                chosen[u].append(label)
                towards[u], fits[u], rests[u] = trial, fit, rest
                weak[u] = weak[u] + 1 if float(fit[-1]) < _WEAK * typical else 0
                if weak[u] < _MOST_WEAK:
                    going_on.append(u)
            active = going_on
            typical = typical or _median([float(fit.max()) for fit in fits if len(fit)])
            if not active:
                break
        sizes = self.arrived.norm(dim=1).clamp_min(1e-300)
        return [
            Labels(dict(zip(chosen[u], fits[u].tolist(), strict=True)), float(rests[u].norm() / sizes[u]))
            for u in range(count)
        ]

    @torch.no_grad()
    def correct(self, again: Tensor, ends: Mapping[int, int], step: float) -> dict[int, int]:
        """Other labels for texts that end behind prefixes u with a label y, where a replay says that y is wrong.

        What is left of the update at u is then step·Jᵤᵀ(e_y − e_y'), whatever local steps did to both alike.
        """
        seen = self.layer.orient(again).double()
        left = self.arrived - self._arrive(seen)[0]
        wrong = self._towards(list(ends), [[y] for y in ends.values()])[:, 0] * step
        wanted = {u: left[u] + wrong[row] for row, u in enumerate(ends)}
        rests = left.clone()
        for u, rest in wanted.items():
            rests[u] = rest
        found = self._best(list(ends), rests, [[] for _ in range(len(left))])
        changed = {}
        for u, (label, direction) in zip(ends, found, strict=True):
            before, after = left[u].norm(), (wanted[u] - step * direction).norm()
            if label != ends[u] and float(after) < _BETTER * float(before):
                changed[u] = label
        return changed

    def _towards(self, nodes: Sequence[int], labels: Sequence[Sequence[int]]) -> Float[Tensor, "u y d"]:
        """t_uy in white coordinates, of equally many labels behind each prefix."""
        which = torch.tensor([[u] * len(ys) for u, ys in zip(nodes, labels, strict=True)])
        named = torch.tensor([list(ys) for ys in labels])
        directions = self.flat.directions(which.flatten(), named.flatten()).double() * self.by_column
        return directions.unflatten(0, named.shape)

    def _best(
        self, nodes: Sequence[int], rests: Float[Tensor, "n d"], known: Sequence[Sequence[int]]
    ) -> list[tuple[int, Float[Tensor, " d"]]]:
        """Of some prefixes the label that explains most of the rest, with its direction in white coordinates."""
        best: list[tuple[int, Tensor]] = []
        step = self.flat.nodes_at_once
        for begin in range(0, len(nodes), step):
            chunk = list(nodes[begin : begin + step])
            moved = self.flat.push(chunk, (rests[chunk] * self.by_column).to(self.flat.embedding))
            scores = (self.flat.means[chunk] * moved).sum(1, keepdim=True) - moved @ self.flat.embedding.T
            for place, u in enumerate(chunk):
                scores[place, list(known[u])] = -torch.inf
            finalists = scores.topk(min(_FINALISTS, scores.shape[1])).indices
            directions = self._towards(chunk, finalists.tolist())
            cosines = (directions * rests[chunk][:, None]).sum(-1) / directions.norm(dim=-1).clamp_min(1e-300)
            top = cosines.argmax(1).tolist()
            best += [(int(finalists[row, t]), directions[row, t]) for row, t in enumerate(top)]
        return best


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def _least_squares(
    rows: Float[Tensor, "n f"], white: Float[Tensor, "f d"]
) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"], float]:
    """Δ, the error of its entries, and the root mean square of what is left (1 where nothing is missing)."""
    left, sizes, right = torch.linalg.svd(rows, full_matrices=False)
    kept = sizes > _SINGULAR * sizes[0]
    left, sizes, right = left[:, kept], sizes[kept], right[kept]
    arrived = left @ ((right @ white) / sizes[:, None])
    rest = white - right.T @ (right @ white)
    free = max(1, white.shape[0] - int(kept.sum()))
    excess = float((rest.square().sum() / (free * white.shape[1])).sqrt())
    return arrived, (left / sizes).norm(dim=1), excess
