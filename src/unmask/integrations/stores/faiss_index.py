"""FAISS index files: what each kind of index keeps of a vector, and how far that may be off.

    Flat                      the vectors
    scalar quantiser          v = vmin + (code + ½)·vdiff/(levels − 1), a number at most vdiff/(2·(levels − 1)) off;
                              fp16 and bf16 half of their last digit
    product quantiser         the nearest of 2^b centroids for each part; the centroids are in the file
    inverted file             codes of what is left without the centre of a list (by residual); the centres are in it
    binary                    signs, one bit a number
    HNSW, IDMap, Refine       another index inside, which is read
    OPQ                       a rotation before the codes, undone; PCA leaves out what it projects away

Where vectors had length 1 and y is a mean over what shares its code, the mean of ‖x − y‖² is 1 − mean ‖y‖²: `error`.

Limits: a scalar quantiser clips what lies outside of the range that it was trained on, and then half steps are too
small. Additive and fast-scan quantisers are refused by name. The file is parsed by FAISS itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unmask.errors import EvidenceError
from unmask.evidence.vectors import half_steps_of
from unmask.integrations.stores.stored import StoredVectors, need, stored_signs

Array = np.ndarray
_FOR_ERROR = 1000  # rows whose lengths tell the error of codes

_MOST_NUMBERS = 1 << 20  # of a vector; four letters of a text are a greater number


def is_index(path: Path, start: bytes) -> bool:
    """Whether this is an index: by its name, or by four letters or digits (I…) and the width, a whole number, behind.

    Every version of FAISS has new letters, and the width behind them tells an index from a text ('INSERT INTO').
    """
    width = int.from_bytes(start[4:8], "little") if len(start) >= 8 else 0
    is_tagged = start[:1] == b"I" and start[:4].isalnum() and 0 < width < _MOST_NUMBERS
    return is_tagged or (bool(start) and path.suffix == ".faiss") or (path / "index.faiss").is_file()


@dataclass(frozen=True)
class _Rows:
    """Rows of an index by their numbers; `steps` are half steps a column or an entry."""

    rows: Array
    ids: Array
    words: str
    steps: Array | None = None
    centroids: Array | None = None
    offsets: Array | None = None
    is_lossy: bool = False


def read_faiss(path: Path, collection: str | None, limit: int | None, model_width: int | None) -> StoredVectors:
    """Vectors of an index; of LangChain's folder the index alone, as the pickle beside it holds the documents."""
    faiss = need("faiss", "a FAISS index")
    file = path / "index.faiss" if path.is_dir() else path
    with open(file, "rb") as opened:
        is_binary = opened.read(2) == b"IB"
    try:
        index = faiss.read_index_binary(str(file)) if is_binary else faiss.read_index(str(file))
    except (RuntimeError, MemoryError) as error:
        said = str(error).rpartition(": ")[2]
        raise EvidenceError(
            f"FAISS {faiss.__version__} cannot read {file} ({said}): it is cut or damaged, or a newer FAISS wrote it; "
            "copy it again, write the index again (faiss.write_index), or upgrade faiss-cpu"
        ) from None
    if not index.ntotal:
        raise EvidenceError(f"the index {file} holds no vectors; give one that vectors were added to")
    if is_binary:
        return _read_signs(faiss, index, limit)
    found = _read(faiss, index, index.ntotal if limit is None else max(limit, _FOR_ERROR))
    left = max(0.0, 1 - float(np.square(found.rows, dtype=np.float64).sum(1).mean())) ** 0.5 if found.is_lossy else None

    def kept(array: Array | None) -> torch.Tensor | None:
        return None if array is None else torch.from_numpy(np.broadcast_to(array, found.rows.shape)[:limit].copy())

    return StoredVectors(
        torch.from_numpy(found.rows[:limit]),
        tuple(map(str, found.ids[:limit])),
        f"{found.words} of {index.ntotal} vectors",
        kept(found.steps),
        None if found.centroids is None else torch.from_numpy(found.centroids),
        kept(found.offsets),
        left,
    )


def _read_signs(faiss: Any, index: Any, limit: int | None) -> StoredVectors:
    """Bits of a flat binary index."""
    kind = type(index).__name__
    if not isinstance(index, faiss.IndexBinaryFlat):
        raise EvidenceError(f"this FAISS index is an {kind}, from which no vectors are read; IndexBinaryFlat is")
    packed = faiss.vector_to_array(index.xb).reshape(index.ntotal, index.code_size)[:limit]
    return stored_signs(packed, None, f"{kind} of {index.ntotal} vectors")


