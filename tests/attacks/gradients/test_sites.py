"""Sites: their rows are what enters the layer in transformers' forward pass, and their spans hold the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.reference.layer_inputs import layer_inputs

from unmask.attacks.gradients.sites import above_noise, first_input_site, output_site, prefix_sites
from unmask.defences import parse_defence
from unmask.models import Model, Role, adapt
from unmask.protocols import observe_gradients

DECODERS = ("tiny_gpt2", "tiny_llama", "tiny_qwen2", "tiny_mistral")
TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47]]
NAMES = ("output projection of block 0", "MLP input of block 0", "attention input of block 1")
# Rows of order 1 in float32, computed in another order: a few roundings of 6e-8, over some hundred terms.
FLOAT32_PARITY = 1e-5
# A row of the batch is left out of the span only by rounding; another one is 0.1 and more away.
IN_SPAN = 1e-3


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


@torch.no_grad()
def block_0(model: Model, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The stream that enters block 0, and its mixed values, for a text at positions 0, 1 …"""
    tokens = torch.tensor([text])
    positions = torch.arange(len(text))[None]
    states = model.embed(tokens, positions)
    return states[0], model.mixed_values(0, states, positions, torch.ones_like(tokens, dtype=torch.bool))[0]


@torch.no_grad()
def test_rows_are_what_transformers_feeds_the_layer(decoder):
    for site in prefix_sites(observe_gradients(decoder, TEXTS), decoder):
        for text in TEXTS:
            expected = layer_inputs(decoder, torch.tensor([text]), site.parameters[0])[0]
            rows = site.rows(decoder, *block_0(decoder, text))
            torch.testing.assert_close(rows, expected, atol=FLOAT32_PARITY, rtol=FLOAT32_PARITY)


def test_the_span_of_a_site_holds_the_rows_of_the_batch_and_no_others(decoder):
    evidence = observe_gradients(decoder, TEXTS)
    for site in prefix_sites(evidence, decoder):
        assert site.span.rank == sum(len(text) - 1 for text in TEXTS)  # the last token is only a label
        for text in TEXTS:
            rows = layer_inputs(decoder, torch.tensor([text[:-1]]), site.parameters[0])[0]
            assert float(site.span.distance(rows).max()) < IN_SPAN
        stranger = layer_inputs(decoder, torch.tensor([[301, 302, 303]]), site.parameters[0])[0]
        assert float(site.span.distance(stranger).min()) > 100 * IN_SPAN


def test_the_span_of_first_inputs_holds_the_tokens_of_the_batch(decoder):
    site = first_input_site(observe_gradients(decoder, TEXTS), decoder)
    assert site is not None
    for text in TEXTS:
        rows = decoder.first_input(torch.tensor(text[:-1]), torch.arange(len(text) - 1))
        assert float(site.span.distance(rows.detach()).max()) < IN_SPAN
    assert site.span.rank == len(
        {(t, i * decoder.learned_positions) for text in TEXTS for i, t in enumerate(text[:-1])}
    )


def test_sites_come_cheapest_first_and_only_where_the_update_holds_them(decoder):
    evidence = observe_gradients(decoder, TEXTS)
    assert tuple(site.name for site in prefix_sites(evidence, decoder)) == NAMES
    out = decoder.linear(Role.ATTENTION_OUT, 0).parameter
    kept = {name: g for name, g in evidence.gradients.items() if name != out}
    assert tuple(site.name for site in prefix_sites(replace(evidence, gradients=kept), decoder)) == NAMES[1:]
    assert not list(prefix_sites(evidence.only("norm", "ln_"), decoder))
    assert first_input_site(evidence.only("norm", "ln_"), decoder) is None


def test_parameters_of_a_site_are_those_of_the_update(decoder):
    evidence = observe_gradients(decoder, TEXTS)
    for site in (*prefix_sites(evidence, decoder), first_input_site(evidence, decoder)):
        assert site.parameters
        assert len(set(site.parameters)) == len(site.parameters)  # GPT-2 keeps three layers in one parameter
        assert set(site.parameters) <= set(evidence.gradients)


def test_a_part_of_queries_keys_and_values_is_used_alone(tiny_llama):
    """Grouped keys alone have 32 columns, so they show 32 rows at most; the rank says that it is at its end."""
    evidence = observe_gradients(tiny_llama, TEXTS)
    for part in ("q_proj", "k_proj", "v_proj"):
        site = first_input_site(evidence.only(f"layers.0.self_attn.{part}"), tiny_llama)
        assert site is not None
        assert site.parameters == (f"layers.0.self_attn.{part}.weight",)
    # Scores of a first token stand alone in their softmax, so queries have no gradient there.
    queries = first_input_site(evidence.only("layers.0.self_attn.q_proj"), tiny_llama)
    together = first_input_site(evidence, tiny_llama)
    assert queries is not None
    assert together is not None
    assert queries.span.rank == together.span.rank - len(TEXTS)


def test_a_model_of_one_block_has_no_site_in_block_1(tiny_llama):
    hf = tiny_llama.to().hf
    hf.model.layers = hf.model.layers[:1]
    hf.config.num_hidden_layers = 1
    model = adapt(hf)
    assert tuple(site.name for site in prefix_sites(observe_gradients(model, TEXTS), model)) == NAMES[:2]


def test_float32_tensors_of_an_autocast_client_are_as_coarse_as_its_products(tiny_llama):
    """Their errors are those of bfloat16, whatever type they are sent in."""
    fine = observe_gradients(tiny_llama.to(dtype=torch.bfloat16), [[5, 17, 99], [400, 3, 8]])
    sent = replace(fine, gradients={name: tensor.float() for name, tensor in fine.gradients.items()})
    assert fine.compute_dtype is sent.compute_dtype is torch.bfloat16
    ranks = [first_input_site(evidence, tiny_llama).span.rank for evidence in (fine, sent)]
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize("defence", ["bf16", "noise:sigma=1e-6"])
@torch.no_grad()
def test_a_span_above_noise_has_the_rows_about_as_far_as_noise_leaves_them(tiny_bert, defence):
    clean = observe_gradients(tiny_bert, TEXTS, task="classification")
    evidence = parse_defence(defence)(clean, torch.Generator().manual_seed(0))
    site = output_site(evidence, tiny_bert)
    assert site is not None
    above = above_noise(evidence, tiny_bert, site)
    assert above.noise is not None
    assert above.parameters == site.parameters
    assert 0 < above.span.rank <= sum(map(len, TEXTS))
    rows = layer_inputs(tiny_bert, torch.tensor([TEXTS[0]]), site.parameters[0])[0]
    far, left = above.noise.squares(rows)
    assert float(far.sum() / left.sum()) < 4
