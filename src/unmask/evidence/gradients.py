"""A client's update as a federated-learning server sees it."""

from __future__ import annotations

import copy
import warnings
from collections import ChainMap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.arguments import named_dtype, require_count, require_fingerprint, require_member, require_number
from unmask.displays import DisplayedFields
from unmask.errors import EvidenceError, TooSmallError
from unmask.evidence.captured import (
    check_factors,
    name_tensors,
    plain_name,
    refuse_weights,
    seems_adams,
    trains_classifier,
)
from unmask.evidence.files import reads, write
from unmask.evidence.tensor_files import StoredTensors, by_size, shapes_of
from unmask.evidence.tensors import AS_HELD, require_floats, stated_precision
from unmask.models.adapter import Model
from unmask.models.encoder_decoder import EncoderDecoder
from unmask.models.linear import Role
from unmask.models.load import require_model
from unmask.models.peft_adapters import Scale


class Task(Enum):
    """What the client trained for."""

    NEXT_TOKEN = "next_token"
    CLASSIFICATION = "classification"  # one label a text; labels of tokens are none of these tasks
    MASKED_TOKEN = "masked_token"


class Update(Enum):
    """What the tensors are: gradients of the loss, or the difference new − old of the weights."""

    GRADIENT = "gradient"
    DELTA = "delta"


OPTIMIZERS = ("sgd", "adamw")
POOLINGS = ("last", "first", "mean")
# Header keys that are written only when known; the first files had none of them.
_IF_KNOWN = (
    *("learning_rate", "num_steps", "optimizer", "weight_decay", "momentum", "local_batch_size", "noise_std"),
    *("all_tokens_predicted", "pooling", "adapter_scale", "num_clients"),
)
_ADAPTER = "adapter/"  # prefix of the server's own LoRA weights among the tensors of a file
_HEAD = "head/weight"  # name of the classification head among them

_SMALLEST = 1e-15  # largest entry of an update: squares of what is 1e-4 of it are still numbers in float32


class SideKnowledge(TypedDict, total=False):
    """What an adversary may know beside the tensors; the fields of `GradientEvidence`, with the same meaning."""

    task: Task | str | None
    num_texts: int | None
    update: Update | str
    compute_dtype: torch.dtype | str
    learning_rate: float | None
    num_steps: int | None
    optimizer: str | None
    weight_decay: float | None
    momentum: float | None
    local_batch_size: int | None
    noise_std: float | None
    num_clients: int | None
    all_tokens_predicted: bool | None
    pooling: str | None
    adapter_scale: Scale | None
    head: Tensor | None
    adapters: Mapping[str, Any] | None


