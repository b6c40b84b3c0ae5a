"""What is said of texts that were found behind vectors: status, certificate, cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unmask.attacks.run import Run
from unmask.models.adapter import Model
from unmask.recovery import (
    Aim,
    Ambiguity,
    AmbiguityKind,
    Certificate,
    RecoveredText,
    RecoveredTexts,
    Recovery,
    Status,
    searches_of,
)
from unmask.wording import count_noun

CLEAR = 3.0  # another text must be off by more than this many tolerances
_NAMED = 4  # other texts that are listed
_CLAIM = (
    "The vector of every certain text, recomputed, equals the stored one, as far as its digits go. The smallest "
    "rejected error is that of the closest neighbour tested. Errors are relative to a vector's length; for product "
    "codes and signs they are the share of the parts that differ."
)


@dataclass(frozen=True)
class ReadVector:
    """The closest text to one vector, and what its neighbours say."""

    tokens: tuple[int, ...]  # without the tokens that frame every text
    distance: float  # by the vector's length
    excess: float
    tolerance: float
    rejected: float | None  # the least excess of a neighbour
    others: tuple[tuple[int, ...], ...]  # texts that agree as well
    tells_apart: bool  # whether the vector's digits tell texts of this length apart
    may_go_on: bool = False  # whether texts are cut at this length before they are embedded

    @property
    def agrees(self) -> bool:
        """Whether its vector is the stored one."""
        return self.excess <= self.tolerance

    @property
    def is_only(self) -> bool:
        """Whether no other text that the model reads to its end comes as close."""
        return self.agrees and self.tells_apart and not self.others

    @property
    def certain(self) -> bool:
        """Whether the text is this one, to its end."""
        return self.is_only and not self.may_go_on


def claim_texts(
    read: Sequence[ReadVector], model: Model, num_texts: int, run: Run, *, not_read: str, stopped: bool = False
) -> Recovery[RecoveredTexts]:
    """The recovery of all vectors, certain texts first.

    `not_read` says why a vector may have no text, and `stopped` that time ran out.
    """
    texts = [_as_recovered_text(each, row, model) for row, each in enumerate(read) if each.tokens or each.agrees]
    certain = [each for each in read if each.is_only]
    status = _status(read, stopped)
    certificate = Certificate.none("no text gives a stored vector")
    if certain:
        worst = max(certain, key=lambda each: each.excess - each.tolerance)
        rejected = min((each.rejected for each in certain if each.rejected is not None), default=None)
        certificate = Certificate(_CLAIM, worst.excess, worst.tolerance, rejected)
    return Recovery(
        value=RecoveredTexts(
            tuple(sorted(texts, key=lambda text: not text.certain)),
            frozenset(token for each in certain for token in each.tokens),
        ),
        status=status,
        reason=_reason(read, model, not_read),
        certificate=certificate,
        cost=run.cost(candidates=num_texts, forward_passes=num_texts),
        used=("vectors",),
        searches=tuple(
            search for each in read for search in searches_of(Aim.TOKENS, Aim.TEXTS, unconfirmed=not each.is_only)
        ),
    )


def _as_recovered_text(read: ReadVector, row: int, model: Model) -> RecoveredText:
    opening, closing = model.special_frame
    framed = (*opening, *read.tokens, *closing)
    ambiguities = tuple(
        Ambiguity(
            AmbiguityKind.OTHER_TEXT,
            f"{model.decode(other)!r} has the same vector",
            tokens=(*opening, *other, *closing),
        )
        for other in read.others[:_NAMED]
    )
    if read.agrees and read.may_go_on:
        cut = f"texts are cut to {len(framed)} tokens before they are embedded, so this one may continue"
        ambiguities += (Ambiguity(AmbiguityKind.OPEN_END, cut),)
    residual = read.excess if read.agrees else read.distance
    return RecoveredText(framed, model.decode(framed), read.certain, residual, ambiguities=ambiguities, row=row)


def _status(read: Sequence[ReadVector], stopped: bool) -> Status:
    if read and all(each.certain for each in read):
        return Status.RECOVERED
    if any(each.is_only for each in read):
        return Status.PARTIAL
    if any(each.agrees for each in read):
        return Status.NOT_IDENTIFIABLE
    return Status.BUDGET_EXHAUSTED if stopped else Status.NOTHING_FOUND


def _reason(read: Sequence[ReadVector], model: Model, not_read: str) -> str:
    num_certain = sum(each.certain for each in read)
    match = "matches exactly one text" if len(read) == 1 else "match exactly one text"
    parts = [f"{num_certain} of {count_noun(len(read), 'vector')} {match} and none of its near neighbours"]
    several = sum(each.agrees and bool(each.others) for each in read)
    if several:
        parts.append(f"vectors that several texts give (listed): {several}")
    coarse = sum(each.agrees and not each.others and not each.tells_apart for each in read)
    if coarse:
        parts.append(f"vectors of a text, but with too few digits to exclude all others: {coarse}")
    open_ends = sum(each.is_only and each.may_go_on for each in read)
    if open_ends:
        parts.append(f"vectors of a text that may continue, because longer texts are cut: {open_ends}")
    unknown = -1 if model.unknown_token is None else model.unknown_token
    num_unknown = sum(each.is_only and unknown in each.tokens for each in read)
    if num_unknown:
        parts.append(f"texts with {model.decode([unknown])}, which hides what was written there: {num_unknown}")
    rest = [each for each in read if not each.agrees]
    if rest:
        nearest = min(each.distance for each in rest)
        parts.append(f"for {len(rest)} {not_read}; the closest one tested is {nearest:.2g} away")
    return "; ".join(parts) + "."
