"""What else an update may be of: one table of edits to texts, each of which may leave the same evidence.

A line of the table looks for other texts that explain the update as well as those that were proposed. What it finds
becomes a class on the text (an `Ambiguity`), or keeps it from being decided, where the class cannot be spelt out. The
client is run on an edit wherever that can tell (`Situation.explains`); elsewhere a line says what nobody stated. A new
way to be wrong is a new line. Why each line is there: docs/why.md.

Notation: a run is how often a text's first token stands at its start.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.near_rows import near_rows
from unmask.models.adapter import Model
from unmask.progress import track
from unmask.proof.agreement import Agreement
from unmask.proof.label_flow import SURE
from unmask.proof.verdicts import Ground, ProposedText, Tokens
from unmask.recovery import Ambiguity, AmbiguityKind, run_length

EQUAL = 1e-2  # embeddings that differ by less leave rows that differ by less, which noise and rounding may hide
_SAME_ROWS = 5e-2  # later rows that differ by less do not tell how long a run is
_SURE_TOLERANCES = 30  # the same in tolerances of the replay: a label leaves 1 − p of its share of the update
_SEEN = 0.3  # tolerances of a replay in the weight of one label: more, and one label more or less does not show
_MOST_MEMBERS, _MOST_EDITS = 16, 32  # of a class, and of all classes, that the client is run on
_NO_TASK = (
    "the task is not stated, and tokens after the last one with a gradient cannot be seen; state "
    "task='classification' if every text has one label"
)
_READS_INSIDE = (
    "the loss reads most tokens, so its last label may come after the text; state pooling='mean' if it takes a mean"
)
_MASKED = "if labels are masked, the tokens under them cannot be seen; state all_tokens_predicted=True if none are"
# Why a text's count is open where the number of texts was not stated: the loss is a mean.
COUNT_IS_UNSTATED = "one copy and ten copies look identical here; pass `--num-texts`"

Texts = Sequence[ProposedText]
Explains = Callable[[ProposedText, int, int], bool]
Found = Mapping[ProposedText, Sequence[Ambiguity]]


@dataclass(frozen=True)
class Situation:
    """Texts that agree with an update, by some ground, and what the lines of the table may ask."""

    evidence: GradientEvidence
    model: Model
    texts: Texts
    ground: Ground
    labelled: bool  # every token behind a text's first one may be a label
    explains: Explains  # whether a token at a place of a text agrees as well, by the same ground
    agreement: Agreement | None = None
    known: Mapping[tuple[Tokens, int], float] = field(default_factory=dict)  # how likely labels behind prefixes are
    reads_inside: bool = False  # a loss that reads most tokens, and nobody said that it takes a mean
    has_masked_labels: bool = False  # a token follows although no label arrives before it
    goes_on: frozenset[ProposedText] = frozenset()  # texts whose last token has a row, or may have one
    shows_ends: bool = True  # whether a text that ends inside a longer one would show

    @cached_property
    def is_blind(self) -> bool:
        """Whether one label more or less would not show: it changes a mean over N labels by 1/N."""
        if self.ground is not Ground.CLIENT or self.agreement is None:
            return not self.ground.is_replay or self.ground is Ground.SCALED_CLIENT
        num_labels = sum((len(text.tokens) - 1) * text.count for text in self.texts)
        return num_labels * self.agreement.tolerance > _SEEN

    @cached_property
    def of_open_runs(self) -> frozenset[ProposedText]:
        """Texts whose first token may stand more or less often at their start."""
        if self.model.learned_positions:
            return frozenset()
        return frozenset(_of_any_run(self)) | {text for text in self.texts if _is_traded(self, text)}

    @property
    def counts_labels(self) -> bool:
        """Whether labels count the repetitions of a token; where rows alone agree, weights of labels are free."""
        return self.labelled and self.ground.is_replay

    @cached_property
    def silent(self) -> float:
        """A label of at least this much less than probability 1 leaves a trace."""
        if self.agreement is None or self.ground.is_lossy:
            return SURE
        num_labels = sum((len(text.tokens) - 1) * text.count for text in self.texts)
        return max(SURE, max(_SURE_TOLERANCES, num_labels) * self.agreement.tolerance)

    def likely(self, text: ProposedText) -> tuple[float, ...]:
        """How likely the model finds each label of a text; 0 for a text that has none."""
        pairs = [(text.tokens[:length], text.tokens[length]) for length in range(1, len(text.tokens))]
        if not pairs or len(text.tokens) > self.model.max_positions:
            return (0.0,)
        if not all(pair in self.known for pair in pairs):
            return tuple(_probabilities(self.model, text.tokens)[0])
        return tuple(self.known[pair] for pair in pairs)

    def is_sure_to_go_on(self, text: ProposedText) -> bool:
        """Whether a label behind a text could leave no trace."""
        fits = len(text.tokens) < self.model.max_positions
        return fits and _probabilities(self.model, text.tokens)[1] > 1 - self.silent

    def merged(self, text: ProposedText) -> Tokens:
        """The text with one token for each class of equal ones, as runs are of these."""
        return tuple(min(self.classes.get(token, (token,))) for token in text.tokens)

    @cached_property
    def classes(self) -> Mapping[int, tuple[int, ...]]:
        """Tokens of the texts whose embeddings others share, with all of these."""
        sent = None if self.ground.is_lossy else self.evidence
        return equal_inputs(self.model, {token for text in self.texts for token in text.tokens}, sent)


@torch.no_grad()
def equal_inputs(
    model: Model, tokens: set[int], evidence: GradientEvidence | None = None
) -> Mapping[int, tuple[int, ...]]:
    """Of tokens that no forward pass tells from others, all of these; but for those whose row did not move."""
    rows = model.parameter(model.token_embedding).detach()
    near = {token: members for token, members in near_rows(rows, sorted(tokens), EQUAL).items() if len(members) > 1}
    if not near or evidence is None or model.token_embedding not in evidence.gradients:
        return near
    moved = evidence.gradients[model.token_embedding].any(1)
    still = {m for members in near.values() for m in members if not moved[m]} - {model.gradient_free_token}
    left = {
        token: tuple(m for m in members if m == token or m not in still or not moved[token])
        for token, members in near.items()
    }
    return {token: members for token, members in left.items() if len(members) > 1}


# ---- lines of the table


def open_runs(here: Situation) -> Found:
    """The first token once more or once less: without absolute positions, 't' and 't t' have the same rows."""
    return {text: (leading_run(text.tokens[0]),) for text in here.of_open_runs}


def masked_runs(here: Situation) -> Found:
    """The same where only the last token is a label that was seen: nothing counts the repetitions before it."""
    if not here.labelled or here.model.learned_positions or here.evidence.all_tokens_predicted is True:
        return {}
    hidden = [t for t in here.texts if len(set(here.merged(t)[:-1])) == 1 and t not in here.of_open_runs]
    return {text: (leading_run(text.tokens[0]),) for text in hidden}


def open_labels(here: Situation) -> Found:
    """Tokens behind the end, without labels: masked ones leave no trace."""
    if not here.labelled or here.evidence.all_tokens_predicted is True:
        return {}
    return dict.fromkeys(here.texts, (open_end(_MASKED),))


def open_tasks(here: Situation) -> Found:
    """Another task: what stands behind the last token that the loss reads leaves no trace."""
    if here.labelled or here.evidence.task is not None:
        return {}
    return dict.fromkeys(here.texts, (open_end(_NO_TASK),))


def open_losses(here: Situation) -> Found:
    """Another loss: where most tokens get gradients, they may be labels or a mean."""
    if here.labelled or not here.reads_inside:
        return {}
    return dict.fromkeys(here.texts, (open_end(_READS_INSIDE),))


def skipped_padding(here: Situation) -> Found:
    """Padding tokens at the end of a classified text, which transformers' classifiers do not read."""
    why = "" if here.labelled else why_end_is_skipped(here.evidence, here.model)
    return dict.fromkeys(here.texts, (open_end(why),)) if why else {}


