"""DAGER tuned: the settings that are run, and which run counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from baselines.dager_sweep import DagerSweep, authors_settings, certificate_merit
from transformers import GPT2Config, GPT2Model

from unmask.attacks.baselines.dager import Dager
from unmask.evidence.gradients import GradientEvidence
from unmask.models import Model, adapt
from unmask.protocols import observe_gradients
from unmask.recovery import Status


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    sizes = {"n_embd": 96, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 500, "initializer_range": 0.1}
    return adapt(GPT2Model(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval())


def batch(num_texts: int, length: int) -> list[list[int]]:
    words = torch.randperm(490, generator=torch.Generator().manual_seed(0))[: num_texts * length] + 10
    return words.reshape(num_texts, length).tolist()


def observe(model: Model, texts: list[list[int]]) -> GradientEvidence:
    return observe_gradients(model, texts, task="classification")


def noisy(evidence: GradientEvidence, sigma: float) -> GradientEvidence:
    generator = torch.Generator().manual_seed(1)
    noise = {name: torch.randn(g.shape, generator=generator) * sigma for name, g in evidence.gradients.items()}
    return replace(evidence, gradients={name: g + noise[name] for name, g in evidence.gradients.items()})


def test_a_rank_that_the_papers_cut_spoils_is_recovered_by_another_margin(model):
    texts = batch(9, 9)  # rank 81 of 96
    evidence = observe(model, texts)
    assert Dager()(evidence, model).status is Status.NOTHING_FOUND
    tuned = DagerSweep()(evidence, model)
    assert tuned.status is Status.RECOVERED, tuned.reason
    assert {text.tokens for text in tuned.value.certain} == set(map(tuple, texts))


def test_the_authors_rank_tolerance_falls_with_the_batch():
    tolerances = [authors_settings(count)["rank_tolerance"] for count in (1, 2, 4, 16, 32, 128)]
    assert tolerances == [1e-7, 1e-7, 1e-8, 1e-8, 1e-9, 1e-9]
    assert Dager(**authors_settings(1, long_texts=True)) == Dager(rank_tolerance=1e-9, token_tolerance=1e-4)


@pytest.mark.slow
def test_tuned_tolerances_read_through_noise_that_its_authors_do_not(model):
    texts = batch(2, 6)
    evidence = noisy(observe(model, texts), 1e-6)
    words = {token for text in texts for token in text}
    assert len(Dager(**authors_settings(2))(evidence, model).value.token_set & words) < len(words) / 2
    sweep = DagerSweep(token_tolerances=(1e-5, 1e-3, 1e-2), sequence_tolerances=(1e-3, 1e-1))
    best = max((run for _, run in sweep.runs(evidence, model)), key=lambda run: len(run.value.token_set & words))
    assert best.value.token_set >= words


def test_equal_spans_are_run_once_and_empty_ones_not_at_all(model):
    evidence = observe(model, batch(2, 6))  # rank 12, far from the width and far from rounding
    attacks = DagerSweep(rank_tolerances=(None, 1e-7, 1e-6, 1e6)).settings(evidence, model)
    assert len(attacks) == 1
    assert attacks[0] == Dager(rank_margin=20)
    every = DagerSweep(rank_tolerances=(None,), token_tolerances=(1e-5, 1e-4), sequence_tolerances=(1e-3, 1e-2))
    assert len(every.settings(evidence, model)) == 4
    assert len(DagerSweep(rank_tolerances=(1e6,)).settings(evidence, model)) == 1


def test_missing_evidence_is_told_as_by_a_single_run(model):
    evidence = observe(model, batch(1, 6)).only("wte")
    assert DagerSweep()(evidence, model).status is Status.MISSING_EVIDENCE


def test_too_many_texts_are_no_merit(model):
    """A run that lets everything pass explains the whole gradient; it must not look better than an honest one."""
    texts = batch(2, 5)
    evidence = observe(model, texts)
    honest = Dager()(evidence, model)
    loose = Dager(sequence_tolerance=0.99)(evidence, model)
    assert len(loose.value.texts) > len(texts)
    assert certificate_merit(honest) > certificate_merit(loose)


def test_it_is_deterministic(model):
    evidence = noisy(observe(model, batch(2, 6)), 1e-7)
    first, second = (DagerSweep(token_tolerances=(1e-3,))(evidence, model) for _ in range(2))
    assert first.value == second.value
    assert first.certificate == second.certificate


def test_noise_of_the_same_norm_is_never_recovered(model):
    evidence = observe(model, batch(2, 6))
    generator = torch.Generator().manual_seed(5)
    noise = {name: torch.randn(g.shape, generator=generator) for name, g in evidence.gradients.items()}
    control = {name: noise[name] * (g.norm() / noise[name].norm()) for name, g in evidence.gradients.items()}
    recovery = DagerSweep()(replace(evidence, gradients=control), model)
    assert recovery.status is not Status.RECOVERED
    assert not recovery.value.certain
