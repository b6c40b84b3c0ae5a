from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.audit.made import save_bert

import unmask
from unmask.errors import EvidenceError
from unmask.integrations.captured_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    is_adapter,
    read_scale,
    read_tensors,
    require_start,
    subtract,
    weights_of,
)

FACTORS = ("base_model.model.h.0.attn.c_attn.lora_A.weight", "base_model.model.h.1.mlp.c_fc.lora_B.weight")


def write_adapter(folder: Path, **config: object) -> dict[str, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    factors = {name: torch.ones(4, 8) for name in FACTORS}
    save_file(factors, folder / ADAPTER)
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(said))
    return factors


def test_files_and_folders_are_read_and_whole_numbers_left_out(tmp_path):
    tensors = {"w": torch.ones(2, 3, dtype=torch.bfloat16), "position_ids": torch.arange(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert list(read_tensors(tmp_path / "model.safetensors")) == list(read_tensors(tmp_path)) == ["w"]
    shards = tmp_path / "shards"
    shards.mkdir()
    save_file({"a": torch.ones(1)}, shards / "1.safetensors")
    save_file({"b": torch.ones(1)}, shards / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    assert sorted(read_tensors(shards)) == ["a", "b"]


@pytest.mark.parametrize("name", ["update.pt", "pytorch_model.bin", "disguised.safetensors"])
def test_a_pickle_is_refused_with_the_lines_that_convert_it(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps({"w": [1.0]}))
    with pytest.raises(EvidenceError, match=r"not opened; convert it .*weights_only=True.*save_file"):
        read_tensors(tmp_path / name)


@pytest.mark.parametrize(
    ("write", "part"),
    [
        (lambda path: None, "there is no file or folder"),
        (lambda path: path.write_bytes(b"\x10\0\0\0\0\0\0\0{"), "is not a whole safetensors file"),
        (lambda path: save_file({"ids": torch.arange(2)}, path), "none of floating-point numbers"),
        (lambda path: path.mkdir(), "holds neither adapter_model.safetensors nor model.safetensors"),
    ],
)
def test_files_that_hold_no_tensors(tmp_path, write, part):
    write(tmp_path / "x.safetensors")
    with pytest.raises(EvidenceError, match=part):
        read_tensors(tmp_path / "x.safetensors")


def test_a_folder_of_pickles_alone_says_how_to_convert_them(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(EvidenceError, match="weights_only=True"):
        read_tensors(tmp_path)


def test_the_scale_is_alpha_over_rank_by_module_where_it_differs(tmp_path):
    assert read_scale(tmp_path, write_adapter(tmp_path)) == 2.0
    assert read_scale(tmp_path, write_adapter(tmp_path, use_rslora=True)) == 4.0
    patterns = {"rank_pattern": {"c_fc": 16}, "alpha_pattern": {"mlp.c_fc": 4}}
    assert read_scale(tmp_path, write_adapter(tmp_path, **patterns)) == {"h.0.attn.c_attn": 2.0, "h.1.mlp.c_fc": 0.25}
    assert is_adapter(tmp_path)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"peft_type": "ADALORA"}, "'ADALORA', which cannot be read"),
        ({"use_dora": True}, "is DoRA"),
        ({"lora_bias": True}, "LoRA with a bias"),
        ({"r": "4"}, "numbers are expected"),
    ],
)
def test_other_adapters_are_refused_by_name(tmp_path, config, part):
    factors = write_adapter(tmp_path, **config)
    with pytest.raises(EvidenceError, match=part):
        read_scale(tmp_path, factors)


def test_differences_are_taken_in_float32_and_what_did_not_move_is_left_out():
    before = {"a": torch.full((2,), 1.0, dtype=torch.bfloat16), "b": torch.ones(2), "gone": torch.ones(1)}
    after = {"a": torch.full((2,), 1.0078125, dtype=torch.bfloat16), "b": torch.ones(2), "new": torch.ones(1)}
    moved = subtract(after, before)
    assert list(moved) == ["a"]
    assert moved["a"].dtype is torch.float32
    assert moved["a"].tolist() == [0.0078125] * 2


@pytest.mark.parametrize(
    ("after", "part"),
    [
        ({"b": torch.ones(2)}, "no name in common"),
        ({"a": torch.ones(3)}, "has shape"),
        ({"a": torch.ones(2)}, "are the same, so there is no update"),
    ],
)
def test_weights_that_cannot_be_subtracted(after, part):
    with pytest.raises(EvidenceError, match=part):
        subtract(after, {"a": torch.ones(2)})


def test_weights_of_another_round_are_no_start(tmp_path):
    model = unmask.load_model(str(save_bert(tmp_path / "bert")))
    own = weights_of(model)
    require_start(model, own)
    with pytest.raises(EvidenceError, match="are not those of --model"):
        require_start(model, {name: 2 * weight for name, weight in own.items()})
