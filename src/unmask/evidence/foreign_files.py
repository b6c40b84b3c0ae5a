"""Arrays as people have them on disk: .safetensors, .npy and .npz, and the command that makes evidence of each.

Pickles (.pt, .pth, .bin) can run code when they are read and are refused, with the lines that convert them.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from unmask.errors import EvidenceError
from unmask.evidence.tensors import as_tensor
from unmask.safe_text import quote_word

HEADER = "unmask"  # of evidence, in the metadata of a safetensors file
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")
_ARRAY, _ARCHIVE, _PICKLE = b"\x93NUMPY", b"PK\x03\x04", b"\x80"
_KEYS, _VALUES = {"k", "key", "keys"}, {"v", "value", "values"}
_CACHE_AXES, _STATES_AXES = 4, 3
_NAMED = 3  # arrays that are named before the others are counted
_NOT_NUMBERS = "USO"  # kinds of numpy: text, bytes, objects


def read_arrays(path: Path) -> dict[str, Tensor]:
    """Every array of numbers of a file, by name; that of a .npy by the file's own."""
    if path.is_dir():
        raise EvidenceError(f"{path} is a folder; give the file in it that holds the arrays")
    if not path.is_file():
        raise EvidenceError(f"there is no file {path}")
    if is_of_numpy(path):
        opened = open_numpy(path)
        arrays = {path.stem: opened} if isinstance(opened, np.ndarray) else _members(path, opened)
        return {name: as_tensor(name, array) for name, array in arrays.items() if array.dtype.kind not in _NOT_NUMBERS}
    try:
        with safe_open(path, framework="pt") as file:
            if HEADER in (file.metadata() or {}):
                raise evidence_already(path)
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        if is_pickle(path):
            raise pickle_error(path) from None
        raise EvidenceError(
            f"{path} is not a whole safetensors file ({error}); give .safetensors, .npy or .npz, or copy it again"
        ) from None


def evidence_already(path: Path) -> EvidenceError:
    """Refuses to wrap what needs no wrapping."""
    return EvidenceError(f"{path} is evidence already; `unmask recover` reads it as it is")


def _members(path: Path, archive: Any) -> dict[str, np.ndarray]:
    with archive:
        try:
            members = {name: archive[name] for name in archive.files}
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            raise numpy_error(path, error) from None
    return {name: array for name, array in members.items() if isinstance(array, np.ndarray)}


def open_numpy(path: Path) -> Any:
    """An array of a .npy, or the archive of a .npz."""
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise numpy_error(path, error) from None


def numpy_error(path: Path, error: Exception) -> EvidenceError:
    """Why a .npy or a .npz cannot be read."""
    if "Object arrays" in str(error):
        return EvidenceError(
            f"{path} holds pickled objects, which can run code when they are read, so it is not opened; save a plain "
            "float array where you trust it (numpy.stack(list(array)))"
        )
    if "pickled" in str(error):  # what numpy says of anything that does not start as an array does
        return EvidenceError(f"{path} is not a whole file of NumPy, whatever its name says; save it with numpy.save")
    return EvidenceError(f"{path} is not a whole file of NumPy ({error}); copy it again")


def is_of_numpy(path: Path) -> bool:
    """Whether a file is a .npy or a .npz, by its name or by what is in it."""
    return path.suffix in (".npy", ".npz") or _start(path) == _ARRAY or _is_archive_of_arrays(path)


def is_pickle(path: Path) -> bool:
    """Whether a file that is of no known kind is called or starts as a pickle or an archive of torch.save."""
    return path.suffix in PICKLES or _start(path).startswith((_ARCHIVE, _PICKLE))


def _is_archive_of_arrays(path: Path) -> bool:
    if not _start(path).startswith(_ARCHIVE) or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return all(name.endswith(".npy") for name in archive.namelist())


