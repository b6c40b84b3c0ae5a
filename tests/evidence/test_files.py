"""Evidence on disk: whole or not at all, versioned, private, and never executed."""

from __future__ import annotations

import io
import json
import os
import pickle
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import unmask
from unmask.errors import EvidenceError, UnmaskError
from unmask.evidence import GradientEvidence, Task, Update, load_evidence
from unmask.evidence import files as evidence_files
from unmask.evidence.files import FORMAT, FORMAT_BY_TENSOR, write
from unmask.evidence.tensors import require_floats

# Examples share a folder: each overwrites the file of the one before.
quick = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
HEADER = {
    "format": FORMAT,
    "kind": "gradients",
    "model_fingerprint": "0123456789abcdef",
    "task": "next_token",
    "num_texts": 4,
    "update": "gradient",
    "compute_dtype": "float32",
}


@pytest.fixture
def evidence() -> GradientEvidence:
    generator = torch.Generator().manual_seed(0)
    tensors = {"h.0.weight": torch.randn(20, 30, generator=generator), "h.0.bias": torch.ones(7)}
    return GradientEvidence(tensors, "0123456789abcdef", task=Task.NEXT_TOKEN, num_texts=4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "update.safetensors"


def write_raw(path: Path, header: Any) -> Path:
    """A safetensors file with any header at all."""
    document = header if isinstance(header, str) else json.dumps(header)
    save_file({"a": torch.ones(2)}, path, metadata={"unmask": document})
    return path


# Round trips


def test_what_is_saved_is_what_is_loaded(evidence, path):
    assert evidence.save(path) == path
    loaded = load_evidence(path)
    assert type(loaded) is GradientEvidence
    assert {name: loaded.gradients[name].tolist() for name in loaded.gradients} == {
        name: evidence.gradients[name].tolist() for name in evidence.gradients
    }
    assert (loaded.task, loaded.num_texts, loaded.update) == (Task.NEXT_TOKEN, 4, Update.GRADIENT)


def test_the_public_name_is_the_same_function():
    assert unmask.load_evidence is load_evidence


def test_paths_may_be_strings(evidence, path):
    evidence.save(str(path))
    assert load_evidence(str(path)).num_texts == 4


@quick
@given(
    fingerprint=st.text(),
    task=st.sampled_from([None, *Task]),
    num_texts=st.none() | st.integers(1, 2**40),
    update=st.sampled_from(Update),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_every_header_comes_back(tmp_path, fingerprint, task, num_texts, update, dtype):
    tensors = {"weight": torch.ones(2, dtype=dtype)}
    before = GradientEvidence(tensors, fingerprint, task, num_texts, update, compute_dtype=dtype)
    after = load_evidence(before.save(tmp_path / "e.safetensors"))
    assert after.gradients["weight"].dtype == dtype
    assert {key: value for key, value in vars(after).items() if key != "gradients"} == {
        key: value for key, value in vars(before).items() if key != "gradients"
    }


RESERVED = ("__metadata__", "adapter/", "head/weight")


@quick
@given(
    st.dictionaries(
        st.text(min_size=1).filter(lambda name: not name.startswith(RESERVED)), st.integers(0, 5), max_size=5
    )
)
def test_every_set_of_names_comes_back(tmp_path, sizes):
    tensors = {name: torch.arange(float(size)) for name, size in sizes.items()}
    loaded = load_evidence(GradientEvidence(tensors, "f").save(tmp_path / "e.safetensors"))
    assert {name: tensor.tolist() for name, tensor in loaded.gradients.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("name", ["adapter/layer.lora_A.weight", "head/weight"])
def test_names_that_files_use_themselves_are_refused(name):
    with pytest.raises(EvidenceError, match="rename the tensor"):
        GradientEvidence({name: torch.ones(2)}, "f")


def test_views_and_shared_memory_come_back(path):
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {"whole": whole, "transposed": whole.T, "part": whole[1:, ::2], "same": whole}
    loaded = load_evidence(GradientEvidence(tensors, "f").save(path))
    assert all(torch.equal(loaded.gradients[name], tensor) for name, tensor in tensors.items())


def test_tensors_that_carry_gradients_are_saved_without(path):
    loaded = load_evidence(GradientEvidence({"a": torch.ones(2, requires_grad=True)}, "f").save(path))
    assert not loaded.gradients["a"].requires_grad


# The header


def test_the_header_is_versioned_and_readable_without_unmask(evidence, path):
    evidence.save(path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["unmask"])
    assert len(header.pop("digest")) == 32
    assert header == HEADER


def test_a_flipped_bit_is_no_evidence(evidence, path):
    """Anywhere in the tensors: one more embedding row that moves would be one more token that 'occurs'."""
    evidence.save(path)
    content = bytearray(path.read_bytes())
    for place in (len(content) - 1, len(content) - 7):
        path.write_bytes(bytes(b ^ (0x10 if n == place else 0) for n, b in enumerate(content)))
        with pytest.raises(EvidenceError, match="damaged"):
            load_evidence(path)
    path.write_bytes(bytes(content))
    load_evidence(path)


def test_a_file_of_the_first_edition_has_no_digest_and_is_read(path):
    assert load_evidence(write_raw(path, HEADER)).num_texts == HEADER["num_texts"]


def test_whole_numbers_are_no_gradients():
    with pytest.raises(EvidenceError, match="floating-point"):
        GradientEvidence({"a": torch.ones(2, dtype=torch.int64)}, "f")


def test_a_future_format_is_refused_with_what_to_do(path):
    with pytest.raises(
        EvidenceError, match=rf"format {FORMAT_BY_TENSOR + 1}, this version reads up to {FORMAT_BY_TENSOR}; upgrade"
    ):
        load_evidence(write_raw(path, HEADER | {"format": FORMAT_BY_TENSOR + 1}))


@pytest.mark.parametrize("version", [None, "1", 1.5, [1], 0, -1, True])
def test_a_format_that_never_was_is_refused(path, version):
    with pytest.raises(EvidenceError):
        load_evidence(write_raw(path, HEADER | {"format": version}))


@pytest.mark.parametrize("kind", ["weights", "", None, 3, ["gradients"], {}])
def test_an_unknown_kind_is_refused(path, kind):
    with pytest.raises(
        EvidenceError, match="known kinds are attention, attention_stack, cache, gradients, hidden, samples, vectors"
    ):
        load_evidence(write_raw(path, HEADER | {"kind": kind}))


@pytest.mark.parametrize("header", ["", "{", "[]", "null", '"text"', "{'format': 1}"])
def test_a_header_that_is_no_json_object_is_refused(path, header):
    with pytest.raises(EvidenceError):
        load_evidence(write_raw(path, header))


@pytest.mark.parametrize("missing", sorted(set(HEADER) - {"format", "kind"}))
def test_an_incomplete_header_is_refused(path, missing):
    header = {key: value for key, value in HEADER.items() if key != missing}
    with pytest.raises(EvidenceError, match=r"incomplete or damaged.*make the evidence again"):
        load_evidence(write_raw(path, header))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task", "summarise"),
        ("task", 3),
        ("update", None),
        ("compute_dtype", "float99"),
        ("compute_dtype", "Tensor"),
        ("compute_dtype", 32),
        ("num_texts", "many"),
        ("num_texts", -3),
    ],
)
def test_a_damaged_header_is_refused(path, field, value):
    with pytest.raises(EvidenceError):
        load_evidence(write_raw(path, HEADER | {field: value}))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=3,
)


