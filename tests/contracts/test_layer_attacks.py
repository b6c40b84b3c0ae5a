"""What attacks on one attention layer keep to: the same contracts, for pre-images in the place of texts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask
from unmask.attacks.baselines.attention_newton import PaperNewton
from unmask.attacks.outputs.layer_inputs.attack import AttentionAttack
from unmask.evidence import AttentionEvidence
from unmask.recovery import Recovery, Status

ATTACKS = (AttentionAttack(), PaperNewton())
# A fresh process that is given a file, and prints the pre-image to its last digit.
REPLAY = """
import json, sys, torch
from importlib import import_module
import unmask
torch.set_num_threads(1)
module, name, path = sys.argv[1:]
recovery = getattr(import_module(module), name)()(unmask.load_evidence(path))
print(json.dumps([recovery.status.name, recovery.reason, recovery.value.X.tolist()]))
"""


@pytest.fixture(scope="module", autouse=True)
def as_in_the_other_process(one_thread: None) -> None:
    """Sums in another order have other last digits."""


@pytest.fixture(params=ATTACKS, ids=lambda attack: type(attack).__name__)
def attack(request: pytest.FixtureRequest) -> Any:
    return request.param


def layer(value_width: int = 8, seed: int = 0) -> tuple[AttentionEvidence, torch.Tensor]:
    """A layer whose W is definite, and the input that it had."""
    generator = torch.Generator().manual_seed(seed)
    X, A, V = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in ((4, 8), (8, 8), (8, value_width))
    )
    W = A @ A.T / 8**1.5
    return AttentionEvidence(W=W, V=V, output=(X @ W @ X.T).softmax(1) @ X @ V), X


def summary(recovery: Recovery[Any]) -> tuple[Status, str, list[Any]]:
    return recovery.status, recovery.reason, recovery.value.X.tolist()


def test_it_is_a_frozen_dataclass_whose_repr_prints_the_settings(attack):
    assert dataclasses.is_dataclass(attack)
    assert type(attack).__dataclass_params__.frozen
    assert all(f"{field.name}=" in repr(attack) for field in dataclasses.fields(attack) if field.repr)


def test_it_is_deterministic_and_leaves_the_evidence_alone(attack):
    evidence, _ = layer()
    kept = [tensor.clone() for tensor in (evidence.W, evidence.V, evidence.output)]
    state = torch.random.get_rng_state()
    assert summary(attack(evidence)) == summary(attack(evidence))
    assert all(map(torch.equal, (evidence.W, evidence.V, evidence.output), kept))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_fresh_process_with_the_file_alone_recovers_the_same(attack, tmp_path: Path):
    evidence, _ = layer()
    path = evidence.save(tmp_path / "layer.safetensors")
    command = [sys.executable, "-c", REPLAY, type(attack).__module__, type(attack).__name__, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    status, reason, X = json.loads(done.stdout)
    assert (Status[status], reason, X) == summary(attack(unmask.load_evidence(path)))


@pytest.mark.parametrize("seed", range(6))
def test_a_certificate_that_holds_means_the_right_input(attack, seed):
    evidence, X = layer(seed=seed)
    recovery = attack(evidence)
    assert recovery.cost.seconds > 0
    assert recovery.reason.strip()
    if recovery.status is Status.RECOVERED:
        assert recovery.certificate.holds
        assert float((recovery.value.X - X).norm() / X.norm()) < 1e-8


@pytest.mark.parametrize("seed", range(4))
def test_noise_of_the_same_norm_is_not_recovered(attack, seed):
    """With more outputs than inputs (V is wide) most outputs are no layer's output at all, and noise is none."""
    evidence, _ = layer(value_width=12, seed=seed)
    noise = torch.randn(evidence.output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    recovery = attack(replace(evidence, output=noise * evidence.output.norm() / noise.norm()))
    assert not recovery.status.conclusive
    assert not recovery.certificate.holds
