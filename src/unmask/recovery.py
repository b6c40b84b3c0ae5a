"""What every attack returns: a value, how it ended, what proves it, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Status(Enum):
    """How an attack ended. The value of a member is the sentence that a user reads."""

    RECOVERED = "The whole secret was recovered, and the certificate holds for every part of it."
    PARTIAL = "A part of the secret was recovered; the certificate says which part is certain."
    NOT_IDENTIFIABLE = "The evidence does not determine the secret: more than one secret explains it."
    MISSING_EVIDENCE = "The evidence lacks the tensors that this attack needs."
    NOT_APPLICABLE = "The attack does not apply to evidence of this kind, so it says nothing about safety."
    NOTHING_FOUND = "The attack ran to its end and found nothing that it could certify."
    BUDGET_EXHAUSTED = "The budget ended before the attack did; what was certain by then is kept."

    @property
    def conclusive(self) -> bool:
        """Whether the attack got something that it can certify ('not conclusive' never means 'safe')."""
        return self in (Status.RECOVERED, Status.PARTIAL)


@dataclass(frozen=True)
class Certificate:
    """What the adversary can verify alone, without the secret; computed in float64.

    `residual` is the worst measured number of everything claimed; it must not exceed `tolerance`, which was set
    from the evidence (a gap), not by hand. `rejected` is the best number among what was refused, so
    `rejected / residual` tells how clear the decision was.
    """

    claim: str
    residual: float
    tolerance: float
    rejected: float | None = None
    details: Mapping[str, float] = field(default_factory=dict)

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


@dataclass(frozen=True)
class Recovery(Generic[Value]):
    """The result of an attack.

    `reason` is the particular sentence ('the gradient's rank equals the width 768 …') beside the general one of
    the status; `used` names the tensors of the evidence that the result rests on.
    """

    value: Value
    status: Status
    reason: str
    certificate: Certificate
    cost: Cost
    used: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecoveredText:
    """One text. `certain` means that the certificate covers every token of it."""

    tokens: tuple[int, ...]
    text: str
    certain: bool
    residual: float
    count: int = 1  # how often the batch holds it


@dataclass(frozen=True)
class RecoveredTexts:
    """A batch of texts, the certain ones first, and the bag of words that supports them."""

    texts: tuple[RecoveredText, ...] = ()
    token_set: frozenset[int] = frozenset()

    @property
    def certain(self) -> tuple[RecoveredText, ...]:
        """The texts that the certificate covers."""
        return tuple(text for text in self.texts if text.certain)

    def expanded(self) -> list[tuple[int, ...]]:
        """Token sequences with repetitions, as a client's batch would hold them."""
        return [text.tokens for text in self.texts for _ in range(text.count)]
