"""Decoders whose update has few digits, carries noise, or is the change of weights after several local steps.

    tokens   ← those nearest to block 0's span; if nothing confirms the texts, the bag of words by tests as well
    prefixes ← grown at many layers of the first blocks together                          (`prefix_growth.py`)
    labels   ← what the last block's gradient says of the token behind every prefix          (`noisy_labels.py`)
    repeat     prefixes that no label names are dropped; labels that no prefix continues are tried as prefixes
    texts    ← where prefixes end and how often; the client, run again on them, is the judge

Source: measured for this project. DAGER (arXiv 2405.15586) needs spans without noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from unmask.attacks.claims import guess_texts
from unmask.attacks.gradients.bag_of_words.candidates import BagOfWords, find_exact_tokens, find_noisy_bag
from unmask.attacks.gradients.bag_of_words.claim import claim_bag, token_proof
from unmask.attacks.gradients.bag_of_words.noisy_tokens import is_adamw
from unmask.attacks.gradients.decoder.endings import TextEnding
from unmask.attacks.gradients.noisy.corrections import correct_texts
from unmask.attacks.gradients.noisy.label_rounds import LabelRounds
from unmask.attacks.gradients.noisy.prefix_growth import NoisySite, PrefixGrowth, nearest_tokens, noisy_sites
from unmask.attacks.run import Progress, Run, silent
from unmask.evidence.gradients import GradientEvidence, Task, Update
from unmask.linalg.noise import estimate_noise
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.proof.conclusions import NO_ORDER, Searched, TokenProof, conclude_texts
from unmask.proof.label_flow import label_layer
from unmask.proof.replay import why_not_replayed
from unmask.proof.updates import UpdateProof, is_coarse
from unmask.proof.verdicts import Ground, Verdict
from unmask.recovery import RecoveredText, RecoveredTexts, Recovery

_ROUNDING = 1e-6  # of the largest entry: float32 leaves less in directions without signal
_UNSTABLE = (
    "no replay can confirm an order of them: this local training makes so much of rounding that the same texts in "
    "another order give another update"
)


@dataclass(frozen=True)
class NoisyAttack:
    """Recover a batch from a causal model's update that is not exact.

    `min_gap_decades`: as for exact updates. `memory_budget_bytes`: the size of the largest temporary.
    """

    num_probes: int = 32
    min_gap_decades: float = 1.0
    memory_budget_bytes: int = 2**30
    seed: int = 0

    def __call__(
        self, evidence: GradientEvidence, model: Model, progress: Progress = silent
    ) -> Recovery[RecoveredTexts]:
        """Run the attack; the evidence and the model are left as they are."""
        run = Run(self.seed, progress)
        exact = find_exact_tokens(evidence, model, self.num_probes, self.min_gap_decades, run.generator)
        return self.read_texts(run, evidence, model, exact)

    def read_texts(
        self, run: Run, evidence: GradientEvidence, model: Model, bag: BagOfWords
    ) -> Recovery[RecoveredTexts]:
        """Texts from tokens that block 0 may hold; if nothing confirms them, from the bag of words as well."""
        sites = [] if _why_no_texts(evidence, model) else noisy_sites(evidence, model)
        role = label_layer(evidence, model)
        tokens = nearest_tokens(evidence, model) if sites and role is not None else []
        found = _NOTHING if role is None else self._search(run, evidence, model, sites, role, tokens)
        if not found.is_confirmed:
            run.progress("reading the bag of words", 0, 1)
            if bag.candidates is None:
                bag = find_noisy_bag(evidence, model, bag, run.generator)
            claimed = frozenset() if bag.candidates is None else bag.candidates.searched | bag.candidates.unseen
            if role is not None and not claimed <= set(tokens):
                found = self._search(run, evidence, model, sites, role, sorted(claimed | set(tokens)))
        if not found.is_confirmed:
            stopped = "" if found.verdict is None else found.verdict.stopped
            why = (_UNSTABLE if found.is_unstable else stopped) or why_not_replayed(evidence) or NO_ORDER
            return claim_bag(run, bag, found.guesses(evidence, model), why, stopped=bool(stopped))
        return self._claim(run, evidence, model, bag, found)

    def _search(
        self,
        run: Run,
        evidence: GradientEvidence,
        model: Model,
        sites: Sequence[NoisySite],
        role: Role,
        tokens: Sequence[int],
    ) -> _Found:
        """Texts that are made of some tokens and of what labels add to them, and what a replay says of them."""
        if not sites or not tokens:
            return _NOTHING
        growth = PrefixGrowth(run, model, sites, torch.tensor(tokens, device=model.device))
        if not growth.grow() or not growth.scores:
            return _NOTHING
        rounds = LabelRounds(run, evidence, model, growth, role, self.memory_budget_bytes)
        read = rounds.settle()
        if not read.endings or model.problem_at(max(len(ending.node[1]) for ending in read.endings)):
            return _NOTHING
        run.progress("running the client again", 0, 1)
        proof = UpdateProof(evidence, model)
        endings, is_unstable = correct_texts(proof, read.endings, rounds.correct)
        return _Found(growth, endings, proof.judge_blurred([ending.proposed for ending in endings]), is_unstable)

    def _claim(
        self, run: Run, evidence: GradientEvidence, model: Model, bag: BagOfWords, found: _Found
    ) -> Recovery[RecoveredTexts]:
        assert found.growth is not None  # a replay confirms what was found
        assert found.verdict is not None
        tokens = TokenProof() if bag.candidates is None else token_proof(bag.candidates)
        cost = run.cost(
            candidates=(bag.candidates.num_tested if bag.candidates else 0) + found.growth.forest.num_tested,
            forward_passes=len(found.growth.forest.leaves) + found.verdict.num_passes,
        )
        details = {"rank": float(max(site.span.rank for site in found.growth.sites))}
        recovery = conclude_texts(
            found.verdict, model, Searched(cost, tuple(sorted(evidence.gradients)), tokens, details)
        )
        held = frozenset(token for text in recovery.value.texts if text.certain for token in text.tokens)
        return replace(recovery, value=replace(recovery.value, token_set=held))


@dataclass(frozen=True)
class _Found:
    """Prefixes, the texts that labels make of them, and what the proof says of these."""

    growth: PrefixGrowth | None = None
    endings: Sequence[TextEnding] = ()
    verdict: Verdict | None = None
    is_unstable: bool = False

    @property
    def is_confirmed(self) -> bool:
        return self.verdict is not None and self.verdict.ground is not Ground.NONE

    def guesses(self, evidence: GradientEvidence, model: Model) -> tuple[RecoveredText, ...]:
        """Texts that nothing confirms, the nearest first, and no more than the batch has."""
        if self.growth is None:
            return ()
        scores = {ending.node[1]: self.growth.worst(ending.node[1]) for ending in self.endings}
        return guess_texts(model, sorted(scores.items(), key=lambda scored: scored[1]), evidence.num_texts)


_NOTHING = _Found()


def is_blurred(evidence: GradientEvidence, model: Model) -> bool:
    """Whether few digits were sent, noise was added, or weights moved meanwhile: exact spans may find too little."""
    if evidence.update is Update.DELTA or is_coarse(evidence, model):
        return True
    output = evidence.linear(model, Role.ATTENTION_OUT, 0)
    if output is None or min(output.shape) < 2:
        return False
    return estimate_noise(output).sigma > _ROUNDING * float(output.abs().max())


def _why_no_texts(evidence: GradientEvidence, model: Model) -> str:
    """Why texts are not tried; empty if they are."""
    if model.problem:
        return model.problem
    if evidence.task not in (None, Task.NEXT_TOKEN) or model.token_head is None:
        return "texts are read from noisy updates of clients that predict the next token"
    layers = (model.linear(role, 0) for role in (Role.ATTENTION_OUT, Role.MLP_IN))
    held = [evidence.gradients[layer.parameter] for layer in layers if layer and layer.parameter in evidence.gradients]
    if any(is_adamw(evidence, gradient) for gradient in held):
        return (
            "an adaptive optimiser divides every entry by its own size, so that columns are no combinations of inputs"
        )
    return ""
