"""Evidence on disk: safetensors with a versioned JSON header. Nothing here can execute what it reads."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unmask.errors import EvidenceError
from unmask.evidence.foreign_files import HEADER, is_of_numpy, not_evidence
from unmask.evidence.tensor_files import StoredTensors, TensorWriter, as_bytes
from unmask.evidence.tensors import as_floats, require_finite
from unmask.safe_text import quote_word
from unmask.whole_files import require_place, written_whole

FORMAT = 1
FORMAT_BY_TENSOR = 2  # has a digest for each tensor, so that each may be read alone
LARGE_BYTES = 2**30  # of tensors; from here on they are read and written one at a time
_BY_TENSOR = frozenset({"gradients"})  # kinds whose tensors need not be read at once
Evidence = TypeVar("Evidence")
Kind = TypeVar("Kind", bound=Enum)
_READERS: dict[str, Callable[[Mapping[str, Tensor], dict[str, Any]], Any]] = {}


def reads(
    kind: str,
) -> Callable[[Callable[[Mapping[str, Tensor], dict[str, Any]], Evidence]], Callable[..., Evidence]]:
    """Register the function that makes evidence of a kind from tensors and header."""

    def register(
        reader: Callable[[Mapping[str, Tensor], dict[str, Any]], Evidence],
    ) -> Callable[..., Evidence]:
        _READERS[kind] = reader
        return reader

    return register


def write(path: str | Path, kind: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Path:
    """Write evidence whole or not at all."""
    path = Path(path)
    require_place(path)
    with written_whole(path) as temporary:
        if kind in _BY_TENSOR and _num_bytes(tensors) >= LARGE_BYTES:
            outlines = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
            writer = write_by_tensor(temporary, kind, outlines, header)
            for name in tensors:
                writer.put(name, tensors[name])
            writer.finish()
        else:
            contiguous = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
            stated = {"format": FORMAT, "kind": kind, **header}
            document = json.dumps({**stated, "digest": _digest(stated, contiguous)}, sort_keys=True)
            save_file(contiguous, temporary, metadata={HEADER: document})
        os.chmod(temporary, 0o600)  # evidence is as sensitive as the secret in it
    return path


def write_by_tensor(
    path: Path, kind: str, outlines: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], header: Mapping[str, Any]
) -> TensorWriter:
    """A writer of evidence whose tensors come one at a time; `outlines` are their types and shapes."""

    def state(digests: Mapping[str, str]) -> dict[str, str]:
        stated = {"format": FORMAT_BY_TENSOR, "kind": kind, **header, "digests": dict(digests)}
        return {HEADER: json.dumps({**stated, "digest": _digest(stated, {})}, sort_keys=True)}

    return TensorWriter(path, outlines, state)


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    if isinstance(tensors, StoredTensors):
        return tensors.num_bytes
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def load_evidence(path: str | Path, device: str | torch.device = "cpu") -> Any:
    """Read evidence of any kind; a foreign, truncated or newer file is refused with the reason."""
    path = Path(path)
    if path.is_dir():
        raise EvidenceError(f"{path} is a folder; give the evidence file itself (.safetensors)")
    if not path.is_file():
        command = f"unmask observe gradients … -o {quote_word(path.name)}"
        raise EvidenceError(f"there is no file {path}; make one with `{command}`")
    if is_of_numpy(path):
        raise not_evidence(path)
    try:
        with safe_open(path, framework="np") as file:  # torch would map all of it, which a large file may not allow
            header = _header(path, file.metadata())
        tensors = _open_tensors(path, header, device)
    except (SafetensorError, OSError) as error:
        raise not_evidence(path, error) from None
    digest = header.pop("digest", None)  # the first files had none
    is_by_tensor = isinstance(tensors, StoredTensors) and header["format"] == FORMAT_BY_TENSOR
    is_short = is_by_tensor and set(header.get("digests", ())) != set(tensors)
    if is_short or (digest is not None and digest != _digest(header, {} if is_by_tensor else tensors)):
        raise EvidenceError(
            f"{path} is damaged: its content is not what was written (the digest differs); copy it again, or make the "
            "evidence again"
        )
    try:
        return _READERS[header["kind"]](tensors, header)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EvidenceError(
            f"{path} says that it is evidence of kind '{header['kind']}', but its header is incomplete or damaged "
            f"({error!r}); make the evidence again"
        ) from None


def _open_tensors(path: Path, header: Mapping[str, Any], device: str | torch.device) -> Mapping[str, Tensor]:
    """The tensors of a file: all of them, or, of a large update, each when it is asked for."""
    is_large = header["format"] == FORMAT_BY_TENSOR or path.stat().st_size >= LARGE_BYTES
    if is_large and header["kind"] in _BY_TENSOR:
        return StoredTensors.open(path, header.get("digests", {}), _require_finite_one).to(device)
    with safe_open(path, framework="pt", device=str(device)) as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A hash of everything that a file says, so that a flipped bit is no evidence."""
    digest = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode("utf-8", "surrogatepass"))
        digest.update(as_bytes(tensor).data)
    return digest.hexdigest()


def _header(path: Path, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    if not metadata or HEADER not in metadata:
        raise not_evidence(path)
    try:
        header = json.loads(metadata[HEADER])
    except (ValueError, RecursionError):
        header = None
    is_read = isinstance(header, dict) and type(header.get("format")) is int and header["format"] >= 1
    if not is_read or not isinstance(header.get("digests", {}), dict):
        raise EvidenceError(f"the unmask header of {path} is damaged; make the evidence again")
    if header["format"] > FORMAT_BY_TENSOR:
        raise EvidenceError(
            f"{path} has evidence format {header['format']}, this version reads up to {FORMAT_BY_TENSOR}; "
            "upgrade unmask"
        )
    if not isinstance(header.get("kind"), str) or header["kind"] not in _READERS:
        raise EvidenceError(
            f"{path} holds evidence of kind {header.get('kind')!r}; known kinds are {', '.join(sorted(_READERS))}"
        )
    return header


def _require_finite_one(name: str, tensor: Tensor) -> None:
    """What a tensor that is read alone must be; float8 is looked at in float32."""
    require_finite(name, as_floats(name, tensor))
