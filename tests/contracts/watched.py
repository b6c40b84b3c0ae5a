"""Oracles and evidence that note what an attack does with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.contracts.replay import ABOUT
from torch import Tensor

from unmask.evidence.logits import LogitEvidence
from unmask.evidence.oracles import OracleEvidence, question_keys

Answering = Callable[[Tensor], Tensor]


class WatchedOracle:
    """An oracle that notes what else than its name and its answers somebody looks at."""

    def __init__(self, answer: Answering) -> None:
        self._answer = answer
        self._touched: list[str] = []

    @property
    def name(self) -> str:
        return ABOUT

    def pieces(self, sequences: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        yield list(range(len(sequences))), object.__getattribute__(self, "_answer")(sequences)

    def __getattribute__(self, name: str) -> Any:
        if name not in ("name", "pieces"):
            object.__getattribute__(self, "_touched").append(name)
        return object.__getattribute__(self, name)


def touched(oracle: WatchedOracle) -> list[str]:
    """What somebody looked at."""
    return object.__getattribute__(oracle, "_touched")


@dataclass(frozen=True, eq=False)
class WatchedEvidence(OracleEvidence):
    """Evidence that keeps every tensor that it was asked with, and what was in it."""

    asked: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def ask(self, sequences: Tensor, repetition: int = 0) -> Tensor:
        self.asked.append((sequences, sequences.clone()))
        return super().ask(sequences, repetition)

    def first_questions(self) -> set[bytes]:
        return set(question_keys(self.asked[0][0]))


@dataclass(frozen=True, eq=False)
class WatchedLogits(LogitEvidence):
    """Evidence that keeps every question that it was asked; questions cannot be changed."""

    asked: list[Any] = field(default_factory=list)

    def ask(self, questions: Any) -> Tensor:
        self.asked.append(questions)
        return super().ask(questions)

    def first_questions(self) -> set[bytes]:
        return {question.key for question in self.asked[0]}
