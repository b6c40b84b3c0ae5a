"""What the rows of texts say where no client that was run again sends the update: another loss, or texts are missing.

    rows    what arrives at the rows of all texts explains every tensor below (`arrivals.py`); the labels of each text
            explain what arrives at its rows (`label_flow.py`)
    spans   every row of a text lies in the spans of later blocks, and those of its edits do not; its last label lies in
            the space of what arrives, and the row of its last token is in no span, so that nothing follows it

Limits: a gradient of one step, without noise and with all its digits. Cost: two passes and a backward pass for rows; a
pass of each text for spans, and of its edits to the lowest block that tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from unmask.evidence.gradients import GradientEvidence, Task, Update
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.proof.alternatives import EQUAL, equal_inputs
from unmask.proof.arrivals import Arrivals, TextInput, highest_layer, prefix_rows, replay_arrivals
from unmask.proof.label_flow import (
    Prefix,
    flow_of,
    is_named,
    label_layer,
    row_of,
    sent_behind,
    share_outside,
    share_unexplained,
    space_of_arrivals,
)
from unmask.proof.later_spans import IN_SPAN, distance_from, distance_of_edits, distances_of_ends, spans_of_blocks
from unmask.proof.verdicts import Decision, Ground, ProposedText
from unmask.wording import count_noun

ARRIVES = 1e-3  # of the largest: less is rounding, so nothing arrives
_TOLERANCES = 20  # what arrives at a text must be beyond so many tolerances of the replay
_EVERYWHERE = 0.5  # of the prefixes that others continue: if more of them get gradient, every position does
_EXPLAINED = 1e-2  # of δ: float32 gradients leave about 1e-5, a wrong label 0.3 and more
_EXPLAINED_WHILE_MISSING = 1e-3  # rounding to few digits leaves more, and then a wrong label may explain the rest
_RIVAL = 3.0  # times what a label may leave: another one must leave more
_OUTSIDE = 0.1  # a row at least this far from a span is not in it
_CLEAR = 10.0  # times as far as a row in a span may be: those of a text's edits are
_NO_LABELS = "the update lacks the tensors that show its last label"
_SILENT = "the model is sure of its last label, so nothing of it arrives"
_RIVALLED = "another last token explains what arrives before it nearly as well"
_NO_ENDS = "no gradient of the last block shows ends (missing, too narrow, or not of one step), so "

Texts = Sequence[ProposedText]
ArrivalsAt = Callable[[Sequence[Prefix]], tuple[list[Prefix], Arrivals | None, bool]]
Doubts = dict[ProposedText, tuple[Decision, str]]


@dataclass(frozen=True)
class RowReading:
    """What rows say: of each text how far it is off, why some are not covered, and what is open about the batch."""

    ground: Ground
    misfits: Mapping[ProposedText, float]
    tolerance: float
    doubts: Doubts = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    rejected: float | None = None
    arrivals: Arrivals | None = None
    reads_inside: bool = False
    has_masked_labels: bool = False
    goes_on: frozenset[ProposedText] = frozenset()
    tells_inputs: bool = False  # embedding rows were compared one by one, so that equal tokens are told apart
    shows_ends: bool = False  # whether a text that ends inside a longer one would show
    read_labels: frozenset[Prefix] = frozenset()  # texts up to a token that was seen as a label
    num_passes: int = 0


def is_labelled(evidence: GradientEvidence, model: Model) -> bool:
    """Whether every token behind a text's first one may be a label."""
    return evidence.task is not Task.CLASSIFICATION and model.unembedding is not None


def arrivals_at(
    evidence: GradientEvidence, model: Model, leaves: Sequence[Prefix]
) -> tuple[list[Prefix], Arrivals | None, bool]:
    """What arrives at every prefix of some texts with a row of its own, and whether rows of equal tokens are merged."""
    inputs, prefixes, rows = prefix_rows(model, leaves)
    found = replay_arrivals(evidence, model, inputs, rows)
    if found is None or found.agreement.holds:
        return prefixes, found, False
    classes = list(dict.fromkeys(equal_inputs(model, {t for _, tokens in leaves for t in tokens}).values()))
    return prefixes, replay_arrivals(evidence, model, inputs, rows, classes) if classes else found, bool(classes)


def leaves_of(prefixes: Sequence[Prefix]) -> list[Prefix]:
    """Those that no other one goes on behind."""
    inner = {(start, tokens[:length]) for start, tokens in prefixes for length in range(1, len(tokens))}
    return [prefix for prefix in dict.fromkeys(prefixes) if prefix not in inner]


