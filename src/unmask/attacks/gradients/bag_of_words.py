"""The bag of words of any model, encoders included: which tokens a batch holds, without their order."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from unmask.attacks.gradients.candidates import find_candidates
from unmask.attacks.gradients.verdict import bag_of_words, no_result
from unmask.attacks.progress import Progress, silent
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.recovery import RecoveredTexts, Recovery


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
            return no_result(bag.status, bag.reason, bag.used, started)
        return bag_of_words(bag.candidates, bag.used, "this attack reads tokens, not their order", started)
