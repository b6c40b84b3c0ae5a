"""Which tokens follow each known prefix, read off the gradient that arrives there.

The last block's down projection has the gradient G = AᵀΔ, with a known row of A for every prefix; Δ is had by least
squares. δ_u = Σ_y c(u, y)·Jᵤᵀ(μ_u − e_y) then names its labels y by matching pursuit over the vocabulary.

Notation: as in `endings.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.gradients.decoder.last_block_rows import LastBlockRows
from unmask.attacks.gradients.decoder.prefix_search import Node
from unmask.linalg.subspace import column_span
from unmask.models.linear import TokenHead

_SKETCH = 32  # random directions that rank all labels of the vocabulary before a few are tested exactly
_FINALISTS = 8
# Different labels behind one prefix, and no more than an eighth of the width: many labels in few dimensions explain
# anything. What low-rank adapters show of δ is too narrow for that: there the replay alone decides.
_MAX_LABELS, _FEW_LABELS, _LABELS_OF_WIDTH = 64, 8, 8
_USEFUL = 0.9  # a label that leaves more of the rest than this is not one
EXPLAINED = 1e-2  # float32 gradients leave about 1e-5 of δ unexplained, a wrong label 0.3 and more
_UNEXPLAINED = 1e-3  # of the whole gradient: more than this is a row that is not among the known ones
_SILENT = 1e-3  # of a typical δ: less arrives only by rounding, so the prefix is not in the batch or predicts nothing
_NEGLIGIBLE = 1e-3  # of the largest weight behind a prefix: a label that least squares did not need
_SURE = 10.0  # times that: a label expected to be weaker than this may be what a silent prefix predicts


@dataclass(frozen=True)
class Labels:
    """c(u, y) of one prefix, and the share of δ_u that they leave unexplained."""

    weights: dict[int, float]
    residual: float


def arriving_gradients(
    hidden: Float[Tensor, "n f"], gradient: Float[Tensor, "f d"]
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "d r"]]:
    """Δ of G = AᵀΔ by least squares in float64, and a basis of the row space of what is left of G."""
    whole = gradient.double()
    q, r = torch.linalg.qr(hidden.double().T)
    arrived = torch.linalg.solve_triangular(r, q.T @ whole, upper=True)
    rest = whole - q @ (q.T @ whole)
    if float(rest.norm()) <= _UNEXPLAINED * float(whole.norm()):
        return arrived, whole.new_zeros(whole.shape[1], 0)
    return arrived, column_span(rest.T).basis


class LabelReader:
    """Reads labels off arriving gradients: known children first, then the vocabulary for what is left."""

    def __init__(
        self,
        head: TokenHead,
        rows: LastBlockRows,
        arrived: Float[Tensor, "n d"],
        foreign: Float[Tensor, "d r"],
        memory_budget_bytes: int,
    ) -> None:
        self.head, self.leave = head, rows.leave
        self.embedding = self.head.embedding.detach()
        self.added = rows.added.to(self.embedding)
        self.foreign = foreign.to(self.embedding)
        self.arrived = self._without_foreign(arrived.to(self.embedding))
        sizes = self.arrived.norm(dim=1)
        self.threshold = _SILENT * float(sizes.median())
        self.silent = set((sizes <= self.threshold).nonzero()[:, 0].tolist())
        self.means = self._mean_embeddings(memory_budget_bytes)
        width, generator = self.added.shape[1], torch.Generator().manual_seed(0)
        sketch = torch.eye(width) if width <= _SKETCH else torch.randn(_SKETCH, width, generator=generator)
        self.sketch = self._without_foreign(sketch.to(self.embedding))
        self.children = _children(rows.nodes)
        self.nodes_at_once = max(1, memory_budget_bytes // (8 * _SKETCH * len(self.embedding)))

    def labels(self) -> list[Labels]:
        """The labels of every prefix: by one known child or by one label, all at once, then the few others in turn."""
        found = self._by_one_label([(u, ys) for u, ys in enumerate(self.children) if len(ys) == 1])
        leaves = [u for u, ys in enumerate(self.children) if not ys and u not in self.silent]
        for chunk in _chunks(leaves, self.nodes_at_once):
            ranked = self._rank(chunk, self.arrived[chunk], _FINALISTS)
            found |= self._by_one_label(list(zip(chunk, ranked.tolist(), strict=True)))
        return [found[u] if u in found else self._read(u) for u in range(len(self.children))]

    def surest(self, weight: float) -> dict[int, int | None]:
        """Of every silent prefix the likeliest label, if an occurrence of this weight would be too weak to arrive."""
        silent = sorted(self.silent)
        found: dict[int, int | None] = {}
        for chunk in _chunks(silent, self.nodes_at_once):
            likeliest = self._logits(chunk).argmax(1)
            sizes = weight * self.directions(torch.tensor(chunk), likeliest.cpu()).norm(dim=1)
            for u, label, size in zip(chunk, likeliest.tolist(), sizes.tolist(), strict=True):
                found[u] = label if size <= _SURE * self.threshold else None
        return found

    def _by_one_label(self, options: list[tuple[int, list[int]]]) -> dict[int, Labels]:
        """Prefixes whose δ is explained by a single one of their options; all have equally many."""
        if not options:
            return {}
        nodes = torch.tensor([u for u, _ in options])
        labels = torch.tensor([ys for _, ys in options])
        pairs = nodes[:, None].expand_as(labels)
        towards = self.directions(pairs.flatten(), labels.flatten()).unflatten(0, labels.shape).double()
        delta = self.arrived[nodes].double()[:, None]
        weights = (towards * delta).sum(-1) / towards.square().sum(-1)
        residuals = (delta - weights[..., None] * towards).norm(dim=-1) / delta.norm(dim=-1).clamp_min(1e-300)
        best = residuals.argmin(1, keepdim=True)
        chosen = labels.to(best.device).gather(1, best)
        columns = (chosen, weights.gather(1, best), residuals.gather(1, best))
        rows = zip(nodes.tolist(), *(column[:, 0].tolist() for column in columns), strict=True)
        return {u: Labels({y: w}, r) for u, y, w, r in rows if r <= EXPLAINED and w > 0}

    def _without_foreign(self, rows: Float[Tensor, "e d"]) -> Float[Tensor, "e d"]:
        return rows - (rows @ self.foreign) @ self.foreign.T

    def _mean_embeddings(self, memory_budget_bytes: int) -> Float[Tensor, "n d"]:
        """μ_u, in chunks of prefixes: probabilities over the vocabulary are the widest rows of all."""
        step = max(1, memory_budget_bytes // (12 * len(self.embedding)))
        means = []
        for chunk in _chunks(list(range(len(self.added))), step):
            logits = self._logits(chunk)
            means.append(self.head.times_slopes(logits.softmax(-1), logits) @ self.embedding)
        return torch.cat(means)

    def _logits(self, nodes: list[int]) -> Float[Tensor, "u vocab"]:
        outputs = self.features(nodes)(self.added[nodes]) @ self.embedding.T
        return self.head.bounded(outputs if self.head.bias is None else outputs + self.head.bias)

    def features(self, nodes: Any) -> Callable[[Tensor], Tensor]:
        """What the output layer is given at some prefixes, as a function of what the down projection adds there."""
        return lambda added: self.head.features(self.leave(nodes, added))

    def directions(self, nodes: Tensor, labels: Tensor) -> Float[Tensor, "e d"]:
        """Jᵤᵀ(μ_u − e_y) of pairs (u, y): what one occurrence of y behind u sends to u."""
        features, backward = torch.func.vjp(self.features(nodes), self.added[nodes])  # type: ignore[misc]
        named = self.embedding[labels]
        outputs = (features * named).sum(-1, keepdim=True)
        outputs = outputs if self.head.bias is None else outputs + self.head.bias[labels][:, None]
        pull = self.means[nodes] - self.head.times_slopes(named, self.head.bounded(outputs))
        return self._without_foreign(backward(pull)[0])

    def _read(self, u: int) -> Labels:
        """Matching pursuit: add the label that explains most of the rest, until δ is explained."""
        if u in self.silent:
            return Labels({}, 0.0)
        labels = list(self.children[u])
        delta = self.arrived[u].double()
        directions = self.directions(torch.full((len(labels),), u), torch.tensor(labels, dtype=torch.long))
        weights, rest = _fit(directions.double(), delta)
        most = min(_MAX_LABELS, max(_FEW_LABELS, len(delta) // _LABELS_OF_WIDTH))
        while float(rest.norm()) > EXPLAINED * float(delta.norm()) and len(labels) < most:
            ranked = self._rank([u], rest[None], _FINALISTS + len(labels), directions)[0].tolist()
            finalists = [y for y in ranked if y not in labels][:_FINALISTS]
            extra = self.directions(torch.full((len(finalists),), u), torch.tensor(finalists))
            trials = [_fit(torch.cat([directions, row[None]]).double(), delta) for row in extra]
            best = min(range(len(trials)), key=lambda index: float(trials[index][1].norm()))
            if float(trials[best][1].norm()) > _USEFUL * float(rest.norm()):
                break  # nothing in the vocabulary explains the rest
            labels.append(finalists[best])
            directions = torch.cat([directions, extra[best : best + 1]])
            weights, rest = trials[best]
        least = _NEGLIGIBLE * float(weights.max()) if len(weights) else 0.0
        found = {y: float(w) for y, w in zip(labels, weights, strict=True) if w > least}
        return Labels(found, float(rest.norm() / delta.norm().clamp_min(1e-300)))

    def _rank(
        self, nodes: list[int], rests: Float[Tensor, "u d"], num_labels: int, known: Float[Tensor, "e d"] | None = None
    ) -> Int[Tensor, "u y"]:
        """The labels whose directions are most parallel to each rest, judged in a random sketch of 32 dimensions.

        Outside of the directions that are known, which the rest was measured outside of.
        """
        pushed = self._push_forward(nodes)
        means = torch.einsum("ud,usd->us", self.means[nodes], pushed)
        named = torch.einsum("vd,usd->uvs", self.embedding, pushed)
        logits = None if self.head.softcap is None else self._logits(nodes)[..., None]
        candidates = means[:, None] - self.head.times_slopes(named, logits)
        wanted = rests.to(self.sketch) @ self.sketch.T
        if known is not None and 0 < len(known) < self.sketch.shape[0]:
            frame = torch.linalg.qr(self.sketch @ known.T)[0]
            candidates = candidates - (candidates @ frame) @ frame.T
        cosine = torch.einsum("uvs,us->uv", candidates, wanted) / candidates.norm(dim=-1).clamp_min(1e-30)
        return cosine.topk(min(num_labels, cosine.shape[1])).indices

    def _push_forward(self, nodes: list[int]) -> Float[Tensor, "u s d"]:
        """J_u·s of all rows s of the sketch."""
        each = [u for u in nodes for _ in self.sketch]
        return self.push(each, self.sketch.repeat(len(nodes), 1)).unflatten(0, (len(nodes), -1))

    def push(self, nodes: list[int], ways: Float[Tensor, "u d"]) -> Float[Tensor, "u d"]:
        """J_u·s of one way s for each prefix: how the head's features move when what is added moves along s.

        Jᵀu is linear in u, so its slope is J. Forward derivatives would take most of a second to load, and kernels of
        experts have none.
        """
        arrived, backward = torch.func.vjp(self.features(nodes), self.added[nodes])  # type: ignore[misc]
        _, forward = torch.func.vjp(lambda pull: backward(pull)[0], torch.zeros_like(arrived))  # type: ignore[misc]
        pushed: Tensor = forward(ways)[0]
        return pushed


def _fit(directions: Float[Tensor, "e d"], delta: Float[Tensor, " d"]) -> tuple[Tensor, Tensor]:
    """Least-squares weights of the directions, and what they leave of δ."""
    if len(directions) == 0:
        return directions.new_zeros(0), delta
    weights = torch.linalg.lstsq(directions.T, delta[:, None]).solution[:, 0]
    return weights, delta - directions.T @ weights


def _chunks(items: list[int], size: int) -> list[list[int]]:
    return [items[begin : begin + size] for begin in range(0, len(items), size)]


def _children(nodes: list[Node]) -> list[list[int]]:
    index = {node: u for u, node in enumerate(nodes)}
    children: list[list[int]] = [[] for _ in nodes]
    for offset, tokens in nodes:
        parent = offset, tokens[:-1]
        if parent in index:
            children[index[parent]].append(tokens[-1])
    return children
