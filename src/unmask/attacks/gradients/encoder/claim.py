"""From the texts that a search on an encoder accepted to what may be claimed.

A text is *certain* if a replay confirms it (`confirm.py`); where texts are missing, if each of its rows lies in
the gradients' spans of the first block and of later ones, and the nearest refused text is far from them. The batch is
*recovered* if the replay explains the whole update and there are as many texts as the batch holds. After masked-token
training, a certain text is the original, and its labels explain the gradient that arrives at it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from unmask.attacks.gradients.bag_of_words.candidates import BagOfWords
from unmask.attacks.gradients.bag_of_words.claim import NO_ORDER, claim_bag, claim_tokens
from unmask.attacks.gradients.bag_of_words.token_filter import EQUAL, Candidates
from unmask.attacks.gradients.decoder.ambiguity import COUNT_IS_UNSTATED, counts_by_means, equal_tokens, open_count
from unmask.attacks.gradients.decoder.confirm import Proof
from unmask.attacks.gradients.encoder.confirm import EncoderConfirmation
from unmask.attacks.gradients.encoder.masked_tokens import Original
from unmask.attacks.gradients.encoder.position_candidates import Text
from unmask.attacks.gradients.encoder.search import EncoderSearch
from unmask.attacks.run import Run
from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.gap import Gap
from unmask.linalg.near_rows import near_rows
from unmask.models.adapter import Model
from unmask.proof.replay import another_client, why_not_replayed
from unmask.recovery import Aim, Certificate, RecoveredText, RecoveredTexts, Recovery, Search, Status
from unmask.wording import count_noun

_ALIKE = 0.7  # guesses that share more than this part of their tokens count as one

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class EncoderResult:
    """Everything that the search found."""

    search: EncoderSearch
    candidates: Candidates
    min_gap_decades: float
    used: tuple[str, ...]
    confirmation: EncoderConfirmation
    originals: Mapping[Text, Original] | str | None = None  # of masked texts, or why they cannot be read
    num_told: int | None = None  # so many texts were stated for one client

    @property
    def texts(self) -> dict[TokenIds, float]:
        """Accepted texts, with the largest distance of their rows."""
        places = self.search.problem.places
        return {places.tokens_of(text): distance for text, distance in self.search.found.items()}

    @property
    def recovered(self) -> list[RecoveredText]:
        """Accepted texts, originals for masked ones, each once."""
        texts: dict[TokenIds, RecoveredText] = {}
        for places, distance in sorted(self.search.found.items(), key=lambda item: item[1]):
            original = self._original(places)
            is_covered = self._is_covered(places) and original.is_explained
            classes = equal_tokens(self.model, original.tokens, self._equal)
            certain, count = is_covered and not classes, original.count if is_covered and self._counts_are_told else 1
            if (other := texts.get(original.tokens)) is not None:
                certain, distance, count = certain and other.certain, max(distance, other.residual), count + other.count
            text = self.model.decode(original.tokens)
            texts[original.tokens] = RecoveredText(
                original.tokens, text, certain, distance, count, tuple(classes) if is_covered else ()
            )
        return list(texts.values())

    @cached_property
    def _counts_are_told(self) -> bool:
        """Whether weights of labels are counts: as many as were stated, and a mean of means gives no others."""
        read = [self._original(places) for places in self.search.found]
        counts = [original.count for original in read]
        if sum(counts) != self.num_told:
            return False
        return counts_by_means(counts, [original.num_labels for original in read], sum(counts)) in (None, counts)

    @cached_property
    def _equal(self) -> Mapping[int, tuple[int, ...]]:
        """Classes of tokens that nothing tells apart: by their embeddings, and labels by their output rows."""
        if not isinstance(self.originals, Mapping) or self.model.token_head is None:
            return self.candidates.equal
        restored = {token for original in self.originals.values() for token in original.tokens}
        near = near_rows(self.model.token_head.embedding.detach(), sorted(restored), EQUAL)
        by_label = {token: others for token, others in near.items() if len(others) > 1}
        return {**by_label, **self.candidates.equal}

    def _is_covered(self, places: Text) -> bool:
        """Whether the proof covers a text: a replay of the update does; else it must stand clear of refused ones."""
        if self.confirmation.proof is Proof.NONE or places in self.confirmation.refuted:
            return False
        return self.explains_everything or self.is_clear

    @property
    def explains_everything(self) -> bool:
        """Whether a replay leaves nothing of the update unexplained."""
        return self.confirmation.proof not in (Proof.NONE, Proof.DEEP_SPANS)

    def _original(self, places: Text) -> Original:
        """A text before masking; as it was found, and not explained, where that cannot be read."""
        if isinstance(self.originals, Mapping):
            return self.originals[places]
        residual = 0.0 if self.originals is None else float("inf")
        return Original(self.search.problem.places.tokens_of(places), 1, residual)

    @property
    def label_residual(self) -> float:
        """The largest share of an arriving gradient that the labels of masked texts leave unexplained."""
        read = self.originals.values() if isinstance(self.originals, Mapping) else ()
        return max((original.residual for original in read if original.is_explained), default=0.0)

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


def claim_encoder_texts(run: Run, evidence: GradientEvidence, findings: EncoderResult) -> Recovery[RecoveredTexts]:
    """Texts, status, reason and certificate of a finished search."""
    guesses = tuple(_guesses(evidence, findings))
    if not findings.texts:
        why = "the budget ended before a text was found" if findings.is_cut else "no text was found whose rows all fit"
        return claim_tokens(run, findings.candidates, findings.used, why, guesses)
    texts = _with_counts(evidence, list(findings.recovered))
    texts.sort(key=lambda text: not text.certain)
    status, reason = _status(evidence, findings, texts)
    certificate = _certificate(findings, any(text.certain for text in texts))
    cost = run.cost(
        candidates=findings.candidates.num_tested + len(findings.search.refused) + len(findings.texts),
    )
    tokens = findings.candidates.tokens
    if status is Status.RECOVERED:  # what masks and random words hid is in no row, and they are in no text
        tokens = frozenset(token for text in texts for token in text.tokens)
    value = RecoveredTexts((*texts, *guesses), tokens, findings.candidates.classes)
    unconfirmed = not findings.explains_everything or not all(text.certain for text in texts)
    searches = Search(Aim.TOKENS), Search(Aim.TEXTS, stopped=findings.is_cut, unconfirmed=unconfirmed)
    return Recovery(value, status, reason, certificate, cost, findings.used, searches)


def claim_noisy_texts(
    run: Run, evidence: GradientEvidence, findings: EncoderResult, bag: BagOfWords
) -> Recovery[RecoveredTexts]:
    """Texts that a replay confirms; else the bag of words alone, with what was found as guesses."""
    if findings.explains_everything:
        recovery = claim_encoder_texts(run, evidence, findings)
        held = frozenset(token for text in recovery.value.texts if text.certain for token in text.tokens)
        return replace(recovery, value=replace(recovery.value, token_set=held))
    nearest = sorted(findings.texts.items(), key=lambda item: item[1])[: evidence.num_texts]
    found = [RecoveredText(tokens, findings.model.decode(tokens), False, distance) for tokens, distance in nearest]
    why = findings.confirmation.stopped or NO_ORDER
    return claim_bag(run, bag, (*found, *_guesses(evidence, findings)), why)


def _with_counts(evidence: GradientEvidence, texts: list[RecoveredText]) -> list[RecoveredText]:
    """Texts that say so where it is open how often they occur; none is certain where there are too many."""
    total = sum(text.count for text in texts)
    if evidence.num_texts == total:
        return texts
    if evidence.num_texts is not None and len(texts) > evidence.num_texts:
        return [replace(text, certain=False, count=1, ambiguities=()) for text in texts]
    why = COUNT_IS_UNSTATED if evidence.num_texts is None else _how_many_found(total, evidence.num_texts)
    return [replace(text, count=1, ambiguities=(*text.ambiguities, open_count(why))) for text in texts]


def _certificate(findings: EncoderResult, any_certain: bool) -> Certificate:
    gap, agreement = findings.gap, findings.confirmation.agreement
    details = {
        "rank": float(findings.search.problem.rank),
        "explained_rank": float(findings.search.num_rows),
        "gap_decades": gap.decades,
        "token_gap_decades": findings.candidates.gap.decades,
        **({} if findings.originals is None else {"label_residual": findings.label_residual}),
    }
    if agreement is not None:
        details |= {"replay_misfit": agreement.misfit_as_is, "replayed_tensors": float(agreement.num_tensors)}
    claim = findings.confirmation.proof.value
    if agreement is None or not findings.explains_everything:
        residual = gap.accepted if any_certain else float("inf")
        return Certificate(claim, residual, gap.threshold, gap.rejected, details)
    scaled = findings.confirmation.proof is Proof.SCALED_CLIENT
    misfit = agreement.misfit if scaled else agreement.misfit_as_is
    return Certificate(claim, misfit if any_certain else float("inf"), agreement.tolerance, None, details)


def _guesses(evidence: GradientEvidence, findings: EncoderResult) -> Iterator[RecoveredText]:
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


def _alike(left: TokenIds, right: TokenIds) -> bool:
    return sum(a == b for a, b in zip(left, right, strict=False)) > _ALIKE * max(len(left), len(right))


def _status(evidence: GradientEvidence, findings: EncoderResult, texts: Sequence[RecoveredText]) -> tuple[Status, str]:
    num_found = sum(text.count for text in texts)
    num_certain = sum(text.count for text in texts if text.certain)
    if not num_certain and not findings.is_clear:
        return Status.PARTIAL, (
            f"the bag of words is certain, but the texts ({num_found}) are a best effort: accepted and rejected texts "
            f"are only {findings.gap.decades:.1f} decades apart"
        )
    problems = []
    if num_certain < num_found:
        why = findings.originals if isinstance(findings.originals, str) else _why_not_certain(findings)
        problems.append(f"found, but not certain: {num_found - num_certain}, because {why}")
    if not findings.explains_everything:
        problems.append(
            findings.confirmation.stopped or why_not_replayed(evidence) or _describe_unexplained(evidence, findings)
        )
    if evidence.num_texts is None:
        problems.append(COUNT_IS_UNSTATED)
    elif num_found != evidence.num_texts:
        unseen = "" if findings.originals is None else ", or nothing was masked in them"
        problems.append(_how_many_found(num_found, evidence.num_texts) + unseen)
    if findings.is_cut:
        return Status.BUDGET_EXHAUSTED, "; ".join([f"certain texts: {num_certain}", *problems])
    if problems:
        return Status.PARTIAL, "; ".join([f"certain texts: {num_certain}", *problems])
    whole = "the only text" if num_found == 1 else f"all {num_found} texts"
    return Status.RECOVERED, f"{whole}: {findings.confirmation.proof.value}"


def _how_many_found(found: int, stated: int) -> str:
    return f"found {found} of {count_noun(stated, 'text')}; the rest are missing or are copies"


def _why_not_certain(findings: EncoderResult) -> str:
    if findings.originals is not None:
        return "what arrives at them has no single label"
    if findings.candidates.equal:
        return "they hold tokens with equal embeddings, or no replay covers them"
    return "no replay covers them"


def _describe_unexplained(evidence: GradientEvidence, findings: EncoderResult) -> str:
    rank, num_rows = findings.search.problem.rank, findings.search.num_rows
    if findings.search.problem.drifts:
        return "no replay of the stated client with these texts sends this update"
    if num_rows < rank:
        return f"they explain {num_rows} of the gradient's {rank} directions, so a text is missing"
    return another_client(evidence)
