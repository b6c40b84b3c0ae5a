from __future__ import annotations

import shlex

from tests.report.findings import HOSTILE, flower_finding, query_finding, text_case

from unmask.report.case_names import case_name, full_name, repeat_command, specification


def test_a_name_has_what_is_particular_and_not_what_is_usual():
    case = text_case(defences=["clip:norm=1", "int8"], batch_size=1, attack="dager", seed=3)
    assert full_name(case) == (
        "gradients · smollm2-135m · fedsgd · 1 text · clip:norm=1 + int8 · attack dager · notes · seed 3"
    )
    assert case_name(query_finding(1.0).case) == "attention:layer=15 · no defence · seed 0"
    assert case_name(flower_finding().case) == "flower · round 1 · client 7239846 · no defence · seed 0"


def test_a_key_of_a_newer_version_is_named():
    assert "warmth 3" in case_name(text_case(warmth=3))


def test_an_invented_secret_has_no_model():
    assert full_name({"channel": "queries", "model": None, "secret": "random:heads=4"}).startswith("queries · no model")


def test_the_specification_has_every_entry():
    case = text_case()
    pairs = dict(specification(case))
    assert set(pairs) == set(case)
    assert pairs["data"] == f"notes (sha256 {'ab' * 32})"
    assert pairs["defences"] == "none"


def test_the_command_is_quoted_for_a_shell():
    command = repeat_command("my plan'; rm -rf.toml", "runs/$(x)", "ab12")
    assert shlex.split(command) == [
        *("unmask", "audit", "my plan'; rm -rf.toml", "--out", "runs/$(x)", "--case", "ab12")
    ]
    assert repeat_command(None, "runs", "ab12") is None


def test_hostile_names_are_harmless():
    for text in HOSTILE:
        case = text_case(model=text, protocol=text, defences=[text], data={"name": text, "sha256": text})
        assert full_name(case).isprintable()
        assert all(value.isprintable() for pair in specification(case) for value in pair)