def _start(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(len(_ARRAY))


def not_evidence(path: Path, error: Exception | None = None) -> EvidenceError:
    """What a file is that is no evidence, and the command that makes evidence of it."""
    if error is not None and is_pickle(path):
        return pickle_error(path)
    if error is not None:
        return EvidenceError(
            f"{path} is not a whole safetensors file ({error}); evidence is written by `unmask observe` or `.save()`: "
            "if this is, copy it again"
        )
    is_safetensors = not is_of_numpy(path)
    shapes = _float_shapes(path)
    kind = "a safetensors file without an unmask header" if is_safetensors else "a file of NumPy"
    held = f"{_list(shapes)}; {_advice(path, shapes)}" if shapes else "no floating-point numbers"
    return EvidenceError(f"{path} is {kind}, so what it was taken from is unknown; it holds {held}")


def list_arrays(arrays: Mapping[str, Tensor]) -> str:
    """Names and shapes of the first few."""
    return _list({name: tuple(array.shape) for name, array in arrays.items()})


def _list(shapes: Mapping[str, tuple[int, ...]]) -> str:
    listed = ", ".join(f"'{name}' {shape}" for name, shape in list(shapes.items())[:_NAMED])
    more = f" and {len(shapes) - _NAMED} more" if len(shapes) > _NAMED else ""
    return listed + more or "nothing that is a number"


def _float_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    if is_of_numpy(path):
        return {name: tuple(array.shape) for name, array in read_arrays(path).items() if array.is_floating_point()}
    with safe_open(path, framework="np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: tuple(one.get_shape()) for name, one in slices.items() if "F" in one.get_dtype()}


def refuse_other_evidence(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse arrays that are no update, by their axes; parameters of models have dots in their names."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if not any("." in name for name in shapes) and "wrap update" not in (advice := _advice(path, shapes)):
        raise EvidenceError(f"{path} holds {_list(shapes)}, which is no update; {advice}")


def _advice(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The command, by names and numbers of axes."""
    name = quote_word(path.name)
    axes = {len(shape) for shape in shapes.values()}
    if min(axes) >= _CACHE_AXES and (any(map(part_of_cache, shapes)) or min(axes) > _CACHE_AXES):
        return (
            f"wrap keys and values with `unmask wrap cache {name} --layer N`, or in Python "
            "unmask.CacheEvidence.of(model, cache, …)"
        )
    if min(axes) >= _STATES_AXES:
        return (
            f"wrap states with `unmask wrap hidden {name} --layer N`, or in Python "
            "unmask.HiddenEvidence.of(model, states, …)"
        )
    only = next(iter(shapes))
    if len(shapes) == 1 and (path.suffix == ".npy" or (axes == {2} and "." not in only and only != "weight")):
        return (
            f"if each row is a text's vector, wrap it with `unmask wrap store {name}`; if the rows are one text's "
            f"tokens, with `unmask wrap hidden {name} --layer N`; if they are logits, with `unmask wrap logits {name}`"
        )
    return f"wrap its tensors with `unmask wrap update {name}`, or in Python unmask.GradientEvidence.of(model, tensors)"


def part_of_cache(name: str) -> str | None:
    """'keys' or 'values' by the last of such words in a name: 'layers.6.keys', 'key_cache.6', 'past.6.value'."""
    words = [word for word in re.split(r"[^A-Za-z]+", name.lower()) if word in _KEYS | _VALUES]
    return None if not words else "keys" if words[-1] in _KEYS else "values"


def of_layer(name: str, layer: int) -> bool:
    """Whether a name has no number, or that of a layer."""
    numbers = re.findall(r"\d+", name)
    return not numbers or str(layer) in numbers


def pickle_error(file: Path) -> EvidenceError:
    """A refusal with the lines that convert a dictionary, one tensor or a list of tensors of one shape."""
    name = quote_word(file.with_suffix(".safetensors").name)
    return EvidenceError(
        f"{file} is a pickle or a torch.save archive, which can run code when it is read, so it is not opened; "
        f"convert it where you trust it: import torch, safetensors.torch; held = torch.load({file.name!r}, "
        "weights_only=True); held = held if isinstance(held, dict) else {'states': torch.stack(list(held))}; "
        "safetensors.torch.save_file({name: tensor.clone().contiguous() for name, tensor in held.items() if "
        f"torch.is_tensor(tensor)}}, {file.with_suffix('.safetensors').name!r}). Then `unmask wrap update {name}` for "
        "gradients or weights, `wrap hidden` for states, `wrap cache` for keys and values, `wrap store` for vectors"
    )
