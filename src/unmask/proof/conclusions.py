"""From verdicts to recoveries: status, reason, certificate and searches of every channel, in one place.

An attack hands over what it proposes and what it looked at. What may be called certain is the proof's, and how that is
said is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unmask.models.adapter import Model
from unmask.proof.verdicts import Decision, TextVerdict, Verdict
from unmask.recovery import (
    Aim,
    AmbiguityKind,
    Certificate,
    Cost,
    RecoveredText,
    RecoveredTexts,
    Recovery,
    Search,
    Status,
    searches_of,
)
from unmask.wording import count_noun

# One half by the decoys of the span, 1e-9 for each row of the embedding, 0.01 by all rows of a tied one, and 0.01 by
# differences of weights after one step; and one of a hundred tokens after several steps of AdamW.
MOST_EXPECTED_FALSE, MOST_FALSE_SHARE = 0.53, 0.01
NO_ORDER = "no replay confirms an order of them"
_TOKENS = searches_of(Aim.TOKENS)  # every token of the vocabulary was tested; an order was not, or is not confirmed


@dataclass(frozen=True)
class TokenProof:
    """Tokens that occur, by a test of all tokens, and classes of which one occurs; numbers are those of that test.

    `expected_false`: how many of them are false on average, where a statistical test chose them; None if none is.
    """

    tokens: frozenset[int] = frozenset()
    classes: tuple[tuple[int, ...], ...] = ()
    residual: float = 0.0
    tolerance: float = 0.0
    rejected: float | None = None
    details: Mapping[str, float] = field(default_factory=dict)
    expected_false: float | None = None


@dataclass(frozen=True)
class Searched:
    """What an attack says of its search: what it cost and used, the tokens it is sure of, and guesses at texts."""

    cost: Cost
    used: tuple[str, ...] = ()
    tokens: TokenProof = field(default_factory=TokenProof)
    details: Mapping[str, float] = field(default_factory=dict)
    guesses: tuple[RecoveredText, ...] = ()
    stopped: bool = False  # whether the search for texts did not come to its end
    is_cut: bool = False  # whether a budget ended it


def conclude_nothing(
    cost: Cost, status: Status, reason: str, used: Sequence[str] = (), searches: tuple[Search, ...] = ()
) -> Recovery[RecoveredTexts]:
    """Nothing can be claimed; `searches` are those that ran."""
    return Recovery(RecoveredTexts(), status, reason, Certificate.none(reason), cost, tuple(used), searches)


def conclude_tokens(searched: Searched, why: str = NO_ORDER) -> Recovery[RecoveredTexts]:
    """The tokens are known, their order is not; guesses at texts claim nothing. `why` the order is not known.

    Nothing follows about texts: the order was never tried, or it was and nothing confirms that it could be found.
    """
    found = searched.tokens
    number = count_noun(len(found.tokens), "token")
    if found.expected_false is None:
        claim = "every token listed occurs: block 0's gradients hold its vector or need it, or its embedding moved"
        certificate = Certificate(claim, found.residual, found.tolerance, found.rejected, found.details)
        reason = f"the bag of words ({number}) was recovered, the texts were not: {why}"
    else:
        claim = "on average, at most the stated number of the listed tokens is false"
        details = {"expected_false": found.expected_false, **found.details}
        tolerance = MOST_EXPECTED_FALSE + MOST_FALSE_SHARE * len(found.tokens)
        certificate = Certificate(claim, found.expected_false, tolerance, details=details, unit="tokens")
        reason = (
            f"{number} {'is' if len(found.tokens) == 1 else 'are'} clearly above rounding and noise (expected false "
            f"ones: {found.expected_false:.2g}); there may be more tokens, and {why}"
        )
    value = RecoveredTexts(searched.guesses, found.tokens, found.classes)
    stopped = (Search(Aim.TEXTS, stopped=True),) if searched.stopped else ()
    return Recovery(value, Status.PARTIAL, reason, certificate, searched.cost, searched.used, (*_TOKENS, *stopped))


def conclude_texts(verdict: Verdict, model: Model, searched: Searched) -> Recovery[RecoveredTexts]:
    """Texts as the proof left them, the certain ones first; refuted ones are dropped, undecided ones are guesses."""
    left = [text for text in verdict.texts if text.decision is not Decision.REFUTED]
    texts = sorted((_as_recovered(text, model) for text in left), key=lambda text: (not text.certain, text.residual))
    status = Status.RECOVERED if verdict.is_whole else Status.BUDGET_EXHAUSTED if searched.is_cut else Status.PARTIAL
    tokens, classes = _tokens(verdict, searched.tokens)
    certain = [text.misfit for text in verdict.certain]
    details = dict(searched.details)
    if verdict.agreement is not None:
        details["replay_misfit"] = verdict.agreement.misfit_as_is
        details["replayed_tensors"] = float(verdict.agreement.num_tensors)
    certificate = Certificate(
        verdict.ground.value, max(certain, default=float("inf")), verdict.tolerance, verdict.rejected, details
    )
    unconfirmed = not verdict.ground.is_whole or len(certain) < len(left)
    searches = Search(Aim.TOKENS), Search(Aim.TEXTS, searched.stopped or searched.is_cut, unconfirmed)
    value = RecoveredTexts((*texts, *searched.guesses), tokens, classes)
    return Recovery(value, status, _reason(verdict), certificate, searched.cost, searched.used, searches)


def _as_recovered(text: TextVerdict, model: Model) -> RecoveredText:
    tokens = text.text.tokens
    certain = text.decision is Decision.CERTAIN
    return RecoveredText(tokens, model.decode(tokens), certain, text.misfit, text.count, text.points)


def _tokens(verdict: Verdict, searched: TokenProof) -> tuple[frozenset[int], tuple[tuple[int, ...], ...]]:
    """The bag of words, and classes of equal tokens that are left.

    Of a batch that is these texts, their tokens: padding may leave a trace as well, and is in no text.
    """
    known = frozenset(token for text in verdict.certain for token in text.text.tokens)
    if verdict.is_whole:
        return known, ()
    left = tuple(members for members in searched.classes if not known & set(members))
    return searched.tokens | known, left


def _reason(verdict: Verdict) -> str:
    num_certain, total = len(verdict.certain), sum(text.count for text in verdict.texts)
    if verdict.is_whole:
        whole = "the only text" if total == 1 else f"all {total} texts"
        return f"{whole}: {verdict.ground.value}"
    known = f"certain: {num_certain} of {count_noun(len(verdict.texts), 'different text')}"
    is_class = all(text.decision in (Decision.CERTAIN, Decision.ONE_OF_THESE) for text in verdict.texts)
    if num_certain < len(verdict.texts) and verdict.ground.is_replay and is_class:
        known += ", though the client, run again on all of them, sends this update: open is only what follows"
    points = [point for text in verdict.texts for point in text.points if point.kind is not AmbiguityKind.COUNT]
    doubts = [text.why for text in verdict.texts if text.decision is Decision.UNDECIDED and text.why]
    refuted = sum(text.decision is Decision.REFUTED for text in verdict.texts)
    sentences = [*verdict.problems, *{point.kind: point.reason for point in points}.values()]
    sentences += [f"not decided ({len(doubts)}): {'; '.join(dict.fromkeys(doubts))}"] if doubts else []
    sentences += [f"not in the batch, and left out: {count_noun(refuted, 'text')}"] if refuted else []
    return "; ".join(dict.fromkeys([known, *sentences]))
