"""The worst leak of each channel and model; recommended is only what stopped it wherever it was tried."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.report.findings import failed, flower_finding, inconclusive, text_case, text_finding, verdict_of

from unmask.audit.findings.finding import Outcome
from unmask.report.counterparts import Counterparts, Effect
from unmask.report.severity import Severity
from unmask.report.worst_leaks import worst_leaks

LEAK = text_finding(text_case(), 1.0, 4)
NOISE, INT8 = ["noise:sigma=0.1"], ["int8"]


def protected(defences, recall, exact=0, cosine=0.9, **changes):
    found = text_finding(text_case(defences=defences, **changes), recall, exact)
    return replace(found, metrics={**found.metrics, "cosine": cosine})


def test_channels_and_models_have_a_line_each_the_worst_first():
    other = text_finding(text_case("outputs", model="b"), 0.3)
    nothing = text_finding(text_case(model="c"), 0.0)
    lines = worst_leaks(verdict_of([nothing, other, LEAK, text_finding(text_case(seed=1), 0.4)]))
    assert [(line.channel, line.model) for line in lines] == [
        ("gradients", "smollm2-135m"),
        ("outputs", "b"),
        ("gradients", "c"),
    ]
    assert [line.place for line in lines] == [2, 1, 0]
    assert lines[0].id == LEAK.id
    assert lines[2].severity is Severity.NONE
    assert lines[2].advice == "–"


def test_what_stopped_it_is_recommended_with_its_cost():
    (line,) = worst_leaks(verdict_of([LEAK, protected(NOISE, 0.0, cosine=0.25), protected(INT8, 0.9, 3)]))
    assert line.advice == "noise:sigma=0.1: not leaked by this attack in 1 of 1 case that leaks"
    kept = "6 % of what is sent is the update, the rest is distortion"
    assert line.cost == f"cosine 0.25 with the true update: {kept}; see docs/defences.md"


def test_of_two_that_stopped_it_the_cheaper_one():
    clip = ["clip:norm=1"]
    (line,) = worst_leaks(verdict_of([LEAK, protected(NOISE, 0.0, cosine=0.2), protected(clip, 0.0, cosine=0.8)]))
    assert line.advice.startswith("clip:norm=1")


def test_of_two_that_stopped_it_the_one_that_was_tried_more_often():
    second = text_finding(text_case(seed=1), 1.0, 4)
    clip = ["clip:norm=1"]
    tried = [protected(NOISE, 0.0, cosine=0.1, seed=seed) for seed in (0, 1)]
    (line,) = worst_leaks(verdict_of([LEAK, second, *tried, protected(clip, 0.0, cosine=0.9)]))
    assert line.advice.startswith("noise:sigma=0.1: not leaked by this attack in 2 of 2 cases")


def test_one_seed_that_leaks_or_cannot_tell_is_enough_not_to_recommend():
    second = text_finding(text_case(seed=1), 1.0, 4)
    for other in (
        protected(NOISE, 0.4, seed=1),
        inconclusive(text_case(defences=NOISE, seed=1)),
        failed(text_case(defences=NOISE, seed=1)),
    ):
        (line,) = worst_leaks(verdict_of([LEAK, second, protected(NOISE, 0.0), other]))
        assert line.advice.startswith("no protection was shown to stop the leak (1 tried")


def test_what_crosses_a_gate_is_never_recommended():
    """By chance a token was right in one of two cases, where the attack claims nothing."""
    second = text_finding(text_case(seed=1), 1.0, 4)
    clear, crossing = protected(NOISE, 0.0), protected(NOISE, 0.0, seed=1)
    crossing = replace(crossing, metrics={**crossing.metrics, "token_recall": 0.05})
    assert crossing.outcome is clear.outcome is Outcome.NO_LEAK
    findings = [LEAK, second, clear, crossing]
    assert worst_leaks(verdict_of(findings))[0].advice.startswith("noise:sigma=0.1: not leaked")
    verdict = verdict_of(findings, ["no token"])
    (line,) = worst_leaks(verdict)
    assert line.advice == "no protection was shown to stop the leak (1 tried); noise:sigma=0.1 crosses 'no token'"
    assert [each.effect for each in Counterparts(verdict).of(second)] == [Effect.SOMETIMES]
    (line,) = worst_leaks(verdict_of([*findings, protected(INT8, 0.0)], ["no token"]))
    assert line.advice == "int8: not leaked by this attack in 1 of 2 cases that leak"


@pytest.mark.parametrize(
    ("unclear", "gates"),
    [({"looked_for": ()}, []), ({"looked_for": ()}, ["no token"]), ({"looked_for": ("tokens",)}, ["no exact text"])],
    ids=["did not look", "did not look, under a gate", "a gate is inconclusive"],
)
def test_what_was_not_looked_for_is_neither_recommended_nor_stopped(unclear, gates):
    """Heads behind noise: the attack ends with nothing and has looked for nothing, so every gate is inconclusive."""
    open_case = replace(protected(NOISE, 0.0), **unclear)
    assert open_case.outcome is Outcome.NO_LEAK
    verdict = verdict_of([LEAK, open_case], gates)
    (line,) = worst_leaks(verdict)
    told = "no protection was shown to stop the leak (1 tried, 1 inconclusive); how much still leaks is not known"
    assert line.advice == told
    assert [each.effect for each in Counterparts(verdict).of(LEAK)] == [Effect.UNCLEAR]
    (line,) = worst_leaks(verdict_of([LEAK, open_case, protected(INT8, 0.9, 3)], gates))
    assert "(2 tried, 1 inconclusive); least leaked with int8: high" in line.advice
    (line,) = worst_leaks(verdict_of([LEAK, open_case, protected(INT8, 0.0)], gates))
    assert line.advice.startswith("int8: not leaked by this attack in 1 of 1 case")


def test_what_leaves_the_least_is_named_where_nothing_stops_it():
    (line,) = worst_leaks(verdict_of([LEAK, protected(INT8, 0.9, 3), protected(NOISE, 0.2, cosine=0.5)]))
    assert line.advice.startswith(
        "no protection was shown to stop the leak (2 tried); least leaked with noise:sigma=0.1: low, 20 %"
    )
    assert line.cost.startswith("cosine 0.50")


def test_what_is_inconclusive_never_leaves_the_least():
    (line,) = worst_leaks(verdict_of([LEAK, inconclusive(text_case(defences=NOISE)), protected(INT8, 0.9, 3)]))
    assert line.advice.startswith(
        "no protection was shown to stop the leak (2 tried, 1 inconclusive); least leaked with"
    )
    assert "int8: high" in line.advice
    (line,) = worst_leaks(verdict_of([LEAK, inconclusive(text_case(defences=NOISE))]))
    told = "no protection was shown to stop the leak (1 tried, 1 inconclusive); how much still leaks is not known"
    assert line.advice == told


def test_what_leaves_as_much_is_not_recommended():
    """Nor is it if it is the best of several."""
    (line,) = worst_leaks(verdict_of([LEAK, protected(INT8, 1.0, 4), protected(NOISE, 1.0, 4)]))
    assert line.advice.endswith("(2 tried); with each of them as much leaked as without")
    assert line.cost == "–"


def test_what_leaves_as_much_up_to_the_digits_that_are_shown_is_not_recommended():
    """Heads behind two decimals are known to 1e-12: less by so little is no less."""
    almost = text_finding(text_case(defences=INT8), 1 - 1e-12, 4)
    verdict = verdict_of([text_finding(text_case(), 1 - 1e-13, 4), almost])
    assert not Counterparts(verdict).of(verdict.findings[0])
    (line,) = worst_leaks(verdict)
    assert line.advice.endswith("(1 tried); with each of them as much leaked as without")


def test_baselines_recommend_nothing():
    weak = protected(NOISE, 0.0, attack="dager")
    (line,) = worst_leaks(verdict_of([LEAK, text_finding(text_case(attack="dager"), 1.0, 4), weak]))
    assert line.advice == "no protection was tried on the cases that leak"


def test_a_protection_of_other_cases_recommends_nothing():
    (line,) = worst_leaks(verdict_of([LEAK, protected(NOISE, 0.0, batch_size=1)]))
    assert line.advice == "no protection was tried on the cases that leak"


def test_costs_that_an_audit_does_not_measure_are_not_invented():
    states = text_finding(text_case("outputs"), 1.0, 4)
    stopped = text_finding(text_case("outputs", defences=NOISE), 0.0)
    (line,) = worst_leaks(verdict_of([states, stopped]))
    assert line.cost == "not measured in an audit; see docs/outputs.md"


def test_a_private_protocol_states_its_budget():
    private = protected([], 0.0, cosine=0.1, protocol="dpsgd:noise_multiplier=1")
    private = replace(private, metrics={**private.metrics, "epsilon": 2.5})
    (line,) = worst_leaks(verdict_of([LEAK, private]))
    assert "; ε = 2.5;" in line.cost


def test_live_federations_compare_nothing():
    (line,) = worst_leaks(verdict_of([flower_finding()]))
    assert line.severity is Severity.MEDIUM
    assert "nothing was compared" in line.advice


def test_a_plan_of_protected_cases_alone_is_compared_with_its_controls():
    """Its controls leak everything: what leaks less leaks less, though no unprotected case is in the plan."""
    (line,) = worst_leaks(verdict_of([protected(INT8, 0.9, 3), protected(NOISE, 0.2, cosine=0.5)]))
    assert "(2 tried); least leaked with noise:sigma=0.1: low, 20 %" in line.advice
    (line,) = worst_leaks(verdict_of([protected(INT8, 1.0, 4)]))
    assert line.advice.endswith("(1 tried); with each of them as much leaked as without")
    unknown = replace(protected(INT8, 1.0, 4), control=None)
    (line,) = worst_leaks(verdict_of([unknown]))
    assert "as without" not in line.advice
    assert line.advice.endswith("least leaked with int8: high, 100 % of tokens, 4 exact")


def test_errors_are_no_inconclusive_cases():
    (line,) = worst_leaks(verdict_of([LEAK, failed(text_case(defences=NOISE)), protected(INT8, 1.0, 4)]))
    assert "(2 tried, 1 ended in an error); with the others as much leaked as without" in line.advice


def test_a_control_is_never_recommended():
    extreme = protected(["noise:sigma=1000"], 0.0)
    gates = ["no near-exact text"]
    (line,) = worst_leaks(verdict_of([LEAK], gates, controls=[extreme]))
    assert line.advice == "no protection was tried on the cases that leak"
    (line,) = worst_leaks(verdict_of([LEAK, extreme], gates))
    assert line.advice.startswith("noise:sigma=1000")


def test_a_leak_that_crosses_no_gate_is_said_to():
    """The gate forbids whole texts; some tokens leak."""
    held = protected(NOISE, 0.2, cosine=0.5)
    verdict = verdict_of([held], ["no near-exact text"])
    assert verdict.exit_code == 0
    (line,) = worst_leaks(verdict)
    assert line.advice.startswith("what leaks crosses no gate, and no protection was shown to stop it (1 tried); least")
    (line,) = worst_leaks(verdict_of([held, protected(INT8, 1.0, 4)], ["no near-exact text"]))
    assert line.advice.startswith("no protection was shown to stop the leak")
