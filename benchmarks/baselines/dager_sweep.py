"""DAGER as its authors run it, and DAGER tuned: its rank tolerance and its cut are swept, and the best run counts.

`authors_settings` is what a benchmark runs as 'DAGER'; a sweep stands beside it where there is time for one. An
adversary has no secret to tune by, so the best run is the one whose own certificate is the best. Who knows the secret
may count the best run by its score instead (`DagerSweep.runs`), which gives the attack more than any adversary has.

Cost: the singular values once more, and one run of the attack for each span that the settings lead to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from unmask.attacks.baselines.dager import Dager
from unmask.attacks.baselines.dager_spans import cut, query_layers, take_ranks
from unmask.attacks.run import Progress, silent
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.recovery import RecoveredTexts, Recovery, Status

RANK_TOLERANCES = (None, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5)
RANK_MARGINS = (20, 5)  # the paper's; 20 of its width 768 is little, of a narrow model's width it is much

Texts = Recovery[RecoveredTexts]


def authors_settings(num_texts: int, *, long_texts: bool = False) -> dict[str, float]:
    """Tolerances of DAGER's authors, from their paper (appendix C) and the guide of their public code.

    The rank tolerance falls as the batch grows. Texts of ECHR (Figures 3 and 4, 512 tokens) have tolerances of their
    own: `long_texts`. All other settings are the defaults of `Dager`. The guide's third set, for 128 texts of Rotten
    Tomatoes on Llama-2, is left out: that batch is not run here.
    """
    if long_texts:
        return {"rank_tolerance": 1e-9, "token_tolerance": 1e-4}
    return {"rank_tolerance": 1e-7 if num_texts <= 2 else 1e-8 if num_texts <= 16 else 1e-9}


@dataclass(frozen=True)
class DagerSweep:
    """DAGER at every one of these settings; what is not swept is taken from `dager`.

    `token_tolerances` and `sequence_tolerances` are τ₁ and τ₂; empty: those of `dager`.
    """

    dager: Dager = field(default_factory=Dager)
    rank_tolerances: tuple[float | None, ...] = RANK_TOLERANCES
    rank_margins: tuple[int, ...] = RANK_MARGINS
    token_tolerances: tuple[float, ...] = ()
    sequence_tolerances: tuple[float, ...] = ()

    def __call__(self, evidence: GradientEvidence, model: Model, progress: Progress = silent) -> Texts:
        """The best run by its own certificate; the first that is RECOVERED ends the sweep."""
        best: Texts | None = None
        for _, recovery in self.runs(evidence, model, progress):
            best = recovery if best is None or certificate_merit(recovery) > certificate_merit(best) else best
            if best.status is Status.RECOVERED:
                break
        assert best is not None  # there is at least one setting
        return best

    def runs(
        self, evidence: GradientEvidence, model: Model, progress: Progress = silent
    ) -> Iterator[tuple[Dager, Texts]]:
        """Every setting with what it recovers, one by one."""
        for attack in self.settings(evidence, model):
            yield attack, attack(evidence, model, progress)

    def settings(self, evidence: GradientEvidence, model: Model) -> list[Dager]:
        """The attacks to run: of those that keep the same number of directions only the first."""
        layers = [layer for layer in query_layers(evidence, model) if layer is not None]
        ranks = take_ranks(evidence, layers, self.rank_tolerances) if layers else [0] * len(self.rank_tolerances)
        spans: dict[int, tuple[float | None, int]] = {}
        for margin, (tolerance, rank) in product(self.rank_margins, zip(self.rank_tolerances, ranks, strict=True)):
            spans.setdefault(cut(rank, model.width, margin) if rank else 0, (tolerance, margin))
        if len(spans) > 1:
            spans.pop(0, None)  # a tolerance above all singular values: nothing to read
        return [
            replace(
                self.dager,
                rank_tolerance=tolerance,
                rank_margin=margin,
                token_tolerance=token_tolerance,
                sequence_tolerance=sequence_tolerance,
            )
            for tolerance, margin in spans.values()
            for token_tolerance in self.token_tolerances or (self.dager.token_tolerance,)
            for sequence_tolerance in self.sequence_tolerances or (self.dager.sequence_tolerance,)
        ]


def certificate_merit(recovery: Texts) -> tuple[bool, int, float, int]:
    """How good a run looks to the adversary: larger is better.

    Recovered or not; certain texts; how much of block 1's gradient the texts that passed explain, nothing if they have
    more rows than the gradient has directions; tokens found.
    """
    details = recovery.certificate.details
    fits = recovery.certificate.holds and details.get("explained_rank", 1.0) <= details.get("rank", 0.0)
    explained = 1.0 - details.get("unexplained_gradient", 1.0) if fits else 0.0
    is_recovered = recovery.status is Status.RECOVERED
    return is_recovered, len(recovery.value.certain), explained, len(recovery.value.token_set)
