"""The verdict: a crossed gate before an error, an error before what is not known, and only then a pass."""

from __future__ import annotations

import itertools

import pytest
from tests.audit.made import LOOKED, finding, spec

from unmask.audit.findings.finding import ERROR, Finding, Outcome
from unmask.audit.findings.folder import Audit
from unmask.audit.findings.verdict import CROSSED, FAILED, INCONCLUSIVE, PASSED, Verdict, reach_verdict

GATE = "no exact text"
NOTHING = {"exact_texts": 0, "token_recall": 0.0}
CODES = {"leak": CROSSED, "error": FAILED, "unknown": INCONCLUSIVE, "missing": INCONCLUSIVE, "fine": PASSED}


def made(kind: str, seed: int) -> Finding | None:
    case = spec(seed=seed)
    return {
        "leak": finding("RECOVERED", case=case),
        "error": finding(ERROR, {}, case),
        "unknown": finding("NOT_APPLICABLE", NOTHING, case),
        "missing": None,
        "fine": finding("NOTHING_FOUND", NOTHING, case, **LOOKED),
    }[kind]


def verdict_on(*kinds: str, gates: tuple[str, ...] = (GATE,)) -> Verdict:
    found = [made(kind, seed) for seed, kind in enumerate(kinds)]
    ids = [finding("PARTIAL", case=spec(seed=seed)).id for seed in range(len(kinds))]
    cases = [{"id": id, "gates": list(gates), "line": 1, "case": {}} for id in ids]
    return reach_verdict(Audit({"cases": cases}, tuple(one for one in found if one is not None)))


@pytest.mark.parametrize(
    "kinds",
    [kinds for size in (1, 2, 3) for kinds in itertools.combinations_with_replacement(CODES, size)],
    ids="+".join,
)
def test_the_worst_comes_first(kinds):
    """Order: crossed 1, error 2, not known or not run 3, passed 0."""
    order = (CROSSED, FAILED, INCONCLUSIVE, PASSED)
    expected = min((CODES[kind] for kind in kinds), key=order.index)
    for shuffled in set(itertools.permutations(kinds)):
        assert verdict_on(*shuffled).exit_code == expected


def test_what_a_crossed_gate_says():
    verdict = verdict_on("leak", "fine", "leak")
    assert "'no exact text' by 2 cases" in verdict.headline
    assert "2 of 3 cases leaked" in verdict.headline
    assert [judgement.finding.case["seed"] for judgement in verdict.crossed] == [0, 2]
    assert not verdict.inconclusive


def test_what_is_not_known_is_not_called_safe():
    verdict = verdict_on("unknown")
    assert "Inconclusive" in verdict.headline
    assert "safe" not in verdict.headline
    assert len(verdict.inconclusive) == 1
    assert "1 inconclusive" in verdict.headline
    assert "told" not in verdict.headline
    assert verdict.inconclusive[0].why == "the attack did not apply or did not finish (NOT_APPLICABLE)"


def test_what_is_missing_is_counted():
    verdict = verdict_on("fine", "missing", "missing")
    assert "2 cases not run yet" in verdict.headline
    assert len(verdict.missing) == 2


def test_a_pass_says_what_it_rests_on():
    assert "Only these attacks were tested" in verdict_on("fine").headline


def test_without_gates_a_leak_is_told_and_passes():
    verdict = verdict_on("leak", "fine", gates=())
    assert verdict.exit_code == PASSED
    assert "1 of 2 cases leaked" in verdict.headline
    assert "no gate" in verdict.headline
    assert verdict.outcomes == {Outcome.LEAK: 1, Outcome.NO_LEAK: 1, Outcome.INCONCLUSIVE: 0, Outcome.ERROR: 0}


def test_without_gates_errors_and_holes_still_count():
    assert verdict_on("leak", "error", gates=()).exit_code == FAILED
    assert verdict_on("leak", "missing", gates=()).exit_code == INCONCLUSIVE
    assert verdict_on("unknown", gates=()).exit_code == INCONCLUSIVE
    assert verdict_on("unknown", "fine", gates=()).exit_code == PASSED


def test_nothing_at_all_is_not_a_pass():
    verdict = reach_verdict(Audit({}, ()))
    assert verdict.exit_code == INCONCLUSIVE


def test_findings_that_were_not_planned_have_no_gates():
    """As those of a federation, which has no plan."""
    verdict = reach_verdict(Audit({}, (finding("RECOVERED", {}),)))
    assert verdict.exit_code == PASSED
    assert not verdict.judgements
    assert "1 of 1 case leaked" in verdict.headline


def test_a_gate_of_another_channel_says_nothing():
    verdict = verdict_on("leak", gates=("no weights", GATE))
    assert [str(judgement.gate) for judgement in verdict.judgements] == [GATE]


def test_cases_under_no_gate_are_not_counted_as_judged():
    verdict = verdict_on("fine", gates=(GATE,))
    assert "No gate is crossed in 1 case;" in verdict.headline


@pytest.mark.parametrize("attack", ["dager", "bag-of-words", "decoder:num_probes=64", "from-the-future"])
def test_an_attack_that_the_plan_chose_holds_no_gate(attack):
    """A paper's attack may fail where ours does not; it used to hold gates on local training that ours crosses."""
    ours = finding("NOTHING_FOUND", NOTHING, spec(), **LOOKED)
    papers = finding("NOTHING_FOUND", NOTHING, {**spec(), "attack": attack}, **LOOKED)
    crossing = finding("RECOVERED", case={**spec(), "attack": attack})

    def code(*found: Finding) -> int:
        cases = [{"id": one.id, "gates": [GATE], "line": 1, "case": {}} for one in found]
        return reach_verdict(Audit({"cases": cases}, found)).exit_code

    assert code(papers) == INCONCLUSIVE
    assert code(ours, papers) == code(ours) == PASSED
    assert code(ours, crossing) == code(crossing) == CROSSED
