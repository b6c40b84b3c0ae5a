"""Something that answers: sequences of real vectors in, numbers out. Who asks pays for every answer once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from unmask.displays import DisplayedFields
from unmask.errors import EvidenceError, InputError, UnmaskError
from unmask.evidence.ledger import Ledger
from unmask.evidence.tensors import as_tensor
from unmask.progress import tell_detail

Sequences = Float[Tensor, "b n d"]
Answers = Float[Tensor, "b *p"]

_LARGEST_BOUND = 1e100  # on the norm of a token: its square must be a float64
_BATCH_BYTES = 2**26  # of sequences that a function is called with at once


class Refused(UnmaskError):  # noqa: N818 (as statuses are named)
    """The oracle gave no number for a sequence: it rejects such tokens, or its arithmetic overflowed."""


class Oracle(Protocol):
    """A batch of sequences in, one answer for each out; in pieces, as they are ready, so that each can be kept."""

    @property
    def name(self) -> str:
        """Who answers, for ledgers and reports; holds no secret."""

    def pieces(self, sequences: Sequences) -> Iterator[tuple[list[int], Answers]]:
        """Places in the batch with their answers, in any order; every place once."""


@dataclass(frozen=True)
class FunctionOracle:
    """A function of this process, (batch, length, width) → (batch,) or (batch, outputs)."""

    function: Callable[[Sequences], Any]
    name: str = "function"
    max_batch: int | None = None  # sequences a call; None: as many as 64 MiB hold

    def pieces(self, sequences: Sequences) -> Iterator[tuple[list[int], Answers]]:
        """The function, called with as much at once as its memory allows."""
        bytes_each = sequences[0].numel() * sequences.element_size()
        size = self.max_batch or max(1, _BATCH_BYTES // max(1, bytes_each))
        for start in range(0, len(sequences), size):
            batch = sequences[start : start + size]
            yield list(range(start, start + len(batch))), self._numbers(self.function(batch))

    def _numbers(self, answer: Any) -> Answers:
        try:
            return as_tensor("answer", answer)
        except EvidenceError:
            raise UnmaskError(
                f"{self.name} answered with {type(answer).__name__}, which is no array of numbers; it must answer one "
                "number, or one vector, for each sequence"
            ) from None


@dataclass(frozen=True)
class ModuleOracle:
    """A torch module that answers in the precision of its own weights, without gradients."""

    module: nn.Module
    name: str = "module"
    max_batch: int | None = None

    def pieces(self, sequences: Sequences) -> Iterator[tuple[list[int], Answers]]:
        """The module in evaluation mode."""
        weight = next(self.module.parameters(), sequences)

        def answer(batch: Sequences) -> Answers:
            with torch.no_grad():
                return self.module.eval()(batch.to(weight.device, weight.dtype))

        return FunctionOracle(answer, self.name, self.max_batch).pieces(sequences)


@dataclass(frozen=True, eq=False, repr=False)
class OracleEvidence(DisplayedFields):
    """An oracle and what the adversary knows about it.

    Side knowledge: the width of a token. `max_norm`, a bound on the norm of a token that is known beforehand; None:
    must be inferred.
    """

    oracle: Oracle
    width: int
    ledger: Ledger = field(default_factory=Ledger)
    max_norm: float | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.width < 1:
            raise InputError(f"width must be 1 or more, got {self.width}")
        if self.max_norm is not None and not 0 < self.max_norm <= _LARGEST_BOUND:
            raise InputError(
                f"max_norm must be above 0 and at most {_LARGEST_BOUND:g}, got {self.max_norm}; leave it out where "
                "tokens may have any norm"
            )

    def ask(self, sequences: Sequences, repetition: int = 0) -> Answers:
        """Answers in float64. The same question is paid for once, unless asked as another `repetition`."""
        sequences = sequences.detach().double()
        if sequences.ndim != 3 or sequences.shape[2] != self.width:
            raise InputError(f"sequences must be (batch, length, {self.width}), got {tuple(sequences.shape)}")

        tell_detail("asking the oracle")

        def ask(places: list[int]) -> Iterator[tuple[list[int], np.ndarray]]:
            for within, answers in self.oracle.pieces(sequences[places]):
                values = _check(answers, len(within))
                is_finite = np.isfinite(values).reshape(len(values), -1).all(1)
                # What was paid for is kept before the others are complained about.
                yield [places[place] for place, kept in zip(within, is_finite, strict=True) if kept], values[is_finite]
                refuse_unless_finite(is_finite)

        answers = self.ledger.fetch(question_keys(sequences, repetition), ask)  # type: ignore[arg-type]
        answers = answers[:, 0] if answers.ndim == 2 and answers.shape[1] == 1 else answers  # a vector of one number
        return torch.from_numpy(np.array(answers)).to(self.device)


def question_keys(sequences: Sequences, repetition: int = 0) -> list[bytes]:
    """A name for each question: equal for equal numbers, lengths and repetitions, and for nothing else."""
    rows = sequences.detach().double().cpu().contiguous().numpy()
    salt = f"{repetition} {rows.shape[1]} {rows.shape[2]}".encode()
    return [hashlib.blake2b(row.tobytes(), digest_size=16, key=salt).digest() for row in rows]


def refuse_unless_finite(is_finite: Bool[np.ndarray, " b"]) -> None:
    """Complain about the answers that are no numbers."""
    if not is_finite.all():
        raise Refused(
            f"the oracle's answer to {int((~is_finite).sum())} of {len(is_finite)} sequences is not a finite number; "
            "its arithmetic overflowed, or it is broken"
        )


def _check(answers: Answers, num_asked: int) -> Float[np.ndarray, "b *p"]:
    """Answers as float64; refused if one is missing."""
    if answers.is_complex():
        raise UnmaskError("the oracle answered with complex numbers; it must answer with real ones")
    values = answers.detach().double().cpu().numpy()
    if values.ndim not in (1, 2) or len(values) != num_asked or values.shape[1:] == (0,):
        raise UnmaskError(
            f"the oracle was asked {num_asked} sequences and answered with an array of shape {values.shape}; it must "
            "answer one number, or one vector, for each"
        )
    return values
