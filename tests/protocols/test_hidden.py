"""Hidden states as a service hands them out: transformers' own, layer by layer, padding zeroed."""

from __future__ import annotations

import pytest
import torch
from tests.tiny_models import NUM_BLOCKS
from torch import Tensor

import unmask
from unmask.errors import InputError
from unmask.evidence import HiddenEvidence, Site, load_evidence
from unmask.models import Model
from unmask.protocols import observe_hidden
from unmask.protocols.batch import make_batch

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49, 50, 51]]
# The same products in float32, summed in another order: 6e-8 each, a hundredfold after norms and peaked softmaxes.
FLOAT32_PARITY = 1e-5


@torch.no_grad()
def states_of_transformers(model: Model, tokens: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    output = model.body(input_ids=tokens, attention_mask=mask.long(), output_hidden_states=True, use_cache=False)
    return output.hidden_states


def worst_error(ours: Tensor, theirs: Tensor, mask: Tensor) -> float:
    """The largest relative error of a real token's row."""
    return float(((ours - theirs)[mask].norm(dim=-1) / theirs[mask].norm(dim=-1)).max())


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("layer", range(NUM_BLOCKS + 1))
def test_states_are_those_of_transformers(tiny, layer, side):
    evidence = observe_hidden(tiny, TEXTS, layer=layer, padding_side=side)
    batch = make_batch(tiny, TEXTS, padding_side=side)
    theirs = states_of_transformers(tiny, batch.tokens, batch.mask)[layer]
    # The last entry of transformers has the final norm already; the stream that is handed out has not.
    ours = evidence.states if layer < tiny.num_blocks else tiny.final_norm(evidence.states)
    assert torch.equal(evidence.mask, batch.mask)
    assert worst_error(ours.detach(), theirs, batch.mask) < FLOAT32_PARITY


@pytest.mark.parametrize(("name", "layer"), [("smollm2", 6), ("minilm", 6)])
def test_states_of_real_weights_are_those_of_transformers(name, layer, request):
    model = request.getfixturevalue(name)
    sentences = ["The patient was discharged on Friday.", "Transfer it today, please."]
    evidence = observe_hidden(model, sentences, layer=layer)
    batch = make_batch(model, sentences)
    theirs = states_of_transformers(model, batch.tokens, batch.mask)[layer]
    assert worst_error(evidence.states, theirs, batch.mask) < FLOAT32_PARITY


def test_texts_do_not_see_each_other(tiny_llama):
    """Each text's rows are those of the text by itself."""
    together = observe_hidden(tiny_llama, TEXTS, layer=2)
    for row, text in enumerate(TEXTS):
        alone = observe_hidden(tiny_llama, [text], layer=2)
        ours, mask = together.states[row, : len(text)], alone.mask[0]
        assert worst_error(ours, alone.states[0], mask) < FLOAT32_PARITY


def test_padding_is_zeroed(tiny):
    evidence = observe_hidden(tiny, TEXTS, layer=1)
    assert not evidence.states[~evidence.mask].any()
    assert (evidence.states[evidence.mask] != 0).any(1).all()


def test_what_is_said_about_the_states(tiny_gpt2, tmp_path):
    evidence = observe_hidden(tiny_gpt2, TEXTS, layer=2)
    assert type(evidence) is HiddenEvidence
    assert (evidence.layer, evidence.model_fingerprint) == (2, tiny_gpt2.fingerprint())
    assert not evidence.states.requires_grad
    evidence.check(tiny_gpt2)
    loaded = load_evidence(evidence.save(tmp_path / "states.safetensors"))
    assert torch.equal(loaded.states, evidence.states)
    assert unmask.observe_hidden is observe_hidden


def test_a_service_has_no_dropout(tiny_gpt2):
    model = tiny_gpt2.to()
    model.hf.train()
    states = observe_hidden(model, TEXTS, layer=3).states
    assert torch.equal(states, observe_hidden(tiny_gpt2, TEXTS, layer=3).states)
    assert model.hf.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_states_have_the_models_precision(tiny_gpt2, dtype):
    assert observe_hidden(tiny_gpt2.to(dtype=dtype), TEXTS, layer=2).states.dtype == dtype


@pytest.mark.parametrize("layer", [-1, NUM_BLOCKS + 1])
def test_a_layer_that_the_model_lacks_is_refused(tiny_gpt2, layer):
    with pytest.raises(InputError, match=f"layer must (lie in 0…3|be a whole number from 0 on, or None), got {layer}"):
        observe_hidden(tiny_gpt2, TEXTS, layer=layer)


def test_an_empty_batch_is_refused(tiny_gpt2):
    with pytest.raises(InputError, match="the batch is empty"):
        observe_hidden(tiny_gpt2, [], layer=1)


def test_states_of_pairs_see_their_types(tiny_bert):
    pairs = [([1, 17, 99, 2], [250, 2]), ([1, 400, 2], [3, 8, 44, 2])]
    evidence = observe_hidden(tiny_bert, pairs, layer=1)
    batch = make_batch(tiny_bert, pairs)
    with torch.no_grad():
        theirs = tiny_bert.body(**batch.inputs, output_hidden_states=True).hidden_states[1]
    assert worst_error(evidence.states, theirs, batch.mask) < FLOAT32_PARITY


# Sites


def test_behind_the_final_norm_is_what_transformers_hand_out(tiny):
    evidence = observe_hidden(tiny, TEXTS, site="final_norm")
    batch = make_batch(tiny, TEXTS)
    theirs = states_of_transformers(tiny, batch.tokens, batch.mask)[-1]
    assert evidence.site is Site.FINAL_NORM
    assert worst_error(evidence.states, theirs, batch.mask) < FLOAT32_PARITY


def test_the_attention_module_alone(tiny_gpt2):
    heard = []
    handle = tiny_gpt2.body.h[0].attn.register_forward_hook(lambda module, inputs, output: heard.append(output[0]))
    batch = make_batch(tiny_gpt2, TEXTS)
    try:
        states_of_transformers(tiny_gpt2, batch.tokens, batch.mask)
    finally:
        handle.remove()
    evidence = observe_hidden(tiny_gpt2, TEXTS, site=Site.ATTENTION)
    assert evidence.layer == 0
    assert worst_error(evidence.states, heard[0], batch.mask) < FLOAT32_PARITY


def test_the_mean_of_a_text(tiny):
    pooled = observe_hidden(tiny, TEXTS, layer=2, site=Site.MEAN)
    states = observe_hidden(tiny, TEXTS, layer=2)
    assert pooled.states.shape == (3, 1, tiny.width)
    for row, text in enumerate(TEXTS):
        mean = states.states[row, : len(text)].mean(0)
        assert torch.allclose(pooled.states[row, 0], mean, rtol=1e-4, atol=1e-5)


def test_all_blocks_are_the_default(tiny_gpt2):
    assert observe_hidden(tiny_gpt2, TEXTS).layer == tiny_gpt2.num_blocks


@pytest.mark.parametrize(("site", "layer"), [("final_norm", 2), ("attention", NUM_BLOCKS)])
def test_a_layer_that_a_site_lacks_is_refused(tiny_gpt2, site, layer):
    with pytest.raises(InputError, match="layer must"):
        observe_hidden(tiny_gpt2, TEXTS, site=site, layer=layer)
