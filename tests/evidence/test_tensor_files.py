"""Updates that are read one tensor at a time: what is not asked for is not read, and what is read is checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import unmask
from unmask.errors import EvidenceError
from unmask.evidence import GradientEvidence, files, load_evidence
from unmask.evidence.tensor_files import StoredTensors, TensorWriter, by_size, shapes_of
from unmask.models import Model
from unmask.protocols import observe_fedavg, observe_gradients

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49]]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "LARGE_BYTES", 1)
    return tmp_path / "update.safetensors"


@pytest.fixture
def stored(tiny_llama: Model, path: Path) -> GradientEvidence:
    observe_gradients(tiny_llama, TEXTS).save(path)
    return load_evidence(path)


def test_every_tensor_comes_back(tiny_llama, stored, path):
    plain = observe_gradients(tiny_llama, TEXTS).gradients
    assert isinstance(stored.gradients, StoredTensors)
    assert set(stored.gradients) == set(plain)
    assert all(torch.equal(stored.gradients[name], plain[name]) for name in plain)
    assert shapes_of(stored.gradients) == shapes_of(plain)
    with safe_open(path, framework="pt") as file:  # any reader of safetensors takes it
        assert all(torch.equal(file.get_tensor(name), plain[name]) for name in plain)


def test_opening_checking_and_shapes_read_next_to_nothing(tiny_llama, stored):
    whole = stored.gradients.num_bytes
    assert stored.gradients.num_bytes_read == 0
    shapes_of(stored.gradients), by_size(stored.gradients), len(stored.gradients)
    assert "no such tensor" not in stored.gradients
    assert stored.only("layers.0.").to("cpu").gradients.num_bytes < whole
    assert stored.gradients.num_bytes_read == 0
    stored.check(tiny_llama)
    assert stored.gradients.num_bytes_read < 0.1 * whole


def test_the_bag_of_words_reads_the_tensors_that_it_uses_and_no_others(tiny_llama, stored):
    recovery = unmask.recover_text(stored, tiny_llama, attack="bag-of-words")
    assert recovery.value.token_set == {token for text in TEXTS for token in text[:-1]}
    places = stored.gradients.places
    used = sum(places[name].num_bytes for name in recovery.used)
    assert stored.gradients.file.checked < set(stored.gradients)
    assert not any("layers.1." in name and "norm" not in name for name in stored.gradients.file.checked)
    assert stored.gradients.num_bytes_read < 0.1 * stored.gradients.num_bytes + 4 * used


@pytest.mark.parametrize("is_delta", [False, True])
def test_texts_are_recovered_and_confirmed_as_from_memory(tiny_llama, path, is_delta):
    observe = observe_fedavg if is_delta else observe_gradients
    options = {"local_steps": 1, "learning_rate": 0.05} if is_delta else {}
    seen = observe(tiny_llama, TEXTS, **options)
    seen.save(path)
    plain, stored = unmask.recover_text(seen, tiny_llama), unmask.recover_text(load_evidence(path), tiny_llama)
    claimed = [[replace(text, residual=0.0) for text in found.value.texts] for found in (stored, plain)]
    assert claimed[0] == claimed[1]  # what is left is measured in another order of sums
    assert (stored.value.token_set, stored.status, stored.reason) == (plain.value.token_set, plain.status, plain.reason)


def test_what_cannot_be_confirmed_for_lack_of_memory_says_so(tiny_llama, path, monkeypatch):
    observe_fedavg(tiny_llama, TEXTS, local_steps=3, learning_rate=0.05).save(path)
    monkeypatch.setenv("UNMASK_MEMORY_GB", "0.000001")
    recovery = unmask.recover_text(load_evidence(path), tiny_llama)
    assert not recovery.value.certain
    assert "of memory" in recovery.reason
    assert "it was not done" in recovery.reason


def test_a_flipped_bit_is_seen_when_its_tensor_is_read(stored, path):
    name = max(stored.gradients, key=lambda each: stored.gradients.places[each].start)
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x10
    path.write_bytes(content)
    again = load_evidence(path)
    assert again.gradients[next(each for each in again.gradients if each != name)] is not None
    with pytest.raises(EvidenceError, match=f"'{name}' .* is damaged"):
        again.gradients[name]


def test_a_changed_header_is_seen_at_once(stored, path):
    content = path.read_bytes()
    assert content.count(b"next_token") == 1
    path.write_bytes(content.replace(b"next_token", b"next_tokem"))
    with pytest.raises(EvidenceError, match="damaged"):
        load_evidence(path)


def test_a_file_that_ends_early_is_refused(stored, path):
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(EvidenceError, match="not a whole safetensors file"):
        load_evidence(path)


def test_nan_is_refused_when_its_tensor_is_read(path):
    evidence = GradientEvidence({"a": torch.ones(3), "b": torch.ones(2)}, "0" * 32)
    evidence.gradients["b"][0] = float("nan")
    evidence.save(path)
    again = load_evidence(path)
    assert torch.equal(again.gradients["a"], torch.ones(3))
    with pytest.raises(EvidenceError, match="'b' holds 1 of 2 values"):
        again.gradients["b"]


def test_a_large_file_of_the_first_format_is_read_by_tensor_too(tiny_llama, path, monkeypatch):
    monkeypatch.setattr(files, "LARGE_BYTES", 2**40)
    observe_gradients(tiny_llama, TEXTS).save(path)
    monkeypatch.setattr(files, "LARGE_BYTES", 1)
    again = load_evidence(path)  # its one digest is compared tensor by tensor
    assert isinstance(again.gradients, StoredTensors)
    path.write_bytes(path.read_bytes()[:-1] + b"\x77")
    with pytest.raises(EvidenceError, match="damaged"):
        load_evidence(path)


def test_tensors_are_written_in_any_order_and_none_may_be_missing(tmp_path):
    tensors = {"a": torch.arange(3.0), "b": torch.randn(4, 5, dtype=torch.float64), "c": torch.zeros(0)}
    outlines = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    writer = TensorWriter(tmp_path / "file", outlines, lambda digests: {"digests": str(digests)})
    writer.put("b", tensors["b"])
    with pytest.raises(EvidenceError, match="2 tensors were not written, as 'a'"):
        writer.finish()
    with pytest.raises(EvidenceError, match="expected"):
        writer.put("a", torch.zeros(4))
    writer.put("c", tensors["c"])
    writer.put("a", tensors["a"])
    writer.finish()
    read = StoredTensors.open(tmp_path / "file", {}, lambda name, tensor: None)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert torch.equal(read.divided_by(2.0).divided_by(-1.0)["a"], tensors["a"] / -2)


def test_stored_evidence_is_saved_again(tiny_llama, stored, tmp_path):
    stored.save(tmp_path / "copy.safetensors")
    copy = load_evidence(tmp_path / "copy.safetensors").gradients
    assert all(torch.equal(copy[name], stored.gradients[name]) for name in copy)


def test_a_file_that_is_gone_is_said_to_be_gone(stored, path):
    path.unlink()
    with pytest.raises(EvidenceError, match="cannot be read any more"):
        stored.gradients[next(iter(stored.gradients))]


@pytest.mark.parametrize("digests", [None, ["a"], 3])
def test_digests_that_are_no_table_are_refused(stored, path, digests):
    """Files are data of strangers: any header may be in them."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["unmask"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    header.pop("digest")
    save_file(tensors, path, {"unmask": json.dumps({**header, "digests": digests})})
    with pytest.raises(EvidenceError, match=r"header of .* is damaged"):
        load_evidence(path)
