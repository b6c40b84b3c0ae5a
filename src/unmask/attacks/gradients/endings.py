"""Where texts end and how often they occur, once every prefix is known.

The last block's down projection has the gradient G = Aᵀ·Δ, with a known row a_u for every prefix u. A has fewer rows
than columns, so Δ is had by least squares: δ_u is the loss gradient that arrives at prefix u alone.

*Next-token training.* δ_u = Σ_y c(u, y)·Jᵤᵀ(μ_u − e_y): J the Jacobian of the final norm, e_y the output embedding of
y, μ_u = Σ_v p_u(v)·e_v, and c(u, y) proportional to how often y follows u. So δ_u names its labels: the last token of
each text, which no span holds, and how often every text occurs. A text ends behind u·y as often as y follows u more
often than anything follows u·y.

*Rows that are not known* (a text that was missed, a padding position that predicts) add A'ᵀΔ' to G. What least squares
leaves of G has the row space of Δ'; labels are read in its orthogonal complement, where Δ' has no part.

*Classification at the last token.* Only prefixes that end a text get gradient in the last block: a_u lies in the
span of G exactly if a text ends at u.

Notation: f width of the down projection's input. Limits: at most f distinct prefixes.
Source: DESIGN of this project; DAGER (arXiv 2405.15586) leaves the last token open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.gradients.labels import LabelReader, arriving_gradients
from unmask.attacks.gradients.node_rows import LastBlockRows
from unmask.attacks.gradients.prefix_search import Node, is_repetition
from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.gap import widest_gap
from unmask.linalg.subspace import column_span
from unmask.models.adapter import Model
from unmask.models.linear import Role

_MAX_OCCURRENCES = 32  # on average, of a label behind its prefix
_COUNT_TOLERANCE = 0.1  # weights are known to a thousandth or better, and counts seldom reach a hundred


@dataclass(frozen=True)
class Ending:
    """A text that ends, how often, and what its last label left unexplained of δ."""

    node: Node
    count: int
    residual: float


def last_down_projection(evidence: GradientEvidence, model: Model) -> tuple[Float[Tensor, "f d"] | None, str]:
    """The gradient that tells endings, if the update holds it, and its name."""
    last = model.num_blocks - 1
    layer = model.linear(Role.MLP_OUT, last)
    assert layer is not None  # every family has a down projection
    return evidence.linear(model, Role.MLP_OUT, last), layer.parameter


def endings_at_leaves(model: Model, leaves: Sequence[Node]) -> list[Ending]:
    """One text for every leaf. A text of one token may be that token repeated where positions are relative."""
    single = 0.0 if model.learned_positions else float("inf")
    return [Ending(leaf, 1, single if len(leaf[1]) == 1 else 0.0) for leaf in leaves]


@torch.no_grad()
def endings_of_next_token(
    model: Model,
    rows: LastBlockRows,
    gradient: Float[Tensor, "f d"],
    generator: torch.Generator,
    memory_budget_bytes: int,
) -> list[Ending]:
    """Texts with their last token and their multiplicity, from the labels of every prefix."""
    own = [u for u, node in enumerate(rows.nodes) if not is_repetition(model, node)]
    known = LastBlockRows([rows.nodes[u] for u in own], rows.hidden[own], rows.states[own])
    arrived, foreign = arriving_gradients(known.hidden, gradient)
    assert model.token_head is not None  # next-token evidence comes from a model with a language head
    labels = LabelReader(model.token_head, known, arrived, foreign, generator, memory_budget_bytes).labels()
    unit = unit_weight([weight for found in labels for weight in found.weights.values()])
    follow = {
        node: {y: 1 if unit is None else round(weight / unit) for y, weight in found.weights.items()}
        for node, found in zip(known.nodes, labels, strict=True)
    }
    residuals = {
        node: float("inf") if unit is None else found.residual for node, found in zip(known.nodes, labels, strict=True)
    }
    if not model.learned_positions:
        for node in [node for node in known.nodes if len(node[1]) == 1]:
            _unfold_repetitions(node, set(rows.nodes), follow, residuals)
    return _endings(follow, residuals)


@torch.no_grad()
def endings_of_classification(model: Model, rows: LastBlockRows, gradient: Float[Tensor, "f d"]) -> list[Ending] | None:
    """Texts whose last prefix row lies in the span of the last block; None if the span cannot tell.

    A text 't' and a text 't t' of a model without absolute positions are the same to every layer: not certain.
    """
    span = column_span(gradient)
    if span.is_full or span.rank >= len(rows.nodes):  # e.g. mean pooling: every position has gradient
        return None
    distances = span.distance(rows.hidden)
    gap = widest_gap(distances, ceiling=float(distances.max()))
    return [
        Ending(node, 1, distance if len(node[1]) > 1 or model.learned_positions else float("inf"))
        for node, distance in zip(rows.nodes, distances.tolist(), strict=True)
        if distance <= gap.threshold and not is_repetition(model, node)
    ]


def unit_weight(weights: list[float]) -> float | None:
    """The weight of one occurrence: the largest of which all weights are multiples; None if there is none.

    Weights are count/num_occurrences up to a common factor, so their sum over the unit is a whole number, at least as
    large as there are weights. A batch and its repetition have the same mean loss: only ratios of counts are visible.
    """
    if not weights:
        return None
    values = torch.tensor(weights, dtype=torch.float64)
    for occurrences in range(len(weights), _MAX_OCCURRENCES * len(weights) + 1):
        counts = values * (occurrences / values.sum())
        if bool(((counts - counts.round()).abs() < _COUNT_TOLERANCE).all()):
            return float(values.sum()) / occurrences
    return None


def _endings(follow: Mapping[Node, Mapping[int, int]], residuals: Mapping[Node, float]) -> list[Ending]:
    """A text ends behind u·y as often as y follows u more often than anything follows u·y."""
    endings = []
    for node, labels in follow.items():
        offset, tokens = node
        for label, count in labels.items():
            text = offset, (*tokens, label)
            ends = count - sum(follow.get(text, {}).values())
            if ends > 0:
                endings.append(Ending(text, ends, max(residuals[node], residuals.get(text, 0.0))))
    return endings


def _unfold_repetitions(
    single: Node, nodes: set[Node], follow: dict[Node, dict[int, int]], residuals: dict[Node, float]
) -> None:
    """Give the labels read at 't' to 't', 't t', 't t t' …, which share one row and so are read together.

    A label goes to the prefix behind which it was seen to go on; t itself follows as often as deeper prefixes need it.
    A t that is then left ends texts of nothing but t, and how many of what length cannot be told: their residual, and
    that of labels that could stand at several depths, is set to infinity.
    """
    start, (token,) = single
    chain = [single]
    while (start, (*chain[-1][1], token)) in nodes:
        chain.append((start, (*chain[-1][1], token)))
    merged = follow[single]
    if len(chain) == 1 and token not in merged:
        return
    unique = True
    shares: dict[Node, dict[int, int]] = {node: {} for node in chain}
    for label, count in merged.items():
        if label == token:
            continue
        holders = [node for node in chain if (start, (*node[1], label)) in nodes]
        for node in holders:
            shares[node][label] = sum(follow.get((start, (*node[1], label)), {}).values())
        left = count - sum(shares[node][label] for node in holders)
        unique &= left == 0 or len(holders) == 1
        if left > 0:
            owner = holders[0] if holders else chain[-1]
            shares[owner][label] = shares[owner].get(label, 0) + left
    for shallow, deep in zip(chain[-2::-1], chain[::-1], strict=False):
        shares[shallow][token] = sum(shares[deep].values())
    spare = merged.get(token, 0) - sum(shares[node].get(token, 0) for node in chain)
    shares[single][token] = shares[single].get(token, 0) + max(spare, 0)
    follow.update(shares)
    residuals.update(dict.fromkeys(chain, residuals[single] if unique and spare == 0 else float("inf")))
