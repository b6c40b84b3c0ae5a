from __future__ import annotations

from dataclasses import replace

import pytest
from tests.report.findings import audit_of, failed, flower_finding, inconclusive, query_finding, text_case, text_finding

from unmask.errors import InputError
from unmask.report.comparison import Direction, compare_audits, judge_change

CASE = text_case()
NOISY = text_case(defences=["noise:sigma=1e-3"])
ALL, HALF, NONE = (text_finding(CASE, recall, exact) for recall, exact in ((1.0, 4), (0.5, 0), (0.0, 0)))
OUT_OF_BUDGET = replace(HALF, status="BUDGET_EXHAUSTED")
UNKNOWN = inconclusive(CASE, "BUDGET_EXHAUSTED")
RAISED = failed(CASE)
BY_CHANCE = replace(NONE, metrics={**NONE.metrics, "token_recall": 0.05, "token_precision": 0.04})


@pytest.mark.parametrize(
    ("before", "after", "direction", "part"),
    [
        (HALF, ALL, Direction.WORSE, "Texts recovered exactly: 0 → 4"),
        (NONE, HALF, Direction.WORSE, "before: not leaked by this attack; now it leaks: 50 % of tokens"),
        (UNKNOWN, ALL, Direction.WORSE, "before: inconclusive (BUDGET_EXHAUSTED); now it leaks"),
        (RAISED, ALL, Direction.WORSE, "before: error; now it leaks"),
        (replace(ALL, status="PARTIAL"), ALL, Direction.WORSE, "status: PARTIAL → RECOVERED"),
        (ALL, HALF, Direction.BETTER, "Texts recovered exactly: 4 → 0"),
        (ALL, NONE, Direction.BETTER, "ROUGE-2: 100 % → 0 % and 1 more"),
        (ALL, ALL, Direction.SAME, "as before"),
        (NONE, NONE, Direction.SAME, "before and now"),
        (NONE, BY_CHANCE, Direction.SAME, "before and now"),
        (ALL, RAISED, Direction.OPEN, "before: leaks; now: error, which is no improvement"),
        (ALL, UNKNOWN, Direction.OPEN, "now: inconclusive (BUDGET_EXHAUSTED), which is no improvement"),
        (ALL, OUT_OF_BUDGET, Direction.OPEN, "the attack did not end (BUDGET_EXHAUSTED)"),
        (NONE, UNKNOWN, Direction.OPEN, "before: not leaked by this attack"),
        (UNKNOWN, UNKNOWN, Direction.OPEN, "no improvement"),
        (UNKNOWN, NONE, Direction.OPEN, "no improvement"),
        (RAISED, RAISED, Direction.OPEN, "before: error; now: error"),
        (ALL, replace(HALF, looked_for=("tokens",)), Direction.OPEN, "did not look for texts this time"),
        (ALL, replace(ALL, metrics={}), Direction.OPEN, "no number was measured in both"),
        (query_finding(0.6), query_finding(1.0), Direction.WORSE, "Weights recovered"),
    ],
)
def test_what_became_of_a_case(before, after, direction, part):
    found, why = judge_change(before, after)
    assert found is direction
    assert part in why


def test_an_attack_that_finds_nothing_without_protection_shows_no_improvement():
    before, after = text_finding(NOISY, 0.9), text_finding(NOISY, 0.3)
    assert judge_change(before, after)[0] is Direction.BETTER
    assert after.control is not None
    blind = replace(after, control={**after.control, "metrics": {"token_recall": 0.3, "rouge2": 0.0}})
    assert judge_change(before, blind)[0] is Direction.OPEN
    assert "finds no more without protection" in judge_change(before, blind)[1]


def test_a_number_that_is_higher_outweighs_one_that_is_lower():
    after = replace(HALF, metrics={**HALF.metrics, "exact_texts": 1, "token_recall": 0.4})
    assert judge_change(HALF, after)[0] is Direction.WORSE


def test_shares_within_the_tolerance_are_the_same():
    after = replace(HALF, metrics={**HALF.metrics, "token_recall": 0.503})
    assert judge_change(HALF, after)[0] is Direction.SAME
    assert judge_change(HALF, after, tolerance=0.0)[0] is Direction.WORSE


