"""What may be claimed of the sequences that DAGER accepts. The paper claims nothing beyond its tolerances.

The search is *complete* if the distinct rows of its texts are as many as the rank (none too many) and their span holds
all of block 1's gradient (none missing). That does not prove the batch: a text that is a prefix of another, or
occurs twice, adds no row. So RECOVERED also asks that the number of texts is known and that as many were found:
each branch of the prefix tree then is one text. In next-token training the last token of a text has no row at all,
so its texts are never called whole. Best-effort guesses failed the paper's own test: nothing is claimed of them, and
they take no part in the judgement. It is ours; the paper leaves it to the comparison with the secret.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unmask.attacks.baselines.dager_spans import QuerySpans, SequenceCheck, span_distance
from unmask.attacks.run import Run
from unmask.evidence.gradients import GradientEvidence, Task
from unmask.recovery import Aim, Certificate, RecoveredText, RecoveredTexts, Recovery, Status, searches_of
from unmask.shapes import Rows, Tokens
from unmask.wording import count_noun

# Float32 leaves about 1e-6 of a gradient outside the span of all its rows; a missing text leaves its share of the loss.
_UNEXPLAINED = 1e-4


@dataclass(frozen=True)
class TokenSets:
    """Tokens that may stand at each position, the nearest first; one set for all where positions are rotary."""

    sets: Sequence[Tokens]
    ends: Sequence[tuple[int, int]]  # (position, end token), the shortest text first
    everywhere: bool
    worst: float  # the largest distance of a token listed
    num_tested: int

    def at(self, position: int) -> Tokens:
        """The set of a position; empty beyond the longest text."""
        index = 0 if self.everywhere else position
        return self.sets[index] if index < len(self.sets) else torch.zeros(0, dtype=torch.long)

    @property
    def tokens(self) -> frozenset[int]:
        """All tokens, whatever their position."""
        return frozenset(int(token) for tokens in self.sets for token in tokens) | {end for _, end in self.ends}


@dataclass(frozen=True)
class AcceptedSequences:
    """Sequences that passed, how many were checked, whether the budget ended the search, and guesses that failed."""

    sequences: Sequence[tuple[int, ...]]
    num_checked: int
    is_cut: bool = False
    guesses: Sequence[tuple[int, ...]] = ()


@dataclass(frozen=True)
class CheckedSequences:
    """Accepted sequences beside the gradient that they must explain."""

    check: SequenceCheck
    spans: QuerySpans
    accepted: AcceptedSequences
    tolerance: float
    distances: Sequence[float]  # the worst row of each sequence, in float64
    num_rows: int
    unexplained: float

    @property
    def is_complete(self) -> bool:
        """Whether the sequences have as many rows as the rank and leave nothing of the gradient."""
        fits = not self.spans.is_cut and self.num_rows == self.spans.rank
        return fits and self.unexplained <= _UNEXPLAINED

    def is_certain(self, distance: float) -> bool:
        """Whether a sequence of this distance is in the batch and ends where it ends."""
        return self.is_complete and distance <= self.tolerance


def check_sequences(
    check: SequenceCheck, spans: QuerySpans, accepted: AcceptedSequences, tolerance: float
) -> CheckedSequences:
    """Measure the accepted sequences in float64."""
    rows: dict[tuple[int, ...], torch.Tensor] = {}
    distances = []
    for text in accepted.sequences:
        inputs = _check_rows(check, text)
        distances.append(float(span_distance(inputs, spans.second.double()).max()))
        for position, row in enumerate(inputs, start=check.num_unchecked):
            seen = text[: position + 1] if check.model.causal else (*text, position)
            rows.setdefault(seen, row)
    stacked = torch.stack(list(rows.values())) if rows else None
    unexplained = 1.0 if stacked is None else _measure_unexplained(stacked, spans)
    return CheckedSequences(check, spans, accepted, tolerance, distances, len(rows), unexplained)


def _check_rows(check: SequenceCheck, text: Sequence[int]) -> Rows:
    return check.rows(torch.tensor([text]))[0].double()[check.num_unchecked :]


def _list_guesses(check: SequenceCheck, accepted: AcceptedSequences) -> list[RecoveredText]:
    """Guesses as texts that are not certain, each with the distance of its worst row."""
    basis = check.basis.double()
    return [
        RecoveredText(
            text, check.model.decode(text), False, float(span_distance(_check_rows(check, text), basis).max())
        )
        for text in accepted.guesses
    ]


def _measure_unexplained(rows: Rows, spans: QuerySpans) -> float:
    """The share of block 1's gradient outside the span of rows."""
    gradient = spans.second_gradient.double()
    frame, _ = torch.linalg.qr(rows.T.to(gradient.device))
    return float((gradient - frame @ (frame.T @ gradient)).norm() / gradient.norm())


