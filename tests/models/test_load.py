"""From a transformers model, or something else, to its adapter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from tests.audit.made import save_llama
from tests.models.families import build
from tests.tiny_models import gpt2_config

import unmask
from unmask.errors import EvidenceError, InputError, UnsupportedModelError
from unmask.models.catalog import resolve
from unmask.models.load import adapt, load_model, require_model
from unmask.models.pooling import recipe_of


@pytest.mark.parametrize(
    "source", [SimpleNamespace(config=SimpleNamespace(model_type="x")), torch.nn.Linear(2, 2), None]
)
def test_what_is_no_transformers_model_is_refused(source):
    with pytest.raises(
        UnsupportedModelError, match=f"an object of type {type(source).__name__} is no transformers model"
    ):
        unmask.load_model(source)


@pytest.mark.parametrize(
    ("build", "part"),
    [
        (
            lambda: transformers.MambaModel(transformers.MambaConfig(hidden_size=32, num_hidden_layers=1)),
            "no attention",
        ),
        (
            lambda: transformers.ViTModel(transformers.ViTConfig(hidden_size=32, num_hidden_layers=1)),
            "no token embedding",
        ),
    ],
)
def test_models_without_attention_or_without_text_are_refused_with_the_reason(build, part):
    with pytest.raises(UnsupportedModelError, match=part):
        unmask.load_model(build())


def test_a_model_to_which_a_token_is_several_ids_is_refused():
    for concatenated in (True, False):
        config = transformers.RoCBertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            pronunciation_vocab_size=9,
            shape_vocab_size=9,
            concat_input=concatenated,
        )
        with pytest.raises(UnsupportedModelError, match=r"several ids \(input_ids, input_shape_ids, input_pron"):
            adapt(transformers.RoCBertForMaskedLM(config))


def test_wrapped_models_are_taken_as_they_come(tiny_gpt2):
    assert unmask.load_model(torch.nn.DataParallel(tiny_gpt2.hf)).hf is tiny_gpt2.hf
    assert unmask.load_model(torch.compile(tiny_gpt2.hf)).hf is tiny_gpt2.hf


def test_a_model_in_memory_is_used_as_it_is(tiny_gpt2):
    model = unmask.load_model(tiny_gpt2.hf)
    assert model.hf is tiny_gpt2.hf
    assert model.adapters is None


def test_what_is_no_adapter_is_refused_with_the_callers_error():
    bare = transformers.GPT2Model(gpt2_config())
    for error in (InputError, EvidenceError):
        with pytest.raises(error, match=r"load_model.*got GPT2Model"):
            require_model(bare, error)
    require_model(adapt(bare))


def test_attention_that_cannot_be_watched_is_replaced_in_a_copy():
    hf = build("Llama")
    hf.set_attn_implementation("flex_attention")
    model = adapt(hf)
    assert not model.problem
    assert (hf.config._attn_implementation, model.config._attn_implementation) == ("flex_attention", "eager")
    assert model.parameter("embed_tokens.weight") is hf.model.embed_tokens.weight


def test_a_sentence_transformer_is_its_transformer_and_its_recipe(minilm, tmp_path):
    sentence = pytest.importorskip("sentence_transformers", reason="run: pip install sentence-transformers")
    source = sentence.SentenceTransformer(str(resolve("minilm-l6")), device="cpu")
    model = load_model(source)
    assert model.hf is source[0].auto_model
    assert model.fingerprint() == minilm.fingerprint()
    assert recipe_of(model) == recipe_of(minilm)
    source.save_pretrained(str(tmp_path / "saved"))
    assert load_model(tmp_path / "saved").fingerprint() == minilm.fingerprint()
    assert recipe_of(load_model(tmp_path / "saved")) == recipe_of(minilm)


def test_a_sentence_transformer_of_no_folder_is_refused(minilm):
    sentence = pytest.importorskip("sentence_transformers", reason="run: pip install sentence-transformers")
    source = sentence.SentenceTransformer(str(resolve("minilm-l6")), device="cpu")
    source[0].auto_model.config._name_or_path = ""
    with pytest.raises(InputError, match=r"save it, model\.save_pretrained"):
        load_model(source)


@pytest.mark.parametrize("name", ["bf16", "torch.bfloat16", torch.bfloat16])
def test_a_precision_has_a_name(tmp_path, name):
    assert load_model(str(save_llama(tmp_path)), dtype=name).dtype is torch.bfloat16


def test_a_model_in_half_precision_is_made_of_the_same_parts(smollm2):
    """Rounding once hid the sums of some blocks: a precise copy is asked instead. The model stays as it is."""
    half = unmask.load_model(smollm2.to(dtype=torch.bfloat16).hf)
    assert half.dtype is torch.bfloat16
    assert half.problem == ""
    assert half.layout == smollm2.layout
