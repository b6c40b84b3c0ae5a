"""Embeddings of texts, as a vector database keeps them: one vector a text, of a known embedding model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unmask.arguments import named_dtype, require_fingerprint, require_float_type, require_number
from unmask.displays import DisplayedFields
from unmask.errors import EvidenceError
from unmask.evidence.files import reads, write
from unmask.evidence.tensors import as_floats, require_floats
from unmask.linalg.product_codes import has_code, product_codes
from unmask.models.adapter import Model
from unmask.models.load import require_model
from unmask.models.pooling import EmbeddingRecipe, Pooling, prefix_tokens, recipe_of

_LEAVE_OUT = (
    "an embedding that failed or overflowed is stored like this; leave such rows out, "
    "array[numpy.isfinite(array).all(1)]"
)
_CODES = "codes alone are no vectors; multiply codes by their scales first, and pass half of a step as half_steps"
_NAMED = 6  # rows that are named before the others are counted
_NEAR_ONE = 0.1  # storage and noise may change a length of 1 by so much; lengths that were not normalised vary more


@dataclass(frozen=True, repr=False)
class VectorEvidence(DisplayedFields):
    """Vectors of texts, and the recipe by which the model made them.

    Side knowledge of the adversary:

    - `half_steps`: how far each number may be off because of its storage; None: what the values show;
    - `quantiser`: the centroids of a product quantiser that made codes of the vectors, so that a candidate can be coded
      again (`same_code`), and `offsets`, the centres of an inverted file that were subtracted before;
    - `error`: how far a stored vector typically lies from the original, where the store can tell;
    - `compute_dtype`: the precision in which the model runs.
    """

    vectors: Float[Tensor, "texts k"]
    recipe: EmbeddingRecipe
    model_fingerprint: str
    compute_dtype: torch.dtype = torch.float32
    half_steps: Float[Tensor, "texts k"] | None = None
    quantiser: Float[Tensor, "m codes k_m"] | None = None
    offsets: Float[Tensor, "texts k"] | None = None
    error: float | None = None

    def __post_init__(self) -> None:
        require_fingerprint(self.model_fingerprint, EvidenceError)
        object.__setattr__(
            self, "compute_dtype", require_float_type("compute_dtype", self.compute_dtype, EvidenceError)
        )
        require_number("error", self.error, positive=False, error=EvidenceError)
        for name, tensor in require_floats(self._tensors(), _LEAVE_OUT).items():
            object.__setattr__(self, name, tensor)
        if self.vectors.ndim != 2 or 0 in self.vectors.shape:
            raise EvidenceError(f"vectors must be (texts, numbers) with at least one, got {tuple(self.vectors.shape)}")
        for name in ("half_steps", "offsets"):
            held = getattr(self, name)
            if held is not None and held.shape != self.vectors.shape:
                raise EvidenceError(
                    f"{name} must have the shape of the vectors, {tuple(self.vectors.shape)}, got {tuple(held.shape)}"
                )
        if self.half_steps is not None and (self.half_steps < 0).any():
            raise EvidenceError(f"half_steps must be 0 or more, got {float(self.half_steps.min()):g}")
        centroids = self.quantiser
        if centroids is not None and (centroids.ndim != 3 or centroids.shape[0] * centroids.shape[2] != self.width):
            raise EvidenceError(
                f"a quantiser must be (parts, centroids, numbers of a part) for {self.width} numbers, got "
                f"{tuple(centroids.shape)}"
            )

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return int(self.vectors.shape[1])

    @classmethod
    def of(
        cls,
        model: Model,
        array: Any,
        *,
        pooling: Pooling | str | None = None,
        normalise: bool | None = None,
        dimensions: int | None = None,
        prefix: str = "",
        half_steps: Any = None,
        compute_dtype: torch.dtype | str = torch.float32,
    ) -> VectorEvidence:
        """Vectors that were found somewhere, as numpy or torch hold them; one by itself may be 1-D.

        What is not given is the model's own recipe (`recipe_of`), whether lengths are 1, and the vectors' width.
        """
        require_model(model, EvidenceError)
        vectors = as_floats("vectors", array, _CODES)
        vectors = vectors[None] if vectors.ndim == 1 else vectors
        if vectors.ndim != 2 or 0 in vectors.shape:
            raise EvidenceError(
                f"the vectors have the shape {tuple(vectors.shape)}, expected (texts, numbers) with at least one, or "
                "one vector; give a row for each text"
            )
        width = vectors.shape[1]
        if not 1 <= width <= model.final_width or dimensions not in (None, width):
            asked = f"{dimensions} dimensions" if dimensions else f"at most {model.final_width} numbers"
            raise EvidenceError(
                f"the vectors have {width} numbers each, expected {asked} of this {model.family} model; load the model "
                "that made them"
            )
        recipe = recipe_of(model) if pooling is None else EmbeddingRecipe(pooling)  # type: ignore[arg-type]
        require_floats({"vectors": vectors}, _LEAVE_OUT)  # before their lengths are looked at
        lengths = vectors.double().norm(dim=1)
        near_one = float((lengths - 1).abs().median()) < _NEAR_ONE
        is_cut = width < model.final_width
        if is_cut and dimensions is None:
            warnings.warn(
                f"the vectors have {width} numbers and this {model.family} model makes {model.final_width}, so "
                "unmask assumes that they were shortened; if another model made them, load that model",
                stacklevel=2,
            )
        if (recipe.normalise if normalise is None else normalise) and bool((lengths == 0).any()):
            raise EvidenceError(
                f"the vectors are all zero in {_name_rows(lengths == 0)}, and no embedding of length 1 is; leave "
                "such rows out: array[array.any(1)]"
            )
        if normalise is None:  # the cut of a vector of length 1 is shorter
            normalise = near_one or (is_cut and recipe.normalise and float(lengths.median()) < 1)
            if recipe.normalise and not normalise:
                warnings.warn(
                    f"the vectors have lengths from {lengths.min():.3g} to {lengths.max():.3g} where this "
                    f"{model.family} model's recipe makes length 1, so they are taken for vectors before they are "
                    "normalised; if they were scaled, divide them by their lengths first, and leave out means and sums "
                    "of several texts' vectors",
                    stacklevel=2,
                )
        recipe = replace(
            recipe,
            normalise=normalise,
            dimensions=width if is_cut else None,
            renormalise=is_cut and normalise and near_one,
            prefix=prefix_tokens(model, prefix) if prefix else recipe.prefix,
        )
        steps = None if half_steps is None else as_floats("half_steps", half_steps)
        if steps is not None:
            try:
                steps = steps.expand_as(vectors).contiguous()
            except RuntimeError:
                raise EvidenceError(
                    f"half_steps must have the shape of the vectors, {tuple(vectors.shape)}, or one that fits it (a "
                    f"number, a row, a column), got {tuple(steps.shape)}"
                ) from None
        return cls(
            vectors,
            recipe,
            model.fingerprint(),
            require_float_type("compute_dtype", compute_dtype, EvidenceError),
            steps,
        )

    def check(self, model: Model) -> None:
        """Refuse vectors of another model, or of a width that it does not give."""
        if self.model_fingerprint != model.fingerprint():
            raise EvidenceError(
                f"these vectors were made with a model of fingerprint {self.model_fingerprint[:12]}, but the model "
                f"given has {model.fingerprint()[:12]}; load the weights that produced them"
            )
        if self.width != self.recipe.width(model):
            raise EvidenceError(
                f"vectors of {self.width} numbers do not fit this model, which gives {self.recipe.width(model)} by "
                f"{self.recipe}"
            )
        if any(not 0 <= token < model.vocab_size for token in self.recipe.prefix):
            raise EvidenceError(f"the prefix {self.recipe.prefix} has tokens that the model lacks")

    def same_code(self, text: int, candidates: Float[Tensor, "n k"]) -> Bool[Tensor, " n"]:
        """Whether each candidate's vector is coded as the stored vector of a text is; needs the quantiser."""
        if self.quantiser is None:
            raise EvidenceError("these vectors came without a product quantiser, so there are no codes to compare")
        offset = 0 if self.offsets is None else self.offsets[text]
        stored = product_codes(self.vectors[text : text + 1] - offset, self.quantiser)
        return has_code(candidates - offset, stored, self.quantiser)

    def named_tensors(self) -> Mapping[str, Tensor]:
        """The vector of each text by its number, as defences change them."""
        return {f"{text:06d}": vector for text, vector in enumerate(self.vectors)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> VectorEvidence:
        """The same evidence with these vectors; what a store told of the old ones is dropped."""
        vectors = torch.stack([tensors[name] for name in self.named_tensors()])
        return replace(self, vectors=vectors, half_steps=None, quantiser=None, offsets=None, error=None)

    def select(self, texts: Sequence[int]) -> VectorEvidence:
        """The same evidence of some texts alone, by their numbers."""
        chosen = {name: tensor[list(texts)] for name, tensor in self._tensors().items() if name != "quantiser"}
        return replace(self, **chosen)  # type: ignore[arg-type]

    def to(self, device: str | torch.device) -> VectorEvidence:
        """The same vectors on another device."""
        return replace(self, **{name: tensor.to(device) for name, tensor in self._tensors().items()})  # type: ignore[arg-type]

    def save(self, path: str | Path) -> Path:
        """Write to a safetensors file."""
        recipe = self.recipe
        header = {
            "model_fingerprint": self.model_fingerprint,
            "pooling": recipe.pooling.value,
            "normalise": recipe.normalise,
            "dimensions": recipe.dimensions,
            "renormalise": recipe.renormalise,
            "prefix": list(recipe.prefix),
            "compute_dtype": str(self.compute_dtype).removeprefix("torch."),
            "error": self.error,
        }
        return write(path, "vectors", self._tensors(), header)

    def _tensors(self) -> dict[str, Tensor]:
        held = {name: getattr(self, name) for name in ("vectors", "half_steps", "quantiser", "offsets")}
        return {name: tensor for name, tensor in held.items() if tensor is not None}


def half_steps_of(stored: Float[Tensor, "texts k"]) -> Float[Tensor, "texts k"] | None:
    """Half of the last digit of each number of a short float type; None for float32 and longer ones."""
    if stored.dtype.itemsize > 2:
        return None
    exponents = torch.frexp(stored.float()).exponent - 1
    kind = torch.finfo(stored.dtype)
    least = math.frexp(kind.smallest_normal)[1] - 1  # below it steps do not shrink
    return kind.eps / 2 * torch.exp2(exponents.clamp_min(least).float())


def _name_rows(is_bad: Bool[Tensor, " texts"]) -> str:
    """Numbers of rows from 0 on."""
    rows = is_bad.nonzero()[:, 0].tolist()
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return f"{'row' if len(rows) == 1 else 'rows'} {', '.join(map(str, rows[:_NAMED]))}{more}"


@reads("vectors")
def _read_vectors(tensors: Mapping[str, Tensor], header: dict[str, Any]) -> VectorEvidence:
    dimensions, error = header.get("dimensions"), header.get("error")
    recipe = EmbeddingRecipe(
        Pooling(header["pooling"]),
        bool(header["normalise"]),
        None if dimensions is None else int(dimensions),
        bool(header.get("renormalise", False)),
        tuple(int(token) for token in header.get("prefix", ())),
    )
    return VectorEvidence(
        tensors["vectors"],
        recipe,
        str(header["model_fingerprint"]),
        named_dtype(header.get("compute_dtype", "float32")),
        tensors.get("half_steps"),
        tensors.get("quantiser"),
        tensors.get("offsets"),
        None if error is None else float(error),
    )