@quick
@given(st.sampled_from(sorted(HEADER)), json_values)
def test_any_header_is_read_or_refused_never_a_crash(tmp_path, field, value):
    path = write_raw(tmp_path / "e.safetensors", HEADER | {field: value})
    with suppress(EvidenceError):
        load_evidence(path)


# Files that are something else


def test_a_missing_file_is_told_how_to_make_one(tmp_path):
    with pytest.raises(EvidenceError, match="make one with `unmask observe gradients … -o 'my file'`"):
        load_evidence(tmp_path / "my file")
    with pytest.raises(EvidenceError, match=r"there is no file .*none\.safetensors; make one with `unmask observe"):
        load_evidence(tmp_path / "none.safetensors")


def test_a_folder_is_not_evidence(tmp_path):
    with pytest.raises(EvidenceError, match="is a folder"):
        load_evidence(tmp_path)


def test_a_foreign_safetensors_file_is_told_how_to_be_wrapped(path):
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(EvidenceError, match=r"unmask header.*GradientEvidence\.of\(model, tensors\)"):
        load_evidence(path)
    save_file({"a": torch.ones(2)}, path, metadata={"format": "pt"})
    with pytest.raises(EvidenceError, match="unmask header"):
        load_evidence(path)


def test_a_truncated_file_is_refused_wherever_it_ends(evidence, path):
    whole = evidence.save(path).read_bytes()
    for length in [*range(24), *range(24, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(EvidenceError, match="truncated"):
            load_evidence(path)


@quick
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(tmp_path, content):
    path = tmp_path / "e.safetensors"
    path.write_bytes(content)
    with pytest.raises(EvidenceError):
        load_evidence(path)


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def pickles(trap: Trap) -> dict[str, bytes]:
    zipped, legacy = io.BytesIO(), io.BytesIO()
    torch.save({"a": torch.ones(2), "trap": trap}, zipped)
    torch.save({"a": torch.ones(2), "trap": trap}, legacy, _use_new_zipfile_serialization=False)
    dumped = {f"protocol {version}": pickle.dumps(trap, version) for version in (0, 2, pickle.HIGHEST_PROTOCOL)}
    return dumped | {"torch.save": zipped.getvalue(), "torch.save, legacy": legacy.getvalue()}


def test_a_pickle_is_refused_without_being_run(tmp_path):
    marker = tmp_path / "executed"
    for kind, content in pickles(Trap(marker)).items():
        path = tmp_path / "update.safetensors"
        path.write_bytes(content)
        with pytest.raises(EvidenceError) as error:
            load_evidence(path)
        assert not marker.exists(), kind
        if kind != "protocol 0":  # plain text, told from other files only by reading it
            assert "pickle or a torch.save archive" in str(error.value), kind
            assert "safetensors.torch.save_file" in str(error.value), kind


def test_the_trap_would_have_worked(tmp_path):
    marker = tmp_path / "executed"
    pickle.loads(pickles(Trap(marker))["protocol 2"])
    assert marker.exists()


# Writing


def test_evidence_is_for_its_owner_alone(evidence, path):
    """Evidence is as sensitive as the secret in it, so not even an existing file's wider permissions are kept."""
    path.write_text("old")
    path.chmod(0o666)
    previous = os.umask(0)
    try:
        evidence.save(path)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["save_file", "fsync", "replace"])
def test_a_failing_save_leaves_the_old_file_and_nothing_else(evidence, path, monkeypatch, step, error):
    evidence.save(path)
    before = path.read_bytes()

    def fail(*arguments: Any, **options: Any) -> None:
        if step == "save_file":
            Path(arguments[1]).write_bytes(b"half of")
        raise error

    owner = evidence_files if step == "save_file" else evidence_files.os
    with monkeypatch.context() as patch:
        patch.setattr(owner, step, fail)
        with pytest.raises(type(error)):
            GradientEvidence({"other": torch.ones(3)}, "f").save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("tensors", "header"),
    [({"a": torch.ones(2)}, {"side_knowledge": object()}), ({"a": torch.ones(2).to_sparse()}, {})],
)
def test_what_cannot_be_written_leaves_no_file(path, tensors, header):
    with pytest.raises(Exception):  # noqa: B017, PT011 (json's, torch's or safetensors' own)
        write(path, "gradients", tensors, header)
    assert os.listdir(path.parent) == []