def unread_labels(here: Situation) -> Found:
    """A last label that was not read, though the text's last token has a row."""
    if not here.labelled:
        return {}
    why = "its last token is only a label, and the update lacks the tensors that show labels"
    return {text: [open_end(why)] for text in here.texts if text in here.goes_on}


def masked_labels(here: Situation) -> Found:
    """Some labels were masked, so others may be."""
    if not here.labelled or not here.has_masked_labels or here.ground.is_replay:
        return {}
    return dict.fromkeys(here.texts, (open_end("some labels were masked"),))


def sure_labels(here: Situation) -> Found:
    """One label more, or one less, that the model is so sure of that it leaves no trace.

    Where one label would show, because it changes a mean over all of them, one text must have it less for another one
    to have it more.
    """
    if not here.labelled:
        return {}
    shorter = [text for text in here.texts if len(text.tokens) > 2 and here.likely(text)[-1] > 1 - here.silent]
    if not here.is_blind and not shorter:
        return {}
    longer = [text for text in here.texts if here.is_sure_to_go_on(text)]
    found: dict[ProposedText, list[Ambiguity]] = {}
    for text in longer:
        if here.is_blind or any(other is not text or text.count > 1 for other in shorter):
            why = "the model is sure of the next token, so its label could not be seen"
            found.setdefault(text, []).append(open_end(why))
    for text in shorter if here.ground.is_replay else ():
        if here.is_blind or any(other is not text or text.count > 1 for other in longer):
            why = "without its last token, of which the model is sure"
            found.setdefault(text, []).append(other_text(text.tokens[:-1], why))
    return found


