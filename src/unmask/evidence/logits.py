"""What a language model's service shows of its logits, and who pays for it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.displays import DisplayedFields
from unmask.errors import InputError, UnmaskError
from unmask.evidence.ledger import Ledger
from unmask.evidence.oracles import Refused
from unmask.evidence.tensors import as_floats
from unmask.progress import tell_detail

Prompt = tuple[int, ...] | str  # token ids, or text where a service takes nothing else
Values = Float[Tensor, "b t"]  # of the tokens asked for; NaN: not shown

_BATCH_NUMBERS = 2**24  # logits that a function is asked for at once


@dataclass(frozen=True)
class LogitView:
    """How much one answer shows of the tokens that it is asked for.

    `num_tokens`: the number of chosen tokens whose values one answer shows. `max_bias`: the largest logit bias that may
    be put on them to make them shown; 0: none is needed. `constant_per_answer`: values of one answer share an unknown
    constant (the normaliser of biased log-probabilities), so that only their differences mean something; otherwise
    the constant is the prompt's. `takes_tokens`: prompts may be token ids. `closed`: why nothing can be read, if so.
    """

    num_tokens: int
    max_bias: float = 0.0
    constant_per_answer: bool = False
    takes_tokens: bool = True
    closed: str = ""


@dataclass(frozen=True)
class LogitQuestion:
    """The values of these tokens as the next token after a prompt, with `bias` added to the logit of each."""

    prompt: Prompt
    tokens: tuple[int, ...]
    bias: float = 0.0

    @property
    def key(self) -> bytes:
        """Names the question in a ledger."""
        return hashlib.blake2b(repr((self.prompt, self.tokens, self.bias)).encode(), digest_size=16).digest()


class LogitOracle(Protocol):
    """Questions about the next token in, values out; in pieces, as they are ready, so that each can be kept."""

    @property
    def name(self) -> str:
        """Who answers, for ledgers and reports; holds no secret."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens that can be asked for."""

    @property
    def view(self) -> LogitView:
        """What one answer shows."""

    def pieces(self, questions: Sequence[LogitQuestion]) -> Iterator[tuple[list[int], Values]]:
        """Places in the list with their answers, in any order; every place once. All ask for as many tokens."""


@dataclass(frozen=True)
class FunctionLogitOracle:
    """A function of this process, token ids (batch, length) → logits (batch, vocab).

    With `top` k it shows what a service does: log-probabilities of the k likeliest tokens, after the bias.
    """

    function: Callable[[Int[Tensor, "b n"]], Float[Tensor, "b vocab"]]
    vocab_size: int
    name: str = "function"
    top: int | None = None
    max_bias: float = 100.0

    @property
    def view(self) -> LogitView:
        """Everything, or the top."""
        if self.top is None:
            return LogitView(self.vocab_size)
        return LogitView(self.top, self.max_bias, constant_per_answer=True)

    def pieces(self, questions: Sequence[LogitQuestion]) -> Iterator[tuple[list[int], Values]]:
        """Prompts of one length are answered together."""
        lengths = [len(question.prompt) for question in questions]
        size = max(1, _BATCH_NUMBERS // self.vocab_size)
        for length in sorted(set(lengths)):
            places = [place for place, other in enumerate(lengths) if other == length]
            for start in range(0, len(places), size):
                batch = places[start : start + size]
                yield batch, self._answer([questions[place] for place in batch])

    def _answer(self, questions: list[LogitQuestion]) -> Values:
        prompts = torch.tensor([question.prompt for question in questions])
        logits = as_floats("logits", self.function(prompts)).cpu().clone()
        tokens = torch.tensor([question.tokens for question in questions])
        if self.top is None:
            return logits.gather(1, tokens)
        biases = torch.tensor([question.bias for question in questions], dtype=logits.dtype)
        logits.scatter_add_(1, tokens, biases[:, None].expand(tokens.shape))
        shown = logits.log_softmax(1)
        values = shown.gather(1, tokens)
        lowest = shown.topk(self.top, dim=1).values[:, -1:]
        return values.masked_fill(values < lowest, math.nan)


@dataclass(frozen=True, eq=False, repr=False)
class LogitEvidence(DisplayedFields):
    """A service that shows logits, with the ledger of its answers."""

    oracle: LogitOracle
    ledger: Ledger = field(default_factory=Ledger)
    device: str = "cpu"

    def __post_init__(self) -> None:
        view = self.oracle.view
        if view.closed:
            return
        if self.oracle.vocab_size < 2:
            raise InputError(f"vocab_size must be 2 tokens or more, got {self.oracle.vocab_size}")
        if view.num_tokens < 1 or view.max_bias < 0:
            raise InputError(f"a view must show a token or more and its largest bias be 0 or more, got {view}")

    def ask(self, questions: Sequence[LogitQuestion]) -> Float[Tensor, "b t"]:
        """Values in float64, NaN where a token is not shown. The same question is paid for once."""
        if len({len(question.tokens) for question in questions}) > 1:
            raise InputError("questions that are asked together must be about the same number of tokens")

        tell_detail("asking the service")

        def ask(places: Sequence[int]) -> Iterator[tuple[list[int], np.ndarray]]:
            for within, values in self.oracle.pieces([questions[place] for place in places]):
                num_tokens = len(questions[0].tokens)
                yield [places[place] for place in within], _check(values, len(within), num_tokens)

        answers = self.ledger.fetch([question.key for question in questions], ask)
        return torch.from_numpy(np.array(answers)).to(self.device)


def _check(values: Values, num_asked: int, num_tokens: int) -> np.ndarray:
    """Values as float64; refused if one is missing or infinite. NaN says 'not shown'."""
    array = values.detach().double().cpu().numpy()
    if array.shape != (num_asked, num_tokens):
        raise UnmaskError(
            f"the service was asked for {num_tokens} tokens after {num_asked} prompts and answered with an array of "
            f"shape {array.shape}; it must answer one number for each"
        )
    if np.isinf(array).any():
        raise Refused("the service's answer holds infinite values; mask them as 'not shown' (NaN)")
    return array