def test_claims_about_a_live_federation_are_counted():
    few = flower_finding(tokens=flower_finding().tokens[:3])
    assert judge_change(few, flower_finding())[0] is Direction.WORSE
    assert judge_change(flower_finding(), few) == (Direction.BETTER, "Tokens claimed: 11 → 3")


def test_every_case_of_both_audits_is_there_and_regressions_come_first():
    fresh, old, lost = (text_case(batch_size=size) for size in (1, 16, 32))
    before = audit_of([ALL, text_finding(NOISY, 0.3), text_finding(old, 1.0), text_finding(lost, 1.0)])
    after = audit_of([ALL, text_finding(NOISY, 0.9), text_finding(fresh, 1.0, 1)], missing=[lost])
    comparison = compare_audits(before, after)
    assert [change.direction.name for change in comparison.changes] == ["WORSE", "OPEN", "NEW", "GONE", "SAME"]
    assert comparison.exit_code == 1
    assert comparison.headline == "1 case got worse; 1 not compared, 1 new, 1 gone, 1 same."
    assert comparison.of(Direction.OPEN)[0].why == "it was not run in the second audit"


def test_the_exit_code_is_0_only_where_what_was_known_is_known():
    assert compare_audits(audit_of([ALL]), audit_of([HALF])).exit_code == 0
    assert compare_audits(audit_of([ALL]), audit_of([ALL])).headline == "No case got worse; 1 same."
    lost = compare_audits(audit_of([ALL, text_finding(NOISY, 0.3)]), audit_of([ALL, failed(NOISY)]))
    assert lost.exit_code == 3
    assert "1 case cannot be compared any more, so a regression cannot be ruled out" in lost.headline
    assert compare_audits(audit_of([ALL]), audit_of([], missing=[CASE])).exit_code == 3
    never_known = [ALL, inconclusive(NOISY)]
    assert compare_audits(audit_of(never_known), audit_of(never_known)).exit_code == 0
    assert compare_audits(audit_of([UNKNOWN]), audit_of([UNKNOWN])).exit_code == 3


def test_a_model_in_another_folder_is_the_same_case_and_other_texts_are_not():
    before = text_finding(text_case(model="/home/ann/clinic"), 0.5)
    after = text_finding(text_case(model="/builds/17/clinic"), 1.0)
    (change,) = compare_audits(audit_of([before]), audit_of([after])).changes
    assert change.direction is Direction.WORSE
    other = text_finding(text_case(data={"name": "notes", "sha256": "cd" * 32}), 1.0, 4)
    (change,) = compare_audits(audit_of([HALF]), audit_of([other])).changes
    assert (change.direction, change.why) == (Direction.OPEN, "its texts differ from before")


def test_names_that_several_cases_share_match_nothing():
    twice = [text_finding(text_case(model=f"/home/{who}/clinic"), 0.5) for who in ("ann", "bob")]
    one = text_finding(text_case(model="/builds/17/clinic"), 1.0)
    comparison = compare_audits(audit_of([ALL, *twice]), audit_of([ALL, one]))
    assert [change.direction.name for change in comparison.changes] == ["NEW", "GONE", "GONE", "SAME"]


def test_audits_without_a_case_in_common_are_refused():
    with pytest.raises(InputError, match="no case is in both audits: the first has 1, the second 1"):
        compare_audits(audit_of([ALL]), audit_of([query_finding(1.0)]))


def test_it_is_said_what_else_differs():
    before, after = audit_of([ALL]), audit_of([replace(ALL, model_fingerprint="60" * 16)])
    newer = replace(after, manifest={**after.manifest, "unmask": "0.2.0"}, num_damaged=1)
    notes = compare_audits(before, newer).notes
    assert notes[0] == "made by unmask 0.1.0 and 0.2.0: a change may come from the attack"
    assert notes[1] == "the weights of the model differ in 1 case"
    assert notes[2] == "1 line of the second audit's findings could not be read"
    assert compare_audits(before, before).notes == ()
