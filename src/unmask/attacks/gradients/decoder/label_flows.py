"""From labels to texts: as often as a text reaches a prefix, it goes on behind it, or ends there.

    in(u·y)  = how often y follows u             out(v) = how often anything follows v
    a text ends at v = u·y  in(v) − out(v) times

A label that the model is sure of leaves no gradient, so such a prefix is *silent*, and its flow is taken from its
neighbours: what was seen to go on behind it goes on, and where nothing was seen, what the model is sure of follows. A
silent prefix of which the model is not sure has a label that the client masked, or is no prefix of the batch.

Runs of a first token: without absolute positions, 't', 't t', 't t t' … share one row at every layer, so their labels
are read together and shared out by what was seen to follow each of them.

Notation: u, v prefixes; y a token. Flows are whole numbers where the weights of labels are multiples of one unit, else
weights in units of their median.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unmask.attacks.gradients.decoder.prefix_search import Node

_NOTHING = 0.25  # flows are known to a tenth; less than this is none


@dataclass(frozen=True)
class Labelled:
    """What was read at every prefix: labels with their flow, what is left unexplained, and what tells nothing.

    `silent` maps prefixes at which nothing arrives to the label that the model is sure of there, None if of none.
    """

    follow: Mapping[Node, Mapping[int, float]]
    residuals: Mapping[Node, float]
    silent: Mapping[Node, int | None]


@dataclass(frozen=True)
class TextEnd:
    """A text that ends, how often, what its labels leave unexplained, and what is open about it."""

    node: Node
    flow: float
    residual: float
    is_traceless: bool = False  # its last label was not read: the model is sure of it
    has_open_run: bool = False  # how often its first token is repeated is not told by what follows


@dataclass(frozen=True)
class Ends:
    """Ends of texts, and whether some label was masked: a prefix goes on though no label arrives there."""

    ends: list[TextEnd] = field(default_factory=list)
    has_masked_labels: bool = False


def ends_of(labelled: Labelled, nodes: set[Node], rotary: bool) -> Ends:
    """Where texts end; `nodes` are all prefixes that were found, those without a row of their own included."""
    follow = {node: dict(labels) for node, labels in labelled.follow.items()}
    traceless: set[Node] = set()
    masked = _fill_silent(follow, labelled.silent, traceless)
    residuals = dict(labelled.residuals)
    open_runs: set[tuple[int, int]] = set()
    if rotary:
        for node in [node for node in follow if len(node[1]) == 1]:
            if not _unfold_run(node, nodes, follow, residuals):
                open_runs.add((node[0], node[1][0]))
    ends = []
    for node, labels in follow.items():
        start, tokens = node
        for label, flow in labels.items():
            text = start, (*tokens, label)
            left = flow - _out(follow, text)
            masked |= left < -_NOTHING and node not in labelled.silent
            if left > _NOTHING:
                residual = max(residuals[node], residuals.get(text, 0.0))
                ends.append(TextEnd(text, left, residual, node in traceless, (start, tokens[0]) in open_runs))
    return Ends(ends, masked)


def _fill_silent(follow: dict[Node, dict[int, float]], silent: Mapping[Node, int | None], traceless: set[Node]) -> bool:
    """Give silent prefixes the flow that their neighbours tell; whether some of them have a masked label."""
    masked = False
    children: dict[Node, list[int]] = {}
    for start, tokens in follow:
        children.setdefault((start, tokens[:-1]), []).append(tokens[-1])
    for node in sorted(silent, key=lambda node: -len(node[1])):
        sure = silent[node]
        # A child at which nothing arrives either, and behind which nothing goes on, is no trace of a text.
        below = ((token, (node[0], (*node[1], token))) for token in children.get(node, []))
        seen = [token for token, child in below if child not in silent or _out(follow, child) > 0]
        masked |= bool(seen) and (sure is None or seen != [sure])
        follow[node] = {token: max(_out(follow, (node[0], (*node[1], token))), 1.0) for token in seen}
        if not seen and sure is not None:
            follow[node] = {sure: 1.0}
            traceless.add(node)
    for node, seen in children.items():
        if node in follow and node not in silent:  # a prefix that goes on where no label of its own was read
            for token in set(seen) - set(follow[node]):
                follow[node][token] = _out(follow, (node[0], (*node[1], token)))
                masked = True
    for node in sorted(silent, key=lambda node: len(node[1])):
        start, tokens = node
        reached = follow.get((start, tokens[:-1]), {}).get(tokens[-1])
        if reached is not None and len(follow[node]) == 1:
            (only,) = follow[node]
            follow[node][only] = max(follow[node][only], reached)
    return masked


def _out(follow: Mapping[Node, Mapping[int, float]], node: Node) -> float:
    return sum(follow.get(node, {}).values())


def _unfold_run(
    single: Node, nodes: set[Node], follow: dict[Node, dict[int, float]], residuals: dict[Node, float]
) -> bool:
    """Give the labels read at 't' to 't', 't t', 't t t' …; False if that can be done in more than one way.

    A label goes to the prefix behind which it was seen to go on; t itself follows as often as deeper prefixes need it.
    A t that is then left ends texts of nothing but t, and how many of what length cannot be told. Nor can the depth
    of a label that nothing was seen to follow, if the run has several.
    """
    start, (token,) = single
    chain = [single]
    while (start, (*chain[-1][1], token)) in nodes:
        chain.append((start, (*chain[-1][1], token)))
    merged = follow[single]
    if len(chain) == 1 and token not in merged:
        return True
    unique = True
    shares: dict[Node, dict[int, float]] = {node: {} for node in chain}
    for label, flow in merged.items():
        if label == token:
            continue
        holders = [node for node in chain if (start, (*node[1], label)) in nodes]
        for node in holders:
            shares[node][label] = _out(follow, (start, (*node[1], label)))
        left = flow - sum(shares[node][label] for node in holders)
        if left > _NOTHING:
            unique &= len(holders) == 1
            owner = holders[0] if holders else chain[-1]
            shares[owner][label] = shares[owner].get(label, 0.0) + left
    for shallow, deep in zip(chain[-2::-1], chain[::-1], strict=False):
        shares[shallow][token] = sum(shares[deep].values())
    spare = merged.get(token, 0.0) - sum(shares[node].get(token, 0.0) for node in chain)
    shares[single][token] = shares[single].get(token, 0.0) + max(spare, 0.0)
    follow.update(shares)
    residuals.update(dict.fromkeys(chain, residuals[single]))
    return unique and abs(spare) < _NOTHING
