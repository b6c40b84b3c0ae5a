"""A finding: the result of one case, one line of JSON. `docs/finding.schema.json` publishes the format.

Each line carries a digest of its content, so that a slip of an editor, a merge or a repair by hand is seen. It is no
signature: whoever computes it anew can write anything.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from unmask.audit.cases.case import case_id
from unmask.audit.cases.case_names import full_name
from unmask.displays import Displayed, Row
from unmask.errors import UnmaskError
from unmask.metrics import METRICS
from unmask.recovery import Status

SCHEMA = 2  # 2: digest, looked_for, control, near-exact texts, ambiguities
ERROR = "ERROR"  # the status of a case that raised; all others are names of `Status`
_GOOD_PAIRS, _GOOD_WORDS = 0.1, 0.2  # above chance, of ROUGE-2 and of tokens: chance itself moves by less
_LARGEST = sys.float_info.max  # whole numbers of JSON may be larger


class FindingError(UnmaskError):
    """A line that is no finding, or one of a newer version."""


class DamagedLineError(FindingError):
    """A line that is not even JSON: a crash cut it off."""


class Outcome(Enum):
    """What a finding means for the one who asked. The value is what people read."""

    LEAK = "leaks"
    NO_LEAK = "not leaked by this attack"
    INCONCLUSIVE = "inconclusive"
    ERROR = "error"


@dataclass(frozen=True)
class OpenPoint:
    """What the evidence leaves open about a recovered text: its kind, a sentence, and the alternatives, if listed.

    `position` is the place of the token that may be any of the `alternatives`.
    """

    kind: str
    reason: str
    position: int | None = None
    alternatives: tuple[str, ...] = ()


@dataclass(frozen=True)
class TextPair:
    """A true text beside its recovery, as lists of (piece, mark); None where there is none, or nobody knows it.

    The pieces of a list join to the text. Marks: 'place', the token was recovered at this place; 'bag', it is known
    to occur, but not here; 'no', it was missed (true text) or is false (recovered text). `exact` and `near_exact` are
    judged on the text that a person reads. Where `ambiguities` name more than a count, the recovered text stands for a
    class of texts.
    """

    true: tuple[tuple[str, str], ...] | None
    recovered: tuple[tuple[str, str], ...] | None
    certain: bool = False
    exact: bool = False
    count: int = 1
    near_exact: bool = False  # an exact text is near-exact as well
    ambiguities: tuple[OpenPoint, ...] = ()


@dataclass(frozen=True, repr=False)
class Finding(Displayed):
    """What a case gave. Only `run` may differ when the same case runs again on the same type of machine.

    `case` is the specification, `id` its hash. `metrics` are the auditor's scores, empty where the secret is not known
    to the auditor either; `chance` has the same scores for a guess that never saw the evidence. `texts` and `tokens`
    hold the secret. `looked_for` says what the attack searched to its end (values of `Aim`). `control` is the same
    attack on the same secret without protection: id, case, status, reason, metrics; None where nothing protects it.
    """

    id: str
    case: Mapping[str, Any]
    status: str
    reason: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    chance: Mapping[str, float] = field(default_factory=dict)
    texts: tuple[TextPair, ...] = ()
    tokens: tuple[tuple[str, str], ...] = ()  # the bag of words where no texts are known, with marks as in texts
    certificate: Mapping[str, Any] = field(default_factory=dict)
    cost: Mapping[str, int] = field(default_factory=dict)
    used: tuple[str, ...] = ()
    model_fingerprint: str | None = None
    error: Mapping[str, str] | None = None  # type, message and traceback of a case that raised
    run: Mapping[str, Any] = field(default_factory=dict)  # seconds, started, host, device, version
    looked_for: tuple[str, ...] = ()
    control: Mapping[str, Any] | None = None
    schema: int = SCHEMA

    def display_rows(self) -> tuple[Row, Sequence[Row]]:
        """The outcome, the case and the numbers, and no text: secrets are shown by reports that are asked for them."""
        numbers = ", ".join(f"{name} {value:.3g}" for name, value in self.metrics.items() if value is not None)
        rows = [("case", full_name(self.case)), ("status", self.status), ("reason", self.reason), ("metrics", numbers)]
        return ("Finding", self.outcome.value), rows

    @property
    def outcome(self) -> Outcome:
        """Leak, none, or not known. Only an attack that ran to its end may say that nothing leaked."""
        if self.status == ERROR:
            return Outcome.ERROR
        if self._shows_a_leak():
            return Outcome.LEAK
        return Outcome.NO_LEAK if self.ran_to_the_end else Outcome.INCONCLUSIVE

    @property
    def ran_to_the_end(self) -> bool:
        """Whether the attack applied and finished, so that what it did not find means something."""
        return self.status != ERROR and Status[self.status].ran_to_the_end

    @property
    def is_default_attack(self) -> bool:
        """Whether the attack is the one that fits, with its own settings, and not one that the plan chose."""
        return bool(self.case.get("attack", "default") == "default")

    @property
    def meaning(self) -> str:
        """The general sentence of the status."""
        return "The case raised an error, so nothing is known." if self.status == ERROR else Status[self.status].value

    def _shows_a_leak(self) -> bool:
        if not self.metrics:
            return Status[self.status].conclusive
        if any(self._beyond(name, 0.0) for name, metric in METRICS.items() if metric.is_whole):
            return True
        numbers = self._beyond("weights_rate", _GOOD_WORDS) or self._beyond("inputs_rate", _GOOD_WORDS)
        if Status[self.status].conclusive and (
            self._tells_tokens() or self._beyond("hidden_size_share", 0.0) or numbers
        ):
            return True
        return self._guesses_well()

    def _beyond(self, metric: str, margin: float) -> bool:
        """Whether a metric is above chance by more than a margin."""
        return (self.metrics.get(metric) or 0.0) > (self.chance.get(metric) or 0.0) + margin

    def _guesses_well(self) -> bool:
        """Whether what nothing certifies is right much more often than chance: pairs of words, or words."""
        words = (self._beyond(name, _GOOD_WORDS) for name in ("token_recall", "token_precision"))
        return self._beyond("rouge2", _GOOD_PAIRS) or all(words)

    def _tells_tokens(self) -> bool:
        """Whether tokens were named that occur, more of them than a guess would name or with fewer false ones."""
        beyond = any(self._beyond(name, 0.0) for name in ("token_recall", "token_precision"))
        return (self.metrics.get("token_recall") or 0.0) > 0 and beyond

    def to_json(self) -> str:
        """One line, ASCII only, with its digest; numbers that JSON lacks are null."""
        document = _plain(asdict(self))
        document["digest"] = digest_of(document)
        return json.dumps(document, ensure_ascii=True, allow_nan=False, sort_keys=True)

    @classmethod
    def from_json(cls, line: str | bytes) -> Finding:
        """Read a line; a damaged, edited, older or newer one is refused with the reason."""
        document = _document(line)
        _check_schema(document.get("schema"))
        _check_digest(document)
        try:
            status = document["status"]
            if status != ERROR:
                Status[status]
            texts = tuple(_pair(pair) for pair in document.pop("texts"))
            tokens = _read_marked(document.pop("tokens")) or ()
            used, looked_for = (tuple(map(str, document.pop(name))) for name in ("used", "looked_for"))
            _check(document)
            return cls(**document, texts=texts, tokens=tokens, used=used, looked_for=looked_for)
        except (KeyError, TypeError, ValueError) as error:
            raise FindingError(f"a finding lacks a field or has a wrong one ({error!r}): {line[:80]!r}") from None


def digest_of(document: Mapping[str, Any]) -> str:
    """The hash of everything that a finding says, but `run`, which may differ when the case runs again."""
    content = {key: value for key, value in document.items() if key not in ("run", "digest")}
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _document(line: str | bytes) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DamagedLineError(f"this line is no finding ({error!r}): {line[:80]!r}") from None
    if not isinstance(document, dict) or "schema" not in document:
        raise FindingError(f"this line is no finding; take it out if it is not unmask's: {line[:80]!r}")
    return document


def _check_schema(schema: Any) -> None:
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise FindingError(f"a finding has schema {schema!r}, this version reads {SCHEMA}; upgrade unmask")
    if schema < SCHEMA:
        raise FindingError(
            f"a finding has schema {schema}, of an older unmask: nothing in it shows that it was not edited, "
            "or that its attack finds anything where nothing protects; run the audit again with another --out"
        )


def _check_digest(document: dict[str, Any]) -> None:
    said = document.pop("digest", None)
    try:
        is_whole = said == digest_of(document)
    except ValueError:  # a number that JSON lacks
        is_whole = False
    if not is_whole:
        raise FindingError(
            f"the finding of case {document.get('id')!r} was changed after it was written: its digest is not that of "
            "its content; take the line out and run the same audit again"
        )


def _check(document: Mapping[str, Any]) -> None:
    """Whether what is counted on later is there and of its kind; `finding.schema.json` says more."""
    for name in ("id", "reason", "case", "metrics", "chance", "certificate", "cost", "run"):
        if not isinstance(document[name], str if name in ("id", "reason") else dict):
            raise TypeError(f"{name} is {document[name]!r}")
    for name in ("metrics", "chance", "cost"):
        _check_numbers(document[name])
    case, error, control = document["case"], document["error"], document["control"]
    if document["id"] != case_id(case):
        raise ValueError(f"the id {document['id']!r} is that of another case")
    if document["model_fingerprint"] is not None and not isinstance(document["model_fingerprint"], str):
        raise TypeError(f"the fingerprint is {document['model_fingerprint']!r}")
    if control is not None:
        _check_numbers(control["metrics"])
        if not all(isinstance(control[name], str) for name in ("id", "status", "reason")):
            raise TypeError(f"the control is {control!r}")
    defences = case.get("defences", [])
    if not isinstance(case["channel"], str) or not isinstance(defences, list):
        raise TypeError(f"the case is {case!r}")
    if not all(isinstance(defence, str) for defence in defences):
        raise TypeError(f"the defences are {defences!r}")
    if not isinstance(document["certificate"].get("details", {}), dict):
        raise TypeError(f"the details of the certificate are {document['certificate']['details']!r}")
    if error is not None and not (isinstance(error, dict) and all(isinstance(text, str) for text in error.values())):
        raise TypeError(f"the error is {error!r}")


def _check_numbers(numbers: Mapping[str, Any]) -> None:
    for key, value in numbers.items():
        if value is not None and (type(value) not in (int, float) or abs(value) > _LARGEST):
            raise TypeError(f"{key} is {value!r}")


def _pair(document: Mapping[str, Any]) -> TextPair:
    return TextPair(
        _read_marked(document["true"]),
        _read_marked(document["recovered"]),
        bool(document["certain"]),
        bool(document["exact"]),
        int(document["count"]),
        bool(document["near_exact"]),
        tuple(_open_point(point) for point in document["ambiguities"]),
    )


def _open_point(document: Mapping[str, Any]) -> OpenPoint:
    position = document["position"]
    return OpenPoint(
        str(document["kind"]),
        str(document["reason"]),
        None if position is None else int(position),
        tuple(map(str, document["alternatives"])),
    )


def _read_marked(pieces: Any) -> tuple[tuple[str, str], ...] | None:
    return None if pieces is None else tuple((str(piece), str(mark)) for piece, mark in pieces)


def _plain(value: Any) -> Any:
    """The value with what JSON cannot hold replaced: infinite numbers and NaN by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value