def claim_sequences(
    evidence: GradientEvidence, judgement: CheckedSequences, sets: TokenSets, used: tuple[str, ...], run: Run
) -> Recovery[RecoveredTexts]:
    """Texts, status and certificate of a finished search that accepted something."""
    model = judgement.check.model
    is_whole = not model.causal or evidence.task is Task.CLASSIFICATION
    texts = [
        RecoveredText(text, model.decode(text), judgement.is_certain(distance) and is_whole, distance)
        for text, distance in zip(judgement.accepted.sequences, judgement.distances, strict=True)
    ]
    certificate = Certificate(
        claim="every row of the texts lies within the paper's tolerance of the span of block 1's query gradient",
        residual=max(judgement.distances),
        tolerance=judgement.tolerance,
        details={
            "rank": float(judgement.spans.rank),
            "explained_rank": float(judgement.num_rows),
            "unexplained_gradient": judgement.unexplained,
        },
    )
    status, reason = _status(evidence, judgement, is_whole)
    cost = run.cost(candidates=sets.num_tested + judgement.accepted.num_checked)
    ordered = sorted(texts, key=lambda text: (not text.certain, text.residual, text.tokens))
    ordered += _list_guesses(judgement.check, judgement.accepted)
    # Tolerances are set by hand: what they refuse may be there, unless the texts explain everything.
    unconfirmed = status is not Status.RECOVERED
    searches = searches_of(Aim.TOKENS, Aim.TEXTS, stopped=judgement.accepted.is_cut, unconfirmed=unconfirmed)
    return Recovery(RecoveredTexts(tuple(ordered), sets.tokens), status, reason, certificate, cost, used, searches)


def _status(evidence: GradientEvidence, judgement: CheckedSequences, is_whole: bool) -> tuple[Status, str]:
    num_found, rank = len(judgement.accepted.sequences), judgement.spans.rank
    problems = []
    if not judgement.is_complete:
        problems.append(
            f"they have {judgement.num_rows} rows where the gradient's rank is {rank}, and leave "
            f"{judgement.unexplained:.1e} of it unexplained, so texts or their ends are missing, or too many passed"
        )
    if not is_whole:
        problems.append("the last token of a next-token text is only a label, which this attack does not read")
    if max(judgement.distances) > judgement.tolerance:
        problems.append(f"a row is {max(judgement.distances):.1e} away, though the mean of its text passed")
    if num_found != evidence.num_texts:
        problems.append(
            "the number of texts is not known"
            if evidence.num_texts is None
            else f"the batch holds {count_noun(evidence.num_texts, 'text')}: the rest are copies, prefixes or missing"
        )
    if not problems:
        whole = "the only text" if num_found == 1 else f"all {num_found} texts"
        return Status.RECOVERED, f"{whole}: their rows explain all {rank} directions of block 1's gradient"
    status = Status.BUDGET_EXHAUSTED if judgement.accepted.is_cut else Status.PARTIAL
    return status, f"{count_noun(num_found, 'text')} passed{_describe(judgement.accepted)}; " + "; ".join(problems)


def _describe(accepted: AcceptedSequences) -> str:
    return f" ({len(accepted.guesses)} more are guesses, which failed)" if accepted.guesses else ""


def tokens_only(
    sets: TokenSets,
    check: SequenceCheck,
    accepted: AcceptedSequences,
    tolerance: float,
    used: tuple[str, ...],
    run: Run,
) -> Recovery[RecoveredTexts]:
    """Tokens passed in block 0, but no sequence of them in block 1."""
    certificate = Certificate(
        claim="every token listed lies within the paper's tolerance of the span of block 0's query gradient",
        residual=sets.worst,
        tolerance=tolerance,
    )
    cost = run.cost(candidates=sets.num_tested + accepted.num_checked)
    status = Status.BUDGET_EXHAUSTED if accepted.is_cut else Status.PARTIAL
    reason = f"the bag of words ({len(sets.tokens)} tokens) was recovered; no sequence of them passed in block 1"
    value = RecoveredTexts(tuple(_list_guesses(check, accepted)), sets.tokens)
    return Recovery(value, status, reason + _describe(accepted), certificate, cost, used)