def equal_tokens(here: Situation) -> Found:
    """Another token with the same embedding, as input or as label."""
    num_edits = 0
    found: dict[ProposedText, list[Ambiguity]] = {}
    by_output = _equal_labels(here)
    for text in here.texts:
        for place, token in enumerate(text.tokens):
            members = set(here.classes.get(token, (token,)))
            is_last = here.labelled and place == len(text.tokens) - 1
            members |= set(by_output.get(token, ())) if is_last else set()
            others = sorted(members - {token})
            num_edits += len(others)
            if len(others) < _MOST_MEMBERS and num_edits <= _MOST_EDITS:
                others = [other for other in others if here.explains(text, place, other)]
            if others:
                found.setdefault(text, []).append(equal_token(here.model, place, sorted({token, *others})))
    return found


UPDATES: tuple[Callable[[Situation], Found], ...] = (
    open_runs,
    masked_runs,
    open_labels,
    open_tasks,
    open_losses,
    skipped_padding,
    unread_labels,
    masked_labels,
    sure_labels,
    equal_tokens,
)


def find_alternatives(here: Situation) -> dict[ProposedText, tuple[Ambiguity, ...]]:
    """What every line finds; of open ends a text has one."""
    found: dict[ProposedText, list[Ambiguity]] = {text: [] for text in here.texts}
    for line in UPDATES:
        for text, points in line(here).items():
            has_end = any(point.kind is AmbiguityKind.OPEN_END for point in found[text])
            found[text] += [p for p in points if not (has_end and p.kind is AmbiguityKind.OPEN_END)]
    return {text: tuple(points) for text, points in found.items()}


# ---- what lines ask


def with_token(texts: Texts, text: ProposedText, place: int, token: int) -> list[ProposedText]:
    """The batch with one token of one text replaced, in one copy of it."""
    changed = replace(text, tokens=(*text.tokens[:place], token, *text.tokens[place + 1 :]), count=1)
    left = [replace(text, count=text.count - 1)] if text.count > 1 else []
    at = list(texts).index(text)
    return [*texts[:at], *left, changed, *texts[at + 1 :]]


def are_equal_labels(model: Model, token: int, other: int) -> bool:
    """Whether the output layer does not tell two tokens apart."""
    rows = model.unembedding
    return rows is None or other in near_rows(rows.detach(), [token], EQUAL)[token]


def _equal_labels(here: Situation) -> Mapping[int, tuple[int, ...]]:
    """Last tokens whose output rows others share."""
    rows = here.model.unembedding
    if rows is None or not here.labelled:
        return {}
    return near_rows(rows.detach(), sorted({text.tokens[-1] for text in here.texts}), EQUAL)


@torch.no_grad()
def _probabilities(model: Model, tokens: Tokens) -> tuple[list[float], float]:
    """Of each label of a text, and of the likeliest token behind it."""
    ids = torch.tensor(tokens, device=model.device)
    likely = model.hf(ids[None]).logits[0].double().softmax(-1)
    return likely[:-1].gather(1, ids[1:, None])[:, 0].tolist(), float(likely[-1].max())


def _is_traded(here: Situation, text: ProposedText) -> bool:
    """Whether a text's run may be another one's: 't t a' and 't b' leave what 't a' and 't t b' do."""
    tokens = here.merged(text)
    if not here.labelled:
        return len(tokens) == 1
    merged = {other: here.merged(other) for other in here.texts}
    kin = {other: own for other, own in merged.items() if (other.start, own[0]) == (text.start, tokens[0])}
    runs = {other: run_length(own) for other, own in kin.items()}
    if all(min(runs[other], len(own) - 1) == 1 and len(set(own)) > 1 for other, own in kin.items()):
        return False
    continuing = Counter(own[runs[other]] for other, own in kin.items() if runs[other] < len(own) - 1)
    may_trade = any(
        runs[other] == len(own) or (runs[other] == len(own) - 1 and continuing[own[-1]] != 1)
        for other, own in kin.items()
    )
    is_alone = sum(other.count for other in kin) == 1 and here.ground is Ground.CLIENT
    if may_trade and is_alone and here.evidence.num_clients == 1:
        return sum(other.count for other in here.texts) != here.evidence.num_texts  # else it would be two texts
    return may_trade


