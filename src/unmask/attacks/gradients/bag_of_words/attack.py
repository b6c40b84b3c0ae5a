"""The bag of words of any model, encoders included: which tokens a batch holds, without their order."""

from __future__ import annotations

from dataclasses import dataclass

from unmask.attacks.gradients.bag_of_words.claim import claim_tokens, read_tokens
from unmask.attacks.gradients.stated_task import as_update_shows
from unmask.attacks.run import Progress, Run, silent
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.recovery import RecoveredTexts, Recovery


@dataclass(frozen=True)
class BagOfWordsAttack:
    """Tokens from embedding rows that moved, or from the span of block 0's query, key and value gradients."""

    num_probes: int = 32
    min_gap_decades: float = 1.0
    seed: int = 0

    @as_update_shows
    def __call__(
        self, evidence: GradientEvidence, model: Model, progress: Progress = silent
    ) -> Recovery[RecoveredTexts]:
        """Run the attack; the evidence and the model are left as they are."""
        run = Run(self.seed, progress)
        read = read_tokens(run, evidence, model, self.num_probes, self.min_gap_decades)
        if isinstance(read, Recovery):
            return read
        return claim_tokens(run, *read, "this attack reads tokens, not their order")
