"""What an OpenAI-style server really supports, found out by asking, not by its manual."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from unmask.errors import NoAnswerError, UnmaskError
from unmask.evidence.logits import LogitView, Prompt
from unmask.integrations.openai.client import Completion, OpenAIClient

PROBE = "The capital of"
AS_IDS = {"return_tokens_as_token_ids": True}  # vLLM's field: tokens come as 'token_id:17'
ALL_LOGITS = {"full_logits": True}  # the field of examples/openai_service.py
_TOPS = (1, 2, 3, 5, 10, 20, 50, 100, 1000, 10_000, 100_000, 1_000_000)
_BIASES = (100.0, 50.0, 20.0, 10.0, 5.0, 1.0)
_BATCHES = (64, 8)
_LONG_PROMPT = 256  # words
_LARGEST_VOCABULARY = 2**21
_DEEP = (3000, 1000, 400, 200, 100, 60, 30, 10)  # tokens to try a bias on, until one is not likely anyway
_MOST_ASKED = 1000  # tokens in one answer: more make requests slow, and a thousand are enough
_MOSTLY = 0.9  # of the tokens asked for: some share a name and are counted once
# A token that was lifted above all others by far has the log-probability 0, and one that was not the likeliest before
# less than log ½ = −0.69: between the two, noise of 0.1 is told apart.
_SURE = -0.35


class Bias(Enum):
    """What a logit bias does. The value is what a user reads."""

    BEFORE = "applied before log-probabilities: k chosen tokens an answer"
    AFTER = "applied after them, and the sampled token's log-probability is told: one chosen token an answer"
    AFTER_HIDDEN = "applied after them, and the sampled token's log-probability is hidden"
    IGNORED = "accepted and ignored"
    REFUSED = "refused"


@dataclass(frozen=True)
class Support:
    """One line for each thing that was tried; what it makes possible is `view`."""

    chat: bool
    largest_top: int  # tokens with log-probabilities in one answer
    shows_all: bool  # every token of the vocabulary is among them
    full_logits: bool
    bias: Bias
    max_bias: float
    vocab_size: int | None  # None: not found
    names_ids: bool
    takes_tokens: bool
    prompts_a_request: int
    takes_long_prompts: bool
    spread: float  # of the log-probabilities of one question, asked three times
    num_requests: int
    names: tuple[str, ...] = ()  # of all tokens, where they are all shown

    @property
    def view(self) -> LogitView:
        """How logits can be read, or why they cannot."""
        vocab = self.vocab_size or 0
        if self.full_logits or self.shows_all:
            return LogitView(len(self.names) or vocab, takes_tokens=self.takes_tokens)
        if self.bias is Bias.BEFORE and self.largest_top >= 2 and vocab:
            size = min(self.largest_top, _MOST_ASKED)
            return LogitView(size, self.max_bias, constant_per_answer=True, takes_tokens=self.takes_tokens)
        if self.bias is Bias.AFTER and vocab:
            return LogitView(1, self.max_bias, takes_tokens=self.takes_tokens)
        closed = (
            f"the server shows {self.largest_top} log-probabilities an answer, and a logit bias is {self.bias.value}: "
            "logits of chosen tokens cannot be read this way, which says nothing about other ways"
        )
        return LogitView(0, takes_tokens=self.takes_tokens, closed=closed)

    def describe(self) -> list[tuple[str, str]]:
        """What was tried, and what came of it."""
        yes = {True: "yes", False: "no"}
        limited = f"{self.largest_top:,}" + (" (all of them)" if self.shows_all else "")
        return [
            ("endpoint", "/v1/chat/completions" if self.chat else "/v1/completions"),
            ("log-probabilities in one answer, at most", limited if self.largest_top else "none"),
            ("full logits (extension)", yes[self.full_logits]),
            ("logit bias", self.bias.value + (f"; up to {self.max_bias:g}" if self.max_bias else "")),
            ("tokens that take a bias", "not found" if self.vocab_size is None else f"{self.vocab_size:,}"),
            ("tokens are named by", "id" if self.names_ids else "text"),
            ("prompts as token ids", yes[self.takes_tokens]),
            ("prompts in one request", str(self.prompts_a_request)),
            (f"prompts of {_LONG_PROMPT} words", yes[self.takes_long_prompts]),
            ("same question, same answer", "yes" if self.spread == 0 else f"differs by {self.spread:.1e}"),
            ("requests used to find out", str(self.num_requests)),
        ]


class _Prober:
    """Asks, counts, and takes a refusal for an answer."""

    def __init__(self, client: OpenAIClient) -> None:
        self.client = client
        self.num_requests = 0

    def try_prompts(
        self,
        prompts: list[Prompt] | None = None,
        top: int = 1,
        bias: dict[int, float] | None = None,
        extras: dict[str, Any] | None = None,
    ) -> list[Completion] | None:
        """Completions, or None where the server refuses."""
        self.num_requests += 1
        try:
            return self.client.complete(prompts or [PROBE], top, bias, extras)
        except NoAnswerError:
            raise  # nothing is known of what the server supports
        except UnmaskError:
            return None

    def largest_top(self) -> tuple[int, bool, tuple[str, ...]]:
        """The most tokens that come back, whether they are all that there are, and then their names."""
        most: tuple[str, ...] = ()
        for top in _TOPS:
            found = self.try_prompts(top=top)
            if found is None or len(found[0].top) <= len(most):
                break
            most = tuple(sorted(found[0].top))
            if len(most) < _MOSTLY * top:  # a limit, or the end of the vocabulary
                total = sum(math.exp(value) for value in found[0].top.values())
                return len(most), len(most) > _MOST_ASKED and total > 0.99, most
        return len(most), False, ()

    def bias(self, top: int) -> tuple[Bias, float]:
        """What a bias does, and the largest that is taken."""
        plain = self.try_prompts(top=top)
        largest = next((size for size in _BIASES if self.try_prompts(top=top, bias={_DEEP[-1]: size})), 0.0)
        if plain is None or largest == 0:
            return Bias.REFUSED, 0.0
        for token in _DEEP:
            lifted = self.try_prompts(top=top, bias={token: largest})
            if lifted is None or lifted[0].sampled == plain[0].sampled:
                continue
            told = lifted[0].sampled_value
            if lifted[0].top.get(lifted[0].sampled, -math.inf if told is None else told) > _SURE:
                return Bias.BEFORE, largest
            if lifted[0].sampled in plain[0].top:
                continue
            return (Bias.AFTER_HIDDEN if told is None else Bias.AFTER), largest
        return Bias.IGNORED, largest

    def vocabulary(self, largest_bias: float) -> int | None:
        """The number of tokens that a bias moves, by bisection; None where there is no end."""
        plain = self.try_prompts()

        def moves(token: int) -> bool:
            lifted = self.try_prompts(bias={token: largest_bias})
            return bool(plain and lifted and lifted[0].sampled != plain[0].sampled)

        low, high = 0, _LARGEST_VOCABULARY
        if moves(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            # One token may be the likeliest anyway and not move; its neighbour tells.
            low, high = (middle, high) if moves(middle) or moves(middle - 1) else (low, middle)
        return low


def probe_server(client: OpenAIClient) -> Support:
    """Try everything that reading logits could use.

    Cost: about 60 requests of one token, most of them the bisection of the vocabulary.
    """
    ask = _Prober(client)
    largest, shows_all, names = ask.largest_top()
    full = None if client.chat else ask.try_prompts(extras=ALL_LOGITS)
    logits = full[0].logits if full else None
    bias, max_bias = ask.bias(min(max(largest, 1), 20)) if largest else (Bias.REFUSED, 0.0)
    works = bias in (Bias.BEFORE, Bias.AFTER)
    vocab_size = len(logits) if logits is not None else ask.vocabulary(max_bias) if works and not shows_all else None
    as_ids = ask.try_prompts(extras=AS_IDS)
    takes_tokens = not client.chat and ask.try_prompts([(5, 6)]) is not None
    pair: Prompt = (5, 6) if takes_tokens else PROBE
    sizes = [] if client.chat else [size for size in _BATCHES if ask.try_prompts([pair] * size)]
    long_prompt = ask.try_prompts([" ".join(["word"] * _LONG_PROMPT)])
    repeated = [found[0].top for _ in range(3) if (found := ask.try_prompts(top=max(largest and 1, min(largest, 20))))]
    return Support(
        chat=client.chat,
        largest_top=largest,
        shows_all=shows_all,
        full_logits=logits is not None,
        bias=bias,
        max_bias=max_bias,
        vocab_size=vocab_size,
        names_ids=bool(as_ids and as_ids[0].sampled.startswith("token_id:")),
        takes_tokens=takes_tokens,
        prompts_a_request=max(sizes, default=1),
        takes_long_prompts=long_prompt is not None,
        spread=_spread(repeated),
        num_requests=ask.num_requests,
        names=names if shows_all else (),
    )


def _spread(repeated: list[Mapping[str, float]]) -> float:
    """The largest difference of a token's value between answers that both show it."""
    first = repeated[0] if repeated else {}
    return max((abs(top[name] - first[name]) for top in repeated for name in top if name in first), default=0.0)
