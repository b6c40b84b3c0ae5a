"""The door for tensors: whatever a user hands over is converted where nothing is lost, or refused in one sentence.

| handed over | what becomes of it |
| --- | --- |
| tensors, arrays of numpy and whatever turns into one, nested lists | a dense tensor in one piece, without a graph |
| sparse, transposed, expanded, `requires_grad`, made in inference mode | the same numbers in such a tensor |
| float64, float32, float16, bfloat16; float8 | as they are; float32 |
| states and caches in float64 that hold numbers of float32 | float32 |
| masks of 0 and 1 in any type | booleans |
| integers where numbers are measured, complex, quantised, nested, sharded or empty ('meta') tensors | refused |
| NaN, Inf, what has no finite square | refused, but in padding, which nothing reads |

Every kind of evidence calls it when it is made, so that files and the API go the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unmask.arguments import require_float_type
from unmask.errors import EvidenceError
from unmask.evidence.tensor_files import StoredTensors
from unmask.shapes import MaskBatch

AS_HELD: Any = None  # a `compute_dtype` that is not stated: what the tensors show of it
OVERFLOW = "look for an overflow in the client's mixed precision, or leave this tensor out"
_CODES = "codes alone say nothing; multiply them by their scales first"
_LARGEST = 1e100  # of an entry: its square must be a number


def require_floats(tensors: Mapping[str, Any], advice: str = OVERFLOW) -> Mapping[str, Tensor]:
    """Tensors by name that attacks can compute with; `advice`: what to do about NaN and Inf."""
    if not isinstance(tensors, Mapping):
        raise EvidenceError(f"tensors must come with their names, got {type(tensors).__name__}; pass a dictionary")
    if isinstance(tensors, StoredTensors):
        return tensors  # each is checked when it is read
    floats = {name: as_floats(name, tensor) for name, tensor in tensors.items()}
    for name, tensor in floats.items():
        require_finite(name, tensor, advice)
    return floats


def as_floats(name: str, value: Any, advice: str = _CODES) -> Tensor:
    """Real numbers as a tensor; of float8, which torch stores but hardly computes with, as float32."""
    tensor = as_tensor(name, value)
    if not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise EvidenceError(f"'{name}' holds {kind}, expected floating-point numbers: {advice}")
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def as_tensor(name: str, value: Any) -> Tensor:
    """Any numbers as a dense tensor in one piece, on the device where they lie, without the graph that made them."""
    if not isinstance(value, Tensor):
        return _from_array(name, value)
    if hasattr(value, "full_tensor"):
        raise EvidenceError(f"'{name}' is sharded ({type(value).__name__}); gather it first: .full_tensor()")
    if value.is_quantized:
        raise EvidenceError(f"'{name}' is quantised ({value.dtype}), expected plain numbers; call .dequantize()")
    if value.is_nested:
        raise EvidenceError(f"'{name}' is a nested tensor, expected one with padding; use .to_padded_tensor(0.0)")
    if value.is_meta:
        raise EvidenceError(f"'{name}' is on the device 'meta' and holds no numbers; load them first")
    dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
    if dense.is_inference():  # autograd refuses it
        with torch.inference_mode(False):
            dense = dense.clone()
    return dense.contiguous()


def _from_array(name: str, value: Any) -> Tensor:
    """The same of numpy, of whatever numpy makes an array of, and of lists, of tensors too."""
    if isinstance(value, Sequence) and any(isinstance(part, Tensor) for part in value):
        parts = [as_tensor(name, part) for part in value]
        if len({part.shape for part in parts}) > 1:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts[:3])
            raise EvidenceError(f"'{name}' is a list of tensors of different shapes ({shapes} …); pad them to one")
        return torch.stack(parts)
    try:
        array = np.array(value)  # a copy: an array may be read-only, or change later
    except (ValueError, TypeError) as error:
        raise EvidenceError(f"'{name}' is no array of numbers ({error}); give rows of one width") from None
    if array.dtype.kind == "f":
        return torch.from_numpy(native_floats(array))
    if array.dtype.kind not in "biuc":
        kind = f"an array of {array.dtype}" if array.ndim else f"an object of {type(value).__name__}"
        raise EvidenceError(f"'{name}' must be a tensor or an array of numbers, got {kind}")
    return torch.from_numpy(array if array.dtype.kind in "bc" else array.astype(np.int64))


def native_floats(array: np.ndarray) -> np.ndarray:
    """Floats in this machine's order of bytes, and of a type that torch has: longer ones become float64."""
    return array.astype(np.float64 if array.dtype.itemsize > 8 else array.dtype.newbyteorder("="), copy=False)


