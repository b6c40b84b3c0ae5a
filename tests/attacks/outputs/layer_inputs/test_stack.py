"""Stacks read as tokens: recovered only where the tokens' own forward pass reproduces what was seen."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tests.attacks.outputs.shaped_models import gpt2, llama
from tests.sampling import sample

from unmask.attacks.outputs.layer_inputs.stack import StackAttack, invert_stack
from unmask.errors import InputError
from unmask.evidence import HiddenEvidence
from unmask.models import Model
from unmask.protocols import observe_hidden
from unmask.recovery import Status

TEXTS = [[5, 17, 99, 17, 250, 3], [400, 8, 8]]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> Model:
    return gpt2(64, 3, 4) if request.param == "gpt2" else llama(64, 3)


@sample("layer, side", product([0, 1, 3], ["left", "right"]), [(0, "right"), (1, "left"), (3, "right")])
def test_texts_from_the_stream_after_any_block(model, layer, side):
    recovery = StackAttack()(observe_hidden(model, TEXTS, layer=layer, padding_side=side), model)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert {text.tokens for text in recovery.value.certain} == {tuple(text) for text in TEXTS}
    assert recovery.certificate.holds


@sample("layer", [0, 1, 3], [0, 1])
def test_noise_is_not_recovered(model, layer):
    """Exact pre-images of noise exist; they are rows of no token."""
    evidence = observe_hidden(model, TEXTS, layer=layer)
    noise = torch.randn(evidence.states.shape, generator=torch.Generator().manual_seed(0)).double()
    noise = noise * evidence.states.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
    recovery = StackAttack()(HiddenEvidence(noise, evidence.mask, layer, model.fingerprint()), model)
    assert recovery.status is Status.NOTHING_FOUND
    assert not recovery.certificate.holds


def test_a_row_that_is_no_token_ends_the_text(model):
    evidence = observe_hidden(model, TEXTS[:1], layer=1)
    states = evidence.states.clone()
    states[0, 3] = states[0, 3].flip(-1)
    recovery = StackAttack()(HiddenEvidence(states, evidence.mask, 1, model.fingerprint()), model)
    assert recovery.status is Status.PARTIAL
    (text,) = recovery.value.texts
    assert text.tokens == tuple(TEXTS[0][:3])
    assert not text.certain


def test_encoders_are_out_of_its_reach(tiny_bert):
    evidence = observe_hidden(tiny_bert, TEXTS, layer=1)
    assert StackAttack()(evidence, tiny_bert).status is Status.NOT_APPLICABLE


def test_blocks_that_do_not_exist_are_refused(model):
    with pytest.raises(InputError, match="bottom"):
        invert_stack(model, torch.ones(2, 64), top=9)


@pytest.mark.slow
def test_real_weights_are_honest(smollm2):
    """Two trained blocks: whatever is claimed is right, and nothing is called recovered on a residual alone."""
    tokens = smollm2.encode("Stock fell")
    recovery = StackAttack(max_steps=5)(observe_hidden(smollm2, [tokens], layer=2), smollm2)
    for text in recovery.value.texts:
        assert text.tokens == tuple(tokens[: len(text.tokens)])
    assert recovery.status is not Status.RECOVERED or recovery.value.certain