def test_a_save_replaces_the_old_file(evidence, path):
    path.write_text("old")
    evidence.save(path)
    assert load_evidence(path).num_texts == 4
    assert os.listdir(path.parent) == [path.name]


def test_a_missing_folder_is_named(evidence, tmp_path):
    with pytest.raises(EvidenceError, match=r"folder .*runs does not exist; create it first"):
        evidence.save(tmp_path / "runs" / "update.safetensors")


def test_saving_onto_a_folder_is_a_callers_mistake(evidence, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    with pytest.raises(UnmaskError):
        evidence.save(folder)
    assert os.listdir(tmp_path) == ["runs"]


# Values


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nan_and_inf_are_refused_by_name_and_number(bad, dtype):
    tensor = torch.zeros(3, 4, dtype=dtype)
    tensor[0, 1] = tensor[2, 3] = bad
    with pytest.raises(EvidenceError, match=r"'h\.0\.weight' holds 2 of 12 values that are NaN or Inf"):
        require_floats({"fine": torch.ones(2), "h.0.weight": tensor})


def test_what_cannot_be_squared_is_refused():
    with pytest.raises(EvidenceError, match=r"holds 1 of 2 values that are NaN or Inf \(or above 1e\+100\)"):
        require_floats({"a": torch.tensor([1e200, 1.0], dtype=torch.float64)})


def test_finite_values_pass():
    limits = torch.finfo(torch.float32)
    require_floats({"a": torch.tensor([limits.max, limits.min, limits.tiny, 0.0]), "empty": torch.ones(0)})


def test_nan_in_a_file_is_refused_at_the_door(path):
    tensors = {"a": torch.tensor([1.0, float("nan")])}
    save_file(tensors, path, metadata={"unmask": json.dumps(HEADER)})
    with pytest.raises(EvidenceError, match="'a' holds 1 of 2 values"):
        load_evidence(path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_becomes_float32(dtype):
    """Torch has no maximum of float8, and no products."""
    tensor = torch.tensor([0.5, -2.0]).to(dtype)
    found = require_floats({"a": tensor, "b": torch.ones(2, dtype=torch.float64)})
    assert torch.equal(found["a"], torch.tensor([0.5, -2.0]))
    assert found["b"].dtype is torch.float64


def test_tensors_without_names_are_refused():
    with pytest.raises(EvidenceError, match="tensors must come with their names, got list; pass a dictionary"):
        require_floats([torch.ones(2)])
