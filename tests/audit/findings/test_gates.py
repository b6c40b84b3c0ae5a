"""Gates: how they are written, and what they say of a finding."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.audit.made import EVERYTHING, LOOKED, finding

from unmask.audit.findings.finding import ERROR, Finding
from unmask.audit.findings.gates import PHRASES, Ruling, parse_gate
from unmask.errors import InputError
from unmask.recovery import Status

RAN = ("RECOVERED", "PARTIAL", "NOTHING_FOUND")


def judge(text: str, status: str, **metrics: float) -> Ruling:
    """Of an attack that looked for everything, and finds everything where nothing protects."""
    return parse_gate(text).judge(finding(status, metrics, **LOOKED))


@pytest.mark.parametrize(
    "text", [*PHRASES, "No Exact Text", "  no token ", "rouge2<0.1", " rouge2 <= 1e-1", "epsilon < inf", "cosine > -1"]
)
def test_a_gate_comes_back_from_its_text(text):
    gate = parse_gate(text)
    assert parse_gate(str(gate)) == gate
    assert str(gate) == text.strip()


@pytest.mark.parametrize(
    "text",
    [
        *("", "nothing", "exact text", "no exact texts", "rouge2", "rouge2 <", "< 0.1", "rouge9 < 0.1", "rouge2 != 0"),
        *(
            "rouge2 < x",
            "rouge2 < nan",
            "rouge2 < 0.1 and rouge1 < 1",
            "rouge2 < 0.1; rm",
            "rouge2 =< 1",
            "0.1 > rouge2",
        ),
        *("rouge2 << 1", "rouge2 < 1_x", "rouge2 < --1", "no\x1b[2J"),
    ],
)
def test_a_gate_that_is_not_understood_is_refused_with_examples(text):
    with pytest.raises(InputError, match="no exact text") as raised:
        parse_gate(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(
    ("rule", "kept", "broken"),
    [
        ("rouge2 < 0.1", (0.0, 0.099), (0.1, 1.0)),
        ("rouge2 <= 0.1", (0.0, 0.1), (0.11,)),
        ("rouge2 > 0.1", (0.2,), (0.1, 0.0)),
        ("rouge2 >= 0.1", (0.1,), (0.0,)),
        ("rouge2 == 0", (0, 0.0), (1e-9, 1)),
    ],
)
def test_a_rule_is_kept_or_broken(rule, kept, broken):
    assert {judge(rule, "PARTIAL", rouge2=value) for value in kept} == {Ruling.HELD}
    assert {judge(rule, "PARTIAL", rouge2=value) for value in broken} == {Ruling.CROSSED}


@pytest.mark.parametrize("status", Status.__members__)
def test_a_gate_is_held_only_by_an_attack_that_ran_to_its_end(status):
    assert judge("no exact text", status, exact_texts=0) is (Ruling.HELD if status in RAN else Ruling.INCONCLUSIVE)
    assert judge("no exact text", status, exact_texts=1) is Ruling.CROSSED


# ---- looking, and being able to find


def explain(text: str, **changes: Any) -> tuple[Ruling, str]:
    """Of a finding of nothing."""
    nothing = {"exact_texts": 0, "near_exact_texts": 0, "rouge2": 0.0, "token_recall": 0.0, "false_texts": 0}
    fields = {**LOOKED, **changes}
    return parse_gate(text).explain(finding("PARTIAL", nothing, **fields))


@pytest.mark.parametrize("text", ["no exact text", "no near-exact text", "rouge2 < 0.5"])
def test_texts_that_were_not_looked_for_hold_no_gate(text):
    """Bags of words under noise, int8, bf16: the order was never tried."""
    ruling, why = explain(text, looked_for=("tokens",))
    assert ruling is Ruling.INCONCLUSIVE
    assert "stopped early, or could not confirm its result" in why
    assert explain("token_recall < 0.5", looked_for=("tokens",))[0] is Ruling.HELD
    assert explain("token_recall < 0.5", looked_for=())[0] is Ruling.INCONCLUSIVE


def test_who_is_certain_of_what_is_not_there_is_said_to():
    wrong = finding("RECOVERED", {"weights_found": 0, "false_weights": 1}, **{**LOOKED, "looked_for": ()})
    ruling, why = parse_gate("no weights").explain(wrong)
    assert ruling is Ruling.INCONCLUSIVE
    assert "certain of weights that are not there" in why


def test_a_gate_is_held_if_the_control_crosses_it():
    ruling, why = explain("no exact text")
    assert ruling is Ruling.HELD
    assert why == "without protection the same attack has exact_texts = 2"


def test_an_attack_that_finds_nothing_without_protection_holds_nothing():
    blind = {**LOOKED["control"], "status": "PARTIAL", "metrics": {**EVERYTHING, "exact_texts": 0}}
    ruling, why = explain("no exact text", control=blind)
    assert ruling is Ruling.INCONCLUSIVE
    assert "would not have found what the gate forbids" in why
    assert explain("token_recall < 0.5", control=blind)[0] is Ruling.HELD  # tokens it finds


def test_a_control_that_is_right_by_chance_shows_nothing():
    """A mean of states of which nothing is certain: one of its guesses is right, and that held a gate."""
    lucky = {**LOOKED["control"], "status": "NOTHING_FOUND", "metrics": {**EVERYTHING, "token_recall": 0.2}}
    ruling, why = explain("token_recall < 0.1", control=lucky)
    assert ruling is Ruling.INCONCLUSIVE
    assert "ended as NOTHING_FOUND" in why


def test_a_bound_that_the_control_keeps_too_is_not_held():
    """Of two texts nobody finds three."""
    assert explain("exact_texts <= 2")[0] is Ruling.INCONCLUSIVE


def test_a_control_that_raised_shows_nothing():
    raised = {**LOOKED["control"], "status": ERROR, "metrics": {}}
    ruling, why = explain("no exact text", control=raised)
    assert ruling is Ruling.INCONCLUSIVE
    assert "ended as ERROR" in why


def test_nothing_found_where_nothing_protects_is_inconclusive():
    ruling, why = explain("no exact text", control=None)
    assert ruling is Ruling.INCONCLUSIVE
    assert "this case has no protection" in why


def test_gates_that_need_no_control():
    """Mistakes of the attack; what the protocol proves; rules that only a find keeps."""
    assert explain("false_texts == 0", control=None, looked_for=())[0] is Ruling.HELD
    found = finding("RECOVERED", {"exact_rate": 1.0, "cosine": 1.0, "weight_error": 0.5})
    assert parse_gate("exact_rate > 0.5").judge(found) is Ruling.HELD
    assert parse_gate("cosine > 0.5").judge(found) is Ruling.HELD
    assert parse_gate("weight_error < 0.9").judge(found) is Ruling.HELD
    assert parse_gate("weight_error > 0.1").judge(found) is Ruling.INCONCLUSIVE


def test_an_error_crosses_and_holds_nothing():
    for metrics in ({"exact_texts": 0}, {"exact_texts": 9}, {}):
        assert judge("no exact text", ERROR, **metrics) is Ruling.INCONCLUSIVE
    assert judge("epsilon < 8", ERROR) is Ruling.INCONCLUSIVE


@pytest.mark.parametrize("status", Status.__members__)
def test_a_guarantee_holds_whatever_the_attack_did(status):
    assert judge("epsilon <= 8", status, epsilon=7.9) is Ruling.HELD
    assert judge("epsilon <= 8", status, epsilon=8.1) is Ruling.CROSSED
    assert judge("cosine > 0.5", status, cosine=0.9) is Ruling.HELD


def test_no_guarantee_is_no_guarantee():
    assert judge("epsilon < 1000", "NOTHING_FOUND", exact_texts=0) is Ruling.CROSSED
    lost = Finding.from_json(finding("PARTIAL", {"epsilon": math.inf}).to_json())  # null in the file
    assert parse_gate("epsilon < 1000").judge(lost) is Ruling.CROSSED


def test_what_was_not_measured_is_not_held():
    assert judge("rouge2 < 0.1", "PARTIAL", exact_texts=0) is Ruling.INCONCLUSIVE
    measured = finding("PARTIAL", {"rouge2": math.nan})
    for seen in (measured, Finding.from_json(measured.to_json())):
        assert parse_gate("rouge2 < 0.1").judge(seen) is Ruling.INCONCLUSIVE


def test_every_phrase_and_metric_concerns_a_channel():
    for phrase in PHRASES:
        assert any(parse_gate(phrase).concerns(channel) for channel in ("gradients", "outputs", "inputs", "queries"))
    assert not parse_gate("epsilon < 1").concerns("outputs")
    assert not parse_gate("no weights").concerns("gradients")
    assert not parse_gate("no weights").concerns("elsewhere")


@pytest.mark.parametrize(
    "text",
    ["exact_rate <= 1", "rouge2 < 2", "exact_texts >= 0", "rouge2 < inf", "epsilon <= inf", "token_recall > -1"],
)
def test_a_gate_that_cannot_fail_is_refused(text):
    with pytest.raises(InputError, match="every value keeps"):
        parse_gate(text)


@pytest.mark.parametrize("text", ["exact_rate > 1", "rouge2 == 2", "exact_texts < 0", "cosine < -1"])
def test_a_gate_that_nothing_can_keep_is_refused(text):
    with pytest.raises(InputError, match="no value can keep"):
        parse_gate(text)
