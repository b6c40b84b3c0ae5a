"""What may be claimed of the sequences that DAGER accepts. The paper claims nothing beyond its tolerances.

The search is *complete* if the distinct rows of its texts are as many as the rank (none too many) and their span holds
all of block 1's gradient (none missing). That does not prove the batch: a text that is a prefix of another, or
occurs twice, adds no row. So RECOVERED also asks that the number of texts is known and that as many were found:
each branch of the prefix tree then is one text. In next-token training the last token of a text has no row at all,
so its texts are never called whole. This judgement is ours; the paper leaves it to the comparison with the secret.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unmask.attacks.gradients.dager_spans import QuerySpans, SequenceCheck, span_distance
from unmask.evidence.gradients import GradientEvidence, Task
from unmask.recovery import Certificate, Cost, RecoveredText, RecoveredTexts, Recovery, Status
from unmask.shapes import Rows

# Float32 leaves about 1e-6 of a gradient outside the span of all its rows; a missing text leaves its share of the loss.
_UNEXPLAINED = 1e-4


@dataclass(frozen=True)
class Accepted:
    """Sequences that passed, how many were checked, and whether the budget cut the search short."""

    sequences: Sequence[tuple[int, ...]]
    num_checked: int
    is_cut: bool = False


@dataclass(frozen=True)
class Judgement:
    """Accepted sequences beside the gradient that they must explain."""

    check: SequenceCheck
    spans: QuerySpans
    accepted: Accepted
    distances: Sequence[float]  # the worst row of each sequence, in float64
    num_rows: int
    unexplained: float

    @property
    def is_complete(self) -> bool:
        """Whether the sequences have as many rows as the rank and leave nothing of the gradient."""
        whole_rank = self.spans.rank == self.spans.second.shape[1]
        return whole_rank and self.num_rows == self.spans.rank and self.unexplained <= _UNEXPLAINED


def judge(check: SequenceCheck, spans: QuerySpans, accepted: Accepted) -> Judgement:
    """Measure the accepted sequences in float64."""
    rows: dict[tuple[int, ...], torch.Tensor] = {}
    distances = []
    for text in accepted.sequences:
        inputs = check.rows(torch.tensor([text]))[0].double()[check.num_unchecked :]
        distances.append(float(span_distance(inputs, spans.second.double()).max()))
        for position, row in enumerate(inputs, start=check.num_unchecked):
            seen = text[: position + 1] if check.model.causal else (*text, position)
            rows.setdefault(seen, row)
    stacked = torch.stack(list(rows.values())) if rows else None
    unexplained = 1.0 if stacked is None else _unexplained(stacked, spans)
    return Judgement(check, spans, accepted, distances, len(rows), unexplained)


def _unexplained(rows: Rows, spans: QuerySpans) -> float:
    """The share of block 1's gradient outside the span of rows."""
    gradient = spans.second_gradient.double()
    frame, _ = torch.linalg.qr(rows.T.to(gradient.device))
    return float((gradient - frame @ (frame.T @ gradient)).norm() / gradient.norm())


def dager_verdict(
    evidence: GradientEvidence,
    judgement: Judgement,
    token_set: frozenset[int],
    *,
    tolerance: float,
    num_tested: int,
    used: tuple[str, ...],
    started: float,
) -> Recovery[RecoveredTexts]:
    """Texts, status and certificate of a finished search that accepted something."""
    model = judgement.check.model
    is_whole = not model.causal or evidence.task is Task.CLASSIFICATION
    certain = judgement.is_complete and is_whole
    texts = [
        RecoveredText(text, model.decode(text), certain and distance <= tolerance, distance)
        for text, distance in zip(judgement.accepted.sequences, judgement.distances, strict=True)
    ]
    status, reason = _status(evidence, judgement, is_whole, all(text.certain for text in texts))
    certificate = Certificate(
        claim="every row of the texts lies within the paper's tolerance of the span of block 1's query gradient",
        residual=max(judgement.distances),
        tolerance=tolerance,
        details={
            "rank": float(judgement.spans.rank),
            "explained_rank": float(judgement.num_rows),
            "unexplained_gradient": judgement.unexplained,
        },
    )
    cost = Cost(time.perf_counter() - started, candidates=num_tested + judgement.accepted.num_checked)
    ordered = tuple(sorted(texts, key=lambda text: (not text.certain, text.residual, text.tokens)))
    return Recovery(RecoveredTexts(ordered, token_set), status, reason, certificate, cost, used)


def _status(evidence: GradientEvidence, judgement: Judgement, is_whole: bool, certain: bool) -> tuple[Status, str]:
    num_found = len(judgement.accepted.sequences)
    rank = judgement.spans.rank
    if certain and num_found == evidence.num_texts:
        return Status.RECOVERED, f"all {num_found} texts; their rows are all {rank} directions of block 1's gradient"
    problems = []
    if not judgement.is_complete:
        problems.append(
            f"they have {judgement.num_rows} rows where the gradient's rank is {rank}, and leave "
            f"{judgement.unexplained:.1e} of it unexplained, so texts or their ends are missing, or too many passed"
        )
    if not is_whole:
        problems.append("the last token of a next-token text is only a label, which this attack does not read")
    if num_found != evidence.num_texts:
        problems.append(
            "the number of texts is not known"
            if evidence.num_texts is None
            else f"the batch holds {evidence.num_texts} texts: others repeat these, are prefixes of them, or were missed"
        )
    status = Status.BUDGET_EXHAUSTED if judgement.accepted.is_cut else Status.PARTIAL
    return status, f"{num_found} texts passed; " + "; ".join(problems)


def tokens_only(
    token_set: frozenset[int],
    worst: float,
    tolerance: float,
    accepted: Accepted,
    *,
    num_tested: int,
    used: tuple[str, ...],
    started: float,
) -> Recovery[RecoveredTexts]:
    """Tokens passed in block 0, but no sequence of them in block 1."""
    certificate = Certificate(
        claim="every token listed lies within the paper's tolerance of the span of block 0's query gradient",
        residual=worst,
        tolerance=tolerance,
    )
    cost = Cost(time.perf_counter() - started, candidates=num_tested + accepted.num_checked)
    status = Status.BUDGET_EXHAUSTED if accepted.is_cut else Status.PARTIAL
    reason = f"the bag of words ({len(token_set)} tokens) was recovered; no sequence of them passed in block 1"
    return Recovery(RecoveredTexts(token_set=token_set), status, reason, certificate, cost, used)
