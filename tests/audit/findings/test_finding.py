"""Findings: a round trip through one line, hostile and damaged lines, and what a finding means."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.audit.made import HOSTILE, LOOKED, finding, sealed, spec

from unmask.audit.findings.finding import ERROR, Finding, FindingError, OpenPoint, Outcome, TextPair, digest_of
from unmask.recovery import Status


def full() -> Finding:
    """Every field filled."""
    point = OpenPoint("equal_tokens", HOSTILE, 2, (HOSTILE, "x"))
    pair = TextPair((("the ", "place"), (HOSTILE, "no")), None, True, False, 3, True, (point, OpenPoint("count", "")))
    return finding(
        texts=(pair, TextPair(None, ((HOSTILE, "bag"),))),
        tokens=((HOSTILE, "bag"),),
        certificate={"claim": HOSTILE, "residual": 1e-7, "details": {"gap": 3.0}, "holds": True},
        cost={"candidates": 5, "forward_passes": 0, "queries": 2**70},
        used=("a.weight", HOSTILE),
        model_fingerprint="ab",
        error={"type": "E", "message": HOSTILE, "traceback": "x"},
        run={"seconds": 0.1},
        **LOOKED,
    )


def test_a_finding_is_one_line_of_ascii_and_comes_back():
    line = full().to_json()
    assert line.isascii()
    assert line.isprintable()
    assert len(line.splitlines()) == 1
    assert Finding.from_json(line) == full()


@given(text=st.text(st.characters(), max_size=20), number=st.floats(allow_nan=False, allow_infinity=False))
def test_any_text_and_any_number_come_back(text, number):
    made = finding(texts=(TextPair(((text, "place"),), ((text, "no"),)),), metrics={"rouge2": number}, used=(text,))
    assert Finding.from_json(made.to_json()) == made


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_has_not_are_null(number):
    made = finding(
        metrics={"rouge2": number, "token_recall": number}, certificate={"residual": number, "many": [number]}
    )
    line = made.to_json()
    assert "NaN" not in line
    assert "Infinity" not in line
    back = Finding.from_json(line)
    assert back.metrics == {"rouge2": None, "token_recall": None}
    assert back.certificate == {"residual": None, "many": [None]}
    assert back.outcome is Outcome.NO_LEAK  # and asking for it does not raise
    assert back.to_json() == line


def test_a_newer_schema_is_refused():
    document = json.loads(full().to_json())
    for schema in (3, 0, True, "2", None, 2.0):
        with pytest.raises(FindingError, match=r"schema .*upgrade"):
            Finding.from_json(sealed({**document, "schema": schema}))


def test_a_finding_of_the_first_schema_is_refused_and_says_to_run_again():
    """It had no digest and no control."""
    document = json.loads(full().to_json())
    for name in ("digest", "control", "looked_for"):
        del document[name]
    with pytest.raises(FindingError, match=r"schema 1, of an older unmask.* run the audit again with another --out"):
        Finding.from_json(json.dumps({**document, "schema": 1}))


# ---- edits


def test_the_digest_is_of_everything_but_the_run():
    document = json.loads(full().to_json())
    assert digest_of(document) == document["digest"]
    assert json.loads(replace(full(), run={"seconds": 9.0}).to_json())["digest"] == document["digest"]
    assert Finding.from_json(json.dumps({**document, "run": {}})) == replace(full(), run={})


@pytest.mark.parametrize(
    "change",
    [
        {"metrics": {"exact_texts": 0, "exact_rate": 0.0, "token_recall": 0.0}},
        {"status": "NOTHING_FOUND"},
        {"case": spec(seed=7)},
        {"id": "0" * 16},
        {"model_fingerprint": "cd"},
        {"looked_for": ["texts", "tokens"]},
        {"control": None},
        {"texts": []},
        {"digest": "0" * 64},
        {"digest": None},
        {"metrics": {"exact_texts": float("inf")}},
    ],
    ids=str,
)
def test_an_edited_finding_is_refused(change):
    """As an `exact_texts` that somebody sets to 0, so that a gate is not crossed."""
    document = {**json.loads(full().to_json()), **change}
    with pytest.raises(FindingError, match=r"was changed after it was written: its digest .* run the same audit again"):
        Finding.from_json(json.dumps(document))


def test_a_finding_under_the_id_of_another_case_is_refused():
    document = {**json.loads(full().to_json()), "id": "0" * 16}
    with pytest.raises(FindingError, match="is that of another case"):
        Finding.from_json(sealed(document))


@pytest.mark.parametrize(
    "line",
    ["", "null", "3", '"text"', "[1]", "{}", '{"id": "x"}', "{" * 10, "[" * 100_000, '{"a":' * 100_000, "\x00" * 50],
)
def test_what_is_no_finding_is_refused(line):
    with pytest.raises(FindingError, match="no finding"):
        Finding.from_json(line)


@pytest.mark.parametrize("name", [*json.loads(full().to_json())])
def test_a_finding_without_a_field_is_refused(name):
    document = json.loads(full().to_json())
    del document[name]
    with pytest.raises(FindingError):
        Finding.from_json(json.dumps(document) if name == "digest" else sealed(document))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("status", "GREAT"), ("status", None), ("status", ["x"]), ("texts", [{}]), ("texts", 3), ("tokens", [1])),
        *(("metrics", []), ("metrics", {"rouge2": "0"}), ("chance", {"rouge2": True}), ("cost", None), ("case", "x")),
        *(("id", 5), ("reason", None), ("run", 1), ("used", 1), ("surprise", 1), ("certificate", "holds")),
        *(("looked_for", None), ("control", {}), ("control", 5), ("model_fingerprint", 5)),
        ("control", {"id": "x", "status": "PARTIAL", "reason": "", "metrics": {"rouge2": "0"}}),
    ],
)
def test_a_wrong_field_is_refused(name, value):
    document = {**json.loads(full().to_json()), name: value}
    with pytest.raises(FindingError, match=r"a finding lacks a field or has a wrong one"):
        Finding.from_json(sealed(document))


# ---- what it means


RAN = ("RECOVERED", "PARTIAL", "NOTHING_FOUND")
DID_NOT_RUN = tuple(status.name for status in Status if status.name not in RAN)


def test_every_status_is_one_of_the_two():
    assert set(RAN) | set(DID_NOT_RUN) == set(Status.__members__)
    assert "NOT_APPLICABLE" in DID_NOT_RUN


def test_exact_text_is_a_leak_however_the_attack_ended():
    for status in Status.__members__:
        assert finding(status).outcome is Outcome.LEAK


@pytest.mark.parametrize("status", RAN)
def test_an_attack_that_ran_and_found_nothing_tells_no_leak(status):
    assert finding(status, {"exact_texts": 0, "token_recall": 0.0}).outcome is Outcome.NO_LEAK


@pytest.mark.parametrize("status", DID_NOT_RUN)
def test_an_attack_that_did_not_run_never_tells_no_leak(status):
    for metrics in ({"exact_texts": 0, "token_recall": 0.0}, {"weights_found": 0, "hidden_size_found": 0}, {}):
        assert finding(status, metrics).outcome is Outcome.INCONCLUSIVE


def test_tokens_leak_only_beyond_chance():
    """PARTIAL with all tokens wrong, or as many right as a guess has, is no leak."""
    for recall, outcome in ((0.0, Outcome.NO_LEAK), (0.2, Outcome.NO_LEAK), (0.21, Outcome.LEAK)):
        assert finding("PARTIAL", {"exact_texts": 0, "token_recall": recall}).outcome is outcome
    assert finding("NOTHING_FOUND", {"exact_texts": 0, "token_recall": 0.9}).outcome is Outcome.NO_LEAK


@pytest.mark.parametrize(
    ("recall", "precision", "outcome"),
    [
        (0.1, 0.9, Outcome.LEAK),  # a few words, but surely
        (0.1, 0.15, Outcome.NO_LEAK),
        (0.9, 0.1, Outcome.LEAK),
        (0.0, 1.0, Outcome.NO_LEAK),  # nothing was named, so nothing was false
    ],
)
def test_few_tokens_leak_where_they_are_surer_than_a_guess(recall, precision, outcome):
    metrics = {"exact_texts": 0, "token_recall": recall, "token_precision": precision}
    chance = {"token_recall": 0.2, "token_precision": 0.15}
    assert finding("PARTIAL", metrics, chance=chance).outcome is outcome


@pytest.mark.parametrize("name", ["near_exact_texts", "weights_found", "hidden_size_found"])
def test_weights_and_sizes_are_leaks(name):
    assert finding("PARTIAL", {name: 1}, chance={}).outcome is Outcome.LEAK
    assert finding("PARTIAL", {name: 0}, chance={}).outcome is Outcome.NO_LEAK


def test_without_scores_the_certificate_decides():
    """Of a real client nobody knows the secret; what is certified leaks."""
    assert finding("RECOVERED", {}).outcome is Outcome.LEAK
    assert finding("PARTIAL", {}).outcome is Outcome.LEAK
    assert finding("NOTHING_FOUND", {}).outcome is Outcome.NO_LEAK


def test_an_error_is_an_error_whatever_was_measured():
    assert finding(ERROR).outcome is Outcome.ERROR
    assert "nothing is known" in finding(ERROR).meaning
    assert finding("PARTIAL").meaning == Status.PARTIAL.value


def test_no_outcome_is_called_safe():
    assert not any("safe" in outcome.value for outcome in Outcome)


@pytest.mark.parametrize(
    ("rouge2", "words", "outcome"),
    [(0.5, 0.2, Outcome.LEAK), (0.06, 0.8, Outcome.LEAK), (0.15, 0.3, Outcome.NO_LEAK)],
)
def test_a_good_guess_is_a_leak_though_nothing_certifies_it(rouge2, words, outcome):
    metrics = {"exact_texts": 0, "rouge2": rouge2, "token_recall": words, "token_precision": words}
    chance = {"rouge2": 0.06, "token_recall": 0.18, "token_precision": 0.2}
    assert Finding("0", {}, Status.NOTHING_FOUND.name, "", metrics, chance).outcome is outcome


def test_a_certified_bound_on_the_hidden_size_is_a_leak():
    metrics = {"weights_found": 0, "hidden_size_found": 0, "hidden_size_share": 0.3}
    assert Finding("0", {}, Status.PARTIAL.name, "", metrics, {"hidden_size_share": 0}).outcome is Outcome.LEAK
    assert Finding("0", {}, Status.PARTIAL.name, "", {**metrics, "hidden_size_share": 0}).outcome is Outcome.NO_LEAK