def reads_everywhere(sizes: Mapping[Prefix, float]) -> bool:
    """Whether a loss reads most tokens: gradient arrives at most prefixes that others continue."""
    inner = {(start, tokens[:-1]) for start, tokens in sizes}
    passed = [size > ARRIVES for prefix, size in sizes.items() if prefix in inner]
    return bool(passed) and sum(passed) > _EVERYWHERE * len(passed)


def read_rows(
    evidence: GradientEvidence, model: Model, texts: Texts, beside: Sequence[Prefix], arriving: ArrivalsAt
) -> RowReading | None:
    """No row is missing or false; None where that does not explain the update. `arriving`: `arrivals_at` of leaves."""
    labelled = is_labelled(evidence, model)
    inputs = [(text.start, text.tokens[: len(text.tokens) - labelled]) for text in texts]
    leaves = leaves_of([prefix for prefix in (*inputs, *beside) if prefix[1]])
    prefixes, arrivals, is_merged = arriving(leaves)
    if arrivals is None or not arrivals.agreement.holds:
        return None
    sizes = dict(zip(prefixes, arrivals.sizes.tolist(), strict=True))
    least = max(ARRIVES, _TOLERANCES * arrivals.agreement.tolerance)
    own = {(start, tokens[:length]) for start, tokens in inputs for length in range(1, len(tokens) + 1)}
    top = highest_layer(evidence, model)
    is_last = top is not None and top.is_last(model)
    problems = []
    read, shows_ends = frozenset[Prefix](), False
    if labelled:
        ends = {text: (text.start, text.tokens) for text in texts}
        goes_on = frozenset(text for text, end in ends.items() if end not in own and sizes.get(end, 0.0) > least)
        arrived = dict(zip(prefixes, arrivals.rows, strict=True))
        reads_labels = is_last and model.token_head is not None
        doubts, read, has_masked = _check_labels(evidence, model, texts, arrived, reads_labels)
        doubts = {text: doubt for text, doubt in doubts.items() if text not in goes_on}
        problems += [f"{_NO_ENDS}last tokens are missing"] if goes_on else []
        reads_inside = False
    else:
        goes_on, has_masked = frozenset[ProposedText](), False
        ended = {(text.start, text.tokens) for text in texts}
        missing = "nothing arrives at its last token: it is not in the batch, or the model is sure of its label"
        doubts = {t: (Decision.UNDECIDED, missing) for t in texts if sizes.get((t.start, t.tokens), 1.0) <= least}
        everywhere = reads_everywhere(sizes)
        reads_inside = is_last and evidence.pooling is None and everywhere
        shows_ends = is_last and evidence.pooling != "mean" and not reads_inside
        if shows_ends:
            others = sum(size > least and prefix not in ended for prefix, size in sizes.items())
            problems += [f"{count_noun(others, 'other text')} end inside of these or beside them"] if others else []
        elif evidence.num_texts != len(texts):
            problems.append(f"{_NO_ENDS}ends inside longer texts cannot be seen")
    unread = [prefix for prefix in sizes if prefix not in own and set(prefix[1]) != {model.pad_token}]
    if unread:
        rows = count_noun(len(unread), "prefix", "prefixes")
        problems.append(f"the update also holds {rows} of other texts, which were not read")
    return RowReading(
        Ground.ARRIVALS,
        dict.fromkeys(texts, arrivals.agreement.misfit_as_is),
        arrivals.agreement.tolerance,
        _padded(model, texts, labelled) | doubts,
        tuple(problems),
        arrivals=arrivals,
        reads_inside=reads_inside,
        has_masked_labels=has_masked,
        goes_on=goes_on,
        shows_ends=shows_ends,
        tells_inputs=model.token_embedding in arrivals.compared and not is_merged,
        read_labels=read,
    )


