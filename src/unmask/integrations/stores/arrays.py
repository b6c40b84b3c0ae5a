"""Plain arrays: .npy, .npz and safetensors. Nothing that is pickled is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from unmask.errors import EvidenceError
from unmask.evidence.foreign_files import HEADER, evidence_already, numpy_error, open_numpy
from unmask.evidence.vectors import half_steps_of
from unmask.integrations.stores.stored import StoredVectors, choose_one, stored_rows

_MATRIX = "a matrix of floats, (vectors, numbers)"


def read_npy(path: Path, collection: str | None, limit: int | None, model_width: int | None) -> StoredVectors:
    """One array."""
    array = open_numpy(path)
    rows = array[None] if array.ndim == 1 else array
    return stored_rows(rows[:limit] if rows.ndim else rows, None, path.name, model_width)


def read_npz(path: Path, collection: str | None, limit: int | None, model_width: int | None) -> StoredVectors:
    """One array of several."""
    name, array = _choose(path, collection, model_width)
    return stored_rows(array[:limit], None, f"'{name}' of {path.name}")


def read_rows(path: Path, name: str | None, limit: int | None) -> np.ndarray:
    """Rows of floats as they are, (rows, numbers), from .npy or .npz."""
    if path.suffix not in (".npy", ".npz"):
        raise EvidenceError(f"{path} must be a .npy or .npz file; save the rows with numpy.save('rows.npy', rows)")
    if not path.is_file():
        raise EvidenceError(f"there is no file {path}")
    rows = _choose(path, name, None)[1] if path.suffix == ".npz" else open_numpy(path)
    rows = rows[None] if rows.ndim == 1 else rows
    if rows.ndim != 2 or rows.dtype.kind != "f" or not len(rows):
        expected = "(rows, numbers)" + ("; take each prompt's last position, logits[:, -1]" if rows.ndim == 3 else "")
        raise EvidenceError(f"{path} holds {rows.dtype} of shape {rows.shape}; expected floats, {expected}")
    return np.ascontiguousarray(rows[:limit].astype(rows.dtype.newbyteorder("=")))


def _choose(path: Path, collection: str | None, model_width: int | None) -> tuple[str, np.ndarray]:
    with open_numpy(path) as archive:
        try:
            arrays = {name: archive[name] for name in archive.files}
        except ValueError as error:
            raise numpy_error(path, error) from None
    shapes = {name: array.shape for name, array in arrays.items() if array.dtype.kind == "f"}
    held = [f"'{name}' of {array.dtype} {array.shape}" for name, array in arrays.items()]
    name = choose_one(fitting(shapes, model_width), collection, "array", path, _MATRIX, held)
    return name, arrays[name]


def read_safetensors(path: Path, collection: str | None, limit: int | None, model_width: int | None) -> StoredVectors:
    """One tensor of several."""
    try:
        with safe_open(path, framework="pt") as file:
            if HEADER in (file.metadata() or {}):
                raise evidence_already(path)
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            held = [f"'{name}' {shape}" for name, shape in shapes.items()]
            name = choose_one(fitting(shapes, model_width), collection, "tensor", path, _MATRIX, held)
            rows = file.get_tensor(name)[:limit]
    except SafetensorError as error:
        raise EvidenceError(f"{path} is not a whole safetensors file ({error}); copy it again") from None
    about = f"'{name}' of {path.name}"
    if not rows.is_floating_point():
        return stored_rows(rows.numpy(), None, about)
    found = stored_rows(rows.float().numpy(), None, about)
    return StoredVectors(found.vectors, found.ids, about, half_steps_of(rows))


def fitting(shapes: Mapping[str, tuple[int, ...]], model_width: int | None) -> list[str]:
    """Names of matrices, those of the model's width alone where there are any."""
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    return [name for name in matrices if shapes[name][1] == model_width] or matrices
