"""The secret in a report: marks always, pieces only where they were asked for, and never without end.

This is the only file of the report that reads what `Finding.texts`, `Finding.tokens` and `Finding.error` say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unmask import errors
from unmask.audit.findings.finding import ERROR, Finding, OpenPoint, TextPair
from unmask.recovery import AmbiguityKind
from unmask.safe_text import make_safe, without_folders

MAX_TEXTS, MAX_TOKENS, LONGEST_PIECE = 64, 256, 80
MAX_PIECES = 250_000  # in a whole report
MAX_OPEN = 16  # points that are left open, of one text
_OPEN: Mapping[str, str] = {
    AmbiguityKind.EQUAL_TOKENS.value: "one token may be another one that no forward pass tells apart from it.",
    AmbiguityKind.LEADING_RUN.value: "how often the first token is repeated at the start.",
    AmbiguityKind.OPEN_END.value: "the text may continue with tokens that cannot be seen.",
    AmbiguityKind.OPEN_BEGINNING.value: "there are tokens before the text that were not seen.",
    AmbiguityKind.COUNT.value: "how often the batch holds the text.",
}
_MARKS = {"place": "p", "bag": "b", "no": "n"}
_OURS = frozenset(name for name, kind in vars(errors).items() if isinstance(kind, type))
HELD_BACK = "The message is left out, because it may quote a text; it is in findings.jsonl."


class Secrets:
    """Writes texts as plain data: with pieces if `show` is set, and as marks alone if not."""

    def __init__(self, show: bool) -> None:
        self.show = show
        self._pieces: dict[str, int] = {}
        self._left = MAX_PIECES

    @property
    def pieces(self) -> list[str]:
        """Every piece once; texts hold places in this list. Empty unless secrets are shown."""
        return list(self._pieces)

    def of(self, finding: Finding) -> dict[str, Any]:
        """Texts and bag of words of a finding; empty where it has none, 'left_out' counts what did not fit."""
        document: dict[str, Any] = {}
        pairs = [pair for pair in finding.texts[:MAX_TEXTS] if self._fits(pair)]
        if pairs:
            document["texts"] = [
                {
                    "true": self._mark(pair.true),
                    "recovered": self._mark(pair.recovered),
                    "certain": pair.certain,
                    "exact": pair.exact,
                    "count": pair.count,
                    "near_exact": pair.near_exact,
                    **(
                        {"open": [self._open(point) for point in pair.ambiguities[:MAX_OPEN]]}
                        if pair.ambiguities
                        else {}
                    ),
                }
                for pair in pairs
            ]
        if len(pairs) < len(finding.texts):
            document["left_out"] = len(finding.texts) - len(pairs)
        if finding.tokens:
            document["bag"] = self._mark(finding.tokens)
        return document

    def _open(self, point: OpenPoint) -> tuple[str, str | None]:
        """What is open about a text: for everybody, and in full, with its alternatives, where secrets are shown."""
        plain = _OPEN.get(point.kind, "something about this text.")
        if not self.show:
            return plain, None
        where = "" if point.position is None else f" (token {point.position + 1})"
        listed = ", ".join(f"'{make_safe(one, LONGEST_PIECE)}'" for one in point.alternatives[:MAX_TOKENS])
        return plain, f"{make_safe(point.reason)}{where}{f': {listed}' if listed else ''}"

    def _fits(self, pair: TextPair) -> bool:
        size = sum(min(len(side), MAX_TOKENS) for side in (pair.true, pair.recovered) if side is not None)
        if size > self._left:
            return False
        self._left -= size
        return True

    def _mark(self, pieces: Sequence[tuple[str, str]] | None) -> dict[str, Any] | None:
        if pieces is None:
            return None
        kept = pieces[:MAX_TOKENS]
        document: dict[str, Any] = {"marks": "".join(_MARKS.get(mark, "n") for _, mark in kept)}
        if self.show:
            document["pieces"] = [
                self._pieces.setdefault(make_safe(piece, LONGEST_PIECE), len(self._pieces)) for piece, _ in kept
            ]
        if len(kept) < len(pieces):
            document["cut"] = len(pieces)
        return document


def error_message(finding: Finding, show: bool) -> str | None:
    """Type and message of an error. A message that is not unmask's own may quote a text, and is held back."""
    if finding.status != ERROR:
        return None
    error = finding.error if isinstance(finding.error, Mapping) else {"message": finding.reason}
    kind, message = str(error.get("type", "error")), str(error.get("message", ""))
    if not show:
        message = without_folders(message) if kind.rpartition(".")[2] in _OURS else HELD_BACK
    return f"{make_safe(kind, 80)}: {make_safe(message, 2000)}"


def error_traceback(finding: Finding, show: bool) -> list[str]:
    """Lines of the traceback, only where secrets are shown."""
    if not isinstance(finding.error, Mapping) or not show:
        return []
    return [make_safe(line) for line in str(finding.error.get("traceback", "")).splitlines()[-60:]]


def reason(finding: Finding, show: bool = False) -> str:
    """Why the finding is as it is, in the attack's or the error's words; without folders unless secrets are shown."""
    return error_message(finding, show) or make_safe(finding.reason if show else without_folders(finding.reason), 2000)
