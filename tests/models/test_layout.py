"""What is found around the blocks: embeddings, positions, heads and poolers; and models that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.models.families import build
from tests.models.own_classes import OwnConfig, OwnForCausalLM
from tests.tiny_models import bert_config, random_model

from unmask.errors import UnsupportedModelError
from unmask.models import adapt
from unmask.models.layout import ModelLayout, ask_model
from unmask.models.parts import find_body
from unmask.models.wiring import Sum

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def ask(hf: Any) -> ModelLayout:
    return ask_model(hf, find_body(hf))[0]


@pytest.mark.parametrize(("pad", "offset"), [(0, 1), (1, 2)])
def test_positions_of_a_roberta_start_behind_its_padding(pad, offset):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.RobertaConfig(vocab_size=500, max_position_embeddings=66, pad_token_id=pad, **sizes)
    embedding = ask(random_model(transformers.RobertaForMaskedLM, config)).embedding
    assert embedding.offset == offset
    assert embedding.position == "embeddings.position_embeddings"
    assert embedding.type == "embeddings.token_type_embeddings"


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "scale"), [("Granite", 12.0), ("Gemma", 8.0), ("BioGpt", 8.0), ("Llama", 1.0), ("OPT", 1.0)]
)
def test_scaled_embeddings(name, scale):
    """By a factor in the model (Granite), or in the embedding itself (Gemma, BioGpt)."""
    model = adapt(build(name))
    tokens, positions = torch.tensor([5, 9]), torch.tensor([0, 1])
    rows = scale * model.parameter(model.token_embedding)[tokens]
    if model.position_embedding is not None:
        rows = rows + model.parameter(model.position_embedding)[positions + model.layout.embedding.offset]
    torch.testing.assert_close(model.embed(tokens, positions), rows)


@pytest.mark.parametrize(
    ("name", "scale", "softcap"),
    [("Gemma2", 1.0, 3.0), ("Cohere", 0.0625, None), ("Granite", 0.125, None), ("Llama", 1.0, None)],
)
def test_the_scale_and_the_bound_of_logits(name, scale, softcap):
    head = ask(build(name)).head
    assert (head.scale, head.softcap) == (pytest.approx(scale), pytest.approx(softcap))
    assert head.input == Sum({"stream": 1.0})


def test_a_pooler_is_beside_the_way_to_the_last_states():
    for kind, beside in ((transformers.BertModel, ("pooler.",)), (transformers.BertForMaskedLM, ())):
        layout = ask(random_model(kind, bert_config()))
        assert layout.beside == beside
        assert not layout.causal


def test_a_model_without_attention_is_refused():
    config = transformers.MambaConfig(vocab_size=500, hidden_size=64, num_hidden_layers=1, state_size=4)
    with pytest.raises(UnsupportedModelError, match="no attention was found in MambaForCausalLM"):
        ask(transformers.MambaForCausalLM(config))


def test_a_model_that_does_not_run_on_texts_alone_is_refused():
    class Looking(OwnForCausalLM):
        def forward(self, **_: Any) -> None:
            raise ValueError("pictures are missing\nand more is said")

    with pytest.raises(UnsupportedModelError, match=r"Looking could not be run on .*: pictures are missing$"):
        ask(Looking(OwnConfig()))


def test_the_model_is_left_as_it_was():
    hf = build("Llama").train()
    hf.model.norm.eval().requires_grad_(False)
    ask(hf)
    assert hf.training
    assert not hf.model.norm.training
    assert not hf.model.norm.weight.requires_grad
    assert all(weight.grad is None for weight in hf.parameters())


REFUSED = {
    "Longformer": {"attention_window": [4, 4], **SMALL},
    "ViT": {"image_size": 8, "patch_size": 4, **SMALL},
    "GPT2": {"vocab_size": 40, "n_positions": 4, "n_embd": 32, "n_layer": 1, "n_head": 2},
    "Hubert": {"conv_dim": (8,), "conv_stride": (5,), "conv_kernel": (10,), "num_conv_pos_embeddings": 16, **SMALL},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_asked_is_refused_in_a_sentence(name):
    config = getattr(transformers, f"{name}Config")(**REFUSED[name])
    with pytest.raises(UnsupportedModelError, match=r"^\w+ (could not|ran|has no|makes)|what \w+ makes|no attention"):
        adapt(getattr(transformers, f"{name}Model")(config))


def test_the_encoder_of_t5_alone():
    config = transformers.T5Config(vocab_size=500, d_model=64, d_ff=64, num_layers=2, num_heads=4, d_kv=16)
    model = adapt(transformers.T5EncoderModel(config).eval())
    assert not model.causal
    assert not model.problem