@torch.no_grad()
def _of_any_run(here: Situation) -> Iterator[ProposedText]:
    """Texts whose rows hardly change when their first token is repeated once more, or once less.

    A client counts the labels of all texts together, so where it agrees only the runs of texts that share a first token
    with a run can be traded. A text of one repeated token has no later rows, and a mean loss has no length: nothing
    tells it.
    """
    merged = {text: here.merged(text) for text in here.texts}
    firsts = Counter[int]()
    for text, own in merged.items():
        firsts[own[0]] += text.count
    runs = {text: run_length(own) for text, own in merged.items()}
    risky = {
        own[0]
        for text, own in merged.items()
        if not here.counts_labels or runs[text] == len(own) or (runs[text] > 1 and firsts[own[0]] > 1)
    }
    for text, run in track(list(runs.items()), "comparing repetitions"):
        if merged[text][0] in risky and _is_any_run(here.model, text.tokens, run, here.labelled):
            yield text


def _is_any_run(model: Model, tokens: Tokens, run: int, labelled: bool) -> bool:
    inputs = tokens[:-1] if labelled else tokens  # the last token of a next-token text has no row
    rest = inputs[run:]
    if not rest or len(inputs) + 1 > model.max_positions or model.problem_at(len(inputs) + 1):
        return True
    own = _last_states(model, inputs)[run:]
    for length in [run + 1] if run == 1 else [run + 1, run - 1]:
        other = _last_states(model, (*(tokens[:1] * length), *rest))[length:]
        if float(((own - other).norm(dim=1) / own.norm(dim=1)).max()) < _SAME_ROWS:
            return True
    return False


def _last_states(model: Model, tokens: Tokens) -> Tensor:
    return model.hidden_states(torch.tensor([tokens], device=model.device))[-1][0].double()


def why_end_is_skipped(evidence: GradientEvidence, model: Model) -> str:
    """Why a classified text may end in padding tokens of its own; empty where the client's head is stated.

    transformers' classifiers may have sent the update though the model was loaded without one.
    """
    is_stated = model.classifier is None and (evidence.head is not None or evidence.pooling == "mean")
    if is_stated or model.unread_end is None:
        return ""
    return (
        f"a classifier of transformers takes token {model.unread_end} at the end of a text for padding and does not "
        "read it"
    )


# ---- counts


def counts_by_means(counts: Sequence[int], num_labels: Sequence[int], num_texts: int) -> list[int] | None:
    """Counts that send the same update if the loss is a mean of each text's own mean; None if none are `num_texts`.

    There a text of n labels weighs n times less on each than it does in a mean over all labels.
    """
    weights = [count * labels for count, labels in zip(counts, num_labels, strict=True)]
    shares = [num_texts * weight for weight in weights]
    total = sum(weights)
    return None if not total or any(share % total for share in shares) else [share // total for share in shares]


def may_be_fewer(counts: Sequence[int], labelled: bool) -> bool:
    """Whether counts may be a part of these, and the others texts of one token, which leave no trace."""
    return labelled and math.gcd(*counts) > 1


# ---- sentences


def equal_token(model: Model, place: int, members: Sequence[int]) -> Ambiguity:
    """One of several tokens stands at a position."""
    words = ", ".join(repr(model.decode([member])) for member in members)
    reason = f"token {place + 1} is one of {words}: their embeddings are equal, and nothing in the update shows which"
    return Ambiguity(AmbiguityKind.EQUAL_TOKENS, reason, place, tuple(members))


def leading_run(token: int) -> Ambiguity:
    """How often the first token is repeated."""
    reason = "the first token may be repeated at the start: a model with relative positions does not show how often"
    return Ambiguity(AmbiguityKind.LEADING_RUN, reason, 0, (token,))


def open_end(why: str) -> Ambiguity:
    """The text may go on."""
    return Ambiguity(AmbiguityKind.OPEN_END, f"the text may continue after its last token: {why}")


def open_count(why: str) -> Ambiguity:
    """How often the text occurs."""
    return Ambiguity(AmbiguityKind.COUNT, f"it may occur more often: {why}")


def other_text(tokens: Tokens, why: str) -> Ambiguity:
    """Another text explains the evidence as well."""
    return Ambiguity(AmbiguityKind.OTHER_TEXT, f"the text may be another one: {why}", tokens=tokens)
