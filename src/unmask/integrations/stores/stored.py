"""What a store gives away: vectors, their names, and how far storage may have moved them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unmask.errors import EvidenceError
from unmask.evidence.tensors import native_floats
from unmask.evidence.vectors import VectorEvidence, half_steps_of
from unmask.linalg.product_codes import decode_codes, sign_centroids
from unmask.models.adapter import Model
from unmask.models.pooling import Pooling, recipe_of

_NAMED = 6  # things that are named before the others are counted


@dataclass(frozen=True)
class StoredVectors:
    """Vectors of a store by their ids; the other fields are those of `VectorEvidence`, `about` says what was read."""

    vectors: Float[Tensor, "texts k"]
    ids: tuple[str, ...]
    about: str
    half_steps: Float[Tensor, "texts k"] | None = None
    quantiser: Float[Tensor, "m codes k_m"] | None = None
    offsets: Float[Tensor, "texts k"] | None = None
    error: float | None = None

    def evidence(
        self,
        model: Model,
        *,
        pooling: Pooling | str | None = None,
        normalise: bool | None = None,
        dimensions: int | None = None,
        prefix: str = "",
        compute_dtype: torch.dtype | str = torch.float32,
    ) -> VectorEvidence:
        """Evidence for `recover_text`; ids stay behind. Codes change lengths, so that these tell nothing then."""
        if normalise is None and self.error is not None:
            normalise = recipe_of(model).normalise
        found = VectorEvidence.of(
            model,
            self.vectors,
            pooling=pooling,
            normalise=normalise,
            dimensions=dimensions,
            prefix=prefix,
            half_steps=self.half_steps,
            compute_dtype=compute_dtype,
        )
        return replace(found, quantiser=self.quantiser, offsets=self.offsets, error=self.error)


def stored_rows(array: Any, ids: Sequence[Any] | None, about: str, model_width: int | None = None) -> StoredVectors:
    """Rows of float numbers as they lie in a store; short float types have half steps.

    Bytes of which eight bits each make the model's width are signs, packed as numpy.packbits packs them.
    """
    rows = np.asarray(array)
    if rows.ndim == 2 and rows.dtype in (np.uint8, np.int8) and 8 * rows.shape[1] == model_width:
        packed = rows if rows.dtype == np.uint8 else (rows.astype(np.int16) + 128).astype(np.uint8)
        return stored_signs(packed, ids, about)
    if rows.ndim != 2 or 0 in rows.shape:
        raise EvidenceError(
            f"{about} has the shape {rows.shape}, expected (vectors, numbers) with at least one; save a matrix with a "
            "row for each text" + ("; states of tokens are for `unmask wrap hidden`" if rows.ndim == 3 else "")
        )
    if rows.dtype.kind != "f":
        raise EvidenceError(f"{about} holds {rows.dtype}, expected floats: {_advice(rows.dtype)}")
    vectors = torch.from_numpy(np.ascontiguousarray(native_floats(rows)))
    names = range(len(rows)) if ids is None else ids
    return StoredVectors(vectors.float(), tuple(map(str, names)), about, half_steps_of(vectors))


def _advice(dtype: np.dtype) -> str:
    """What to do with numbers, or what is none, that are not floats."""
    if dtype.names:
        return f"it has the fields {', '.join(dtype.names)}; save the one with the vectors, array['{dtype.names[0]}']"
    return _ADVICE.get(dtype.kind, "give the array of the embeddings")


_CODES = (
    "codes whose scale it does not say; multiply them by their scales and store float32, or wrap them with "
    "unmask.VectorEvidence.of(model, vectors, half_steps=…)"
)
_ADVICE = {
    "i": _CODES,
    "u": _CODES,
    "b": "if they are signs of embeddings, pack them, numpy.packbits(array, axis=1), which are read as signs",
    "c": "embeddings are real; if the imaginary parts are 0, save array.real",
    "U": "text is no embedding; give the array of the embeddings, not of what was embedded",
    "S": "text is no embedding; give the array of the embeddings, not of what was embedded",
    "V": "bytes whose type NumPy does not know; if they were bfloat16, save array.astype('float32') instead",
}


def stored_signs(packed: np.ndarray, ids: Sequence[Any] | None, about: str) -> StoredVectors:
    """Vectors of length 1 with the signs that bits tell, and the quantiser that makes signs."""
    codes = torch.from_numpy(np.unpackbits(packed, axis=1)).long()
    centroids = sign_centroids(codes.shape[1])
    names = range(len(codes)) if ids is None else ids
    return StoredVectors(
        decode_codes(codes, centroids), tuple(map(str, names)), f"{about}, signs alone", quantiser=centroids
    )


def need(package: str, store: str) -> Any:
    """The library that reads a store, or a sentence that says how to get it."""
    try:
        return import_module(package)
    except ImportError:
        raise EvidenceError(
            f"reading {store} needs the package '{package}', which is not installed; pip install 'unmask[stores]'"
        ) from None


def choose_one(
    names: Sequence[str], asked: str | None, what: str, where: Any, expected: str = "", held: Sequence[str] = ()
) -> str:
    """The name that was asked for, or the only one; where there is none, `held` is there where `expected` should be."""
    if asked in names:
        return str(asked)
    if not names:
        seen = ", ".join(held[:_NAMED]) + (f" and {len(held) - _NAMED} more" if len(held) > _NAMED else "")
        raise EvidenceError(
            f"{where} has no {what} with vectors: it holds {seen or 'nothing'}, expected {expected or f'a {what}'}; "
            "give the file or folder that the embeddings are in"
        )
    listed = ", ".join(sorted(names))
    if asked is not None:
        raise EvidenceError(f"{where} has no {what} '{asked}'; it has: {listed}")
    if len(names) > 1:
        raise EvidenceError(f"{where} has {len(names)} of the kind '{what}': {listed}; choose one (--collection NAME)")
    return names[0]
