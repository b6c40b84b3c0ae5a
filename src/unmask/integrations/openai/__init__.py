"""An OpenAI-style server as an oracle for logits, by whichever way it leaves open."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float

from unmask.errors import UnmaskError
from unmask.evidence.logits import LogitQuestion, LogitView, Values
from unmask.integrations.openai.client import Completion, OpenAIClient
from unmask.integrations.openai.probe import ALL_LOGITS, AS_IDS, PROBE, Bias, Support, probe_server


@dataclass(frozen=True)
class OpenAIOracle:
    """Values of chosen tokens from a server, as its `support` allows; the best way first.

    1. all logits or log-probabilities in one answer; 2. a bias lifts k chosen tokens into the top-k (Carlini et al.);
    3. a bias that comes after the log-probabilities still chooses the sampled token, and the server tells that token's
    log-probability: one token an answer.

    Where tokens are named by text, the name of each is learned once by lifting it alone; `num_named` counts these
    extra answers, which no ledger keeps.
    Source: arXiv 2403.06634, §5; the third way is open in servers that hide biases but not the sampled token.
    """

    client: OpenAIClient
    support: Support
    concurrency: int = 4
    _names: dict[int, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The address and the model; holds no secret."""
        return self.client.name

    @property
    def vocab_size(self) -> int:
        """Tokens that can be asked for: ids, or places in the list of names where all are shown by name."""
        return len(self.support.names) or self.support.vocab_size or 0

    @property
    def view(self) -> LogitView:
        """How logits are read here."""
        return self.support.view

    @property
    def num_named(self) -> int:
        """Answers that were spent on names of tokens."""
        return len(self._names)

    def pieces(self, questions: Sequence[LogitQuestion]) -> Iterator[tuple[list[int], Values]]:
        """Questions about the same tokens share requests, as many prompts as the server takes."""
        groups: dict[tuple[tuple[int, ...], float], list[int]] = {}
        for place, question in enumerate(questions):
            groups.setdefault((question.tokens, question.bias), []).append(place)
        size = self.support.prompts_a_request
        batches = [places[i : i + size] for places in groups.values() for i in range(0, len(places), size)]
        with ThreadPoolExecutor(self.concurrency) as pool:
            if not (self.support.full_logits or self.support.shows_all):
                # Before anything else, so that no two requests ask for the same name.
                list(pool.map(self._name, dict.fromkeys(token for tokens, _ in groups for token in tokens)))
            answers = pool.map(lambda batch: self._answer([questions[place] for place in batch]), batches)
            yield from zip(batches, answers, strict=True)

    def _answer(self, questions: list[LogitQuestion]) -> Values:
        """Values of one batch; all its questions are about the same tokens."""
        tokens, bias = questions[0].tokens, questions[0].bias
        prompts = [question.prompt for question in questions]
        if self.support.full_logits:
            found = self.client.complete(prompts, 1, extras=ALL_LOGITS)
            wanted = list(tokens)
            return torch.stack([torch.tensor(_logits(one)[wanted], dtype=torch.float64) for one in found])
        if self.support.shows_all:
            names = [self.support.names[token] for token in tokens]
            found = self.client.complete(prompts, 10 * len(self.support.names))
            return _rows(found, names)
        names = [self._name(token) for token in tokens]
        extras = AS_IDS if self.support.names_ids else None
        top = len(tokens) if self.support.bias is Bias.BEFORE else 1
        found = self.client.complete(prompts, top, dict.fromkeys(tokens, bias), extras)
        if self.support.bias is Bias.AFTER:
            told = [one.sampled_value if one.sampled == names[0] else None for one in found]
            return torch.tensor([[math.nan if value is None else value] for value in told], dtype=torch.float64)
        return _rows(found, names)

    def _name(self, token: int) -> str:
        """What the server calls a token."""
        if self.support.names_ids:
            return f"token_id:{token}"
        if token not in self._names:
            lifted = self.client.complete([PROBE], 1, {token: self.support.max_bias})
            self._names[token] = lifted[0].sampled
        return self._names[token]


def connect(client: OpenAIClient) -> OpenAIOracle:
    """Probe a server and make it an oracle."""
    return OpenAIOracle(client, probe_server(client))


def _rows(found: list[Completion], names: list[str]) -> Values:
    """Values by name; NaN where a token is not shown, or where two of them share a name."""
    shared = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    return torch.tensor(
        [[math.nan if name in shared else one.top.get(name, math.nan) for name in names] for one in found],
        dtype=torch.float64,
    )


def _logits(completion: Completion) -> Float[np.ndarray, " vocab"]:
    if completion.logits is None:
        raise UnmaskError("the server stopped sending full logits; probe it again")
    return completion.logits
