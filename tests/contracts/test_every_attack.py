"""What every attack of the table keeps to, whatever it does: run for each recipe of `recipes.py`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.attacks.queries.random_heads import added
from tests.audit.made import EVERYTHING, LOOKED, finding
from tests.contracts import replay
from tests.contracts.clock import WorkClock
from tests.contracts.recipes import RECIPES, Logits, Recipe, Texts, Weights, claims_no_part
from tests.contracts.replay import pack_recovery
from tests.contracts.watched import WatchedEvidence, touched
from torch import Tensor

from unmask.attacks.table import ATTACKS
from unmask.audit.findings.gates import Ruling, parse_gate
from unmask.channels import CHANNELS
from unmask.evidence import GradientEvidence
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Aim, Recovery, Status
from unmask.scores.weights import score_heads

ASKING = [recipe for recipe in RECIPES if isinstance(recipe, Weights | Logits)]
HEADS = [recipe for recipe in ASKING if isinstance(recipe, Weights) and isinstance(recipe.layer, HeadWeights)]


@pytest.fixture(scope="module", autouse=True)
def as_in_the_other_process(one_thread: None) -> None:
    """Sums in another order have other last digits."""


@dataclass(frozen=True)
class Case:
    """A recipe with its evidence, what the attack made of it, and the state of the world before and after."""

    recipe: Recipe
    evidence: Any
    recovery: Recovery[Any]
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    path: Path  # where the answers are, if they are answers


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recipe], Case]:
    """Each recipe is observed and attacked once, and nobody watches."""
    folder, cases = tmp_path_factory.mktemp("evidence"), {}

    def make(recipe: Recipe) -> Case:
        if recipe not in cases:
            path = folder / str(len(cases))
            evidence = recipe.observe(path)
            before = state_of_the_world(recipe, evidence)
            recovery = recipe.run(evidence)
            cases[recipe] = Case(recipe, evidence, recovery, before, state_of_the_world(recipe, evidence), path)
        return cases[recipe]

    return make


@pytest.fixture(params=RECIPES, ids=str)
def case(request: pytest.FixtureRequest, case_of: Callable[[Recipe], Case]) -> Case:
    return case_of(request.param)


def state_of_the_world(recipe: Recipe, evidence: Any) -> dict[str, Any]:
    """Everything that an attack must leave as it is."""
    state = {"evidence": digest(recipe.tensors(evidence)), "generator": torch.random.get_rng_state().tolist()}
    if isinstance(recipe, Texts):
        parameters = dict(recipe.model.named_parameters())
        state |= {"model": digest(parameters), "training": recipe.model.hf.training}
        state |= {"gradients": [name for name, parameter in parameters.items() if parameter.grad is not None]}
    return state


def digest(tensors: Mapping[str, Tensor]) -> str:
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


# ---- the recipes, and what an attack is


def test_every_attack_of_the_table_has_a_recipe():
    assert {recipe.name for recipe in RECIPES} == set(ATTACKS)
    assert len({str(recipe) for recipe in RECIPES}) == len(RECIPES)


def test_an_attack_is_a_frozen_dataclass_whose_repr_prints_the_settings():
    for recipe in RECIPES:
        attack = recipe.attack
        assert dataclasses.is_dataclass(attack), recipe
        shown = [each for each in dataclasses.fields(attack) if each.repr]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(attack, shown[0].name, getattr(attack, shown[0].name))
        assert all(f"{each.name}={getattr(attack, each.name)!r}" in repr(attack) for each in shown), recipe


# ---- what it does on good evidence


def test_it_finds_the_secret_and_claims_nothing_else(case):
    recovery = case.recovery
    assert recovery.status is case.recipe.status, recovery.reason
    assert case.recipe.is_found(recovery) == (recovery.status is not Status.NOTHING_FOUND)
    assert not list(case.recipe.faults(recovery))
    if recovery.status is Status.RECOVERED:
        assert recovery.certificate.holds


def test_it_tells_how_it_ended_and_what_it_cost(case):
    recovery = case.recovery
    assert recovery.reason.strip()
    assert recovery.certificate.claim.strip()
    assert recovery.cost.seconds > 0
    if case.recipe in ASKING:
        assert recovery.cost.queries == case.evidence.ledger.num_asked > 0
    if isinstance(case.recipe, Texts):
        assert recovery.cost.candidates > 0


def test_a_certificate_that_holds_has_told_true_from_false(case):
    certificate = case.recovery.certificate
    if certificate.holds and certificate.rejected is not None:
        assert certificate.residual <= certificate.tolerance < certificate.rejected


def test_it_names_what_it_used(case):
    used = case.recovery.used
    assert used
    assert len(set(used)) == len(used)
    assert set(used) <= set(case.recipe.tensors(case.evidence))
    if isinstance(case.evidence, GradientEvidence):
        parameters = {name for name, _ in case.recipe.model.named_parameters()}
        assert set(used) <= parameters | set(case.evidence.adapters)


def test_what_it_used_is_enough(case):
    tensors = case.recipe.tensors(case.evidence)
    kept = {name: tensors[name] for name in case.recovery.used}
    if kept.keys() == tensors.keys():
        return  # it used all that there is
    again = case.recipe.run(case.recipe.with_tensors(case.evidence, kept))
    assert again.status is case.recovery.status
    assert [text.tokens for text in again.value.texts] == [text.tokens for text in case.recovery.value.texts]
    assert again.value.token_set == case.recovery.value.token_set


def test_evidence_model_and_global_generator_are_left_alone(case):
    assert case.after == case.before
    if isinstance(case.recipe, Texts):
        assert not case.after["gradients"]
    if isinstance(case.evidence, WatchedEvidence):
        assert touched(case.evidence.oracle) == []
        assert all(torch.equal(tensor, kept) for tensor, kept in case.evidence.asked)


def test_an_attack_that_falls_silent_is_noticed():
    """The control: the same work, told at its begin alone, or without a number."""

    def faults(tell_of: Callable[[WorkClock, int], None]) -> str:
        with WorkClock(few := 100) as clock:
            for done in range(3 * few):
                tell_of(clock, done)
                torch.ones(1) + 1
        return ", ".join(clock.faults())

    assert not faults(lambda clock, done: clock.hear("reading texts", done, 300))
    assert "after 'reading texts'" in faults(lambda clock, done: done or clock.hear("reading texts", 0, 9))
    assert "is not known" in faults(lambda clock, done: clock.hear("reading texts", 0, 1))
    assert "'reading texts', 2 of 1" in faults(lambda clock, done: clock.hear("reading texts", 2, 1))
    assert "nothing is told" in faults(lambda clock, done: None)


# ---- gates: what counts as looked for

LIMITS: Mapping[str, Mapping[str, Any]] = {  # settings that end a search early, or with which nothing is confirmed
    "decoder": {"min_gap_decades": 30.0},
    "noisy": {"min_gap_decades": 30.0},
    "lora": {"min_gap_decades": 30.0},
    "pairs": {"min_gap_decades": 30.0},
    "bag-of-words": {"min_gap_decades": 30.0},
    "encoder": {"max_anchors": 1, "min_gap_decades": 30.0},
    "dager": {"max_products": 1, "sequence_tolerance": 1e-30},
    "prompt": {"first": 1, "max_candidates": 1},
    "cache": {"first": 1, "max_candidates": 1},
    "encoder-prompt": {"max_texts": 1, "max_settling": 0},
    "first-attention": {"min_gap_decades": 30.0},
    "stack": {"min_gap_decades": 30.0},
    "pooled": {"max_length": 1, "max_length_with_positions": 1, "max_guess": 1},
    "embedding": {"seconds": 0.0, "max_texts": 1},  # a deadline
    "known-texts": {"texts": ((60, 61), (62, 63, 64))},
    "attention": {"num_starts": 1, "max_nodes": 1, "max_steps": 1},
    "attention-stack": {"max_chains": 1, "residual_tolerance": 1e-300},
    "attention-newton": {"max_steps": 1},
    "samples": {"num_starts": 1, "max_heads": 1},
}


def rule_on_nothing(looked_for: Iterable[Aim], aim: Aim) -> Ruling:
    """Of a gate on an aim, where the attack ended as PARTIAL with nothing of it, and the control has everything."""
    gate, metric = {
        Aim.TEXTS: ("no exact text", "exact_texts"),
        Aim.TOKENS: ("token_recall < 0.5", "token_recall"),
        Aim.WEIGHTS: ("no weights", "weights_found"),
        Aim.INPUTS: ("no inputs", "inputs_found"),
    }[aim]
    control = {**LOOKED["control"], "metrics": {**EVERYTHING, "inputs_found": 1}}
    named = tuple(each.value for each in looked_for)
    return parse_gate(gate).judge(finding("PARTIAL", {metric: 0}, looked_for=named, control=control))


def test_a_completed_search_has_looked_and_one_that_ran_out_has_not(case):
    """The status alone takes everything back: a budget, or a deadline, ended the attack."""
    recovery, aims = case.recovery, CHANNELS[ATTACKS[case.recipe.name].channel].aims
    assert recovery.looked_for <= aims
    if recovery.status is Status.RECOVERED:
        assert recovery.looked_for == aims
        assert {rule_on_nothing(recovery.looked_for, aim) for aim in aims} == {Ruling.HELD}
    for status in Status:
        ended = dataclasses.replace(recovery, status=status)
        if not status.ran_to_the_end:
            assert not ended.looked_for
            assert {rule_on_nothing(ended.looked_for, aim) for aim in aims} == {Ruling.INCONCLUSIVE}


TIGHTEST: Mapping[str, Any] = {  # of settings whose tightest value is not 1
    "min_gap_decades": 30.0,
    **dict.fromkeys(("token_tolerance", "sequence_tolerance", "tolerance", "residual_tolerance"), 1e-300),
    "rank_tolerance": 1.0,
    "distinct_fraction": 1e-9,
    "try_every_token": False,
    "max_settling": 0,
    "seconds": 0.0,
    "passes": 2,
    "longest": 8,
    "num_tokens": 32,
    "max_prompts": 64,
    "num_fresh": 8,
}
NO_LIMITS = {  # what is drawn, done at once, or known; what claims name; judgements and factors
    *("seed", "num_probes", "effort", "batch_size", "memory_budget_bytes", "batch_from", "first_prompts"),
    *(
        "prompt_length",
        "rank_margin",
        "start_token",
        "bits",
        "least_power",
        "least_row_power",
        "gamma",
        "kappa",
        "margin",
    ),
}


def limits() -> Iterator[Any]:
    """Limits that are known of an attack, and each number that the table has of it at its tightest."""
    first = {recipe.name: recipe for recipe in reversed(RECIPES)}
    yield from (pytest.param(each, LIMITS[each.name], id=str(each)) for each in RECIPES if each not in ASKING)
    for name, kind in ATTACKS.items():
        for setting in kind.settings:
            is_number = setting.expected.startswith(("a whole number", "a number"))
            tight = {setting.name: TIGHTEST.get(setting.name, 1)}
            if tight != LIMITS.get(name) and (
                setting.name in TIGHTEST or (is_number and setting.name not in NO_LIMITS)
            ):
                yield pytest.param(first[name], tight, id=f"{name}:{setting.name}={tight[setting.name]}")


@pytest.mark.parametrize(("recipe", "limit"), list(limits()))
def test_a_search_that_stopped_early_or_confirmed_nothing_has_not_looked(recipe, limit):
    """The evidence gives the secret away: whoever has not found it has not looked at everything."""
    given = {field.name for field in dataclasses.fields(recipe.attack)}
    recovery = recipe.run(recipe.observe(), **{k: v for k, v in limit.items() if k in given})
    if isinstance(recipe, Texts):
        missed = {Aim.TEXTS} if set(recipe.secret) - set(recovery.value.expand()) else set()
        missed |= {Aim.TOKENS} if recipe.input_tokens - recovery.value.token_set else set()
    else:
        missed = set() if recovery.status.conclusive and recipe.is_found(recovery) else {Aim.INPUTS, Aim.WEIGHTS}
    assert not recovery.looked_for & missed, recovery.reason
    assert {rule_on_nothing(recovery.looked_for, aim) for aim in missed} <= {Ruling.INCONCLUSIVE}


def test_every_attack_without_a_ledger_has_a_limit_here():
    assert set(LIMITS) == {recipe.name for recipe in RECIPES if recipe not in ASKING}


# ---- a fresh process


@pytest.fixture(scope="module")
def replays(case_of: Callable[[Recipe], Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All recipes again, in one fresh process that is given files and settings."""
    folder, jobs = tmp_path_factory.mktemp("replay"), {}
    for number, case in enumerate(map(case_of, RECIPES)):
        path = folder / f"{number}.safetensors"
        if case.recipe in ASKING:
            case.evidence.ledger.close()
            path = case.path
        jobs[str(case.recipe)] = case.recipe.job(case.evidence, path)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, replay.__file__, str(folder / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_fresh_process_with_the_file_alone_recovers_the_same(case, replays):
    assert replays[str(case.recipe)]["recovery"] == pack_recovery(case.recovery)


def test_it_tells_what_it_does_and_how_long_that_takes(case, replays):
    assert not replays[str(case.recipe)]["faults"]


def test_the_fresh_process_is_told_nothing_of_the_secret(case_of, tmp_path):
    """But for lists of expected texts, which are side knowledge: they are the settings of 'known-texts'."""
    told = [recipe for recipe in RECIPES if isinstance(recipe, Texts) and "texts" not in recipe.settings]
    for number, case in enumerate(map(case_of, told)):
        job = json.dumps(case.recipe.job(case.evidence, tmp_path / str(number)))
        assert not any(str(text) in job for text in (*case.recipe.texts, *map(list, case.recipe.secret)))


# ---- negative controls: evidence whose signal was destroyed


def assert_silent(recipe: Recipe, recovery: Recovery[Any], control: str) -> None:
    assert recovery.status is not Status.RECOVERED, (control, recovery.reason)
    assert recovery.status is not Status.BUDGET_EXHAUSTED, control
    assert recipe.is_silent(recovery, control), (control, recovery.reason)
    assert recovery.reason.strip(), control


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_evidence_that_says_nothing_yields_nothing(recipe):
    for control, evidence in recipe.controls():
        recovery = recipe.run(evidence)
        assert_silent(recipe, recovery, control)
        if isinstance(recipe, Texts):
            assert not list(recipe.faults(recovery)), control


# ---- attacks that ask


@pytest.mark.parametrize("recipe", ASKING, ids=str)
def test_another_seed_asks_other_questions(recipe, case_of):
    """Else the seed would be a setting that does nothing. Under it, too, the layer is learned, and noise is not."""
    evidence = recipe.observe()
    assert recipe.run(evidence, seed=1).status is Status.RECOVERED
    assert evidence.first_questions() != case_of(recipe).evidence.first_questions()
    control, destroyed = next(recipe.controls())
    assert_silent(recipe, recipe.run(destroyed, seed=1), control)


@pytest.mark.parametrize("recipe", ASKING, ids=str)
def test_no_more_is_paid_than_allowed(recipe, case_of):
    whole = case_of(recipe)
    needed = len(whole.evidence.ledger)
    for budget in (0, 1, needed // 3, needed - 1):
        evidence = recipe.observe(budget=budget)
        recovery = recipe.run(evidence)
        assert recovery.status is Status.BUDGET_EXHAUSTED, (budget, recovery.reason)
        assert not recovery.looked_for
        assert len(evidence.ledger) <= budget
        # A part may be certain before the budget ends, as W is before the network behind it.
        assert not recovery.certificate.holds or not claims_no_part(recovery.value)
        assert recovery.reason.strip()
        assert not list(recipe.faults(recovery))
    assert pack_recovery(recipe.run(recipe.observe(budget=needed))) == pack_recovery(whole.recovery)


@pytest.mark.parametrize("recipe", HEADS, ids=str)
def test_noise_with_bounded_tokens_is_not_taken_for_weights(recipe):
    """Noise of three tenths of an answer, and tokens too short to drown it: claim what is right, or nothing."""
    noisy = dataclasses.replace(recipe, after=added(0.3 * float(recipe.size.mean())), max_norm=7.0)
    recovery = noisy.run(noisy.observe())
    if recovery.status.conclusive:
        assert score_heads(recovery.value, recipe.layer).W_error < 0.3, recovery.certificate
