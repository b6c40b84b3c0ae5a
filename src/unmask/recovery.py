"""What every attack returns: a value, how it ended, what proves it, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from unmask.displays import Displayed, Row

Value = TypeVar("Value")


class Status(Enum):
    """How an attack ended. The value of a member is the sentence that a user reads."""

    RECOVERED = "The whole secret was recovered, and the certificate holds for every part of it."
    PARTIAL = "A part of the secret was recovered. Only what is marked certain is proven."
    NOT_IDENTIFIABLE = "The evidence does not determine the secret: several secrets explain it equally well."
    MISSING_EVIDENCE = "The evidence lacks the tensors that this attack needs."
    NOT_APPLICABLE = "The attack does not work on this kind of evidence. This says nothing about safety."
    NOTHING_FOUND = "The attack ran to its end and found nothing that it could certify."
    BUDGET_EXHAUSTED = "The budget ran out before the attack finished. Everything certain by then is kept."

    @property
    def conclusive(self) -> bool:
        """Whether the attack got something that it can certify ('not conclusive' never means 'safe')."""
        return self in (Status.RECOVERED, Status.PARTIAL)

    @property
    def ran_to_the_end(self) -> bool:
        """Whether the attack applied and finished."""
        return self.conclusive or self is Status.NOTHING_FOUND


@dataclass(frozen=True)
class Certificate:
    """What the adversary can verify alone, without the secret; computed in float64.

    `residual` is the worst measured number of everything claimed; it must not exceed `tolerance`, which was set
    from the evidence (a gap), not by hand. `rejected` is the best number among what was refused, so
    `rejected / residual` tells how clear the decision was. `unit` is what the three numbers count ('tokens'); it is
    empty where they are relative errors or distances.
    """

    claim: str
    residual: float
    tolerance: float
    rejected: float | None = None
    details: Mapping[str, float] = field(default_factory=dict)
    unit: str = ""

    @property
    def holds(self) -> bool:
        """Whether the claim passed its own test."""
        return self.residual <= self.tolerance

    @classmethod
    def none(cls, why: str) -> Certificate:
        """The certificate of an attack that claims nothing."""
        return cls(claim=why, residual=float("inf"), tolerance=0.0)


@dataclass(frozen=True)
class Cost:
    """What the attack used up, in units that do not depend on the machine, and seconds."""

    seconds: float = 0.0
    candidates: int = 0  # (token, position) or (prefix, token) pairs that were tested
    forward_passes: int = 0  # texts sent through the whole model
    queries: int = 0  # answers asked of an oracle


class Aim(Enum):
    """What an attack may look for. An attack that did not look has not shown that nothing is there."""

    TOKENS = "tokens"  # which tokens occur
    TEXTS = "texts"  # the order of tokens as well: whole texts
    WEIGHTS = "weights"  # weights and sizes of a layer
    INPUTS = "inputs"  # the numbers that were sent into a layer


@dataclass(frozen=True)
class Search:
    """A search that an attack ran, and what kept it from looking at everything; an attack may report several.

    `stopped`: a budget, a deadline or a limit ended it, or it had to end where nothing agreed. `unconfirmed`: it
    proposes something that its proof did not confirm, or proposes a part, so something better may be there.
    """

    aim: Aim
    stopped: bool = False
    unconfirmed: bool = False


def searches_of(*aims: Aim, stopped: bool = False, unconfirmed: bool = False) -> tuple[Search, ...]:
    """One search for several aims."""
    return tuple(Search(aim, stopped, unconfirmed) for aim in aims)


@dataclass(frozen=True, repr=False)
class Recovery(Displayed, Generic[Value]):
    """The result of an attack.

    `reason` is the particular sentence ('the gradient's rank equals the width 768 …') beside the general one of
    the status; `used` names the tensors of the evidence that the result rests on. `searches` are what the attack
    reports of its searches: an attack that reports none has looked for nothing.
    """

    value: Value
    status: Status
    reason: str
    certificate: Certificate
    cost: Cost
    used: tuple[str, ...] = ()
    searches: tuple[Search, ...] = ()

    @property
    def looked_for(self) -> frozenset[Aim]:
        """What the attack has looked for, by the rule for all channels; gates are held by this alone.

        A gate is held only if the search looked at everything that the gate forbids. Whatever stopped early, could not
        confirm, or ran out of anything has not looked; one such search for an aim is enough.
        """
        if not self.status.ran_to_the_end:
            return frozenset()
        incomplete = {search.aim for search in self.searches if search.stopped or search.unconfirmed}
        return frozenset(search.aim for search in self.searches) - incomplete

    @property
    def unproven(self) -> str:
        """What it means that the certificate does not hold."""
        is_open = any(text.ambiguities for text in getattr(self.value, "texts", ()))
        return "no text is certain while that is open" if is_open else "nothing of this is proven"

    def display_rows(self) -> tuple[Row, Sequence[Row]]:
        """The status with its reason; texts or other values; the proof and the cost."""
        rows = self.value.display_rows() if isinstance(self.value, RecoveredTexts) else [("value", repr(self.value))]
        proof = f"{self.certificate.residual:.1e} of at most {self.certificate.tolerance:.1e}: {self.certificate.claim}"
        proof = proof if self.certificate.holds else self.unproven
        counts = {"candidates": self.cost.candidates, "forward passes": self.cost.forward_passes}
        counts["queries"] = self.cost.queries
        used = ", ".join([f"{self.cost.seconds:.1f} s", *(f"{n:,} {name}" for name, n in counts.items() if n)])
        certificate = ("certificate" if self.certificate.holds else "no certificate", proof)
        return (self.status.name, self.reason), [*rows, certificate, ("cost", used)]


class AmbiguityKind(Enum):
    """What the evidence may leave open about a text."""

    EQUAL_TOKENS = "equal_tokens"  # several tokens that no forward pass tells apart may stand at a position
    LEADING_RUN = "leading_run"  # how often the first token is repeated at the start
    OPEN_END = "open_end"  # the text may go on with tokens that leave no trace
    OPEN_BEGINNING = "open_beginning"  # tokens stand before the text that were not seen
    COUNT = "count"  # how often the batch holds the text
    OTHER_TEXT = "other_text"  # another text explains the evidence as well


@dataclass(frozen=True)
class Ambiguity:
    """One thing about a text that the evidence cannot tell: a class of texts that explain it equally well.

    `reason` says it in one sentence. `position` and `tokens` spell out a class of equal tokens; `tokens` is the
    repeated token of a leading run, and all of another text.
    """

    kind: AmbiguityKind
    reason: str
    position: int | None = None
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class RecoveredText:
    """One text. `certain` means that the batch holds exactly this text, and that the certificate covers all of it.

    Where `ambiguities` name more than the count, the batch holds this text or another one of the class that they
    describe (`covers` tells which), and the text is not certain. `count` is how often the batch holds it: exactly, or
    at least, where an ambiguity of the count says so. `side` says who read it, where a model has an encoder and a
    decoder: pairs come one after the other. `row` is the vector that it was read from, where each text has its own. The
    first `num_given` tokens were known before, and are not recovered. `text` leaves out the special tokens that the
    tokenizer puts around every text; `tokens` have them.
    """

    tokens: tuple[int, ...]
    text: str
    certain: bool
    residual: float
    count: int = 1
    ambiguities: tuple[Ambiguity, ...] = ()
    side: str = ""
    row: int | None = None
    num_given: int = 0

    @property
    def certainty(self) -> str:
        """How sure it is: of the text, of a part of it, of a class of texts, or not at all."""
        if self.certain:
            return "certain"
        if any(a.kind is AmbiguityKind.OPEN_BEGINNING for a in self.ambiguities):
            return "a part"
        return "not unique" if self.ambiguities else "best effort"

    def covers(self, tokens: Sequence[int]) -> bool:
        """Whether a sequence is in the class that the text stands for: the text itself, and what it may as well be."""
        if any(a.kind is AmbiguityKind.OTHER_TEXT and a.tokens == tuple(tokens) for a in self.ambiguities):
            return True
        own, other = list(self.tokens), list(tokens)
        equal = {a.position: set(a.tokens) for a in self.ambiguities if a.kind is AmbiguityKind.EQUAL_TOKENS}
        first = {token: min(members) for members in equal.values() for token in members}
        own_classes = [equal.get(position, set()) | {token} for position, token in enumerate(own)]
        if any(a.kind is AmbiguityKind.LEADING_RUN for a in self.ambiguities) and own and other:
            runs = [run_length([first.get(token, token) for token in tokens]) for tokens in (own, other)]
            own_classes, other = [set().union(*own_classes[: runs[0]]), *own_classes[runs[0] :]], other[runs[1] - 1 :]
        if any(a.kind is AmbiguityKind.OPEN_END for a in self.ambiguities):
            other = other[: len(own_classes)]
        if any(a.kind is AmbiguityKind.OPEN_BEGINNING for a in self.ambiguities):
            other = other[max(0, len(other) - len(own_classes)) :]
        fits = (token in allowed for token, allowed in zip(other, own_classes, strict=False))
        return len(other) == len(own_classes) and all(fits)


def run_length(tokens: Sequence[int]) -> int:
    """How many tokens at the start equal the first one."""
    return next((place for place, token in enumerate(tokens) if token != tokens[0]), len(tokens))


@dataclass(frozen=True)
class RecoveredTexts:
    """A batch of texts, the certain ones first, and the bag of words that supports them."""

    texts: tuple[RecoveredText, ...] = ()
    token_set: frozenset[int] = frozenset()
    token_classes: tuple[tuple[int, ...], ...] = ()  # of each, at least one token occurs, and it is open which

    @property
    def certain(self) -> tuple[RecoveredText, ...]:
        """The texts that the certificate covers."""
        return tuple(text for text in self.texts if text.certain)

    def expand(self) -> list[tuple[int, ...]]:
        """Token sequences with repetitions, as a client's batch would hold them."""
        return [text.tokens for text in self.texts for _ in range(text.count)]

    def display_rows(self) -> list[Row]:
        """A row for each text, and one for the bag of words where texts are missing."""
        rows = [(text.certainty, f"{text.text!r}, {len(text.tokens)} tokens") for text in self.texts]
        bag = f"{len(self.token_set)} tokens" if self.token_set else "nothing"
        return rows if self.texts and all(text.certain for text in self.texts) else [*rows, ("bag of words", bag)]
