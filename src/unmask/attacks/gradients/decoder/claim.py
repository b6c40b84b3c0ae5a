"""From what a search on a decoder found to what may be claimed.

A text is *certain* if a replay confirms it (`confirm.py`) and nothing about it is open but how often it occurs. The
batch is *recovered* if the replay explains the whole update, every text is certain, and there are as many as the batch
holds. All of it is computed without the secret.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unmask.attacks.gradients.bag_of_words.token_filter import Candidates
from unmask.attacks.gradients.decoder.ambiguity import (
    COUNT_IS_UNSTATED,
    EqualTokens,
    counts_by_means,
    leading_run,
    open_count,
    open_end,
    texts_of_any_run,
    why_end_is_skipped,
)
from unmask.attacks.gradients.decoder.confirm import Confirmation, Proof
from unmask.attacks.gradients.decoder.endings import TextEnding
from unmask.attacks.gradients.decoder.labels import EXPLAINED
from unmask.attacks.gradients.decoder.prefix_search import Forest, Node, is_repetition
from unmask.attacks.run import Run
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.proof.replay import another_client, why_not_replayed
from unmask.recovery import (
    Aim,
    Ambiguity,
    AmbiguityKind,
    Certificate,
    RecoveredText,
    RecoveredTexts,
    Recovery,
    Search,
    Status,
)
from unmask.wording import count_noun

_EXPLAINED_WHILE_MISSING = 1e-3  # of δ: rounding to few digits leaves more, and then a wrong label may explain the rest
_NO_TASK = (
    "the task is not stated, and tokens after the last one with a gradient cannot be seen; state "
    "task='classification' if every text has one label"
)
_READS_INSIDE = (
    "the loss reads most tokens, so its last label may come after the text; state pooling='mean' if it takes a mean"
)
_MASKED = "if labels are masked, the tokens under them cannot be seen; state all_tokens_predicted=True if none are"


@dataclass(frozen=True)
class SearchResult:
    """Everything that the stages of an attack on a decoder found."""

    model: Model
    candidates: Candidates
    site: str  # the layer whose gradient checked prefixes
    rank: int  # how many directions that gradient has
    forest: Forest
    confirmation: Confirmation
    used: tuple[str, ...]
    min_gap_decades: float
    labelled: bool  # next-token training: every token behind the first is a label
    noise_floor: float = 0.0  # of that gradient's spectrum
    has_ends: bool = True  # whether ends of texts inside longer ones, and last tokens, could be read
    has_masked_labels: bool = False
    reads_inside: bool = False  # a classification whose loss reads most tokens, and nobody said that it takes a mean
    names: Mapping[Node, frozenset[int]] = field(default_factory=dict)  # labels read for a prefix's last token
    doubtful: frozenset[Node] = frozenset()  # prefixes that the others do not verify, where that is the proof

    @property
    def num_distinct_rows(self) -> int:
        """Prefixes with a row of their own."""
        return self.forest.num_rows(self.model)

    @property
    def is_clear(self) -> bool:
        """Whether the distances of accepted and refused prefixes stand far apart."""
        return self.forest.is_clear(self.min_gap_decades)

    @property
    def endings(self) -> list[TextEnding]:
        """The texts."""
        return self.confirmation.endings

    @property
    def num_other_rows(self) -> int:
        """Prefixes with a row of their own that are in none of the texts, but for padding."""
        listed = {(e.node[0], e.node[1][:end]) for e in self.endings for end in range(1, len(e.node[1]) + 1)}
        return sum(
            node not in listed and set(node[1]) != {self.model.pad_token} and not is_repetition(self.model, node)
            for node in self.forest.nodes
        )

    @property
    def is_replayed(self) -> bool:
        """Whether the client was run again and sends this update."""
        clients = (Proof.CLIENT, Proof.SCALED_CLIENT, Proof.ROUNDED_CLIENT, Proof.NOISY_CLIENT)
        return self.confirmation.proof in clients

    @property
    def explains_everything(self) -> bool:
        """Whether a replay leaves nothing of the update unexplained."""
        return self.is_replayed or self.confirmation.proof is Proof.ARRIVALS


def claim_texts(run: Run, evidence: GradientEvidence, findings: SearchResult) -> Recovery[RecoveredTexts]:
    """Texts, status, reason and certificate of a finished search."""
    texts = _texts(evidence, findings)
    status, reason = _status(evidence, findings, texts)
    tokens, classes = _bag(findings, texts)
    if status is Status.RECOVERED:  # padding may leave a trace as well, and is in no text; a label may leave none
        tokens = frozenset(token for text in texts for token in text.tokens)
    value = RecoveredTexts(tuple(texts), tokens, classes)
    cost = run.cost(
        candidates=findings.candidates.num_tested + findings.forest.num_tested,
        forward_passes=len(findings.forest.leaves) + findings.confirmation.num_passes,
    )
    # Texts that do not explain the update say nothing about others, and an open end may hold the rest of a text.
    unconfirmed = not findings.explains_everything or not all(text.certain for text in texts)
    searches = Search(Aim.TOKENS), Search(Aim.TEXTS, unconfirmed=unconfirmed)
    return Recovery(value, status, reason, _certificate(findings, texts), cost, findings.used, searches)


def _bag(findings: SearchResult, texts: Sequence[RecoveredText]) -> tuple[frozenset[int], tuple[tuple[int, ...], ...]]:
    """The bag of words, and classes of equal tokens that are left; a replay may have told which of a class occurs."""
    if not findings.confirmation.tells_equal_tokens:
        return findings.candidates.tokens, findings.candidates.classes
    occurring = {token for text in texts for token in text.tokens}
    left = tuple(members for members in findings.candidates.classes if not occurring & set(members))
    told = {token for members in findings.candidates.classes for token in members if token in occurring}
    return findings.candidates.tokens | told, left


def _certificate(findings: SearchResult, texts: Sequence[RecoveredText]) -> Certificate:
    gap, agreement = findings.forest.gap, findings.confirmation.agreement
    details = {
        "rank": float(findings.rank),
        "explained_rank": float(findings.num_distinct_rows),
        "gap_decades": gap.decades,
        "token_gap_decades": findings.candidates.gap.decades,
        "noise_floor": findings.noise_floor,
        "span_distance": max((text.residual for text in texts), default=float("inf")),
    }
    if agreement is not None:
        details |= {"replay_misfit": agreement.misfit_as_is, "replayed_tensors": float(agreement.num_tensors)}
    certain = [text.residual for text in texts if text.certain]
    if agreement is None or not findings.explains_everything:
        residual = max(certain, default=float("inf"))
        return Certificate(findings.confirmation.proof.value, residual, gap.threshold, gap.rejected, details)
    misfit = agreement.misfit if findings.confirmation.proof is Proof.SCALED_CLIENT else agreement.misfit_as_is
    residual = misfit if certain else float("inf")
    return Certificate(findings.confirmation.proof.value, residual, agreement.tolerance, None, details)


def _texts(evidence: GradientEvidence, findings: SearchResult) -> list[RecoveredText]:
    """Every ending as a text, with what is open about it; the certain ones first."""
    equal = {} if findings.confirmation.tells_equal_tokens else findings.candidates.equal
    classes = EqualTokens.of(findings.model, equal, findings.names, findings.endings)
    any_run = texts_of_any_run(findings.model, findings.endings, findings.labelled)
    too_many = evidence.num_texts is not None and len(findings.endings) > evidence.num_texts
    counts = _why_counts_are_open(evidence, findings, any_run)
    texts = []
    for ending in findings.endings:
        tokens, open_points = classes.resolve(ending, findings.labelled)
        is_covered = (
            not too_many and _is_covered(findings, ending) and not _is_part_of_another(evidence, findings, ending)
        )
        open_points += _open_points(evidence, findings, ending, ending.node in any_run)
        certain = is_covered and not open_points
        # While texts are missing, what is open about one may lie in what is missing: then it is a guess.
        is_covered = certain or (is_covered and findings.explains_everything)
        if counts is not None:
            open_points.append(open_count(counts))
        is_run = len(set(ending.node[1])) == 1 and not findings.model.learned_positions
        count = ending.count if _counts_are_told(evidence, findings) and not is_run else 1
        distance = findings.forest.worst_distance(ending.node)
        text = findings.model.decode(tokens)
        # What is a mere guess stands for no class of texts.
        said = tuple(open_points) if is_covered else ()
        texts.append(RecoveredText(tokens, text, certain, distance, count if is_covered else 1, said))
    return sorted(texts, key=lambda text: (not text.certain, text.residual))


def _open_points(
    evidence: GradientEvidence, findings: SearchResult, ending: TextEnding, of_any_run: bool
) -> list[Ambiguity]:
    """What is open about where a text begins and ends."""
    points = []
    is_unstated = findings.labelled and evidence.all_tokens_predicted is not True
    # With masked labels, nothing counts the repetitions of a first token that only labels follow.
    hides_run = is_unstated and not findings.model.learned_positions and len(set(ending.node[1][:-1])) == 1
    if ending.has_open_run or of_any_run or hides_run:
        points.append(leading_run(ending.node[1][0]))
    if is_unstated:
        points.append(open_end(_MASKED))
    elif not findings.labelled and evidence.task is None:
        points.append(open_end(_NO_TASK))
    elif findings.reads_inside:
        points.append(open_end(_READS_INSIDE))
    elif not findings.labelled and (why := why_end_is_skipped(evidence, findings.model)):
        points.append(open_end(why))
    elif findings.labelled and not findings.has_ends:
        points.append(open_end("its last token is only a label, and the update lacks the tensors that show labels"))
    elif findings.has_masked_labels and not findings.is_replayed:
        points.append(open_end("some labels were masked"))
    elif ending.node in findings.confirmation.open_ends:
        points.append(open_end("the model is sure of the next token, so its label could not be seen"))
    return points


def _counts_are_told(evidence: GradientEvidence, findings: SearchResult) -> bool:
    """Whether the weights of labels are counts: as many as texts were stated, in a mean over one client's tokens.

    That it is one is not known: a mean of each text's own mean must not give as many texts with other counts. Nor is
    it known that every text has a label: a text of one token leaves no trace, and then counts may be a part of these.
    """
    exact = (Proof.CLIENT, Proof.ROUNDED_CLIENT, Proof.NOISY_CLIENT)
    counts = [ending.count for ending in findings.endings]
    if evidence.num_clients != 1 or findings.confirmation.proof not in exact or sum(counts) != evidence.num_texts:
        return False
    may_be_fewer = findings.labelled and math.gcd(*counts) > 1
    return not may_be_fewer and _counts_by_means(evidence, findings) in (None, counts)


def _counts_by_means(evidence: GradientEvidence, findings: SearchResult) -> list[int] | None:
    """As `counts_by_means`, of the texts found."""
    labels = [len(ending.node[1]) - 1 for ending in findings.endings]
    return counts_by_means([ending.count for ending in findings.endings], labels, evidence.num_texts or 0)


def _why_counts_are_open(
    evidence: GradientEvidence, findings: SearchResult, any_run: frozenset[Node] = frozenset()
) -> str | None:
    """Why it is open how often texts occur; None where it is known.

    Where runs of a first token are open, so is the number of texts that start with it.
    """
    num_found, total = len(findings.endings), sum(ending.count for ending in findings.endings)
    if evidence.num_texts is None:
        return COUNT_IS_UNSTATED
    runs = any(ending.has_open_run or ending.node in any_run for ending in findings.endings)
    everyone = all(_is_covered(findings, ending) for ending in findings.endings) and not runs
    counts = {ending.count for ending in findings.endings}
    is_clients = findings.confirmation.proof is Proof.CLIENT and evidence.num_clients == 1 and len(counts) > 1
    if is_clients and total > evidence.num_texts and _counts_by_means(evidence, findings) is None:
        return f"the client sends this update for {count_noun(total, 'text')}, but {evidence.num_texts} were stated"
    if num_found == evidence.num_texts and findings.explains_everything and everyone:
        return None  # each of them occurs, so each occurs once
    if not _counts_are_told(evidence, findings):
        if findings.is_replayed and total == evidence.num_texts and math.gcd(*counts) > 1:
            return (
                f"found {num_found} of {total} texts; the rest are copies, or texts of one token, which leave no trace"
            )
        return f"found {num_found} of {count_noun(evidence.num_texts, 'text')}; a text's weight need not be its count"
    if total == evidence.num_texts and not runs:
        return None
    return f"found {total} of {count_noun(evidence.num_texts, 'text')}; the rest are copies or cannot be seen"


def _is_covered(findings: SearchResult, ending: TextEnding) -> bool:
    """Whether the proof covers a text: the replay of the client does; else its own prefixes must be clear as well."""
    if findings.confirmation.proof is Proof.NONE or ending.node in findings.confirmation.refuted:
        return False
    if findings.is_replayed:
        return True
    start, tokens = ending.node
    prefixes = {(start, tokens[:length]) for length in range(1, len(tokens) + 1)}
    # Padding whose labels count seems to be a part of the text: in front of it, and behind it.
    is_padding = findings.model.pad_token in (tokens[0], tokens[-1]) and findings.labelled
    if ending.is_traceless or is_padding:
        return False
    explained = EXPLAINED if findings.explains_everything else _EXPLAINED_WHILE_MISSING
    return findings.is_clear and ending.residual <= explained and not prefixes & findings.doubtful


def _is_part_of_another(evidence: GradientEvidence, findings: SearchResult, ending: TextEnding) -> bool:
    """Whether what seems to be a text of its own may be the start of another one.

    A text of one repeated token may be the run at another's start; an end inside a longer text may be a masked label.
    """
    start, tokens = ending.node
    others = [other.node for other in findings.endings if other is not ending]
    ends_are_open = evidence.all_tokens_predicted is not True if findings.labelled else evidence.task is None
    if ends_are_open and any(other[0] == start and other[1][: len(tokens)] == tokens for other in others):
        return True
    if ends_are_open:  # of two runs the shorter one is a part
        others = [other for other in others if len(set(other[1])) > 1]
    if findings.model.learned_positions or len(set(tokens)) > 1 or not (ends_are_open or ending.has_open_run):
        return False
    return any(other[1][0] == tokens[0] for other in others)


def _status(evidence: GradientEvidence, findings: SearchResult, texts: Sequence[RecoveredText]) -> tuple[Status, str]:
    rank = findings.rank
    num_found, num_certain = len(texts), sum(text.certain for text in texts)
    total = sum(text.count for text in texts)
    if not findings.is_clear and not findings.is_replayed:
        why = (
            f"more prefixes pass at the {findings.site} than its rank {rank} allows"
            if findings.forest.overflow
            else f"distances at the {findings.site} {findings.forest.gap.describe()}"
        )
        return Status.PARTIAL, f"the bag of words is certain, but the texts ({num_found}) are a best effort: {why}"
    problems = []
    if not findings.has_ends:
        problems.append(_no_ends(findings))
    if not findings.explains_everything:
        why = findings.confirmation.stopped or why_not_replayed(evidence, by_tensor=True)
        problems.append(why or _describe_unexplained(evidence, findings, rank))
    if findings.explains_everything and not findings.is_replayed and findings.num_other_rows:
        prefixes = count_noun(findings.num_other_rows, "prefix", "prefixes")
        problems.append(f"the update also holds {prefixes} of other texts, which were not read")
    if evidence.num_texts is not None and len(texts) > evidence.num_texts:
        stated = count_noun(evidence.num_texts, "text")
        problems.append(f"the batch holds {stated}, so these are too many, and none is certain")
    open_counts = {p.reason for text in texts for p in text.ambiguities if p.kind is AmbiguityKind.COUNT}
    problems += sorted(open_counts)
    points = [point for text in texts for point in text.ambiguities if point.kind is not AmbiguityKind.COUNT]
    problems += {point.kind: point.reason for point in points}.values()
    if num_certain < num_found and len(problems) == 0:
        problems.append(f"the others ({num_found - num_certain}) are a best effort: the replay does not cover them")
    if problems:
        known = f"certain: {num_certain} of {count_noun(num_found, 'different text')}"
        if num_certain < num_found and findings.is_replayed and all(text.certain or text.ambiguities for text in texts):
            known += ", though the client, run again on all of them, sends this update: open is only what follows"
        return Status.PARTIAL, "; ".join([known, *problems])
    whole = "the only text" if total == 1 else f"all {total} texts"
    return Status.RECOVERED, f"{whole}: {findings.confirmation.proof.value}"


def _no_ends(findings: SearchResult) -> str:
    what = "last tokens are missing" if findings.labelled else "ends inside longer texts cannot be seen"
    return f"no gradient of the last block shows ends (missing, too narrow, or not of one step), so {what}"


def _describe_unexplained(evidence: GradientEvidence, findings: SearchResult, rank: int) -> str:
    if (explained := findings.num_distinct_rows) != rank:
        return f"they explain {explained} of the gradient's {rank} directions: a text is missing, or padding predicts"
    return another_client(evidence)
