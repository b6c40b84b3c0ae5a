"""Queries, keys and values of any block, made by the model's own attention module.

The module is called as the model itself would call it at these positions, and stopped at its softmax: rotations, norms
of queries and keys, groups and whatever a family adds are then in them. With what arguments it is called is asked of
the body: its blocks are skipped, and tell what they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from unmask.models.record import KINDS, Kind, first_tensor, hook_before

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


class _Told(Exception):  # noqa: N818 — not an error: the pass has told what was asked
    """What was wanted is known; the rest of the pass is left out."""


@dataclass(frozen=True)
class KnownRows:
    """Rows that are asked for at many positions, and what linear layers made of them: that is the same at all."""

    rows: Tensor
    outputs: dict[int, tuple[Tensor, int]] = field(default_factory=dict)  # by weight, with the version that was kept

    def multiply(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """What a layer makes of the rows; again only where it was changed in place since."""
        weight = args[1]
        if not isinstance(weight, nn.Parameter):  # a part that was cut out for this call: another may get its id
            return func(*args, **kwargs)
        output, version = self.outputs.get(id(weight), (None, 0))
        if output is None or output._version != version:
            output = func(*args, **kwargs)
            self.outputs[id(weight)] = output, output._version
        return output


def _typed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: Tensor) -> Mapping[str, Any]:
    """Options of an operation; a number that is filled in (a least score) gets the rows' type, or it may overflow."""
    is_plain = func is torch.full and len(args) > 1 and isinstance(args[1], float) and "dtype" not in kwargs
    return {**kwargs, "dtype": rows.dtype} if is_plain else kwargs


class _StopAtSoftmax(TorchFunctionMode):
    """Keeps the operands of the products around the next softmax, then ends the pass."""

    def __init__(self, given: Tensor, known: KnownRows | None) -> None:
        super().__init__()
        self.given, self.known = given, known
        self.products: list[tuple[Tensor, ...]] = []
        self.is_behind = False
        self.heads: tuple[Tensor, Tensor, Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, or end the pass where values are mixed."""
        if self.known is not None and func is functional.linear and len(args) > 1 and args[0] is self.given:
            return self.known.multiply(func, args, kwargs or {})
        kind = KINDS.get(func)
        if kind is None:
            return func(*args, **_typed(func, args, kwargs or {}, self.given))
        tensors = tuple(each for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor))
        if kind is Kind.ATTENTION:
            self.heads = tensors[0], tensors[1], tensors[2]
            raise _Told
        if kind is Kind.PRODUCT and self.is_behind:
            queries, keys = self.products[-1][-2:]
            self.heads = queries, keys.transpose(-1, -2), tensors[-1]
            raise _Told
        if kind is Kind.PRODUCT:
            self.products.append(tensors)
        if kind is Kind.SOFTMAX and self.products:
            self.is_behind = True
        return func(*args, **(kwargs or {}))


def read_heads(
    attention: nn.Module, where: int | str, arguments: Arguments, rows: Tensor, known: KnownRows | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (N, h, e) that an attention module makes of rows (N, d), each a text of its own.

    `known`: of the same rows, asked for before.
    """
    texts = rows[:, None]
    mode = _StopAtSoftmax(texts, known)
    given, options = replace_rows(arguments, where, texts)
    try:
        with mode:
            attention(*given, **options)
    except _Told:
        pass
    assert mode.heads is not None  # the same module told them when the model was asked
    return tuple(part.reshape(len(rows), -1, part.shape[-1]).to(rows) for part in mode.heads)  # type: ignore[return-value]


class _MixInstead(TorchFunctionMode):
    """Puts other mixed values behind the next softmax; the module goes on with them."""

    def __init__(self, mixed: Tensor) -> None:
        super().__init__()
        self.mixed = mixed
        self.is_behind, self.is_done = False, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, or say what came out of it."""
        output, kind = func(*args, **_typed(func, args, kwargs or {}, self.mixed)), KINDS.get(func)
        if not self.is_done and (kind is Kind.ATTENTION or (kind is Kind.PRODUCT and self.is_behind)):
            self.is_done = True
            return self.mixed.reshape(output.shape)
        self.is_behind |= kind is Kind.SOFTMAX and output.dim() > 2
        return output


def finish_attention(
    attention: nn.Module, where: int | str, arguments: Arguments, rows: Tensor, mixed: Tensor
) -> Tensor:
    """What an attention module puts out (N, d), given its rows (N, d) and the values mixed for each of them (N, o)."""
    given, options = replace_rows(arguments, where, rows[:, None])
    with _MixInstead(mixed):
        made = first_tensor(attention(*given, **options))
    assert made is not None
    return made.reshape(len(rows), -1)


def block_arguments(
    body: Any, blocks: Sequence[nn.Module], returned: Sequence[Any], run: Callable[[], Any]
) -> list[Arguments]:
    """What each block is given when something is run; the blocks themselves are skipped."""
    calls: list[Arguments] = []
    num_kept = sum(not isinstance(block, nn.Identity) for block in blocks)  # a copy may have its first blocks alone

    def skip(*given: Any, **options: Any) -> Any:
        calls.append((given, options))
        if len(calls) == num_kept:
            raise _Told
        hidden = given[0] if given else options["hidden_states"]
        rest = returned[len(calls) - 1]
        return hidden if rest is None else (hidden, *rest)

    with _replaced(set(blocks), skip), suppress(_Told):
        run()
    return calls


def module_arguments(block: nn.Module, module: nn.Module, arguments: Arguments) -> Arguments:
    """What a module inside a block is given when the block is called."""
    seen: list[Arguments] = []

    def stop(_: nn.Module, given: Any, options: Any) -> None:
        seen.append((given, options))
        raise _Told

    with hook_before(module, stop), suppress(_Told):
        block(*arguments[0], **arguments[1])
    return seen[0]


def replace_rows(arguments: Arguments, where: int | str, rows: Tensor) -> Arguments:
    """The same arguments, with other rows; a mask of one text is spread over all, as a family may check its shape."""

    def spread(value: Any) -> Any:
        is_mask = isinstance(value, Tensor) and value.dim() == 4 and len(value) == 1
        return value.expand(len(rows), -1, -1, -1) if is_mask else value

    given = tuple(map(spread, arguments[0]))
    options = {name: spread(value) for name, value in arguments[1].items()}
    if isinstance(where, int):
        return (*given[:where], rows, *given[where + 1 :]), options
    return given, {**options, where: rows}


@contextmanager
def _replaced(modules: set[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Modules that run something else for a while."""
    before = {module: module.__dict__.get("forward") for module in modules}
    for module in modules:
        module.forward = forward
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del module.forward
            else:
                module.forward = own
