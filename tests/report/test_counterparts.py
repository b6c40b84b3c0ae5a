from __future__ import annotations

from dataclasses import replace

from tests.report.findings import failed, flower_finding, inconclusive, text_case, text_finding, verdict_of

from unmask.report.counterparts import Counterparts, Effect

LEAK = text_finding(text_case(), 1.0, 4)
NOISE = text_finding(text_case(defences=["noise:sigma=0.1"]), 0.0)
INT8 = text_finding(text_case(defences=["int8"]), 0.6)
TOPK = text_finding(text_case(defences=["topk:share=0.01"]), 0.3)
PRIVATE = text_finding(text_case(protocol="dpsgd:noise_multiplier=1"), 0.0)
UNCLEAR = inconclusive(text_case(protocol="lora:rank=8"))


def found(finding, *others):
    return [(stop.effect, stop.protection) for stop in Counterparts(verdict_of([finding, *others])).of(finding)]


def test_what_stopped_it_comes_first_then_what_reduced_it_and_never_what_could_not_tell_as_stopped():
    assert found(LEAK, UNCLEAR, INT8, TOPK, NOISE, PRIVATE) == [
        (Effect.STOPPED, "noise:sigma=0.1"),
        (Effect.STOPPED, "dpsgd:noise_multiplier=1"),
        (Effect.REDUCED, "topk:share=0.01"),
        (Effect.REDUCED, "int8"),
        (Effect.UNCLEAR, "lora:rank=8"),
    ]


def test_only_findings_that_differ_in_protection_alone_count():
    other_seed = text_finding(text_case(seed=1, defences=["noise:sigma=0.1"]), 0.0)
    other_size = text_finding(text_case(batch_size=1, defences=["noise:sigma=0.1"]), 0.0)
    other_model = text_finding(text_case(model="b", defences=["noise:sigma=0.1"]), 0.0)
    assert found(LEAK, other_seed, other_size, other_model) == []


def test_a_defence_that_does_not_help_is_not_named():
    assert found(INT8, text_finding(text_case(defences=["bf16"]), 0.9)) == []


def test_fewer_defences_are_no_defence():
    both = text_finding(text_case(defences=["int8", "topk:share=0.01"]), 0.9)
    assert found(both, INT8, LEAK) == []
    assert found(both, NOISE) == [(Effect.STOPPED, "noise:sigma=0.1")]


def test_no_protection_at_all_is_never_what_stopped_it():
    several = text_finding(text_case(protocol="fedavg:local_steps=4"), 0.8)
    assert found(several, text_finding(text_case(), 0.0)) == []


def test_a_weaker_one_of_the_same_kind_is_not_named():
    def noisy(text, recall):
        return text_finding(text_case(defences=[text]), recall)

    assert found(noisy("noise:sigma=0.01", 0.5), noisy("noise:sigma=0.0001", 0.0)) == []
    assert found(noisy("topk:share=0.01", 0.5), noisy("topk:share=0.1", 0.0)) == []
    assert found(noisy("noise:sigma=1e-4", 0.5), noisy("noise:sigma=0.01", 0.0)) == [
        (Effect.STOPPED, "noise:sigma=0.01")
    ]
    assert found(noisy("noise:sigma=0.01", 0.5), noisy("noise:sigma=0.001,relative=true", 0.0)) == [
        (Effect.STOPPED, "noise:sigma=0.001,relative=true")  # of another unit, so nobody can compare them
    ]


def test_fewer_exact_texts_at_equal_tokens_are_less():
    several = text_finding(text_case(protocol="fedavg:local_steps=4"), 1.0, 0)
    assert found(LEAK, several) == [(Effect.REDUCED, "fedavg:local_steps=4")]


def test_fewer_exact_texts_beside_more_tokens_are_not_less():
    assert found(text_finding(text_case(), 0.5, 2), text_finding(text_case(defences=["int8"]), 0.9, 1)) == []


def test_stopped_means_in_every_seed():
    other_leaks = text_finding(text_case(seed=1, defences=["noise:sigma=0.1"]), 1.0, 4)
    (stop,) = Counterparts(verdict_of([LEAK, NOISE, other_leaks])).of(LEAK)
    assert (stop.effect, stop.num_stopped, stop.num_seeds) == (Effect.SOMETIMES, 1, 2)
    other_stops = text_finding(text_case(seed=1, defences=["noise:sigma=0.1"]), 0.0)
    (stop,) = Counterparts(verdict_of([LEAK, NOISE, other_stops])).of(LEAK)
    assert (stop.effect, stop.num_stopped, stop.num_seeds) == (Effect.STOPPED, 2, 2)
    (stop,) = Counterparts(verdict_of([LEAK, NOISE, failed(text_case(seed=1, defences=["noise:sigma=0.1"]))])).of(LEAK)
    assert stop.effect is Effect.SOMETIMES


def test_nobody_knows_the_defences_of_a_live_federation():
    live = flower_finding()
    other = replace(live, id="x", case={**live.case, "defences": ["int8"]}, tokens=(), status="NOTHING_FOUND")
    assert found(live, other) == []


def test_a_sum_over_clients_is_a_protection():
    summed = text_finding(text_case(clients=4), 0.2)
    alone = text_finding(text_case(clients=1), 1.0)
    assert found(alone, summed) == [(Effect.REDUCED, "4 clients summed")]


def test_nothing_stopped_what_did_not_leak():
    assert found(NOISE, PRIVATE, LEAK) == []
    assert found(UNCLEAR, PRIVATE) == []


def test_a_control_is_never_what_stopped_it():
    extreme = text_finding(text_case(defences=["noise:sigma=1000"]), 0.0)
    gates = ["no near-exact text"]
    (stop,) = Counterparts(verdict_of([LEAK, NOISE], gates, controls=[extreme])).of(LEAK)
    assert stop.protection == "noise:sigma=0.1"
    assert not Counterparts(verdict_of([LEAK], gates, controls=[extreme])).of(LEAK)
    assert Counterparts(verdict_of([LEAK, extreme], gates)).of(LEAK)  # under a gate it is a protection
    assert Counterparts(verdict_of([LEAK, extreme])).of(LEAK)  # a plan without gates has no controls