@dataclass(frozen=True, repr=False)
class GradientEvidence(DisplayedFields):
    """Gradients by canonical parameter name, as the family stores them; any subset of the parameters is legal.

    Side knowledge of the adversary, `None` meaning that it must be inferred: `task`, `num_texts`, and `compute_dtype`,
    the precision in which the client ran its model (the server sent it, so it is known as a rule). Of a client that
    trained locally: `learning_rate`, `num_steps`, `optimizer`, `weight_decay`, `momentum` and `local_batch_size`, the
    texts of one step. Of a protocol that publishes its noise: `noise_std`, the standard deviation on each entry of the
    shared tensors. Of LoRA: `adapters`, the weights that the server sent, by '<module>.lora_A.weight' and
    '<module>.lora_B.weight', and `adapter_scale`, alpha/rank (by module where it differs). Of next-token training:
    `all_tokens_predicted`, whether every token behind a text's first one has a label; chat fine-tuning masks some. Of
    classification: `head` (labels, d), the weights that the server sent where they are no part of the model, and
    `pooling`, the state that the head reads ('first', 'last' or 'mean'). `num_clients`: 1 if the update is one client's
    mean over its batch (of tokens, or of each text's own mean), more if it is a sum; then losses have weights of their
    own.
    """

    gradients: Mapping[str, Tensor]
    model_fingerprint: str
    task: Task | None = None
    num_texts: int | None = None
    update: Update = Update.GRADIENT
    compute_dtype: torch.dtype = AS_HELD
    learning_rate: float | None = None
    num_steps: int | None = None
    optimizer: str | None = None
    weight_decay: float | None = None
    momentum: float | None = None
    local_batch_size: int | None = None
    noise_std: float | None = None
    num_clients: int | None = None
    all_tokens_predicted: bool | None = None
    pooling: str | None = None
    adapter_scale: Scale | None = None
    head: Tensor | None = None
    adapters: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_fingerprint(self.model_fingerprint, EvidenceError)
        object.__setattr__(self, "gradients", require_floats(self.gradients))
        object.__setattr__(self, "adapters", require_floats(self.adapters))
        if self.head is not None:
            object.__setattr__(self, "head", require_floats({"head": self.head})["head"])
        # Clients train in bfloat16; float16 is how updates are sent (mixed precision leaves gradients in float32).
        sent = () if isinstance(self.gradients, StoredTensors) else self.gradients.values()
        held = [tensor for tensor in sent if tensor.dtype is not torch.float16]
        if self.task is not None:
            object.__setattr__(self, "task", require_member(Task, "task", self.task, EvidenceError))
        object.__setattr__(self, "update", require_member(Update, "update", self.update, EvidenceError))
        object.__setattr__(self, "compute_dtype", stated_precision(self.compute_dtype, held))
        for name in ("num_texts", "num_steps", "local_batch_size", "num_clients"):
            require_count(name, getattr(self, name), error=EvidenceError)
        require_number("learning_rate", self.learning_rate, positive=True, error=EvidenceError)
        stated = self.adapter_scale
        for scale in stated.values() if isinstance(stated, Mapping) else [stated]:
            require_number("adapter_scale", scale, positive=True, error=EvidenceError)
        for name in ("weight_decay", "momentum", "noise_std"):
            require_number(name, getattr(self, name), positive=False, error=EvidenceError)
        if self.optimizer not in (None, *OPTIMIZERS):
            raise EvidenceError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, or None, got {self.optimizer!r}")
        if self.all_tokens_predicted not in (None, True, False):
            raise EvidenceError(f"all_tokens_predicted must be True, False or None, got {self.all_tokens_predicted!r}")
        if self.pooling not in (None, *POOLINGS):
            raise EvidenceError(f"pooling must be one of {', '.join(POOLINGS)}, or None, got {self.pooling!r}")
        if self.head is not None and self.head.ndim != 2:
            raise EvidenceError(f"the head must be a matrix (labels, width), got shape {tuple(self.head.shape)}")
        if reserved := [name for name in self.gradients if name.startswith(_ADAPTER) or name == _HEAD]:
            raise EvidenceError(f"'{reserved[0]}' is a name that evidence files use themselves; rename the tensor")

    @classmethod
    def of(cls, model: Model, tensors: Mapping[str, Any], **side_knowledge: Unpack[SideKnowledge]) -> GradientEvidence:
        """Wrap tensors that were captured elsewhere, under the names that transformers gives them.

        Arrays of numpy are taken too; gradients that are None, as those of frozen layers, are left out; what DDP,
        torch.compile, FSDP and PEFT put before names is removed. Of a model that was loaded from a PEFT model, the
        adapters and their scale are known unless stated.
        """
        require_model(model, EvidenceError)
        gradients = name_tensors(model, tensors)
        known: dict[str, Any] = dict(side_knowledge)
        sent = name_tensors(model, known.pop("adapters", None) or {})
        adapters = {name: factor.clone() for name, factor in sent.items()}  # a model in training may own them
        if not adapters and model.adapters is not None:
            adapters = dict(model.adapters.factors)
            known.setdefault("adapter_scale", model.adapters.scale)
        if isinstance(scales := known.get("adapter_scale"), Mapping):
            named = {model.canonical_name(plain_name(str(module))): scale for module, scale in scales.items()}
            known["adapter_scale"] = named
        evidence = cls(gradients, model.fingerprint(), adapters=adapters, **known)
        evidence.check(model)
        if evidence.update is Update.GRADIENT and seems_adams(gradients):
            warnings.warn(
                "the largest entries of all matrices are about equal, as in what Adam adds to weights (or in signs of "
                "gradients); if these are new − old, state update='delta' and optimizer='adamw'",
                stacklevel=2,
            )
        if not adapters and any(".lora_B." in name for name in gradients):
            warnings.warn(
                "the tensors hold LoRA factors, but not the weights of the adapters that the server sent, without "
                "which little can be read; pass adapters=…, or load_model(the PEFT model)",
                stacklevel=2,
            )
        return evidence

    def check(self, model: Model | EncoderDecoder) -> None:
        """Refuse evidence of another model (other weights, parameters, shapes), weights, and numbers near zero."""
        largest = _largest_entry(self.gradients)
        if 0 < largest < _SMALLEST:
            raise TooSmallError(
                f"the largest entry of this update is {largest:.1e}: float32 cannot square such numbers, so nothing "
                "could be certified; multiply all tensors by one factor"
            )
        fingerprint = model.fingerprint()
        if self.model_fingerprint != fingerprint:
            raise EvidenceError(
                f"this evidence was made with a model of fingerprint {self.model_fingerprint[:12]}, but the model "
                f"given has {fingerprint[:12]}; load the weights that the client started from "
                "(the same round, the same checkpoint)"
            )
        weights = dict(model.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in weights.items()}
        for name, shape in shapes_of(self.gradients).items():
            if name in shapes and shape != shapes[name]:
                raise EvidenceError(
                    f"the gradient of '{name}' has shape {shape}, the parameter has {shapes[name]}; "
                    "was it flattened or sharded on the way?"
                )
        factors: Collection[str] = ()
        if isinstance(model, Model):
            factors = check_factors(model, self.gradients, self.adapters)
        if strangers := sorted(set(self.adapters) - set(factors)):
            raise EvidenceError(
                f"the adapters hold {strangers[0]!r}; their names must be '<module>.lora_A.weight' or '….lora_B.weight'"
            )
        if not {*shapes, *factors} & set(self.gradients):
            raise EvidenceError(
                f"none of the {len(self.gradients)} tensors is a parameter of this model (first: "
                f"{next(iter(self.gradients), 'none')!r}); names must be those of transformers' named_parameters()"
            )
        # B is zero at first, so that after a round it is itself a change, and the next one may be parallel to it.
        grown = {name: factor for name, factor in self.adapters.items() if ".lora_B." not in name}
        refuse_weights(self.gradients, {**weights, **grown})

    def may_be_tied(self, model: Model) -> bool:
        """Whether the token embedding may have predicted tokens too; a model without a head may have borrowed it."""
        if self.task is Task.CLASSIFICATION or model.unembedding_name not in (None, model.token_embedding):
            return False
        decays = bool(self.weight_decay)  # which moves heads that nobody trains
        return self.task is not None or decays or not trains_classifier(model, self.gradients)

    def linear(self, model: Model, role: Role, block: int) -> Float[Tensor, "d_in d_out"] | None:
        """The gradient of a linear layer as (d_in, d_out); None if the update does not hold it or it is zero.

        Of weights that blocks share there is only the sum of all blocks' gradients: None as well.
        """
        layer = model.linear(role, block)
        if layer is None or layer.parameter not in self.gradients or model.is_shared(block):
            return None
        gradient = layer.orient(self.gradients[layer.parameter])
        return gradient if bool(gradient.any()) else None

    def only(self, *patterns: str) -> GradientEvidence:
        """The part of the update whose names contain one of the patterns."""
        names = [name for name in self.gradients if any(pattern in name for pattern in patterns)]
        if isinstance(self.gradients, StoredTensors):
            return self._changed(gradients=self.gradients.only(names))
        return self._changed(gradients={name: self.gradients[name] for name in names})

    def named_tensors(self) -> Mapping[str, Tensor]:
        """The gradients by parameter name, as defences change them."""
        return self.gradients

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> GradientEvidence:
        """The same update with these gradients."""
        return self._changed(gradients=require_floats(tensors))

    def to(self, device: str | torch.device) -> GradientEvidence:
        """The same evidence on another device."""
        gradients, adapters = (
            part.to(device)
            if isinstance(part, StoredTensors)
            else {name: tensor.to(device) for name, tensor in part.items()}
            for part in (self.gradients, self.adapters)
        )
        return self._changed(
            gradients=gradients, adapters=adapters, head=None if self.head is None else self.head.to(device)
        )

    def _changed(self, **parts: Any) -> GradientEvidence:
        """A copy with other containers for the same numbers, which were checked when the evidence was made."""
        changed = copy.copy(self)
        for name, value in parts.items():
            object.__setattr__(changed, name, value)
        return changed

    def save(self, path: str | Path) -> Path:
        """Write to a safetensors file."""
        header = {
            "model_fingerprint": self.model_fingerprint,
            "task": None if self.task is None else self.task.value,
            "num_texts": self.num_texts,
            "update": self.update.value,
            "compute_dtype": str(self.compute_dtype).removeprefix("torch."),
            **{name: value for name in _IF_KNOWN if (value := getattr(self, name)) is not None},
        }
        adapters = {_ADAPTER + name: tensor for name, tensor in self.adapters.items()}
        head = {} if self.head is None else {_HEAD: self.head}
        return write(path, "gradients", ChainMap({**adapters, **head}, self.gradients), header)  # type: ignore[arg-type]


def _largest_entry(gradients: Mapping[str, Tensor]) -> float:
    """The largest entry of an update; the first one that is no small number where there is one."""
    largest = 0.0
    for name in by_size(gradients):
        tensor = gradients[name]
        largest = max(largest, float(tensor.abs().max()) if tensor.numel() else 0.0)
        if largest >= _SMALLEST:
            break
    return largest


@reads("gradients")
def _read(tensors: Mapping[str, Tensor], header: dict[str, Any]) -> GradientEvidence:
    adapters = {name.removeprefix(_ADAPTER): tensors[name] for name in tensors if name.startswith(_ADAPTER)}
    names = [name for name in tensors if not name.startswith(_ADAPTER) and name != _HEAD]
    stored = tensors.only(names) if isinstance(tensors, StoredTensors) else {name: tensors[name] for name in names}
    return GradientEvidence(
        gradients=stored,
        model_fingerprint=str(header["model_fingerprint"]),
        task=None if header["task"] is None else Task(header["task"]),
        num_texts=header["num_texts"],
        update=Update(header["update"]),
        compute_dtype=named_dtype(header["compute_dtype"]),
        adapters=adapters,
        head=tensors.get(_HEAD),
        **{name: header.get(name) for name in _IF_KNOWN},
    )
