"""The hidden size of a language model, and its output layer up to a linear map, from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.output_layer.logit_reading import LogitReader, open_reader, random_prompts
from unmask.attacks.queries.output_layer.logit_spectrum import LogitSpectrum, OutputLayer
from unmask.attacks.run import Progress, Run, silent
from unmask.errors import InputError
from unmask.evidence.ledger import BudgetSpent
from unmask.evidence.logits import LogitEvidence, Prompt
from unmask.recovery import Aim, Certificate, Recovery, Status, searches_of

_GROWTH = 1.25  # of the sample: the cost is quadratic where answers show few tokens, so an overshoot is dear
_HOPELESS = 4  # so many prompts for each direction above the noise, and still no end: more will not show one


@dataclass(frozen=True)
class OutputLayerAttack:
    """Logits of random prompts span a space whose dimension is the hidden size.

        Z = H·Wᵀ  (n × m),   rank Z = min(n, m, d),   Z = U·S·Vᵀ  ⇒  V·S/√n = W·A  for an invertible A

    The sample grows until the singular values end: the rank is the number of values above the edge of what noise
    explains (Marchenko and Pastur), and it is claimed only where the spectrum falls there as it falls nowhere before,
    and fresh prompts agree.

    Notation: H (n, d) the final states of n prompts, W (m, d) the output layer's rows of m tokens, d the hidden size.
    Log-probabilities are logits minus a constant for each prompt; the mean over tokens is taken away from each row,
    which removes it and leaves the rank (unless all-ones is in W's column space, which more than d tokens exclude).
    Final norms: RMSNorm leaves d. LayerNorm takes a direction away and its bias adds an offset: rank d, and d − 1 about
    the mean; without a bias the rank is d − 1. A bias on the logits adds 1 where there was no offset.
    Limits: m, n > d. Noise or rounding above the weakest direction leaves 'at least'. The hidden size is that of the
    output layer: an output layer of lower rank shows its rank.
    Cost: n = 1.05 to 1.6·d prompts, as the growth by quarters and the noise will have it, and 48 fresh ones; an answer
    for each where all logits are shown, ⌈m/(k − 1)⌉ for m ≈ n tokens where k biased tokens are; singular values of an
    (n × m) matrix for each growth. d = 576: 653 answers with all logits, 32,286 with 20 log-probabilities.
    Source: Carlini et al., arXiv 2403.06634, §4 (rank, SVD, gauge); Finlayson et al., arXiv 2403.09539. The rank by the
    edge of noise, with a certificate on fresh prompts, is ours.
    """

    num_tokens: int = 4096
    max_prompts: int = 16384
    first_prompts: int = 64
    num_fresh: int = 48
    prompt_length: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_tokens", 32), ("first_prompts", 32), ("num_fresh", 8), ("prompt_length", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be {least} or more, got {getattr(self, name)}")
        if self.max_prompts < self.first_prompts:
            raise InputError(
                f"max_prompts must be first_prompts ({self.first_prompts}) or more, got {self.max_prompts}"
            )

    def __call__(self, evidence: LogitEvidence, progress: Progress = silent) -> Recovery[OutputLayer]:
        """Grow, decompose, certify."""
        run, asked_before = Run(self.seed, progress), evidence.ledger.num_asked
        found = _Found()
        try:
            ending, over = self._grow(run, evidence, found), ""
        except BudgetSpent as spent:
            ending, over = Status.BUDGET_EXHAUSTED, f"when the budget ended: {spent}."
        layer = found.spectrum.layer(ending is Status.RECOVERED) if found.spectrum else OutputLayer.unknown()
        reason = f"{_so_far(layer)} {over}" if over else _reason(ending, found.spectrum, layer, evidence)
        proof = found.certificate if ending is Status.RECOVERED else None
        if proof is None and layer.at_least and found.spectrum:
            proof = found.spectrum.bound()
        cost = run.cost(queries=evidence.ledger.num_asked - asked_before)
        searches = searches_of(Aim.WEIGHTS, stopped=ending is not Status.RECOVERED)
        return Recovery(layer, ending, reason, proof or Certificate.none(reason), cost, ("logits",), searches)

    def _grow(self, run: Run, evidence: LogitEvidence, found: _Found) -> Status:
        """Ask for more until the spectrum ends or cannot; what is known is in `found` at any time."""
        if evidence.oracle.view.closed:
            return Status.NOT_APPLICABLE
        tokens = torch.randperm(evidence.oracle.vocab_size, generator=run.generator)[: self.num_tokens].tolist()
        prompts = random_prompts(evidence, self.num_fresh + self.max_prompts, self.prompt_length, run.generator)
        fresh, prompts = prompts[: self.num_fresh], prompts[self.num_fresh :]
        opened = open_reader(evidence, fresh, tokens)
        if opened is None:
            return Status.NOT_APPLICABLE
        sample, size = _Sample(*opened, prompts), self.first_prompts
        while True:
            found.spectrum = sample.grow(size).spectrum()
            run.progress("prompts asked", len(sample.matrix), len(prompts))
            found.certificate = found.spectrum.certify(sample.fresh(fresh)) if found.spectrum.ends else None
            ending = _ending(found, sample)
            if ending is not None:
                return ending
            size = math.ceil(size * _GROWTH)


class _Found:
    """What is known so far."""

    spectrum: LogitSpectrum | None = None
    certificate: Certificate | None = None


class _Sample:
    """Logits of a growing number of prompts and tokens; every block is asked for once."""

    def __init__(self, reader: LogitReader, tokens: list[int], prompts: list[Prompt]) -> None:
        self.reader, self.tokens, self.prompts = reader, tokens, prompts
        self.matrix = torch.zeros(0, 0, dtype=torch.float64, device=reader.evidence.device)

    @property
    def columns(self) -> list[int]:
        """The tokens that were read."""
        return self.tokens[: self.matrix.shape[1]]

    @property
    def is_exhausted(self) -> bool:
        """Whether there is nothing to grow into."""
        return len(self.matrix) >= len(self.prompts) or len(self.matrix) > len(self.tokens)

    def grow(self, size: int) -> _Sample:
        """At least `size` prompts, and as many tokens; all tokens where one answer shows them anyway."""
        step = self.reader.tokens_an_answer
        width = min(math.ceil(size / step) * step, len(self.tokens))
        rows, columns = self.matrix.shape
        right = self.reader(self.prompts[:rows], self.tokens[columns:width])
        below = self.reader(self.prompts[rows:size], self.tokens[:width])
        self.matrix = torch.cat([torch.cat([self.matrix, right], dim=1), below]) if rows else below
        return self

    def spectrum(self) -> LogitSpectrum:
        """Of the logits without the constant of each prompt; tokens that once were hidden are left out."""
        shown = ~self.matrix.isnan().any(0)
        return LogitSpectrum(
            self.reader.even_noise(self.matrix)[:, shown],
            self.matrix[:, shown],
            torch.tensor(self.columns)[shown.cpu()],
        )

    def fresh(self, prompts: list[Prompt]) -> Float[Tensor, "f m"]:
        """Logits of other prompts, on the same tokens, treated alike."""
        shown = ~self.matrix.isnan().any(0)
        rows = self.reader(prompts, self.columns)
        rows[:, ~shown] = math.nan
        return self.reader.even_noise(rows[~rows[:, shown].isnan().any(1)])[:, shown]


def _ending(found: _Found, sample: _Sample) -> Status | None:
    """How the attack ends here; None: the sample must grow."""
    spectrum, certificate = found.spectrum, found.certificate
    assert spectrum is not None
    if certificate is not None and certificate.holds and (certificate.rejected or 0.0) > certificate.tolerance:
        return Status.RECOVERED
    if sample.is_exhausted or len(sample.matrix) >= _hopeless_size(spectrum):
        # Chance lifts no value above the edge, so the directions that were counted are there.
        return Status.PARTIAL if spectrum.rank else Status.NOTHING_FOUND
    return None


def _hopeless_size(spectrum: LogitSpectrum) -> int:
    return _HOPELESS * (spectrum.rank + 64)


def _reason(ending: Status, spectrum: LogitSpectrum | None, layer: OutputLayer, evidence: LogitEvidence) -> str:
    if ending is Status.NOT_APPLICABLE:
        view = evidence.oracle.view
        return view.closed or (
            f"{evidence.oracle.name} shows {view.num_tokens} of the likeliest tokens an answer, and a logit bias of "
            f"{view.max_bias:g} does not make two chosen ones appear among them; their logits cannot be read."
        )
    assert spectrum is not None
    n, m = spectrum.matrix.shape
    if ending is Status.RECOVERED:
        return (
            f"Logits of {n:,} prompts on {m:,} tokens have rank {spectrum.rank}: {layer.describe()}. The "
            f"spectrum falls by {spectrum.fall:.1f} decades there, to a noise of {spectrum.sigma:.1e} a logit."
        )
    if ending is Status.NOTHING_FOUND:
        return f"Logits of {n:,} prompts on {m:,} tokens look like noise: no direction stands out."
    why = (
        "more prompts or tokens (max_prompts, num_tokens) may show its end"
        if n < _hopeless_size(spectrum)
        else f"a noise of {spectrum.sigma:.1e} a logit hides the weaker directions"
    )
    return f"{_so_far(layer)} after {n:,} prompts on {m:,} tokens, without an end of the spectrum; {why}."


def _so_far(layer: OutputLayer) -> str:
    return f"The hidden size is at least {layer.at_least}"