def read_spans(evidence: GradientEvidence, model: Model, texts: Texts) -> RowReading:
    """While texts are missing: rows in the spans of later blocks, ends and labels in the last one."""
    labelled = is_labelled(evidence, model)
    spans = spans_of_blocks(evidence, model, (model.num_blocks // 2, model.num_blocks - 1, 1))
    lowest = min(spans, default=0)
    known = {(t.start, t.tokens[:length]) for t in texts for length in range(1, len(t.tokens) + 1)}
    doubts: Doubts = {}
    misfits: dict[ProposedText, float] = {}
    rejected: list[float] = []
    for text in texts:
        rows = TextInput(text.tokens[: len(text.tokens) - labelled], text.start)
        misfits[text] = distance_from(model, rows, spans)
        if misfits[text] > _OUTSIDE and spans:
            decision = Decision.REFUTED if _leaves_rows(evidence, model, text) else Decision.UNDECIDED
            doubts[text] = decision, "a row of it is in no span of the gradients"
        elif misfits[text] > IN_SPAN:
            doubts[text] = Decision.UNDECIDED, "no span of a later block tells its rows from others"
        else:
            rejected.append(distance_of_edits(model, rows, lowest, spans[lowest], known))
            if rejected[-1] <= _CLEAR * IN_SPAN:
                doubts[text] = Decision.UNDECIDED, "another token at a place of it lies in the spans as well"
    if all(doubt is Decision.REFUTED for doubt, _ in doubts.values()) and len(doubts) == len(texts):
        doubts = {
            text: (Decision.UNDECIDED, why) for text, (_, why) in doubts.items()
        }  # another model, or another loss
    inside = [text for text in texts if text not in doubts]
    goes_on, read = frozenset[ProposedText](), frozenset[Prefix]()
    if labelled:
        for starts_anew in (False, True):  # in a packed row the next text stands at the first position again
            ends = _distances_of_ends(evidence, model, inside, starts_anew=starts_anew)
            goes_on |= frozenset(text for text in inside if ends is None or ends[text] < _OUTSIDE)
        unread, read = _check_last_labels(evidence, model, inside)
        doubts |= unread
    else:
        ends = _distances_of_ends(evidence, model, inside) if evidence.pooling == "last" else None
        why = "what would show that a text ends there is not in the update"
        doubts |= {t: (Decision.UNDECIDED, why) for t in inside if ends is None or ends[t] > IN_SPAN}
    confirmed = len(doubts) < len(texts)
    return RowReading(
        Ground.DEEP_SPANS if confirmed else Ground.NONE,
        misfits,
        IN_SPAN,
        _padded(model, texts, labelled) | doubts,
        rejected=min(rejected, default=None),
        goes_on=goes_on,
        read_labels=read,
        num_passes=2 * len(texts),
    )


def _leaves_rows(evidence: GradientEvidence, model: Model, text: ProposedText) -> bool:
    """Whether a gradient would arrive at every row of a text: its last label counts, is no sure one, and sees them."""
    if not is_labelled(evidence, model) or evidence.all_tokens_predicted is not True or model.token_head is None:
        return False
    role = label_layer(evidence, model)
    if role is None or not 1 < len(text.tokens) <= min(model.shortest_window, model.max_positions):
        return False
    return not flow_of(model, role, text.tokens, text.start).is_silent(len(text.tokens) - 1)


def _padded(model: Model, texts: Texts, labelled: bool) -> Doubts:
    """Padding whose labels count seems to be a part of the text: in front of it, and behind it."""
    why = "it begins or ends in padding, which may be none of it"
    return {t: (Decision.UNDECIDED, why) for t in texts if labelled and model.pad_token in (t.tokens[0], t.tokens[-1])}


def _check_labels(
    evidence: GradientEvidence, model: Model, texts: Texts, arrived: Mapping[Prefix, torch.Tensor], reads_labels: bool
) -> tuple[Doubts, frozenset[Prefix], bool]:
    """Texts whose last label does not explain what arrives before it; all labels that do; whether some do not."""
    if not reads_labels:
        return dict.fromkeys(texts, (Decision.UNDECIDED, _NO_LABELS)), frozenset(), False
    flows = {(t.start, t.tokens): flow_of(model, Role.MLP_OUT, t.tokens, t.start) for t in texts if len(t.tokens) > 1}
    sent = sent_behind(model, flows)
    typical = float(torch.stack([row.norm() for row in arrived.values()]).median())
    doubts: Doubts = {t: (Decision.UNDECIDED, "it has no label") for t in texts if (t.start, t.tokens) not in flows}
    read, has_masked = set[Prefix](), False
    for (start, tokens), flow in flows.items():
        for length in range(1, len(tokens)):
            prefix = row_of(model, start, tokens[:length])
            share = partial(share_unexplained, arrived[prefix])
            if is_named(sent[prefix], tokens[length], _EXPLAINED, share):
                read.add((start, tokens[: length + 1]))
            else:
                has_masked |= length < len(tokens) - 1 and not flow.is_silent(length)
    for text in texts:
        found = flows.get((text.start, text.tokens))
        if found is None:
            continue
        if found.is_silent(len(text.tokens) - 1):
            doubts[text] = Decision.UNDECIDED, _SILENT
        elif (text.start, text.tokens) in read:
            prefix = row_of(model, text.start, text.tokens[:-1])
            share = partial(share_unexplained, arrived[prefix])
            if _is_rivalled(model, Role.MLP_OUT, text, sent[prefix], _EXPLAINED, share):
                doubts[text] = Decision.UNDECIDED, _RIVALLED
        else:
            is_silent = float(arrived[row_of(model, text.start, text.tokens[:-1])].norm()) <= ARRIVES * typical
            is_silent &= evidence.all_tokens_predicted is True  # else its last label may be masked
            doubts[text] = (
                (Decision.REFUTED, "nothing arrives before its last label")
                if is_silent
                else (Decision.UNDECIDED, "its last label does not explain what arrives before it")
            )
    return doubts, frozenset(read), has_masked


def _check_last_labels(evidence: GradientEvidence, model: Model, texts: Texts) -> tuple[Doubts, frozenset[Prefix]]:
    """Texts whose last label sends something that is not in the space of what arrives; and all labels that do not."""
    role = None if evidence.update is Update.DELTA else label_layer(evidence, model)
    space = None if role is None or model.token_head is None else space_of_arrivals(evidence, model, role)
    if role is None or space is None:
        return dict.fromkeys(texts, (Decision.UNDECIDED, _NO_LABELS)), frozenset()
    flows = {(t.start, t.tokens): flow_of(model, role, t.tokens, t.start) for t in texts if len(t.tokens) > 1}
    sent = sent_behind(model, flows)
    share = partial(share_outside, space)
    read = frozenset(
        (start, tokens[: length + 1])
        for start, tokens in flows
        for length in range(1, len(tokens))
        if is_named(sent[row_of(model, start, tokens[:length])], tokens[length], _EXPLAINED_WHILE_MISSING, share)
    )
    doubts: Doubts = {}
    for text in texts:
        flow = flows.get((text.start, text.tokens))
        if flow is None or flow.is_silent(len(text.tokens) - 1):
            doubts[text] = Decision.UNDECIDED, _SILENT
        elif (text.start, text.tokens) not in read:
            doubts[text] = Decision.UNDECIDED, "what its last label sends is not in the space of what arrives"
        elif _is_rivalled(
            model, role, text, sent[row_of(model, text.start, text.tokens[:-1])], _EXPLAINED_WHILE_MISSING, share
        ):
            doubts[text] = Decision.UNDECIDED, _RIVALLED
    return doubts, read


def _is_rivalled(
    model: Model,
    role: Role,
    text: ProposedText,
    labels: Mapping[int, torch.Tensor],
    limit: float,
    share: Callable[[torch.Tensor], float],
) -> bool:
    """Whether the token whose output row points most nearly where that of the last one does explains it as well.

    Weights of labels are free here, so the lengths of output rows say nothing. Equal rows are a class, and no rivals.
    """
    rows = model.unembedding
    assert rows is not None  # the model predicts tokens
    token, own = text.tokens[-1], rows[text.tokens[-1]].detach().float()
    with torch.no_grad():
        every = rows.detach().float()
        cosines = torch.nn.functional.cosine_similarity(every, own[None], dim=1)
        is_equal = (every - own).norm(dim=1) <= EQUAL * own.norm()
        rival = int(cosines.masked_fill(is_equal, -2.0).argmax())
    if rival in labels or rival == token:
        return False
    sent = flow_of(model, role, (*text.tokens[:-1], rival), text.start).sent[-1]
    others = [each for label, each in labels.items() if label != token]
    return share(torch.stack([*others, sent])) <= _RIVAL * limit


def _distances_of_ends(
    evidence: GradientEvidence, model: Model, texts: Texts, *, starts_anew: bool = False
) -> dict[ProposedText, float] | None:
    """How far the row of each text's last token is from the span of the last block; None where it cannot tell."""
    inputs = [TextInput(text.tokens, text.start, starts_anew=starts_anew) for text in texts]
    distances = distances_of_ends(evidence, model, inputs)
    return None if distances is None else dict(zip(texts, distances, strict=True))
