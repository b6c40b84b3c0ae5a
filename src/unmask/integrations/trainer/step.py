"""One step of a running training: the texts that it reads, the weights that it starts from, the update that it makes.

    gradient:  G = ∂L/∂W, as the optimizer is about to use it (accumulated, clipped)
    delta:     ΔW = W(after) − W(before), of one or several steps

Everything is copied before an attack sees it, and nothing of the model is changed. The texts are kept beside the
update, for scores: attacks get the update and the weights alone.

Notation: W weights, L the loss of the step.
Limits: one process; parameters that are sharded over devices have no gradient here.
Cost: one copy of the weights that are trained; frozen ones are shared.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unmask.integrations.federation.update import kept_names
from unmask.models.adapter import Model
from unmask.models.load import load_model, unwrap

Rows = list[list[int]]
Batch = tuple[Tensor, Tensor | None]  # token ids and their mask


class BatchRecorder:
    """Notes the token ids that a model is trained on, by a hook that changes nothing."""

    def __init__(self) -> None:
        self._batches: list[Batch] = []
        self._earlier: list[Batch] = []
        self._handle: Any = None

    def attach(self, hf: nn.Module) -> None:
        """Listen to a model."""
        self.detach()
        self._batches, self._earlier = [], []
        recorder = self

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if module.training and torch.is_grad_enabled():
                recorder.note(args, kwargs)

        self._handle = hf.register_forward_pre_hook(note, with_kwargs=True)

    def detach(self) -> None:
        """Stop listening."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    def note(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep a batch of one forward pass."""
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(tokens, Tensor) and tokens.ndim == 2:
            self._batches.append((tokens.detach(), kwargs.get("attention_mask")))

    def begin(self) -> None:
        """A step or a round begins: what was noted so far is that of the one before."""
        self._earlier, self._batches = self._batches or self._earlier, []

    @property
    def rows(self) -> Rows:
        """The texts of this step or round, as lists of tokens without padding."""
        return [row for batch in self._batches for row in _rows(*batch)]

    @property
    def earlier_rows(self) -> Rows:
        """The texts of the step or round before."""
        return [row for batch in self._earlier for row in _rows(*batch)]

    def forget_in(self, copied: nn.Module) -> None:
        """Take the hook out of a copy of the model."""
        if self._handle is not None:
            copied._forward_pre_hooks.pop(self._handle.id, None)
            copied._forward_pre_hooks_with_kwargs.pop(self._handle.id, None)


def _rows(tokens: Tensor, mask: Tensor | None) -> Iterator[list[int]]:
    is_plain = isinstance(mask, Tensor) and mask.shape == tokens.shape
    kept = mask.bool() if is_plain and mask is not None else torch.ones_like(tokens, dtype=torch.bool)
    for row, real in zip(tokens.cpu(), kept.cpu(), strict=True):
        if real.any():
            yield row[real].tolist()


def copy_model(hf: nn.Module, recorder: BatchRecorder) -> nn.Module:
    """The model as it is now, in evaluation mode; weights that are not trained are shared.

    What accelerate puts around `forward` (mixed precision) and the recorder's hook are left out.
    """
    frozen = [parameter for parameter in hf.parameters() if not parameter.requires_grad]
    memo = {id(weight): _share(weight) for weight in frozen}
    copied: nn.Module = copy.deepcopy(hf, memo)
    for name in ("forward", "_original_forward"):
        copied.__dict__.pop(name, None)
    recorder.forget_in(copied)
    return copied.eval()


def _share(weight: nn.Parameter) -> nn.Parameter:
    """The same numbers under a name of their own, so that nobody can ask for the original's gradient."""
    is_plain = type(weight) is nn.Parameter and weight.is_floating_point()
    return nn.Parameter(weight.detach(), requires_grad=False) if is_plain else weight


def open_model(copied: nn.Module, tokenizer: Any) -> Model:
    """The adapter of a copy."""
    model = load_model(copied, tokenizer=tokenizer)
    for parameter in model.hf.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
    return model


def read_gradients(hf: nn.Module, model: Model) -> dict[str, Tensor]:
    """Copies of the gradients that the optimizer is about to use, of tensors that attacks read."""
    held = {name: parameter.grad for name, parameter in unwrap(hf).named_parameters() if parameter.grad is not None}
    return _read(model, held, lambda name: held[name].detach().clone())


def read_change(hf: nn.Module, before: nn.Module, model: Model) -> dict[str, Tensor]:
    """By how much the trained weights have moved, of tensors that attacks read."""
    old = dict(unwrap(before).named_parameters())
    new = {name: weight.detach() for name, weight in unwrap(hf).named_parameters() if weight.requires_grad}
    return _read(model, new, lambda name: _precise(new[name]) - _precise(old[name]))


def _read(model: Model, held: Mapping[str, Tensor], value: Callable[[str], Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        return {own: value(name) for name, own in kept_names(model, held).items()}


def _precise(weight: Tensor) -> Tensor:
    weight = weight.detach()
    return weight if weight.dtype is torch.float64 else weight.float()


@contextmanager
def keep_randomness() -> Iterator[None]:
    """Whatever is drawn inside, the random numbers outside go on as if nothing had been."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else range(0)
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