def _read(faiss: Any, index: Any, limit: int) -> _Rows:
    """The first rows of an index; wrappers are opened."""
    kind = type(index).__name__
    if isinstance(index, faiss.IndexIDMap):
        inner = _read(faiss, faiss.downcast_index(index.index), limit)
        return replace(inner, ids=faiss.vector_to_array(index.id_map)[inner.ids])
    if isinstance(index, faiss.IndexHNSW):
        inner = _read(faiss, faiss.downcast_index(index.storage), limit)
        return replace(inner, words=f"{kind} over {inner.words}")
    if isinstance(index, faiss.IndexRefine):
        inner = _read(faiss, faiss.downcast_index(index.refine_index), limit)
        return replace(inner, words=f"{kind}, its exact part {inner.words}")
    if isinstance(index, faiss.IndexPreTransform):
        return _read_transformed(faiss, index, limit)
    if isinstance(index, faiss.IndexIVF):
        return _read_lists(faiss, index, limit)
    if not isinstance(index, (faiss.IndexFlat, faiss.IndexScalarQuantizer, faiss.IndexPQ)):
        raise EvidenceError(
            f"this FAISS index is an {kind}, from which no vectors are read; read are IndexFlat, scalar and product "
            "quantisers, inverted files of them, and HNSW, IDMap, Refine and PreTransform around them"
        )
    rows = index.reconstruct_n(0, min(limit, index.ntotal))
    return _quantised(faiss, index, _Rows(rows, np.arange(len(rows)), kind), rows)


def _read_lists(faiss: Any, index: Any, limit: int) -> _Rows:
    """Rows of an inverted file in the order of their numbers, and the centre of each one's list."""
    kind, lists = type(index).__name__, index.invlists
    if not isinstance(index, (faiss.IndexIVFFlat, faiss.IndexIVFScalarQuantizer, faiss.IndexIVFPQ)):
        raise EvidenceError(f"this FAISS index is an {kind}, from which no vectors are read")
    sizes = [lists.list_size(number) for number in range(index.nlist)]
    ids = np.concatenate(
        [faiss.rev_swig_ptr(lists.get_ids(number), size).copy() for number, size in enumerate(sizes) if size]
    )
    order = np.argsort(ids, kind="stable")[:limit]
    if len(np.unique(ids)) != len(ids):
        raise EvidenceError(f"this {kind} has {len(ids) - len(np.unique(ids))} numbers that occur twice")
    index.set_direct_map_type(faiss.DirectMap.Hashtable)
    rows = np.stack([index.reconstruct(int(number)) for number in ids[order]])
    found = _Rows(rows, ids[order], kind)
    if isinstance(index, faiss.IndexIVFFlat) or not index.by_residual:
        return _quantised(faiss, index, found, rows)
    centres = faiss.downcast_index(index.quantizer).reconstruct_n(0, index.nlist)
    offsets = centres[np.repeat(np.arange(index.nlist), sizes)][order]
    return _quantised(faiss, index, replace(found, offsets=offsets), rows - offsets)


def _read_transformed(faiss: Any, index: Any, limit: int) -> _Rows:
    """Rows before the rotation or projection in front of an index."""
    inner = _read(faiss, faiss.downcast_index(index.index), limit)
    rows = inner.rows
    kinds = []
    for number in reversed(range(index.chain.size())):
        step = faiss.downcast_VectorTransform(index.chain.at(number))
        kinds.append(type(step).__name__)
        if not isinstance(step, faiss.LinearTransform) or not step.is_orthonormal:
            raise EvidenceError(f"this FAISS index has a {kinds[-1]} in front, which cannot be undone")
        rows = step.reverse_transform(np.ascontiguousarray(rows))
    is_exact = inner.steps is None and not inner.is_lossy and rows.shape == inner.rows.shape
    words = f"{inner.words} behind {' and '.join(kinds)}"
    return _Rows(rows, inner.ids, words, is_lossy=not is_exact)


def _quantised(faiss: Any, index: Any, found: _Rows, coded: Array) -> _Rows:
    """What the quantiser of an index tells; `coded` is what it was given, decoded."""
    if isinstance(index, (faiss.IndexScalarQuantizer, faiss.IndexIVFScalarQuantizer)):
        return replace(found, steps=_scalar_steps(faiss, index.sq, coded), offsets=None)
    if isinstance(index, (faiss.IndexPQ, faiss.IndexIVFPQ)):
        quantiser = index.pq
        shape = (quantiser.M, quantiser.ksub, quantiser.dsub)
        centroids = faiss.vector_to_array(quantiser.centroids).reshape(shape)
        return replace(found, centroids=centroids, is_lossy=True)
    return found


def _scalar_steps(faiss: Any, quantiser: Any, coded: Array) -> Array:
    """Half steps of a scalar quantiser, a column or an entry."""
    kinds = faiss.ScalarQuantizer
    short = {kinds.QT_fp16: torch.float16, kinds.QT_bf16: torch.bfloat16}
    if quantiser.qtype in short:
        steps = half_steps_of(torch.from_numpy(coded).to(short[quantiser.qtype]))
        assert steps is not None
        return steps.numpy()
    levels = {
        kinds.QT_8bit: 255,
        kinds.QT_8bit_uniform: 255,
        kinds.QT_6bit: 63,
        kinds.QT_4bit: 15,
        kinds.QT_4bit_uniform: 15,
    }
    if quantiser.qtype not in levels:
        raise EvidenceError(f"this FAISS index has a scalar quantiser of type {quantiser.qtype}, which is not read")
    trained = faiss.vector_to_array(quantiser.trained)
    spans = trained[len(trained) // 2 :]  # the least values, then the spans; one of each where they are uniform
    # Codes are the whole part, and decoding adds half a step; float32 rounds both.
    return (spans / levels[quantiser.qtype] / 2 * (1 + 1e-5) + 1e-7).astype(np.float32)
