"""Where a model keeps what: names that do not depend on its head, sizes, and blocks that share their weights."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.models.families import build
from tests.tiny_models import bert_config, gpt2_config, llama_sizes, random_model

from unmask.models import adapt
from unmask.models.linear import Role
from unmask.models.parts import find_body


def test_a_classifier_and_a_language_model_name_the_same_weights_alike(tiny_gpt2):
    classifier = adapt(random_model(transformers.GPT2ForSequenceClassification, gpt2_config()))
    bare = adapt(random_model(transformers.GPT2Model, gpt2_config()))
    names = {model: {name for name, _ in model.named_parameters()} for model in (tiny_gpt2, classifier, bare)}
    assert names[tiny_gpt2] == names[bare]  # the output layer is tied to the token embedding
    assert names[classifier] - names[bare] == {"score.weight"}
    assert "h.0.attn.c_attn.weight" in names[bare]
    assert tiny_gpt2.canonical_name("transformer.h.0.attn.c_attn.weight") == "h.0.attn.c_attn.weight"
    assert classifier.canonical_name("score.weight") == "score.weight"


@pytest.mark.parametrize("kind", [transformers.LlamaForCausalLM, transformers.LlamaForSequenceClassification])
def test_every_canonical_name_leads_to_its_parameter(kind):
    model = adapt(random_model(kind, transformers.LlamaConfig(**llama_sizes())))
    assert all(model.parameter(name) is parameter for name, parameter in model.named_parameters())
    with pytest.raises(AttributeError):
        model.parameter("model.layers.0.self_attn.q_proj.weight")


def test_the_output_layer_has_a_name_of_its_own_unless_it_is_tied(tiny_llama, tiny_qwen2, tiny_bert):
    assert tiny_llama.unembedding_name == "lm_head.weight"
    assert tiny_qwen2.unembedding_name == "embed_tokens.weight"
    headless = adapt(random_model(transformers.BertModel, bert_config()))
    assert tiny_bert.has_language_head
    assert not headless.has_language_head
    assert headless.unembedding_name is None


def test_the_body_is_found_where_a_class_does_not_say_where_it_is():
    hf = build("Llama4")
    assert hf.base_model is hf
    assert find_body(hf) is hf.model
    assert find_body(hf.model) is hf.model


@pytest.mark.parametrize(
    ("name", "positions", "learned"),
    [("OPT", 64, True), ("Roberta", 65, True), ("GPT2", 64, True), ("Mpt", 64, False), ("Bloom", 2048, False)],
)
def test_the_longest_text(name, positions, learned):
    """Learned positions without the rows that are skipped, a limit by any of its names, or 2048 without a limit."""
    model = adapt(build(name))
    assert (model.max_positions, model.learned_positions) == (positions, learned)
    tokens = torch.full((1, min(positions, 65)), 7)
    assert len(model.hidden_states(tokens, num_blocks=1)) == 2


def test_widths_of_the_stream_of_the_last_states_and_of_heads():
    projected, plain = adapt(build("OPT with projections")), adapt(build("OPT"))
    assert (projected.width, projected.final_width) == (64, 32)
    assert (plain.width, plain.final_width) == (64, 64)
    latent = adapt(build("DeepseekV3"))
    assert (latent.head_width, latent.value_width) == (32, 16)
    assert (plain.head_width, plain.value_width) == (16, 16)


def test_the_shortest_window_is_half_of_what_the_configuration_names(tiny_llama):
    assert adapt(build("GPTNeo with a window")).shortest_window == 2
    assert tiny_llama.shortest_window > tiny_llama.max_positions


def test_blocks_that_share_their_weights_are_known(tiny_bert):
    assert adapt(build("Albert")).is_shared(0)
    assert not tiny_bert.is_shared(0)


def test_layers_by_role_or_none(tiny_llama, tiny_gpt2):
    gate = tiny_llama.weight(Role.MLP_GATE, 1)
    assert torch.equal(gate, tiny_llama.body.layers[1].mlp.gate_proj.weight.T)
    assert tiny_gpt2.weight(Role.MLP_GATE, 1) is None
    assert tiny_gpt2.linear(Role.MLP_GATE, 1) is None


def test_token_types_are_counted(tiny_bert, tiny_llama):
    assert (tiny_bert.num_token_types, tiny_llama.num_token_types) == (2, 1)
