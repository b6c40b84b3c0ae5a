"""One forward pass, written down: what enters and leaves every module, and the products and softmaxes of attention.

A model tells by running what it is made of. Hooks see its modules, a function mode sees the operations between them, so
that nothing need be known of the family: a module's input that equals another one's output was made by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Kind(Enum):
    """Operations that attention is made of."""

    PRODUCT = "product"
    SOFTMAX = "softmax"
    TANH = "tanh"
    ATTENTION = "attention"  # all of it in one call


KINDS: Mapping[Any, Kind] = {
    **dict.fromkeys([torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm], Kind.PRODUCT),
    **dict.fromkeys([torch.baddbmm, Tensor.baddbmm], Kind.PRODUCT),
    **dict.fromkeys([torch.softmax, Tensor.softmax, functional.softmax], Kind.SOFTMAX),
    **dict.fromkeys([torch.tanh, Tensor.tanh], Kind.TANH),
    functional.scaled_dot_product_attention: Kind.ATTENTION,
}


@dataclass
class Call:
    """A module's call: what it was given, what it returned, and when it began and ended."""

    module: nn.Module
    name: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    start: int
    end: int = -1
    returned: Any = None
    input: Any = None  # the first tensor that it was given, as it was then; None if there was none
    output: Any = None  # the first tensor that it returned, as it was then

    @property
    def live_output(self) -> Any:
        """The first tensor that it returned, in the graph of the pass; it may have been changed in place since."""
        return first_tensor(self.returned)

    @property
    def given(self) -> dict[int | str, Any]:
        """Its arguments, by place or by name."""
        return {**dict(enumerate(self.arguments)), **dict(self.options)}  # type: ignore[dict-item]

    def holds(self, other: Call | Operation) -> bool:
        """Whether something happened while it ran."""
        return self.start < other.start < self.end


@dataclass(frozen=True)
class Operation:
    """One of the operations of attention, with its operands."""

    kind: Kind
    start: int
    operands: tuple[Tensor, ...]
    options: Mapping[str, Any]
    output: Tensor


@dataclass
class Record:
    """Calls and operations in the order in which they began."""

    calls: list[Call] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    clock: int = 0

    def tick(self) -> int:
        """The next moment."""
        self.clock += 1
        return self.clock

    def inside(self, outer: Call) -> Iterator[Call]:
        """Calls made while another one ran."""
        return (call for call in self.calls if outer.holds(call))


class Operations(TorchFunctionMode):
    """Writes down the operations of attention while it is active."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; keep it if attention is made of such."""
        output, kind = func(*args, **(kwargs or {})), KINDS.get(func)
        if kind is not None:
            operands = tuple(each for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor))
            self.record.operations.append(Operation(kind, self.record.tick(), operands, kwargs or {}, output))
        return output


def record_pass(hf: nn.Module, last: nn.Module | None = None, **inputs: Any) -> Record:
    """Run a model once, and write down what happens; with `last`, until that module has run."""
    record, running = Record(), []
    names = {module: name for name, module in hf.named_modules()}

    def begin(module: nn.Module, arguments: Any, options: Any) -> None:
        given = first_tensor((*arguments, *options.values()))
        running.append(Call(module, names[module], arguments, options, record.tick(), input=_keep(given)))
        record.calls.append(running[-1])

    def finish(module: nn.Module, arguments: Any, options: Any, returned: Any) -> None:
        call = running.pop()
        made = first_tensor(returned)
        call.end, call.returned, call.output = record.tick(), returned, _keep(made)
        if module is last:
            raise _Reached

    frozen = [weight for weight in hf.parameters() if weight.is_floating_point() and not weight.requires_grad]
    hooks = [module.register_forward_pre_hook(begin, with_kwargs=True) for module in names]
    hooks += [module.register_forward_hook(finish, with_kwargs=True) for module in names]
    try:
        for weight in frozen:  # they would start no graph
            weight.requires_grad_(True)
        with Operations(record), torch.enable_grad(), suppress(_Reached):
            hf(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for weight in frozen:
            weight.requires_grad_(False)
    return record


def _keep(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


class _Reached(Exception):  # noqa: N818 — not an error: the pass has told what was asked
    """The module whose input is wanted was called."""


def input_of(module: nn.Module, run: Any) -> Tensor:
    """What a module is given when something is run; the rest of the run is left out."""
    seen: list[Tensor] = []

    def stop(_: nn.Module, arguments: Any, options: Any) -> None:
        seen.append(first_tensor((*arguments, *options.values())))  # type: ignore[arg-type]
        raise _Reached

    with hook_before(module, stop):
        try:
            run()
        except _Reached:
            return seen[0]
    raise RuntimeError(f"{type(module).__name__} was not reached")


@contextmanager
def hook_before(module: nn.Module, hook: Any) -> Iterator[None]:
    """Call a hook before a module, for a while."""
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return next((found for found in map(first_tensor, value) if found is not None), None)
    return None
