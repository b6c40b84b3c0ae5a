"""Which texts of a decoder are certain: the client is run again on them, and what stays open is said.

    client    the whole update is what the stated client sends for these texts, tensor by tensor
    arrivals  it is what the texts' rows give for some loss on top of them (`arrivals.py`): no row is missing or false,
              but labels, counts and ends rest on what was read of the labels
    deep      texts are missing; every row of a confirmed text still lies in the spans of later blocks

Limits: see `Ambiguity`. Cost: one client's work for the first, about the same for each of the others if it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from unmask.attacks.gradients.decoder.client_replay import ClientReplay, replay_client
from unmask.attacks.gradients.decoder.endings import ARRIVES, TextEnding
from unmask.attacks.gradients.decoder.prefix_search import Forest, Node, is_repetition
from unmask.evidence.gradients import GradientEvidence, Update
from unmask.evidence.tensor_files import by_size
from unmask.linalg.coarse import Coarseness, storage_of
from unmask.models.adapter import Model
from unmask.proof.agreement import Agreement
from unmask.proof.arrivals import Arrivals, TextInput, replay_arrivals
from unmask.proof.later_spans import IN_SPAN, distances_of_ends, lies_in, spans_of_blocks
from unmask.proof.sketched_replay import SketchedClient

_SURE = 2e-3  # a next token of at least this much less than probability 1 would have left a trace
_SURE_TOLERANCES = 30  # the same in tolerances of the replay: a label leaves 1 − p of its share of the update
_SEEN = 0.3  # tolerances of a replay in the weight of one label: more, and one label more or less does not show
_OUTSIDE = 0.1  # a last token at least this far from the last block's span has no row in it: nothing follows it
_TELLING = 4096  # entries other than zero, in which a grid, few digits or missing ones show
_TOLERANCES = 20  # what arrives at a text must be beyond so many tolerances of the replay


class Proof(Enum):
    """What the certainty of texts rests on. The value is the claim that the certificate makes."""

    CLIENT = "the client, run again on these texts, sends the same update: every tensor agrees"
    SCALED_CLIENT = "the client, run again on these texts, sends this update up to one factor: every tensor agrees"
    ROUNDED_CLIENT = "the client, run again on these texts, sends the same update, up to the digits that were sent"
    NOISY_CLIENT = "the client, run again on these texts, sends this update up to noise: what is left has no structure"
    ARRIVALS = "the texts' rows, and no others, explain every tensor of the update below the loss"
    DEEP_SPANS = "every row of a certain text lies in the gradients' spans in the first block and in later ones"
    NONE = "every prefix of a text lies in the gradient's span in the first block, which is no proof of the text"


@dataclass(frozen=True)
class Confirmation:
    """What replay says: the proof, how well it fits, the texts as they were confirmed, and which of them are not."""

    proof: Proof
    endings: list[TextEnding]
    agreement: Agreement | None = None
    refuted: frozenset[Node] = frozenset()  # texts that the proof does not cover
    open_ends: frozenset[Node] = frozenset()  # texts that may go on with tokens that the model is sure of
    num_passes: int = 0
    tells_equal_tokens: bool = False  # which member of each class of equal tokens is meant
    is_unstable: bool = False  # the client sends another update for the same texts in another order
    stopped: str = ""  # why the client was not run, where memory is short


def confirm_next_token(
    evidence: GradientEvidence,
    working: GradientEvidence,
    model: Model,
    forest: Forest,
    endings: Sequence[TextEnding],
    equal: Mapping[int, tuple[int, ...]],
    client: SketchedClient | None = None,
) -> Confirmation:
    """Replay the client on texts with their labels; where that disagrees, what arrives; else spans of later blocks."""
    if is_coarse(evidence, model):
        return Confirmation(Proof.NONE, list(endings))
    too_many = evidence.num_texts is not None and sum(ending.count for ending in endings) > evidence.num_texts
    if too_many and evidence.num_clients == 1:
        merged = _with_inner_runs(model, endings)
        endings = merged if sum(ending.count for ending in merged) == evidence.num_texts else endings
    done = replay_client(evidence, model, list(endings), equal, client)
    if done.holds:
        return confirm_client(model, done)
    if any(ending.is_traceless for ending in endings):
        read = [replace(e, node=(e.node[0], e.node[1][:-1])) if e.is_traceless else e for e in endings]
        again = replay_client(evidence, model, [e for e in read if len(e.node[1]) > 1], equal)
        if again.holds:
            return confirm_client(model, again)
    sure = _sure_to_go_on(model, done.endings, done.agreement)
    if done.agreement is not None and done.agreement.holds_up_to_scale:
        return Confirmation(
            Proof.SCALED_CLIENT, done.endings, done.agreement, open_ends=sure, num_passes=done.num_passes
        )
    rows = _confirm_rows(working, model, forest, done.endings, equal, sure, done.num_passes)
    return replace(rows, stopped=done.stopped)


def confirm_client(model: Model, done: ClientReplay) -> Confirmation:
    """The client sends the same update. A label more changes a mean over N labels by 1/N, if that is seen at all."""
    assert done.agreement is not None  # it holds
    num_labels = sum((len(ending.node[1]) - 1) * ending.count for ending in done.endings)
    is_blind = num_labels * done.agreement.tolerance > _SEEN
    return Confirmation(
        Proof.CLIENT,
        done.endings,
        done.agreement,
        open_ends=_sure_to_go_on(model, done.endings, done.agreement) if is_blind else frozenset(),
        num_passes=done.num_passes,
        tells_equal_tokens=done.tells_equal_tokens,
    )


def _with_inner_runs(model: Model, endings: Sequence[TextEnding]) -> list[TextEnding]:
    """Texts 't t' and 't x' as 't t x': where positions are relative they leave the same trace, and are one text less.

    Only where one text of each first token can take the run.
    """
    kept = list(endings)
    for pure in [ending for ending in endings if len(set(ending.node[1])) == 1 and not model.learned_positions]:
        start, tokens = pure.node
        others = [e for e in kept if e.node[:1] == (start,) and e.node[1][0] == tokens[0] and e is not pure]
        if len(others) == 1 and others[0].count == 1 and len(set(others[0].node[1])) > 1:
            run = tokens[1:] * pure.count
            longer = replace(others[0], node=(start, (*run, *others[0].node[1])), has_open_run=False)
            kept = [longer if ending is others[0] else ending for ending in kept if ending is not pure]
    return kept


def confirm_classification(
    working: GradientEvidence, model: Model, forest: Forest, endings: Sequence[TextEnding], arrivals: Arrivals | None
) -> Confirmation:
    """Whatever the head and the labels: what arrives at the rows explains the update, or spans of later blocks do."""
    if is_coarse(working, model):
        return Confirmation(Proof.NONE, list(endings))
    if arrivals is not None and arrivals.agreement.holds:
        sizes = dict(zip(forest_rows(model, forest.leaves)[1], arrivals.sizes.tolist(), strict=True))
        absent = _without_arrivals(endings, sizes, arrivals.agreement, len_label=0)
        return Confirmation(
            Proof.ARRIVALS, list(endings), arrivals.agreement, absent, num_passes=2 * len(forest.leaves)
        )
    # With texts missing, only the last block tells where a text ends: it sees ends alone, if the loss reads them alone.
    ends = _ends_in_last_span(working, model, endings)
    is_end = ends is not None and working.pooling == "last"
    others = frozenset(ending.node for ending in endings if not is_end or ends is None or ends[ending.node] > IN_SPAN)
    refuted = others | _outside_later_spans(working, model, endings)
    return _deep(list(endings), refuted, frozenset(), None, 2 * len(forest.leaves))


def _without_arrivals(
    endings: Sequence[TextEnding], sizes: Mapping[Node, float], agreement: Agreement, len_label: int
) -> frozenset[Node]:
    """Texts that are not in the batch: nothing arrives at their last row. Labels have none, if they end texts."""
    least = max(ARRIVES, _TOLERANCES * agreement.tolerance)
    last = {e.node: (e.node[0], e.node[1][: len(e.node[1]) - len_label]) for e in endings}
    return frozenset(node for node, row in last.items() if sizes.get(row, 1.0) <= least)


def is_coarse(evidence: GradientEvidence, model: Model) -> bool:
    """Whether the update has few digits, or only some of its entries: a replay agrees with nearly right texts too."""
    if evidence.compute_dtype in (torch.bfloat16, torch.float16):
        return True
    # Any tensor tells: the smallest that has entries enough to see levels in.
    sizes = by_size(evidence.gradients)
    telling = next((name for name in sizes if int(evidence.gradients[name].count_nonzero()) >= _TELLING), sizes[-1])
    update = evidence.gradients[telling]
    if storage_of(update).kind is Coarseness.FINE:
        return False
    weights = {**dict(model.named_parameters()), **evidence.adapters}.get(telling)
    return evidence.update is not Update.DELTA or weights is None or not _is_difference(update, weights.detach())


def _is_difference(delta: Tensor, weights: Tensor) -> bool:
    """Whether a delta is coarse only as any difference of two weights is: by their rounding, which a replay shares."""
    return bool(((weights + delta) - weights == delta).all())


def arrivals_of(
    working: GradientEvidence, model: Model, forest: Forest, equal: Mapping[int, tuple[int, ...]] | None = None
) -> tuple[list[Node], Arrivals | None]:
    """What arrives at every prefix with a row of its own, if the update tells."""
    texts, nodes, rows = forest_rows(model, forest.leaves)
    return nodes, replay_arrivals(working, model, texts, rows, list((equal or {}).values()))


def forest_rows(model: Model, leaves: Sequence[Node]) -> tuple[list[TextInput], list[Node], Tensor]:
    """Texts, and for each prefix with a row of its own where it stands first."""
    nodes: dict[Node, tuple[int, int]] = {}
    for index, (start, tokens) in enumerate(leaves):
        for length in range(1, len(tokens) + 1):
            node = start, tokens[:length]
            if not is_repetition(model, node):
                nodes.setdefault(node, (index, length - 1))
    texts = [TextInput(tokens, start) for start, tokens in leaves]
    return texts, list(nodes), torch.tensor(list(nodes.values()), dtype=torch.long).reshape(-1, 2)


def _confirm_rows(
    working: GradientEvidence,
    model: Model,
    forest: Forest,
    endings: list[TextEnding],
    equal: Mapping[int, tuple[int, ...]],
    sure: frozenset[Node],
    passes: int,
) -> Confirmation:
    nodes, arrivals = arrivals_of(working, model, forest, equal)
    passes += 2 * len(forest.leaves)
    if arrivals is not None and arrivals.agreement.holds:
        sizes = dict(zip(nodes, arrivals.sizes.tolist(), strict=True))
        absent = _without_arrivals(endings, sizes, arrivals.agreement, len_label=1)
        return Confirmation(Proof.ARRIVALS, endings, arrivals.agreement, absent, sure, passes)
    # The last token of a next-token text has no row.
    inner = [replace(ending, node=(ending.node[0], ending.node[1][:-1])) for ending in endings]
    refuted = _outside_later_spans(working, model, inner)
    outside = frozenset(e.node for e in endings if (e.node[0], e.node[1][:-1]) in refuted)
    # A text that goes on into what is missing has a row at its last token too. In a packed row that token may be the
    # first of the next text, and stand at the first position again.
    for starts_anew in (False, True):
        ends = _ends_in_last_span(working, model, endings, starts_anew=starts_anew)
        sure |= frozenset(ending.node for ending in endings if ends is None or ends[ending.node] < _OUTSIDE)
    return _deep(endings, outside, sure, None if arrivals is None else arrivals.agreement, passes)


def _deep(
    endings: list[TextEnding], refuted: frozenset[Node], sure: frozenset[Node], agreement: Agreement | None, passes: int
) -> Confirmation:
    everyone = frozenset(ending.node for ending in endings)
    proof = Proof.NONE if refuted >= everyone else Proof.DEEP_SPANS
    return Confirmation(proof, endings, agreement, refuted, sure, passes)


@torch.no_grad()
def _sure_to_go_on(model: Model, endings: Sequence[TextEnding], agreement: Agreement | None) -> frozenset[Node]:
    """Texts behind which the model is so sure of a token that its label leaves less than the replay's tolerance."""
    limit = _SURE if agreement is None else max(_SURE, _SURE_TOLERANCES * agreement.tolerance)
    sure = set()
    for ending in endings:
        tokens = ending.node[1]
        if len(tokens) < model.max_positions:
            logits = model.hf(torch.tensor([tokens], device=model.device)).logits[0, -1].double()
            if float(logits.softmax(-1).max()) > 1 - limit:
                sure.add(ending.node)
    return frozenset(sure)


def _outside_later_spans(working: GradientEvidence, model: Model, endings: Sequence[TextEnding]) -> frozenset[Node]:
    """Texts with a row that a later block's span does not hold; all of them where no later block can tell."""
    spans = spans_of_blocks(working, model, (model.num_blocks // 2, model.num_blocks - 1, 1))
    nodes = [ending.node for ending in endings]
    return frozenset(node for node in nodes if not lies_in(model, TextInput(node[1], node[0]), spans))


def _ends_in_last_span(
    working: GradientEvidence, model: Model, endings: Sequence[TextEnding], *, starts_anew: bool = False
) -> dict[Node, float] | None:
    """How far the row of each text's last token is from the span of the last block; None where it cannot tell."""
    texts = [TextInput(e.node[1], e.node[0], starts_anew=starts_anew) for e in endings]
    distances = distances_of_ends(working, model, texts)
    return None if distances is None else dict(zip((e.node for e in endings), distances, strict=True))
