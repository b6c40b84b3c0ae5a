"""The names of cases: what is particular, and nothing that is usual."""

from __future__ import annotations

from tests.audit.made import spec
from tests.report.findings import flower_finding, query_finding, text_case

from unmask.audit.cases.case import Case
from unmask.audit.cases.case_names import case_name, full_name, model_and_case


def test_a_name_has_what_is_particular_and_not_what_is_usual():
    case = text_case(defences=["clip:norm=1", "int8"], batch_size=1, attack="dager", seed=3)
    assert full_name(case) == (
        "gradients · smollm2-135m · fedsgd · 1 text · clip:norm=1 + int8 · attack dager · notes · seed 3"
    )
    assert case_name(query_finding(1.0).case) == "attention:layer=15 · no defence · seed 0"
    assert case_name(flower_finding().case) == "flower · round 1 · client 7239846 · seed 0"
    assert "defence" not in case_name({**flower_finding().case, "defences": []})  # as findings had it once


def test_a_key_of_a_newer_version_is_named():
    assert "warmth 3" in case_name(text_case(warmth=3))


def test_an_invented_secret_has_no_model():
    assert full_name({"channel": "queries", "model": None, "secret": "random:heads=4"}).startswith("queries · no model")
    assert model_and_case({"channel": "queries", "model": "", "secret": "random:heads=4"}) == "random:heads=4"


def test_a_case_in_one_line():
    assert model_and_case(spec()) == "m · fedsgd · 2 texts · no defence · notes · seed 0"
    assert "attack dager · bfloat16" in model_and_case(spec(dtype="bfloat16", attack="dager"))
    assert "int8 + sign" in str(Case(spec(defences=["int8", "sign"])))
    assert "2 clients" in model_and_case(spec(clients=2))
    live = {"channel": "gradients", "model": "m", "source": "flower", "protocol": "flower", "round": 2, "seed": 0}
    assert model_and_case(live) == "m · flower · round 2 · seed 0"
    service = {"channel": "queries", "model": "", "secret": "random:heads=1,width=4", "defences": [], "seed": 3}
    assert model_and_case(service) == "random:heads=1,width=4 · no defence · seed 3"
    assert "layer 0" in model_and_case({**service, "layer": 0})