def require_padded(
    rows: Mapping[str, Any], mask: Any, num_axes: int, expected: str
) -> tuple[dict[str, Tensor], MaskBatch]:
    """Floats of a padded batch, (batch, length, …) of `num_axes` axes, and which places hold tokens, on one device.

    Of padding only the shape counts: where it is not finite, as kernels may leave it, it becomes zero.
    """
    held = {name: as_floats(name, part) for name, part in rows.items()}
    shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in held.items())
    first = next(iter(held.values()))
    if any(part.ndim != num_axes or part.shape[:2] != first.shape[:2] for part in held.values()):
        raise EvidenceError(f"{expected}, got {shapes}; one text is a batch of one")
    given = as_tensor("mask", mask)
    if given.shape != first.shape[:2]:
        raise EvidenceError(f"{expected}, got {shapes} and a mask {tuple(given.shape)}")
    is_token = _as_booleans(given).to(first.device)
    for name, part in held.items():
        if not _has_finite_sum(part):
            part = part.masked_fill(~is_token.reshape(*is_token.shape, *[1] * (num_axes - 2)), 0.0)
        require_finite(name, part, "leave out texts whose computation overflowed")
        held[name] = _without_empty_digits(part).to(first.device)
    return held, is_token


def _without_empty_digits(rows: Tensor) -> Tensor:
    """Float64 that holds numbers of float32, as numpy makes it, is float32: a type says how rows were rounded."""
    short = rows.float()
    return short if rows.dtype is torch.float64 and torch.equal(short.double(), rows) else rows


def _as_booleans(mask: Tensor) -> MaskBatch:
    """Of 1 and 0 in any type. Torch would take integers for places, so that `states[mask]` is other rows."""
    is_token = mask.bool()
    if not torch.equal(is_token.to(mask.dtype), mask):
        raise EvidenceError(
            f"the mask must be 1 for tokens and 0 for padding, got numbers from {mask.min():g} to {mask.max():g}; give "
            "the tokenizer's attention_mask (of a mask that is added to scores: mask == 0)"
        )
    if not bool(is_token.any()):
        raise EvidenceError("the mask is 0 everywhere, so there is no token to read; 1 stands for tokens")
    return is_token


def stated_precision(stated: Any, tensors: Iterable[Tensor], otherwise: torch.dtype = torch.float32) -> torch.dtype:
    """The precision that a model ran in: as stated, else that of the tensors if all matrices are of one half precision.

    Other tensors say nothing: numpy makes float64 of anything, and a defence or a server may have cast them.
    """
    if stated is not AS_HELD:
        return require_float_type("compute_dtype", stated, EvidenceError)
    held = {tensor.dtype for tensor in tensors if tensor.ndim > 1}
    return next(iter(held)) if held in ({torch.bfloat16}, {torch.float16}) else otherwise


def in_half_precision(rows: Tensor) -> Tensor:
    """Rows in the half precision that holds the same numbers, if one does; numpy, for example, has no bfloat16.

    Of float8 that holds them nothing follows: it is how they were stored, and not how they were computed.
    """
    if rows.dtype.itemsize > 2:
        for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float16):  # from the fewest digits on
            if torch.equal((short := rows.to(dtype)).to(rows.dtype), rows):
                return short if dtype.itemsize > 1 else rows
    return rows


def require_finite(name: str, tensor: Tensor, advice: str = OVERFLOW) -> None:
    """Refuse NaN, Inf and what cannot be squared, naming the tensor and how much of it is affected."""
    if tensor.dtype is not torch.float64 and _has_finite_sum(tensor):
        return
    bad = tensor.numel() - int((tensor.abs() < _LARGEST).sum())
    if bad:
        raise EvidenceError(
            f"'{name}' holds {bad} of {tensor.numel()} values that are NaN or Inf (or above {_LARGEST:g}), and no "
            f"attack can use it; {advice}"
        )


def _has_finite_sum(tensor: Tensor) -> bool:
    """Whether a sum is finite; then all of its terms are. One pass without a copy, four times as fast as `isfinite`."""
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32)))
