"""Poolings of states, frames of texts, and the recipe that a model's folder states."""

from __future__ import annotations

import json

import pytest
import torch

from unmask.errors import InputError, UnsupportedModelError
from unmask.models.pooling import (
    EmbeddingRecipe,
    Pooling,
    max_length_of,
    prefix_tokens,
    prompt_of,
    recipe_of,
)
from unmask.protocols.batch import make_batch

STATES = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
MASKS = {
    "right": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool),
    "left": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool),
}
SLOW = {
    "mean": lambda rows: rows.mean(0),
    "cls": lambda rows: rows[0],
    "last": lambda rows: rows[-1],
    "weighted_mean": lambda rows: sum((i + 1) * row for i, row in enumerate(rows)) / sum(range(1, len(rows) + 1)),
}


@pytest.mark.parametrize("side", MASKS)
@pytest.mark.parametrize("pooling", SLOW)
def test_pooling_is_the_slow_obvious_one(pooling, side):
    """Texts one by one, in a loop."""
    mask = MASKS[side]
    vectors = EmbeddingRecipe(Pooling(pooling), normalise=False).pool(STATES, mask)
    for row in range(2):
        assert torch.allclose(vectors[row], SLOW[pooling](STATES[row][mask[row]]), atol=1e-6)


def test_a_cut_follows_the_normalisation():
    mask = MASKS["right"]
    whole = EmbeddingRecipe().pool(STATES, mask)
    assert torch.allclose(whole.norm(dim=1), torch.ones(2))
    cut = EmbeddingRecipe(dimensions=3).pool(STATES, mask)
    assert torch.equal(cut, whole[:, :3])
    again = EmbeddingRecipe(dimensions=3, renormalise=True).pool(STATES, mask)
    assert torch.allclose(again, cut / cut.norm(dim=1, keepdim=True))


@pytest.mark.parametrize(("setting", "value"), [("pooling", "max"), ("dimensions", 0)])
def test_a_recipe_that_is_none_is_refused(setting, value):
    with pytest.raises(InputError, match=f"{setting} must be"):
        EmbeddingRecipe(**{setting: value})


def test_a_framed_text_is_what_the_tokenizer_makes(minilm, smollm2):
    for model in (minilm, smollm2):
        opening, closing = model.special_frame
        whole = model.encode("The garden was quiet.")
        inner = whole[len(opening) : len(whole) - len(closing)]
        recipe = EmbeddingRecipe()
        assert recipe.frame(model, inner) == whole
        assert torch.equal(recipe.frame(model, torch.tensor([inner, inner])), torch.tensor([whole, whole]))
    assert minilm.special_frame == ((101,), (102,))


@pytest.mark.parametrize("name", ["minilm", "smollm2"])
def test_prefixes_are_the_tokens_that_every_text_begins_with(name, request):
    model = request.getfixturevalue(name)
    prefix = prefix_tokens(model, "query: ")
    opening, _ = model.special_frame
    assert prefix
    for text in ("Nothing else.", "4 people"):
        assert tuple(model.encode(f"query: {text}"))[len(opening) : len(opening) + len(prefix)] == prefix
    assert prefix_tokens(model, "") == ()


def test_a_model_without_a_tokenizer_has_no_frame(tiny_bert):
    assert EmbeddingRecipe(prefix=(5,)).frame(tiny_bert, [7, 8]) == [5, 7, 8]


def test_embedding_is_the_pooled_forward_pass(tiny):
    batch = make_batch(tiny, [[5, 17, 99, 17, 250], [400, 3, 8]])
    with torch.no_grad():
        vectors = EmbeddingRecipe(normalise=False).embed(tiny, batch.tokens, batch.mask)
        states = tiny.body(input_ids=batch.tokens, attention_mask=batch.mask.long()).last_hidden_state
    for row in range(2):
        assert torch.allclose(vectors[row], states[row][batch.mask[row]].mean(0), atol=1e-5)
    assert EmbeddingRecipe(dimensions=9).width(tiny) == 9
    assert EmbeddingRecipe().width(tiny) == tiny.final_width


# Folders


def test_minilm_states_its_recipe(minilm):
    assert recipe_of(minilm) == EmbeddingRecipe(Pooling.MEAN, normalise=True)
    assert max_length_of(minilm) == 256
    assert prompt_of(minilm) == ""


def test_models_without_a_folder_have_the_usual_recipe(tiny_bert, tiny_llama):
    assert recipe_of(tiny_bert) == EmbeddingRecipe(Pooling.MEAN)
    assert recipe_of(tiny_llama) == EmbeddingRecipe(Pooling.LAST)
    assert max_length_of(tiny_llama) == tiny_llama.max_positions


def folder_of(model, folder, pooling, modules=("Transformer", "Pooling"), settings=None):
    """A copy of the model that says that it came from a folder of sentence-transformers."""
    (folder / "1_Pooling").mkdir()
    paths = {"Pooling": "1_Pooling"}
    listed = [{"type": f"sentence_transformers.models.{name}", "path": paths.get(name, "")} for name in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings or {}))
    copied = model.to()
    copied.config._name_or_path = str(folder)
    return copied


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, Pooling.CLS),
        ({"pooling_mode_mean_tokens": True}, Pooling.MEAN),
        ({"pooling_mode_lasttoken": True}, Pooling.LAST),
        ({"pooling_mode_weightedmean_tokens": True}, Pooling.WEIGHTED_MEAN),
        ({"pooling_mode": "cls"}, Pooling.CLS),
        ({"pooling_mode": ["lasttoken"]}, Pooling.LAST),
        ({}, Pooling.MEAN),
    ],
)
def test_old_and_new_folders_are_read(tiny_bert, tmp_path, config, pooling):
    assert recipe_of(folder_of(tiny_bert, tmp_path, config)) == EmbeddingRecipe(pooling, normalise=False)


def test_the_default_prompt_is_a_prefix(minilm, tmp_path):
    settings = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    modules = ("Transformer", "Pooling", "Normalize")
    model = folder_of(minilm, tmp_path, {"pooling_mode_mean_tokens": True}, modules, settings)
    assert recipe_of(model).prefix == tuple(model.encode("query:")[1:-1])
    assert recipe_of(model).normalise


@pytest.mark.parametrize(
    ("config", "modules", "said"),
    [
        ({"pooling_mode": "max"}, ("Transformer", "Pooling"), "pools by max"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, ("Pooling",), "pools by cls and mean"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, ("Pooling",), "leaves its prompt out"),
        ({}, ("Transformer", "Pooling", "Dense"), "modules Dense"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tiny_bert, tmp_path, config, modules, said):
    with pytest.raises(UnsupportedModelError, match=said):
        recipe_of(folder_of(tiny_bert, tmp_path, config, modules))


def test_a_damaged_folder_is_refused(tiny_bert, tmp_path):
    model = folder_of(tiny_bert, tmp_path, {})
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(InputError, match="is no JSON"):
        recipe_of(model)
