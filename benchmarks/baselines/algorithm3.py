"""The cost of Algorithm 3 of DAGER without running it: its products are counted, and some of them timed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from baselines.dager_sweep import DagerSweep, authors_settings
from gradients.encoder_cases import Attack, Tokens

from unmask.attacks.baselines.dager import Dager, FrameTokens
from unmask.attacks.baselines.dager_claim import AcceptedSequences, TokenSets
from unmask.attacks.baselines.dager_spans import SequenceCheck
from unmask.attacks.run import Progress
from unmask.evidence import GradientEvidence
from unmask.models import Model
from unmask.recovery import RecoveredTexts, Recovery

TOKEN_TOLERANCES = (1e-5, 3e-5, 1e-4)  # the paper's τ₁ first; rounding decides at it, wrong tokens are 0.1 away
NUM_TIMED = 3  # batches of products; the fastest gives the rate


@dataclass
class Tally:
    """What Algorithm 3 has before it if every text of a length is found as soon as its products are enumerated.

    That is the best that can happen to it, as tokens of texts that were found leave the sets. `needed` counts all
    products, `checked` those that its budget lets it check; `held`: how many texts are among the products.
    """

    needed: int = 0
    checked: int = 0
    held: int = 0
    setup_seconds: float = 0.0
    least_seconds: float = 0.0


@dataclass(frozen=True)
class CountedDager(Dager):
    """Algorithm 3 up to its token sets; then its products are counted and not checked, but for some to time them."""

    texts: tuple[tuple[int, ...], ...] = ()
    timed: bool = True
    tally: Tally = field(default_factory=Tally)
    started: float = field(default_factory=time.perf_counter)

    def search_products(
        self, sets: TokenSets, check: SequenceCheck, frame: FrameTokens, num_texts: int | None, progress: Progress
    ) -> AcceptedSequences:
        """Count."""
        self.tally.setup_seconds = self.tally.least_seconds = time.perf_counter() - self.started
        remaining = [set(tokens[:num_texts].tolist()) for tokens in sets.sets]
        self.tally.held = sum(_holds(remaining, sets.ends, text) for text in self.texts)
        for position, _ in sets.ends:
            sizes = [len(tokens) for tokens in remaining[:position]]
            needed = math.prod(sizes)
            checked = min(needed, self.max_products)
            self.tally.needed += needed
            self.tally.checked += checked
            if self.timed and checked:
                self.tally.least_seconds += checked / self._products_a_second(remaining[:position], check, checked)
            for text in self.texts:
                if len(text) == position + 1:
                    remaining = _without(remaining, text, frame.start)
        return AcceptedSequences([], 0)

    def _products_a_second(self, choices: Sequence[set[int]], check: SequenceCheck, checked: int) -> float:
        """The fastest of some batches of random products."""
        generator = torch.Generator().manual_seed(self.seed)
        size = min(checked, self.batch_size)
        rates = []
        for _ in range(min(NUM_TIMED, math.ceil(checked / size))):
            columns = [torch.tensor(sorted(choice)) for choice in choices]
            picked = [column[torch.randint(len(column), (size,), generator=generator)] for column in columns]
            started = time.perf_counter()
            check.distances(torch.stack([*picked, picked[0]], dim=1)).mean(1)
            rates.append(size / (time.perf_counter() - started))
        return max(rates)


def _holds(choices: Sequence[set[int]], ends: Sequence[tuple[int, int]], text: Sequence[int]) -> bool:
    """Whether a text is a product of the sets up to an end token."""
    place = len(text) - 1
    return (place, text[-1]) in ends and all(a in b for a, b in zip(text[:-1], choices[:place], strict=True))


def _without(remaining: list[set[int]], text: Sequence[int], start: int | None) -> list[set[int]]:
    """Token sets less a text's tokens, where another token is left."""
    pairs = list(zip(remaining, text, strict=False))
    left = [tokens - {token} if token != start and len(tokens) > 1 else tokens for tokens, token in pairs]
    return left + remaining[len(left) :]


def count(
    evidence: GradientEvidence, model: Model, texts: Sequence[Tokens], *, timed: bool, dager: Dager | None = None
) -> CountedDager:
    """The products that Algorithm 3 has before it, and the least time they take; `dager`: its authors' if None.

    Where the paper's τ₁ loses texts to rounding, the one that keeps most is taken: tuned by the truth, in its favour.
    """
    wanted = tuple(map(tuple, texts))
    dager = dager or Dager(**authors_settings(len(texts)))
    settings = {one.name: getattr(dager, one.name) for one in fields(Dager)}
    best: CountedDager | None = None
    for tolerance in TOKEN_TOLERANCES:
        counted = CountedDager(**settings | {"token_tolerance": tolerance}, texts=wanted, timed=timed)
        counted(evidence, model)
        best = counted if best is None or counted.tally.held > best.tally.held else best
        if best.tally.held == len(wanted):
            break
    assert best is not None
    return best


def count_tuned(evidence: GradientEvidence, model: Model, texts: Sequence[Tokens], *, timed: bool) -> CountedDager:
    """The same with the rank tolerance and the cut swept too: the setting whose token sets hold the most texts."""
    best: CountedDager | None = None
    for dager in DagerSweep().settings(evidence, model):
        counted = count(evidence, model, texts, timed=False, dager=dager)
        best = counted if best is None or counted.tally.held > best.tally.held else best
        if best.tally.held == len(texts):
            break
    assert best is not None
    return count(evidence, model, texts, timed=True, dager=best) if timed else best


def as_dager(counted: CountedDager) -> Dager:
    """The attack whose products were counted."""
    return Dager(**{one.name: getattr(counted, one.name) for one in fields(Dager)})


class OutOfTimeError(Exception):
    """Algorithm 3 took longer than it was given."""


def within(limit: float, dager: Dager) -> Attack:
    """Algorithm 3 that is stopped after `limit` seconds."""

    def attack(evidence: GradientEvidence, model: Model) -> Recovery[RecoveredTexts]:
        ends = time.perf_counter() + limit

        def watch(stage: str, done: int, total: int) -> None:
            if time.perf_counter() > ends:
                raise OutOfTimeError

        return dager(evidence, model, watch)

    return attack
