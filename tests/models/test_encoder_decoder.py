"""Both sides of an encoder–decoder are models of their own."""

from __future__ import annotations

import pytest
import torch
from tests.models.families import ENCODER_DECODERS, build

import unmask
from unmask.errors import InputError, UnsupportedModelError
from unmask.models.linear import Role
from unmask.recovery import Status

TEXTS = [(11, 12, 13, 14), (21, 22, 23), (31, 32)]


@pytest.fixture(scope="module", params=ENCODER_DECODERS)
def model(request):
    return unmask.load_encoder_decoder(build(request.param))


@torch.no_grad()
def test_each_side_computes_what_the_model_computes(model):
    tokens = torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24]])
    theirs = model.hf.get_encoder()(input_ids=tokens).last_hidden_state
    ours = model.encoder.final_norm(model.encoder.hidden_states(tokens)[-1])
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
    assert not model.encoder.causal
    assert model.decoder.causal
    assert not model.encoder.problem
    assert not model.decoder.problem


def test_prompts_from_the_states_of_the_encoder(model):
    recovery = unmask.recover_text(unmask.observe_hidden(model.encoder, TEXTS, site="final_norm"), model.encoder)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert sorted(text.tokens for text in recovery.value.texts) == sorted(TEXTS)


def test_the_tensors_of_a_side_are_known_by_its_own_names(model):
    gradients = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    sides = [set(model.of_side(side, gradients)) for side in (model.encoder, model.decoder)]
    for side, names in zip((model.encoder, model.decoder), sides, strict=True):
        assert side.linear(Role.QUERY, 0).parameter in names
        assert side.linear(Role.ATTENTION_OUT, 1).parameter in names
    assert not any("embed_tokens" in name for names in sides for name in names)  # both sides share it


def test_a_copy_has_another_precision_and_the_same_fingerprint(model):
    copied = model.to(dtype=torch.float64)
    assert (copied.dtype, model.dtype) == (torch.float64, torch.float32)
    assert copied.encoder.dtype is copied.decoder.dtype is torch.float64
    assert copied.fingerprint() == model.fingerprint()


def test_where_one_side_is_needed_the_whole_is_refused(model):
    with pytest.raises(InputError, match=r"model\.encoder or model\.decoder"):
        unmask.observe_hidden(model, TEXTS)
    states = unmask.observe_hidden(model.encoder, TEXTS)
    with pytest.raises(InputError, match="one side"):
        unmask.recover_text(states, model)
    with pytest.raises(UnsupportedModelError, match="load_encoder_decoder"):
        unmask.load_model(model.hf)


def test_a_decoder_is_no_encoder_decoder():
    with pytest.raises(InputError, match="use load_model"):
        unmask.load_encoder_decoder(build("Llama"))
