from __future__ import annotations

from tests.report.findings import inconclusive, text_case, text_finding

from unmask.report.stops import Effect, Stops

LEAK = text_finding(text_case(), 1.0, 4)
NOISE = text_finding(text_case(defences=["noise:sigma=0.1"]), 0.0)
INT8 = text_finding(text_case(defences=["int8"]), 0.6)
TOPK = text_finding(text_case(defences=["topk:share=0.01"]), 0.3)
PRIVATE = text_finding(text_case(protocol="dpsgd:noise_multiplier=1"), 0.0)
UNCLEAR = inconclusive(text_case(protocol="lora:rank=8"))


def found(finding, *others):
    return [(stop.effect, stop.protection) for stop in Stops([finding, *others]).of(finding)]


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


def test_a_sum_over_clients_is_a_protection():
    summed = text_finding(text_case(clients=4), 0.2)
    alone = text_finding(text_case(clients=1), 1.0)
    assert found(alone, summed) == [(Effect.REDUCED, "4 clients summed")]


def test_nothing_stopped_what_did_not_leak():
    assert found(NOISE, PRIVATE, LEAK) == []
    assert found(UNCLEAR, PRIVATE) == []
