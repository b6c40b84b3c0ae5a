"""From what a search found to what may be claimed.

A text is *certain* if every prefix of it lies on the zero side of a clear gap and its last token explains the gradient
that arrives there. The batch is *complete* if the distinct prefixes are as many as the span's rank: then they explain
every direction that the gradient has, and nothing that left a trace is missing. Both are computed without the secret.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from unmask.attacks.gradients.endings import Ending, endings_at_leaves
from unmask.attacks.gradients.labels import EXPLAINED
from unmask.attacks.gradients.prefix_search import Forest, Node
from unmask.attacks.gradients.sites import Site
from unmask.attacks.gradients.token_filter import Candidates
from unmask.evidence.gradients import GradientEvidence, Task
from unmask.models.adapter import Model
from unmask.recovery import Aim, Certificate, Cost, RecoveredText, RecoveredTexts, Recovery, Status


@dataclass(frozen=True)
class Findings:
    """Everything that the stages of an attack on a decoder found."""

    model: Model
    candidates: Candidates
    site: Site
    forest: Forest
    endings: list[Ending] | None
    used: tuple[str, ...]
    min_gap_decades: float
    doubtful: frozenset[Node] = frozenset()  # prefixes that the others do not verify, where that is the proof

    @property
    def num_distinct_rows(self) -> int:
        """Prefixes with a row of their own."""
        return self.forest.num_rows(self.model)

    @property
    def is_complete(self) -> bool:
        """Whether the prefixes explain the whole rank of the site's gradient."""
        return self.forest.explains(self.site.span.rank, self.model)

    @property
    def is_clear(self) -> bool:
        """Whether the distances of accepted and refused prefixes stand far apart."""
        return self.forest.is_clear(self.min_gap_decades)


def verdict(evidence: GradientEvidence, findings: Findings, started: float) -> Recovery[RecoveredTexts]:
    """Texts, status, reason and certificate of a finished search."""
    texts = _texts(evidence, findings)
    status, reason = _status(evidence, findings, texts)
    gap = findings.forest.gap
    certificate = Certificate(
        claim=f"every prefix of a certain text lies in the gradient's span at the {findings.site.name}",
        residual=max((text.residual for text in texts if text.certain), default=float("inf")),
        tolerance=gap.threshold,
        rejected=gap.rejected,
        details={
            "rank": float(findings.site.span.rank),
            "explained_rank": float(findings.num_distinct_rows),
            "gap_decades": gap.decades,
            "token_gap_decades": findings.candidates.gap.decades,
            "noise_floor": findings.site.span.noise_floor,
        },
    )
    value = RecoveredTexts(tuple(texts), findings.candidates.tokens)
    cost = Cost(
        seconds=time.perf_counter() - started,
        candidates=findings.candidates.num_tested + findings.forest.num_tested,
        forward_passes=len(findings.forest.leaves),
    )
    return Recovery(value, status, reason, certificate, cost, findings.used)


def bag_of_words(
    candidates: Candidates,
    used: Sequence[str],
    reason: str,
    started: float,
    guesses: tuple[RecoveredText, ...] = (),
    *,
    searched: bool = False,
) -> Recovery[RecoveredTexts]:
    """The tokens are known, their order is not; guesses at texts claim nothing.

    `searched`: a search for the order ran to its end and found none. Else the order was never tried (a span that is
    full, a search that could not start or that its budget ended), and nothing follows about texts.
    """
    certificate = Certificate(
        claim="every token listed occurs: its vector lies in the span of block 0's gradients, or its embedding moved",
        residual=candidates.gap.accepted,
        tolerance=candidates.gap.threshold,
        rejected=candidates.gap.rejected,
        details={"token_gap_decades": candidates.gap.decades},
    )
    cost = Cost(seconds=time.perf_counter() - started, candidates=candidates.num_tested)
    reason = f"the bag of words ({len(candidates.tokens)} tokens) was recovered, the texts were not: {reason}"
    looked_for = frozenset([Aim.TOKENS, Aim.TEXTS] if searched else [Aim.TOKENS])
    value = RecoveredTexts(guesses, candidates.tokens)
    return Recovery(value, Status.PARTIAL, reason, certificate, cost, tuple(used), looked_for)


def _texts(evidence: GradientEvidence, findings: Findings) -> list[RecoveredText]:
    labelled = evidence.task is not Task.CLASSIFICATION
    endings = findings.endings
    if endings is None:  # the branches are certain, where they end is not
        endings = endings_at_leaves(findings.model, findings.forest.leaves)
        endings = [replace(ending, residual=float("inf")) for ending in endings] if labelled else endings
    if evidence.num_texts is not None and sum(ending.count for ending in endings) > evidence.num_texts:
        # More than there are: losses have weights of their own (a sum of several clients' means), not repetitions.
        endings = [replace(ending, count=1) for ending in endings]
    texts = []
    for ending in endings:
        tokens = ending.node[1]
        certain = findings.is_clear and ending.residual <= EXPLAINED and not _doubtful(findings, ending.node)
        distance = _worst(findings.forest, ending.node)
        texts.append(RecoveredText(tokens, findings.model.decode(tokens), certain, distance, ending.count))
    return sorted(texts, key=lambda text: (not text.certain, text.residual))


def _doubtful(findings: Findings, node: Node) -> bool:
    start, tokens = node
    return any((start, tokens[:length]) in findings.doubtful for length in range(1, len(tokens) + 1))


def _worst(forest: Forest, node: Node) -> float:
    """The largest distance of a text's prefixes; a last token that is only a label has none."""
    offset, tokens = node
    prefixes = ((offset, tokens[:length]) for length in range(1, len(tokens) + 1))
    return max(forest.nodes[prefix] for prefix in prefixes if prefix in forest.nodes)


def _status(evidence: GradientEvidence, findings: Findings, texts: Sequence[RecoveredText]) -> tuple[Status, str]:
    rank, explained = findings.site.span.rank, findings.num_distinct_rows
    num_found = sum(text.count for text in texts)
    num_certain = sum(text.count for text in texts if text.certain)
    if not findings.is_clear:
        why = (
            f"more prefixes pass at the {findings.site.name} than its rank {rank} allows"
            if findings.forest.overflow
            else f"distances at the {findings.site.name} have a gap of only {findings.forest.gap.decades:.1f} decades"
        )
        return Status.PARTIAL, f"the bag of words is certain, the {num_found} texts are a best effort: {why}"
    problems = []
    if findings.endings is None:
        problems.append(
            "the last block's down projection is not in the update or too narrow for this batch, so "
            + (
                "ends inside longer texts are not visible"
                if evidence.task is Task.CLASSIFICATION
                else "last tokens are missing"
            )
        )
    if not findings.is_complete:
        problems.append(
            f"they explain {explained} of {rank} directions of the gradient: something else left a trace as well "
            "(a text that was missed, or padding that predicts)"
        )
    if num_certain < num_found:
        problems.append(f"{num_found - num_certain} others are a best effort: their last token or a prefix is in doubt")
    if evidence.num_texts is None:
        problems.append(
            "how many texts there are is not known, and a mean loss does not tell a batch from its repetition"
        )
    elif num_found != evidence.num_texts:
        problems.append(
            f"{num_found} of {evidence.num_texts} texts were found; the others repeat these, or are too short to leave "
            "a trace"
        )
    if problems:
        return Status.PARTIAL, f"{num_certain} texts are certain; " + "; ".join(problems)
    return Status.RECOVERED, f"all {num_found} texts, which explain all {rank} directions of the gradient"
