"""Where texts end and how often they occur, once every prefix is known.

The last block's down projection has the gradient G = Aᵀ·Δ, with a known row a_u for every prefix u. A has fewer rows
than columns, so Δ is had by least squares: δ_u is the loss gradient that arrives at prefix u alone. Where the update
has no such gradient (experts), the output projection of the last block's attention serves: behind it no token is mixed
with another one either, and J goes through the MLP as well.

*Next-token training.* δ_u = Σ_y c(u, y)·Jᵤᵀ(μ_u − e_y): J the Jacobian of the final norm, e_y the output embedding of
y, μ_u = Σ_v p_u(v)·e_v, and c(u, y) proportional to how often y follows u. So δ_u names its labels: the last token of
each text, which no span holds, and how often every text occurs (`label_flows.py`).

*Rows that are not known* (a text that was missed, a padding position that predicts) add A'ᵀΔ' to G. What least squares
leaves of G has the row space of Δ'; labels are read in its orthogonal complement, where Δ' has no part.

*Classification at the last token.* Only prefixes that end a text get gradient in the last block: δ_u = 0 elsewhere.

Notation: f width of the down projection's input. Limits: at most f distinct prefixes.
Source: DESIGN of this project; DAGER (arXiv 2405.15586) leaves the last token open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.gradients.decoder.label_flows import Labelled, ends_of
from unmask.attacks.gradients.decoder.labels import LabelReader, Labels, arriving_gradients
from unmask.attacks.gradients.decoder.last_block_rows import LastBlockRows
from unmask.attacks.gradients.decoder.prefix_search import Node
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.proof.arrivals import is_repetition
from unmask.proof.update_rows import ARRIVES, reads_everywhere
from unmask.proof.verdicts import ProposedText

_MAX_OCCURRENCES = 32  # on average, of a label behind its prefix
_COUNT_TOLERANCE = 0.1  # weights are known to a thousandth or better, and counts seldom reach a hundred


@dataclass(frozen=True)
class TextEnding:
    """A text that ends, how often, and what its last label left unexplained of δ.

    `is_traceless`: the model is sure of the last label, so nothing of it arrives. `has_open_run`: how often the first
    token is repeated cannot be told.
    """

    node: Node
    count: int
    residual: float
    is_traceless: bool = False
    has_open_run: bool = False

    @property
    def proposed(self) -> ProposedText:
        """The text as it is handed to the proof."""
        start, tokens = self.node
        return ProposedText(tokens, self.count, start)


@dataclass(frozen=True)
class EndingsRead:
    """The endings of next-token texts, and whether some prefix goes on though no label arrives at it.

    `names` are the labels that were read for a prefix's last token: of a class of equal tokens, the one that is meant,
    where the output layer tells them apart.
    """

    endings: list[TextEnding]
    has_masked_labels: bool = False
    names: Mapping[Node, frozenset[int]] = field(default_factory=dict)

    def with_named(self, equal: Mapping[int, tuple[int, ...]]) -> list[TextEnding]:
        """The texts with the member of each class of equal tokens that labels name, where they name one."""
        named = []
        for ending in self.endings:
            start, tokens = ending.node
            found = list(tokens)
            for place, token in enumerate(tokens):
                members = set(equal.get(token, ()))
                read = self.names.get((start, tokens[: place + 1]), frozenset()) & members
                if place and len(read) == 1:
                    found[place] = next(iter(read))
            named.append(replace(ending, node=(start, tuple(found))))
        return named


def last_down_projection(evidence: GradientEvidence, model: Model) -> tuple[Float[Tensor, "f d"] | None, str]:
    """The gradient that tells endings, if the update holds it, and its name."""
    last = model.num_blocks - 1
    layer = model.linear(Role.MLP_OUT, last)
    return evidence.linear(model, Role.MLP_OUT, last), "" if layer is None else layer.parameter


def endings_at_leaves(model: Model, leaves: Sequence[Node]) -> list[TextEnding]:
    """One text for every leaf. A text of one token may be that token repeated where positions are relative."""
    return [TextEnding(leaf, 1, 0.0, has_open_run=_is_open_run(model, leaf)) for leaf in leaves]


def endings_of_classification(
    model: Model, nodes: Sequence[Node], sizes: Float[Tensor, " n"], pooling: str | None
) -> list[TextEnding] | None:
    """Prefixes at which gradient arrives in the last block, given its sizes; None if it arrives at every position.

    Where the loss reads a mean of states, or where `pooling` is not known and many inner prefixes get gradient, ends
    inside longer texts cannot be seen.
    """
    arrives = (sizes > ARRIVES).tolist()
    everywhere = reads_everywhere(dict(zip(nodes, sizes.tolist(), strict=True)))
    if pooling == "mean" or (pooling is None and everywhere):
        return None
    return [
        TextEnding(node, 1, 0.0, has_open_run=_is_open_run(model, node))
        for node, here in zip(nodes, arrives, strict=True)
        if here
    ]


def _is_open_run(model: Model, node: Node) -> bool:
    """A text 't' and a text 't t' of a model without absolute positions are the same to every layer."""
    return not model.learned_positions and len(node[1]) == 1


@torch.no_grad()
def endings_of_next_token(
    model: Model,
    rows: LastBlockRows,
    gradient: Float[Tensor, "f d"],
    memory_budget_bytes: int,
    equal: Mapping[int, tuple[int, ...]] | None = None,
) -> EndingsRead:
    """Texts with their last token and their multiplicity, from the labels of every prefix.

    `equal` maps a token that stands for several in the search to all of them.
    """
    own = [u for u, node in enumerate(rows.nodes) if not is_repetition(model, node[1])]
    known = rows[own]
    arrived, foreign = arriving_gradients(known.hidden, gradient)
    assert model.token_head is not None  # next-token evidence comes from a model with a language head
    reader = LabelReader(model.token_head, known, arrived, foreign, memory_budget_bytes)
    labels = reader.labels()
    weights = [weight for found in labels for weight in found.weights.values()]
    unit = unit_weight(weights)
    step = unit or (sorted(weights)[len(weights) // 2] if weights else 1.0)
    silent = {known.nodes[u]: label for u, label in reader.surest(step).items() if not labels[u].weights}
    read = dict(zip(known.nodes, labels, strict=True))
    return endings_from_labels(model, set(rows.nodes), read, silent, step, unit is not None, equal)


def endings_from_labels(
    model: Model,
    nodes: set[Node],
    labels: Mapping[Node, Labels],
    silent: Mapping[Node, int | None],
    step: float,
    is_unit: bool,
    equal: Mapping[int, tuple[int, ...]] | None = None,
) -> EndingsRead:
    """Texts from the labels of every prefix with a row of its own, and from prefixes at which nothing arrives.

    `step` is the weight of one occurrence if it `is_unit`, else a typical weight.
    """
    stands_for = {member: token for token, members in (equal or {}).items() for member in members}
    follow: dict[Node, dict[int, float]] = {}
    names: dict[Node, set[int]] = {}
    for node, read in labels.items():
        follow[node] = {}
        for label, weight in read.weights.items():
            shared = node[0], (*node[1], stands_for.get(label, label))
            continues = shared in nodes or is_repetition(model, shared[1])
            text = shared if continues else (node[0], (*node[1], label))
            names.setdefault(text, set()).add(label)
            flow = float(round(weight / step)) if is_unit else weight / step
            follow[node][text[1][-1]] = follow[node].get(text[1][-1], 0.0) + flow
    residuals = {node: read.residual for node, read in labels.items()}
    found = ends_of(Labelled(follow, residuals, silent), nodes, rotary=not model.learned_positions)
    endings = [
        TextEnding(
            end.node,
            max(1, round(end.flow)) if is_unit else 1,
            end.residual,
            is_traceless=end.is_traceless,
            has_open_run=end.has_open_run,
        )
        for end in found.ends
    ]
    return EndingsRead(endings, found.has_masked_labels, {text: frozenset(read) for text, read in names.items()})


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
