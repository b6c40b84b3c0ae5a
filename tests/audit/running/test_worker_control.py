"""The positive control: what protects a case is taken away, nothing else; it runs once for all cases that share it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.audit.made import finding, make_plan, spec

from unmask.audit.cases.case import Case
from unmask.audit.channels.gradients import GRADIENTS
from unmask.audit.findings.finding import ERROR, Finding
from unmask.audit.findings.gates import Ruling, parse_gate
from unmask.audit.running import worker as module
from unmask.audit.running.worker import Controls, Worker, control_case


@pytest.fixture(scope="module", autouse=True)
def small_layers(one_thread: None) -> None:
    """Threads on busy cores wait for each other, and sums in another order have other last digits."""


@pytest.mark.parametrize(
    "protection",
    [
        {"defences": ["int8"]},
        {"protocol": "fedavg:local_steps=4"},
        {"protocol": "dpsgd:noise_multiplier=1"},
        {"clients": 2},
        {"dtype": "bfloat16"},
        {"defences": ["int8"], "protocol": "fedavg:local_steps=4", "clients": 2, "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_everything_that_protects_is_taken_away_and_nothing_else(protection):
    others = {"task": "classification", "attack": "dager", "batch_size": 7, "seed": 3}
    assert control_case(Case(spec(**others, **protection))) == Case(spec(**others))


@pytest.mark.parametrize("changes", [{}, {"dtype": "float64"}, {"batch_size": 64}, {"attack": "dager"}], ids=str)
def test_where_nothing_protects_there_is_no_control(changes):
    assert control_case(Case(spec(**changes))) is None


def test_services_and_states_have_controls_too():
    service = {"channel": "queries", "model": "", "secret": "random:heads=1,width=4", "seed": 0}
    assert control_case(Case({**service, "defences": ["sign"]})) == Case({**service, "defences": []})
    states = {"channel": "outputs", "model": "m", "site": "mean", "layer": 2, "seed": 0}
    assert control_case(Case({**states, "defences": ["int8"]})) == Case({**states, "defences": []})
    assert control_case(Case({**states, "defences": []})) is None  # another site would be another attack


def test_a_control_runs_once_for_all_its_cases():
    ran = []

    def run(case: Case) -> Finding:
        ran.append(case.id)
        return finding(case=case.spec)

    controls, plain = Controls(run), Case(spec())
    seen = [controls.of(Case(spec(defences=[text]))) for text in ("int8", "bf16", "sign")]
    assert ran == [plain.id]
    assert seen[0] == seen[1] == seen[2]
    assert seen[0] is not None
    assert seen[0]["id"] == plain.id
    assert controls.of(plain) is None


def test_an_unprotected_case_of_the_plan_is_the_control():
    controls = Controls(lambda case: pytest.fail("it ran before"))
    controls.keep(finding(case=spec()))
    known = controls.of(Case(spec(defences=["int8"])))
    assert known is not None
    assert set(known) == {"id", "case", "status", "reason", "metrics"}  # no text


# ---- beside the finding


def work(plan_folder: Path, model: Path, rest: str, channel: str = "gradients") -> list[Finding]:
    group = f'[[{channel}]]\nmodels = ["{model}"]\ndata = ["notes"]\nbatch_sizes = [2]\n{rest}\n'
    plan = make_plan(plan_folder, group)
    worker = Worker(plan.data, "cpu", 1)
    return [worker.work(case) for case in plan.cases]


def test_noise_holds_no_gate_over_texts_that_were_not_found(tmp_path, bert_folder):
    """Where noise hides the order of tokens, nothing follows about texts, so 'no exact text' is not held."""
    plain, noisy = work(tmp_path, bert_folder, 'defences = ["none", "noise:sigma=2,relative=true"]')
    assert plain.control is None
    assert noisy.control is not None
    assert noisy.control["id"] == plain.id
    assert noisy.control["metrics"] == plain.metrics
    assert noisy.looked_for == ("tokens",)
    assert noisy.metrics["exact_texts"] == 0
    assert noisy.ran_to_the_end
    crossed = noisy.metrics["rouge2"] >= 0.1  # guesses of a few tokens may be near by chance, and then they count
    for text in ("no exact text", "no near-exact text", "rouge2 < 0.1"):
        is_crossed = crossed and "rouge2" in text
        assert parse_gate(text).judge(noisy) is (Ruling.CROSSED if is_crossed else Ruling.INCONCLUSIVE)
        assert parse_gate(text).judge(plain) is Ruling.CROSSED
    assert parse_gate("token_recall < 0.99").judge(noisy) is not Ruling.INCONCLUSIVE
    assert Finding.from_json(noisy.to_json()) == noisy


def test_a_gate_over_states_is_held_where_nothing_is_nearer_than_chance(tmp_path, llama_folder):
    """The control is not in the plan, and runs all the same."""
    rest = 'layers = [1]\ndefences = ["noise:sigma=1e3,relative=true"]'
    (noisy,) = work(tmp_path, llama_folder, rest, "outputs")
    assert noisy.control is not None
    assert noisy.control["metrics"]["exact_texts"] == 2
    ruling, why = parse_gate("no near-exact text").explain(noisy)
    assert ruling is Ruling.HELD
    assert "near_exact_texts = 2" in why


@pytest.mark.parametrize("defences", ['["topk:share=0.9"]', '["int8", "noise:sigma=1e-6"]', '["clip:norm=1", "fp8"]'])
@pytest.mark.parametrize("channel", ["outputs", pytest.param("caches", marks=pytest.mark.slow)])
def test_a_gate_over_states_is_not_held_where_the_nearest_tokens_are_the_text(
    tmp_path, llama_folder, channel, defences
):
    """Reading stops where nothing agrees, or all of it is multiplied by one number; directions tell the tokens."""
    (found,) = work(tmp_path, llama_folder, f"layers = [1]\ndefences = [{defences}]", channel)
    assert found.metrics["exact_texts"] == 2, found.reason
    assert found.metrics["false_texts"] == 0
    assert parse_gate("no exact text").judge(found) is Ruling.CROSSED


def test_a_control_that_raises_is_told_and_does_not_spoil_the_finding(monkeypatch):
    def story(case: Case, context: object) -> Finding:
        if not case["defences"]:
            raise ValueError("Maria Keller")
        return finding("NOTHING_FOUND", {"exact_texts": 0}, case.spec, looked_for=("texts", "tokens"))

    monkeypatch.setattr(module, "CHANNEL_AUDITS", {"gradients": replace(GRADIENTS, run=story)})
    found = Worker({}, "cpu", 1).work(Case(spec(defences=["int8"])))
    assert found.status == "NOTHING_FOUND"
    assert found.control is not None
    assert found.control["status"] == ERROR
    assert "Maria" not in str(found.control)
    assert parse_gate("no exact text").judge(found) is Ruling.INCONCLUSIVE


def test_a_case_that_raised_needs_no_control(monkeypatch):
    ran = []

    def story(case: Case, context: object) -> Finding:
        ran.append(case.id)
        raise ValueError("bad")

    monkeypatch.setattr(module, "CHANNEL_AUDITS", {"gradients": replace(GRADIENTS, run=story)})
    case = Case(spec(defences=["int8"]))
    found = Worker({}, "cpu", 1).work(case)
    assert (found.status, found.control) == (ERROR, None)
    assert ran == [case.id]
