"""Tokens with equal embeddings: one class, never a certain text, and nothing else of the batch suffers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.sampling import sample

import unmask
from unmask.attacks.outputs.prompts.equal_tokens import equal_tokens, equal_tokens_ambiguity
from unmask.attacks.recover import recover_text
from unmask.evidence import Site
from unmask.models import Model
from unmask.protocols import observe_cache, observe_hidden
from unmask.recovery import AmbiguityKind, RecoveredTexts, Recovery, Status

TWINS = (40, 41, 300)  # their rows are equal to the last bit
NEAR = 77  # differs from 78 by a millionth: less than float32 tells apart after a few blocks
TEXTS = [[5, 17, 41, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48]]
SITES = ((Site.STREAM, 0), (Site.STREAM, 2), (Site.FINAL_NORM, None), (Site.ATTENTION, 0))


def with_twins(model: Model) -> Model:
    """A copy in which some tokens have the embedding of others."""
    twin = model.to()
    embedding = twin.parameter(twin.token_embedding)
    with torch.no_grad():
        embedding[list(TWINS)] = embedding[TWINS[0]].clone()
        embedding[NEAR] = embedding[NEAR + 1] * (1 + 1e-6)
    return twin


@pytest.fixture(scope="module", params=["tiny_gpt2", "tiny_llama", "tiny_bert"])
def model(request: pytest.FixtureRequest, one_thread: None) -> Model:
    return with_twins(request.getfixturevalue(request.param))


def recover(
    model: Model, texts: list[list[int]], site: Site, layer: int | None, **changes: Any
) -> Recovery[RecoveredTexts]:
    return recover_text(replace(observe_hidden(model, texts, site=site, layer=layer), **changes), model)


def test_the_classes_of_a_vocabulary(model, tiny_llama):
    classes = equal_tokens(model)
    assert classes == {**dict.fromkeys(TWINS, TWINS), NEAR: (NEAR, NEAR + 1), NEAR + 1: (NEAR, NEAR + 1)}
    assert equal_tokens(tiny_llama) == {}


def test_behind_a_norm_that_forgets_lengths_multiples_are_equal(tiny_llama):
    """RMSNorm: an attention module sees the same input; the stream does not."""
    twin = tiny_llama.to()
    with torch.no_grad():
        twin.parameter(twin.token_embedding)[9] = 2 * twin.parameter(twin.token_embedding)[8]
    assert equal_tokens(twin, "inputs") == {8: (8, 9), 9: (8, 9)}
    assert equal_tokens(twin) == {}
    module = recover(twin, [[5, 9, 6]], Site.ATTENTION, 0)
    assert not module.value.certain
    assert module.value.texts[0].covers([5, 9, 6])
    assert recover(twin, [[5, 9, 6]], Site.STREAM, 1).value.certain[0].tokens == (5, 9, 6)


@sample("site, layer", SITES, [SITES[0], SITES[1], SITES[3]])
def test_a_class_is_reported_and_the_rest_of_the_batch_is_certain(model, site, layer):
    recovery = recover(model, TEXTS, site, layer)
    assert recovery.status is Status.PARTIAL, recovery.reason
    is_bound = (site, layer) != (Site.STREAM, 0)  # embeddings prove tokens, not that they are of one text
    assert {text.tokens for text in recovery.value.certain} == ({*map(tuple, TEXTS[1:3])} if is_bound else set())
    for open_text in [text for text in recovery.value.texts if not text.certain] if is_bound else []:
        (ambiguity,) = open_text.ambiguities
        assert (ambiguity.kind, ambiguity.position, ambiguity.tokens) == (AmbiguityKind.EQUAL_TOKENS, 2, TWINS)
        assert open_text.covers(TEXTS[0])
        assert not open_text.covers([5, 17, 42, 17, 250])
    assert recovery.value.token_set == {5, 17, 250, *TEXTS[1], *TEXTS[2]}
    assert recovery.value.token_classes == (TWINS,)
    assert "equal embeddings" in recovery.reason
    assert recovery.certificate.holds


@pytest.mark.parametrize(("site", "layer"), SITES)
def test_a_text_of_nothing_else_is_not_identifiable(model, site, layer):
    recovery = recover(model, [[41]], site, layer)
    assert recovery.status is Status.NOT_IDENTIFIABLE, recovery.reason
    assert recovery.value.texts[0].covers([300]) or (site, layer) == (Site.STREAM, 0)
    assert not recovery.value.certain
    assert not recovery.value.token_set
    assert recovery.value.token_classes == (TWINS,)
    assert not recovery.certificate.holds


@pytest.mark.parametrize("token", [NEAR, NEAR + 1])
def test_tokens_that_differ_by_less_than_can_be_seen_are_a_class(model, token):
    recovery = recover(model, [[5, token, 6, 7]], Site.STREAM, 2)
    (text,) = recovery.value.texts
    assert text.covers([5, token, 6, 7])
    assert text.tokens == (5, token, 6, 7) or not text.certain


def test_coarse_states_leave_the_class_too(model):
    """In bfloat16 two equal tokens compete by likelihood and neither wins; that is no doubt about the others."""
    evidence = observe_hidden(model, TEXTS[:2], layer=1)
    recovery = recover_text(replace(evidence, states=evidence.states.bfloat16().float()), model)
    for text in recovery.value.certain:
        assert list(text.tokens) in TEXTS
    assert all(not text.certain for text in recovery.value.texts if text.ambiguities)
    assert not any(text.certain for text in recovery.value.texts if set(text.tokens) & set(TWINS))


def test_runs_of_a_leading_token_are_no_problem(tiny_llama):
    """Rotary positions: 't t t' has one state at every position, but there is a row for each, so the length shows."""
    texts = [[9, 9, 9], [9, 9], [9], [9, 9, 9, 9, 4], [9, 9, 4]]
    for site, layer in SITES:
        recovery = recover(tiny_llama, texts, site, layer)
        is_bound = (site, layer) != (Site.STREAM, 0)
        assert recovery.status is (Status.RECOVERED if is_bound else Status.PARTIAL), recovery.reason
        read = recovery.value.certain if is_bound else recovery.value.texts
        assert sorted(text.tokens for text in read) == sorted(map(tuple, texts))


def test_a_sentence_names_the_class_and_stays_short(tiny_gpt2):
    assert "token 3 is one of '40', '41', '300': their" in equal_tokens_ambiguity(tiny_gpt2, 2, TWINS).reason
    assert "and 12 more" in equal_tokens_ambiguity(tiny_gpt2, 2, range(20)).reason


@pytest.mark.parametrize("seen", ["float32", "float16", "cache"])
def test_states_that_lie_close_because_one_large_number_is_in_all_of_them(tiny_gpt2, one_thread, seen):
    """Their tokens agree within the tolerance of each other, though embeddings differ by more than it allows."""
    model = tiny_gpt2.to()
    embedding = model.parameter(model.token_embedding)
    apart = 1.0 if seen == "float16" else 3e-3
    noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(5)) / embedding.shape[1] ** 0.5
    with torch.no_grad():
        model.hf.transformer.h[0].mlp.c_proj.bias[3] += 1e4 if seen == "float16" else 3e3
        for first in range(60, 480, 60):
            beside = slice(first + 1, first + 60)
            embedding[beside] = embedding[first] + apart * embedding[first].norm() * noise[beside]
    texts = [[73], [296, 438], [415, 396, 137, 135, 65]]
    evidence = observe_cache(model, texts, layer=2) if seen == "cache" else observe_hidden(model, texts, layer=2)
    if seen == "float16":
        evidence = replace(evidence, states=evidence.states.half().float())
    recovery = recover_text(evidence, model)
    assert {text.tokens for text in recovery.value.certain} <= {*map(tuple, texts)}
    assert recovery.value.token_set <= {token for text in texts for token in text}
    assert all(any(text.covers(own) for own in texts) for text in recovery.value.texts if text.ambiguities)
    assert recovery.status is Status.RECOVERED, recovery.reason


def test_rounding_to_a_random_neighbour_where_one_large_number_sets_the_step(tiny_llama, one_thread):
    """Steps are longer than most numbers, and a wrong token agrees beside the right one."""
    model = tiny_llama.to()
    with torch.no_grad():
        model.parameter(model.token_embedding).mul_(4e-4)
        model.hf.model.layers[0].mlp.down_proj.weight[3] *= 100
    for seed in (6, 19, 29):
        drawn = random.Random(seed)
        text = [drawn.randrange(5, 500) for _ in range(12)]
        rounded = unmask.parse_defence("int8:stochastic=true")
        seen = unmask.defend_states(
            observe_hidden(model, [text], layer=1), rounded, torch.Generator().manual_seed(seed)
        )
        found = recover_text(seen, model, known_beginning=text[:4]).value
        assert found.token_set <= set(text)
        assert all(set(tokens) & set(text) for tokens in found.token_classes)
        assert all(each.tokens == tuple(text) for each in found.certain)
