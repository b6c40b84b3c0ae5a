"""From the texts that a search on an encoder accepted to what may be claimed.

A text is *certain* if each of its rows lies in the gradients' spans and the nearest refused text is far from them. The
batch is *complete* if the texts' rows are as many as the gradient's rank: then nothing that left a trace is missing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unmask.attacks.gradients.encoder_search import EncoderSearch
from unmask.attacks.gradients.token_filter import Candidates
from unmask.attacks.gradients.verdict import bag_of_words
from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.gap import Gap
from unmask.models.adapter import Model
from unmask.recovery import Certificate, Cost, RecoveredText, RecoveredTexts, Recovery, Status

_ALIKE = 0.7  # guesses that share more than this part of their tokens count as one

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class Findings:
    """Everything that the search found."""

    search: EncoderSearch
    candidates: Candidates
    min_gap_decades: float
    used: tuple[str, ...]

    @property
    def texts(self) -> dict[TokenIds, float]:
        """Accepted texts, with the largest distance of their rows."""
        places = self.search.problem.places
        return {places.tokens_of(text): distance for text, distance in self.search.found.items()}

    @property
    def guesses(self) -> list[TokenIds]:
        """Refused texts, the best first; texts that were only made to be refused are left out."""
        refused = sorted((cost, text) for text, (cost, _) in self.search.refused.items() if cost < float("inf"))
        return [self.search.problem.places.tokens_of(text) for _, text in refused]

    @property
    def model(self) -> Model:
        """The model under attack."""
        return self.search.problem.model

    @property
    def is_cut(self) -> bool:
        """Whether the budget ended the search."""
        return self.search.is_out_of_budget and not self.search.is_done

    @property
    def gap(self) -> Gap:
        """What lies between the accepted texts' distances and the nearest refused one."""
        return Gap(max(self.texts.values(), default=0.0), self.search.nearest_refused)

    @property
    def is_clear(self) -> bool:
        """Whether accepted and refused texts stand far apart."""
        return self.gap.decades >= self.min_gap_decades


def encoder_verdict(evidence: GradientEvidence, findings: Findings, started: float) -> Recovery[RecoveredTexts]:
    """Texts, status, reason and certificate of a finished search."""
    guesses = tuple(_guesses(evidence, findings))
    if not findings.texts:
        why = "the budget ended before a text was found" if findings.is_cut else "no text was found whose rows all fit"
        return bag_of_words(findings.candidates, findings.used, why, started, guesses)
    clear = findings.is_clear
    texts = [
        RecoveredText(tokens, findings.model.decode(tokens), clear, distance, _count(evidence, findings))
        for tokens, distance in sorted(findings.texts.items(), key=lambda item: item[1])
    ]
    status, reason = _status(evidence, findings, texts)
    gap = findings.gap
    certificate = Certificate(
        claim=f"every row of a certain text lies in the gradients' spans at the {_sites(findings)}",
        residual=gap.accepted if clear else float("inf"),
        tolerance=gap.threshold,
        rejected=gap.rejected,
        details={
            "rank": float(findings.search.problem.rank),
            "explained_rank": float(findings.search.num_rows),
            "gap_decades": gap.decades,
            "token_gap_decades": findings.candidates.gap.decades,
        },
    )
    cost = Cost(
        seconds=time.perf_counter() - started,
        candidates=findings.candidates.num_tested + len(findings.search.refused) + len(findings.texts),
    )
    value = RecoveredTexts((*texts, *guesses), findings.candidates.tokens)
    return Recovery(value, status, reason, certificate, cost, findings.used)


def _count(evidence: GradientEvidence, findings: Findings) -> int:
    """How often a text occurs: known only if it is the only one and explains everything."""
    alone = len(findings.texts) == 1 and findings.search.is_complete
    return evidence.num_texts if alone and evidence.num_texts is not None else 1


def _guesses(evidence: GradientEvidence, findings: Findings) -> Iterator[RecoveredText]:
    """The best refused texts, no two alike, as many as are missing."""
    missing = (evidence.num_texts or 0) - len(findings.texts)
    shown = list(findings.texts)
    if findings.search.is_complete:
        return
    for tokens in findings.guesses:
        if missing <= 0:
            return
        if not any(_alike(tokens, other) for other in shown):
            shown.append(tokens)
            missing -= 1
            yield RecoveredText(tokens, findings.model.decode(tokens), certain=False, residual=float("inf"))


def _sites(findings: Findings) -> str:
    return " and the ".join(site.name for site in findings.search.problem.sites)


def _alike(left: TokenIds, right: TokenIds) -> bool:
    return sum(a == b for a, b in zip(left, right, strict=False)) > _ALIKE * max(len(left), len(right))


def _status(evidence: GradientEvidence, findings: Findings, texts: Sequence[RecoveredText]) -> tuple[Status, str]:
    num_found = sum(text.count for text in texts)
    if not findings.is_clear:
        return Status.PARTIAL, (
            f"the bag of words is certain, the {num_found} texts are a best effort: accepted and refused texts lie "
            f"only {findings.gap.decades:.1f} decades apart"
        )
    problems = []
    rank, num_rows = findings.search.problem.rank, findings.search.num_rows
    if num_rows != rank:
        problems.append(
            f"they explain {num_rows} of {rank} directions of the gradient"
            + (": some text was missed" if num_rows < rank else ": some rows depend on each other")
        )
    if evidence.num_texts is None:
        problems.append(
            "how many texts there are is not known, and a mean loss does not tell a batch from its repetition"
        )
    elif num_found != evidence.num_texts:
        problems.append(f"{num_found} of {evidence.num_texts} texts were found; the others are missing or repeat these")
    if findings.is_cut:
        return Status.BUDGET_EXHAUSTED, f"{num_found} texts are certain; " + "; ".join(problems)
    if problems:
        return Status.PARTIAL, f"{num_found} texts are certain; " + "; ".join(problems)
    return Status.RECOVERED, f"all {num_found} texts, which explain all {rank} directions of the gradient"
