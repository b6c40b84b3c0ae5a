"""The bag of words of any model, encoders included: which tokens a batch holds, without their order."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from unmask.attacks.gradients.bag_of_words.candidates import BagOfWords, find_candidates
from unmask.attacks.gradients.decoder.claim import bag_of_words
from unmask.attacks.no_result import no_result
from unmask.attacks.progress import Progress, silent
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.recovery import Aim, Certificate, Cost, RecoveredTexts, Recovery, Status

MOST_EXPECTED_FALSE = 0.51  # one half by the decoys of the span, and 1e-9 for each row of the embedding


@dataclass(frozen=True)
class BagOfWordsAttack:
    """Tokens from embedding rows that moved, or from the span of block 0's query, key and value gradients."""

    num_probes: int = 32
    min_gap_decades: float = 1.0
    seed: int = 0

    def __call__(
        self, evidence: GradientEvidence, model: Model, progress: Progress = silent
    ) -> Recovery[RecoveredTexts]:
        """Run the attack; the evidence and the model are left as they are."""
        started = time.perf_counter()
        progress("reading the bag of words", 0, 1)
        bag = find_candidates(
            evidence,
            model,
            num_probes=self.num_probes,
            min_gap_decades=self.min_gap_decades,
            generator=torch.Generator().manual_seed(self.seed),
        )
        if bag.candidates is None:
            return no_result(bag.status, bag.reason, bag.used, started, frozenset([Aim.TOKENS]))
        if bag.expected_false is not None:
            return statistical_bag(bag, started)
        return bag_of_words(bag.candidates, bag.used, "this attack reads tokens, not their order", started)


def statistical_bag(bag: BagOfWords, started: float) -> Recovery[RecoveredTexts]:
    """Tokens that a test chose under noise: a part of the batch, a stated number of false ones, no texts."""
    assert bag.candidates is not None  # only a bag with tokens has expected false ones
    assert bag.expected_false is not None
    certificate = Certificate(
        claim="on average over the noise, no more than `residual` of the tokens listed do not occur",
        residual=bag.expected_false,
        tolerance=MOST_EXPECTED_FALSE,
        details={"expected_false": bag.expected_false, **bag.details},
    )
    tokens = bag.candidates.tokens
    reason = (
        f"{len(tokens)} tokens stand out of the noise, {bag.expected_false:.2g} of them false on average; others may "
        "occur too, and the order of tokens is not read from noisy updates"
    )
    cost = Cost(seconds=time.perf_counter() - started, candidates=bag.candidates.num_tested)
    looked_for = frozenset([Aim.TOKENS])
    return Recovery(RecoveredTexts((), tokens), Status.PARTIAL, reason, certificate, cost, bag.used, looked_for)
