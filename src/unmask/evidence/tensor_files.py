"""Tensors in one safetensors file, read and written one at a time: an update may be larger than the memory.

    file    8 bytes: the header's length · the header, JSON: name → dtype, shape, first and last byte · the numbers
    read    seek, read into a new tensor, compare its digest, refuse NaN and Inf; nothing is kept
    write   room for the header, each tensor to its own place in any order, then the header with the digests

Limits: float tensors only. A tensor that is asked for twice is read twice; its digest is compared the first time.
Cost: the memory of one tensor. Source: the safetensors format, github.com/huggingface/safetensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.errors import EvidenceError

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_LENGTH_BYTES = 8
_DIGEST = "0" * 32  # room for one
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: its type, shape and first byte in the file."""

    dtype: torch.dtype
    shape: Shape
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass
class _Opened:
    """A file that is read: which tensors were compared with their digests, and how many bytes were read."""

    path: Path
    digests: Mapping[str, str]
    check: Callable[[str, Tensor], None]
    checked: set[str] = field(default_factory=set)
    num_bytes_read: int = 0


@dataclass(frozen=True)
class StoredTensors(Mapping[str, Tensor]):
    """Tensors of a file by name, each read when it is asked for; `names` without reading any."""

    file: _Opened
    places: Mapping[str, Place]
    device: str = "cpu"
    divisor: float | None = None

    @classmethod
    def open(cls, path: Path, digests: Mapping[str, str], check: Callable[[str, Tensor], None]) -> StoredTensors:
        """The tensors of a file; `check` refuses one when it is read for the first time."""
        with open(path, "rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        places = {}
        for name, entry in header.items():
            if entry["dtype"] not in _DTYPES:
                raise EvidenceError(
                    f"'{name}' of {path} holds {entry['dtype']}, and evidence is of floating-point numbers; convert it"
                )
            start = _LENGTH_BYTES + length + entry["data_offsets"][0]
            places[name] = Place(_DTYPES[entry["dtype"]], tuple(entry["shape"]), start)
        return cls(_Opened(path, digests, check), places)

    def __getitem__(self, name: str) -> Tensor:
        place, file = self.places[name], self.file
        tensor = torch.empty(place.shape, dtype=place.dtype)
        try:
            with open(file.path, "rb") as stream:
                stream.seek(place.start)
                num_read = stream.readinto(memoryview(as_bytes(tensor)))
        except OSError as error:
            raise EvidenceError(f"{file.path} cannot be read any more ({error.strerror}); put it back") from None
        file.num_bytes_read += num_read
        if num_read != place.num_bytes or (name not in file.checked and not self._is_as_written(name, tensor)):
            raise EvidenceError(
                f"'{name}' of {file.path} is damaged: it is not what was written (the digest differs); copy the file "
                "again, or make the evidence again"
            )
        if name not in file.checked:
            file.check(name, tensor)
            file.checked.add(name)
        tensor = tensor.float() if place.dtype.itemsize == 1 else tensor
        tensor = tensor if self.divisor is None else tensor / self.divisor
        return tensor.to(self.device)

    def _is_as_written(self, name: str, tensor: Tensor) -> bool:
        stated = self.file.digests.get(name)
        return stated is None or stated == digest_of(name, tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, name: object) -> bool:
        return name in self.places  # without reading it

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(place.num_bytes for place in self.places.values())

    @property
    def num_bytes_read(self) -> int:
        """Bytes that were read of the file so far."""
        return self.file.num_bytes_read

    def only(self, names: Iterable[str]) -> StoredTensors:
        """Some of the tensors."""
        return replace(self, places={name: self.places[name] for name in names})

    def to(self, device: str | torch.device) -> StoredTensors:
        """The same tensors, which go to another device when they are read."""
        return replace(self, device=str(device))

    def divided_by(self, divisor: float) -> StoredTensors:
        """The same tensors, divided when they are read."""
        return replace(self, divisor=divisor if self.divisor is None else self.divisor * divisor)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Shapes by name; nothing is read."""
    if isinstance(tensors, StoredTensors):
        return {name: place.shape for name, place in tensors.places.items()}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def by_size(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names, those of the smallest tensors first; nothing is read."""
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes_of(tensors).items()}
    return sorted(sizes, key=lambda name: sizes[name])


class TensorWriter:
    """Writes tensors to their places in a file, in any order; `finish` writes the header.

    `state(digests)` gives the file's metadata, of the same length whatever the digests are.
    """

    def __init__(
        self,
        path: Path,
        outlines: Mapping[str, tuple[torch.dtype, Shape]],
        state: Callable[[Mapping[str, str]], Mapping[str, str]],
    ) -> None:
        self.path, self.state = path, state
        self.digests = dict.fromkeys(sorted(outlines), _DIGEST)
        self.missing = set(outlines)
        self.entries: dict[str, Any] = {}
        end = 0
        for name in sorted(outlines):
            dtype, shape = outlines[name]
            place = Place(dtype, shape, end)
            end += place.num_bytes
            offsets = [place.start, end]
            self.entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": offsets}
        self.header_length = len(self._header()) + -len(self._header()) % 8
        with open(path, "wb") as stream:
            stream.truncate(_LENGTH_BYTES + self.header_length + end)

    def _header(self) -> bytes:
        return json.dumps({"__metadata__": dict(self.state(self.digests)), **self.entries}).encode()

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one tensor."""
        entry, tensor = self.entries[name], tensor.detach().cpu().contiguous()
        if (list(tensor.shape), _CODES[tensor.dtype]) != (entry["shape"], entry["dtype"]):
            raise EvidenceError(f"'{name}' is a {tensor.dtype} of {tuple(tensor.shape)}, expected {entry}")
        self.digests[name] = digest_of(name, tensor)
        with open(self.path, "r+b") as stream:
            stream.seek(_LENGTH_BYTES + self.header_length + entry["data_offsets"][0])
            stream.write(memoryview(as_bytes(tensor)))
        self.missing.discard(name)

    def finish(self) -> None:
        """Write the header, once every tensor is there."""
        if self.missing:
            raise EvidenceError(f"{len(self.missing)} tensors were not written, as '{min(self.missing)}'")
        with open(self.path, "r+b") as stream:
            stream.write(self.header_length.to_bytes(_LENGTH_BYTES, "little"))
            stream.write(self._header().ljust(self.header_length))


def digest_of(name: str, tensor: Tensor) -> str:
    """A hash of a tensor, its name, type and shape."""
    about = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(about, digest_size=16)
    digest.update(as_bytes(tensor.detach().cpu().contiguous()).data)
    return digest.hexdigest()


def as_bytes(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor as an array that shares its memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
