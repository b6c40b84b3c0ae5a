"""Fitted once, read the second time; damage and folders that cannot be written cost another fit, no error."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from unmask.attacks.kept_fits import fit_once

CPU = torch.device("cpu")


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Ask for a fit by its name; how often it was made."""
    monkeypatch.setenv("UNMASK_CACHE", str(tmp_path / "cache"))
    made: list[str] = []

    def fit(name: str) -> dict[str, torch.Tensor]:
        made.append(name)
        return {"slope": torch.arange(12.0).view(3, 4).T}  # not contiguous

    return lambda name, kind="fits": (dict(fit_once(kind, name, lambda: fit(name), CPU)), made)


def test_equal_names_are_fitted_once(asked):
    first, made = asked("weights 1")
    again, _ = asked("weights 1")
    assert torch.equal(first["slope"], again["slope"])
    assert made == ["weights 1"]
    asked("weights 2")
    asked("weights 1", "others")
    assert made == ["weights 1", "weights 2", "weights 1"]


def test_a_damaged_file_is_fitted_again(asked, tmp_path):
    asked("weights")
    (path,) = (tmp_path / "cache" / "fits").iterdir()
    path.write_bytes(path.read_bytes()[:50])
    found, made = asked("weights")
    assert len(made) == 2
    assert found["slope"].shape == (4, 3)
    assert len(asked("weights")[1]) == 2


@pytest.mark.parametrize("numbers", [0.0, float("nan")])
def test_other_numbers_are_not_taken(asked, tmp_path, numbers):
    asked("weights")
    (path,) = (tmp_path / "cache" / "fits").iterdir()
    with safe_open(path, "pt") as file:
        said = file.metadata()
    save_file({"slope": torch.full((4, 3), numbers)}, path, metadata=said)
    found, made = asked("weights")
    assert len(made) == 2
    assert float(found["slope"].sum()) == 66


def test_a_file_under_another_name_is_not_taken(asked, tmp_path):
    asked("weights")
    (path,) = (tmp_path / "cache" / "fits").iterdir()
    asked("other weights")
    (other,) = set((tmp_path / "cache" / "fits").iterdir()) - {path}
    other.write_bytes(path.read_bytes())
    assert len(asked("other weights")[1]) == 3


def test_a_folder_that_cannot_be_made_is_no_error(asked, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNMASK_CACHE", str(tmp_path / "file" / "below"))
    assert asked("weights")[0]["slope"].shape == (4, 3)
