"""Texts by the directions of states alone: behind defences that stop a proof, behind one factor, and in noise."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product

import pytest
import torch
from tests.sampling import in_turn, sample

import unmask
from unmask.attacks.outputs.prompts.nearest import is_beyond_chance, nearest_row
from unmask.defences.table import parse_defence
from unmask.models import adapt
from unmask.protocols import observe_cache, observe_hidden
from unmask.recovery import Aim, Status

TEXTS = [(5, 17, 99, 17, 250, 8), (400, 3, 8, 21, 90, 91)]
KINDS = ("states", "cache")
FACTORS = (("clip:norm=1",), ("clip:norm=1", "int8"), ("int8", "clip:norm=1"))
BOTH = {Aim.TOKENS, Aim.TEXTS}


def observe(kind, model, *defences):
    evidence = (observe_hidden if kind == "states" else observe_cache)(model, TEXTS, layer=2)
    generator = torch.Generator().manual_seed(0)
    for text in defences:
        evidence = parse_defence(text)(evidence, generator)
    return evidence


@sample("defences, kind", product(FACTORS, KINDS), in_turn(FACTORS, KINDS))
def test_one_factor_of_everything_hides_nothing(tiny_llama, kind, defences):
    recovery = unmask.recover_text(observe(kind, tiny_llama, *defences), tiny_llama)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert {text.tokens for text in recovery.value.certain} == set(TEXTS)
    assert "one factor, which was taken out" in recovery.reason
    assert "divided by one number" in recovery.certificate.claim
    assert recovery.looked_for == BOTH


def test_a_factor_of_its_own_at_each_row_is_read_and_proves_nothing(tiny_llama):
    """Certificates are about one number for all rows."""
    evidence = observe("states", tiny_llama)
    factors = 0.1 + torch.rand(evidence.mask.shape, generator=torch.Generator().manual_seed(1))
    recovery = unmask.recover_text(replace(evidence, states=evidence.states * factors[..., None]), tiny_llama)
    assert not recovery.value.certain
    assert {text.tokens for text in recovery.value.texts} == set(TEXTS)
    assert not recovery.looked_for


STOPPED = (("topk:share=0.9",), ("random:share=0.97",), ("clip:norm=1", "noise:sigma=1e-3"))


@sample("defences, kind", product(STOPPED, KINDS), in_turn(STOPPED, KINDS))
def test_what_stops_the_proof_does_not_stop_the_reading(tiny_gpt2, kind, defences):
    recovery = unmask.recover_text(observe(kind, tiny_gpt2, *defences), tiny_gpt2)
    assert {text.tokens for text in recovery.value.texts} == set(TEXTS), recovery.reason
    assert set(recovery.value.certain) <= {text for text in recovery.value.texts if text.tokens in TEXTS}
    assert recovery.status is Status.RECOVERED or not recovery.looked_for


@pytest.mark.parametrize("kind", ["states", "cache"])
def test_noise_that_drowns_everything_leaves_nothing_to_look_for(tiny_llama, kind):
    """The negative control: a signal that is heard is not called drowned."""
    drowned = unmask.recover_text(observe(kind, tiny_llama, "noise:sigma=1000"), tiny_llama)
    assert drowned.status is Status.NOTHING_FOUND
    assert drowned.looked_for == BOTH
    assert "no token's state is nearer than chance has it" in drowned.reason
    heard = unmask.recover_text(observe(kind, tiny_llama, "noise:sigma=0.3,relative=true"), tiny_llama)
    assert heard.status is Status.RECOVERED or not heard.looked_for


@pytest.mark.parametrize(("width", "vocabulary", "length"), [(16, 60, 4), (32, 500, 8), (384, 2_000, 12), (32, 500, 1)])
def test_noise_is_seldom_beyond_chance_and_a_signal_is(width, vocabulary, length):
    generator = torch.Generator().manual_seed(width)
    tokens = torch.nn.functional.normalize(torch.randn(vocabulary, width, generator=generator), dim=1)

    def excess(share: float) -> list[float]:
        noise = torch.nn.functional.normalize(torch.randn(length, width, generator=generator), dim=1)
        rows = torch.nn.functional.normalize(share * tokens[:length] + (1 - share) * noise, dim=1)
        return [nearest_row(tokens, row, vocabulary)[2] for row in rows]

    assert sum(is_beyond_chance(excess(0.0)) for _ in range(50)) <= 4
    assert all(is_beyond_chance(excess(0.8)) for _ in range(50))


def test_a_row_that_few_entries_make_up_is_not_noise():
    """One entry of fifty is sent, and weak noise is added to all: cosines alone take it for noise."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randn(2_000, 500, generator=draw).double()
    noise = 1e-6 * torch.randn(500, generator=draw).double()
    sent = torch.rand(500, generator=draw) < 0.02
    assert is_beyond_chance([nearest_row(tokens, tokens[7] * sent + noise, 2_000)[2]])
    assert not is_beyond_chance([nearest_row(tokens, noise, 2_000)[2]])


@pytest.mark.parametrize("kind", ["states", "cache"])
def test_few_entries_that_are_sent_as_they_are_tell_tokens(tiny_llama, kind):
    recovery = unmask.recover_text(observe(kind, tiny_llama, "random:share=0.15"), tiny_llama)
    assert not recovery.looked_for
    nothing = unmask.recover_text(observe(kind, tiny_llama, "random:share=0"), tiny_llama)
    assert nothing.looked_for == BOTH
    assert "the states are zero, or next to nothing beside their noise" in nothing.reason


def test_one_position_that_stands_out_is_a_leak_and_one_without_entries_tells_nothing():
    assert is_beyond_chance([15.0] + 20 * [0.0])
    assert not is_beyond_chance([3.0] + 20 * [0.0])
    assert is_beyond_chance([5.0] + 20 * [None])
    assert not is_beyond_chance([None])


def test_tokens_nearer_to_each_other_than_the_rounding_are_left_open(tiny_gpt2):
    """The embeddings of 8 and 21 are 0.2 % apart, and int8 rounds by 0.7 %."""
    hf = copy.deepcopy(tiny_gpt2.hf)
    rows = hf.get_input_embeddings().weight.data
    rows[21] = rows[8] + 2e-3 * rows[8].norm() * torch.nn.functional.normalize(torch.ones_like(rows[8]), dim=0)
    model = adapt(hf)
    for layer in (0, 1):
        evidence = parse_defence("int8")(observe_hidden(model, TEXTS, layer=layer), torch.Generator())
        recovery = unmask.recover_text(evidence, model)
        assert not recovery.value.certain  # each holds one of the two
        assert all(any(text.covers(true) for text in recovery.value.texts) for true in TEXTS)


def test_entries_that_were_left_out_are_no_noise(tiny_llama):
    """A row with gaps is never proven; its token is read all the same."""
    evidence = observe("states", tiny_llama)
    states = evidence.states.clone()
    states[:, :, ::16] = 0
    recovery = unmask.recover_text(replace(evidence, states=states), tiny_llama)
    assert not recovery.value.token_set
    assert {text.tokens for text in recovery.value.texts} == set(TEXTS)
    assert not recovery.looked_for
