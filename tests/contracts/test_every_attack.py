"""What every attack keeps to, whatever it does: run for each row of the table in `attacks.py`."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import pkgutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contracts import replay
from tests.contracts.attacks import ROWS, Evidence, Row, tensors_of, with_tensors
from tests.contracts.recipes import stranger
from torch import Tensor

import unmask.attacks
from unmask.models import Model
from unmask.recovery import RecoveredTexts, Recovery, Status

Gradients = dict[str, Tensor]


@pytest.fixture(scope="module", autouse=True)
def as_in_the_other_process(one_thread: None) -> None:
    """Sums in another order have other last digits."""


@dataclass(frozen=True)
class Case:
    """A row with its model, what was seen of it and what the attack made of that."""

    row: Row
    model: Model
    evidence: Evidence
    recovery: Recovery[RecoveredTexts]

    def attack(self, evidence: Evidence) -> Recovery[RecoveredTexts]:
        return self.row.attack(evidence, self.model)

    @property
    def secret(self) -> list[tuple[int, ...]]:
        return self.row.secret(self.model)

    @property
    def secret_tokens(self) -> set[int]:
        return {token for text in self.secret for token in text}


@pytest.fixture(scope="module")
def case_of(request: pytest.FixtureRequest) -> Callable[[Row], Case]:
    """Each row is observed and attacked once."""
    cases: dict[str, Case] = {}

    def make(row: Row) -> Case:
        if row.name not in cases:
            model = request.getfixturevalue(row.recipe)
            evidence = row.observe(model)
            cases[row.name] = Case(row, model, evidence, row.attack(evidence, model))
        return cases[row.name]

    return make


@pytest.fixture(params=ROWS, ids=lambda row: row.name)
def case(request: pytest.FixtureRequest, case_of: Callable[[Row], Case]) -> Case:
    return case_of(request.param)


@pytest.fixture(scope="module")
def replays(case_of: Callable[[Row], Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All rows again, in one fresh process that is given files, recipes and settings."""
    folder = tmp_path_factory.mktemp("replay")
    jobs = {}
    for number, row in enumerate(ROWS):
        try:
            evidence = case_of(row).evidence
        except pytest.skip.Exception:  # weights that are not installed here: the row's own tests say so
            continue
        jobs[row.name] = replay.job_of(row.attack, row.recipe, evidence.save(folder / f"{number}.safetensors"))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, replay.__file__, str(folder / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---- the table


def attack_classes() -> set[type]:
    """Every class of `unmask.attacks` that is called like an attack on texts."""
    modules = pkgutil.walk_packages(unmask.attacks.__path__, "unmask.attacks.")
    members = (vars(importlib.import_module(module.name)).values() for module in modules)
    return {
        member
        for values in members
        for member in values
        if isinstance(member, type) and member.__module__.startswith("unmask.attacks") and gives_a_recovery(member)
    }


def gives_a_recovery(member: type) -> bool:
    """Whether calling an instance returns a recovery of texts, by its annotation."""
    call = vars(member).get("__call__")
    return "Recovery[RecoveredTexts]" in str(getattr(call, "__annotations__", {}).get("return"))


def test_every_attack_is_in_the_table():
    assert attack_classes() == {type(row.attack) for row in ROWS}


def test_names_of_rows_are_unique():
    assert len({row.name for row in ROWS}) == len(ROWS)


# ---- what an attack is


def test_an_attack_is_a_frozen_dataclass(case):
    attack = case.row.attack
    assert dataclasses.is_dataclass(attack)
    name = dataclasses.fields(attack)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(attack, name, getattr(attack, name))


def test_the_repr_prints_the_settings(case):
    attack = case.row.attack
    settings = (f"{field.name}={getattr(attack, field.name)!r}" for field in dataclasses.fields(attack))
    assert all(setting in repr(attack) for setting in settings)


# ---- what it does on good evidence


def test_it_ends_as_the_table_says(case):
    assert case.recovery.status is case.row.status, case.recovery.reason


def test_it_tells_how_it_ended(case):
    assert case.recovery.reason.strip()
    assert case.recovery.certificate.claim.strip()
    assert case.recovery.cost.seconds > 0
    assert case.recovery.cost.candidates > 0


def test_it_names_the_parameters_that_it_used(case):
    used = case.recovery.used
    assert used
    assert len(set(used)) == len(used)
    assert set(used) <= set(tensors_of(case.evidence))
    if case.row.sees_gradients:
        assert set(used) <= {name for name, _ in case.model.named_parameters()}


def test_the_parameters_that_it_used_are_enough(case):
    kept = {name: tensors_of(case.evidence)[name] for name in case.recovery.used}
    again = case.attack(with_tensors(case.evidence, kept))
    assert again.status is case.recovery.status
    assert [text.tokens for text in again.value.texts] == [text.tokens for text in case.recovery.value.texts]
    assert again.value.token_set == case.recovery.value.token_set


def test_it_is_deterministic_under_its_seed(case):
    assert without_seconds(case.attack(case.evidence)) == without_seconds(case.recovery)


def test_evidence_model_and_global_generator_are_left_alone(case):
    def state() -> tuple[str, str, bool, list[int]]:
        parameters = dict(case.model.named_parameters())
        random_state = torch.random.get_rng_state().tolist()
        return digest(tensors_of(case.evidence)), digest(parameters), case.model.hf.training, random_state

    before = state()
    case.attack(case.evidence)
    assert state() == before
    assert all(parameter.grad is None for _, parameter in case.model.named_parameters())


def test_a_fresh_process_with_the_file_alone_recovers_the_same(case, replays):
    assert replays[case.row.name] == replay.document(case.recovery)


# ---- what it may claim


def false_claims(case: Case, recovery: Recovery[RecoveredTexts]) -> list[str]:
    """Everything that a recovery claims and the secret does not hold. The auditor's side: this sees the secret."""
    secret = Counter(case.secret)
    certain = Counter({text.tokens: text.count for text in recovery.value.certain})
    faults = [f"a certain text that is not in the batch: {tokens}" for tokens in certain - secret]
    if recovery.status is Status.RECOVERED and Counter(recovery.value.expand()) != secret:
        faults.append(f"'{recovery.status.value}' with {recovery.value.expand()}")
    if recovery.certificate.holds and not recovery.value.token_set <= case.secret_tokens:
        faults.append(f"{len(recovery.value.token_set - case.secret_tokens)} false tokens, and the certificate holds")
    return faults


def test_a_certificate_that_holds_means_a_perfect_score(case):
    assert not false_claims(case, case.recovery)
    if case.recovery.status is Status.RECOVERED:
        assert case.recovery.certificate.holds


def test_a_certificate_that_holds_has_told_true_from_false(case):
    certificate = case.recovery.certificate
    if certificate.holds and certificate.rejected is not None:
        assert certificate.residual <= certificate.tolerance < certificate.rejected


# ---- negative controls: evidence whose signal was destroyed


def noise_of_the_same_norm(case: Case, generator: torch.Generator) -> Iterable[tuple[str, Tensor]]:
    for name, gradient in tensors_of(case.evidence).items():
        yield name, scaled(torch.randn(gradient.shape, generator=generator), gradient)


def noise_of_the_same_norm_and_a_low_rank(case: Case, generator: torch.Generator) -> Iterable[tuple[str, Tensor]]:
    """Passes every test of the spectrum: a span of few directions, none of which belongs to a token."""
    rank = 12
    for name, gradient in tensors_of(case.evidence).items():
        noise = torch.randn(gradient.shape, generator=generator)
        if gradient.ndim == 2:
            left = torch.randn(gradient.shape[0], rank, generator=generator)
            noise = left @ torch.randn(rank, gradient.shape[1], generator=generator)
        yield name, scaled(noise, gradient)


def shuffled_entries(case: Case, generator: torch.Generator) -> Iterable[tuple[str, Tensor]]:
    for name, gradient in tensors_of(case.evidence).items():
        order = torch.randperm(gradient.numel(), generator=generator)
        yield name, gradient.flatten()[order].reshape(gradient.shape)


def evidence_of_a_stranger(case: Case, generator: torch.Generator) -> Iterable[tuple[str, Tensor]]:
    seed = int(torch.randint(2**31, (), generator=generator))
    yield from tensors_of(case.row.observe(stranger(case.model, seed))).items()


NOISE = (noise_of_the_same_norm, noise_of_the_same_norm_and_a_low_rank)


@pytest.mark.parametrize("destroy", [*NOISE, shuffled_entries, evidence_of_a_stranger], ids=lambda f: f.__name__)
def test_destroyed_evidence_yields_no_text(case, destroy):
    destroyed = dict(destroy(case, torch.Generator().manual_seed(3)))
    recovery = case.attack(with_tensors(case.evidence, destroyed))
    assert recovery.status is not Status.RECOVERED
    assert not recovery.value.certain
    assert not false_claims(case, recovery)
    assert recovery.reason.strip()
    if destroy in NOISE:
        assert not (recovery.status.conclusive and recovery.value.token_set)
        assert not recovery.certificate.holds


# ---- parts


def without_seconds(recovery: Recovery[RecoveredTexts]) -> Recovery[RecoveredTexts]:
    return replace(recovery, cost=replace(recovery.cost, seconds=0.0))


def scaled(noise: Tensor, like: Tensor) -> Tensor:
    return noise * (like.norm() / noise.norm())


def digest(tensors: dict[str, Any]) -> str:
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole.update(name.encode())
        whole.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def test_the_digest_sees_a_single_bit():
    tensor = torch.zeros(3, 4)
    changed = tensor.clone()
    changed[2, 1] = 1e-45
    assert digest({"x": tensor}) != digest({"x": changed})


def test_the_replay_is_told_nothing_of_the_secret(case, tmp_path):
    job = json.dumps(replay.job_of(case.row.attack, case.row.recipe, Path("evidence.safetensors")))
    assert not any(str(text) in job for text in (*case.row.texts, *case.secret))
