"""The roles of a block's layers, read off one recorded pass: no family is named, no module is known by its name.

attention inputs   the layers that feed the queries, keys and values of the softmax (by their gradients)
output projection  the first layer behind it that is given the mixed values
down projection    the layer whose output the block adds to the stream at last
MLP inputs         the layers between, that share one input
all other rows     sums of earlier ones (`wiring.py`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unmask.models.linear import LinearLayer, Role
from unmask.models.record import Call, Record
from unmask.models.softmaxes import Heads, find_heads
from unmask.models.wiring import RowFlow, Sum, find_sum

STREAM, ATTENTION, MLP = "stream", "attention", "mlp"  # rows of a block that are given, not computed by its steps


@dataclass(frozen=True)
class MlpCore:
    """From the MLP's input to the down projection's: a module that is stopped there, or modules one after the other."""

    module: str | None = None
    chain: tuple[str, ...] = ()


@dataclass(frozen=True)
class MlpSum:
    """The sum that the MLP's output is added to, with factor 1; `factor` times it goes through the modules `behind`."""

    input: Sum
    factor: float
    behind: tuple[str, ...]


@dataclass(frozen=True)
class BlockLayout:
    """Where a block keeps what: names of modules below it, and how rows flow between them."""

    linear: Mapping[Role, LinearLayer]  # parameters by their names below the block
    attention: tuple[str, int | str] | None  # the module that makes queries, keys and values; its argument for rows
    attention_input: Sum | None
    mlp_input: Sum | None
    mlp: MlpCore | None
    output: Sum | None
    flow: RowFlow
    attention_sum: Sum | None = (
        None  # all that later rows depend on behind attention; None where the stream goes round it
    )
    mlp_sum: MlpSum | None = None
    num_heads: int = 0
    num_key_value_heads: int = 0
    head_width: int = 0
    value_width: int = 0  # of one head's values, where keys have another width


def find_layout(record: Record, block: Call) -> BlockLayout:
    """The roles of a block's layers; those that are not found are left out."""
    return _Finder(record, block).layout()


class _Finder:
    """Reads one block's part of a record."""

    def __init__(self, record: Record, block: Call) -> None:
        self.record, self.block = record, block
        self.calls = list(record.inside(block))
        self.linears = [call for call in self.calls if is_linear(call.module)]
        self.heads = [heads for heads in find_heads(record, block) if heads is not None]
        self.known: dict[str, Tensor] = {STREAM: block.input}
        self.steps: dict[str, Sum] = {}

    def layout(self) -> BlockLayout:
        """Attention first, then whatever is added to the stream behind it."""
        heads = self.heads[0] if self.heads else None
        projections, rows = ({}, None) if heads is None else self._attention_layers(heads)
        out = None if heads is None else self._output_projection(heads)
        module = None if heads is None or rows is None else self._attention_module(projections, heads, rows)
        self._add_steps(until=heads.start if heads else self.block.end)
        if heads is None:
            projections, rows = self._first_layer()
        attention_input = None if rows is None else find_sum(rows, self.known)
        linear = {role: self._layer(call, columns) for role, (call, columns) in projections.items()}
        if out is not None:
            linear[Role.ATTENTION_OUT] = self._layer(out)
        elif module is not None:  # something happens between mixed values and layer: the module is run to its end
            out = next(call for call in self.calls if self._name(call) == module[0])
        if out is not None:
            self.known[ATTENTION] = out.output
        down, core, mlp_input = self._mlp(after=out.end if out else self.block.start)
        linear |= down
        output = find_sum(self.block.output, self.known)
        shape = (0, 0, 0, 0)
        if heads is not None:
            shape = heads.queries.shape[1], heads.keys.shape[1], heads.queries.shape[3], heads.values.shape[3]
        flow = RowFlow(dict(self.steps))
        sums = _attention_sum(flow, mlp_input, output), _mlp_sum(flow, output)
        return BlockLayout(linear, module, attention_input, mlp_input, core, output, flow, *sums, *shape)

    # ---- attention

    def _attention_layers(self, heads: Heads) -> tuple[dict[Role, tuple[Call, Tensor | None]], Tensor | None]:
        """The layers that queries, keys and values come from, which of their columns, and the rows they share."""
        before = [call for call in self.linears if call.end < heads.start]
        found: dict[Role, tuple[Call, Tensor | None]] = {}
        rows: Tensor | None = None
        for role, operand in ((Role.QUERY, heads.queries), (Role.KEY, heads.keys), (Role.VALUE, heads.values)):
            weights = torch.randn(operand.shape, generator=torch.Generator().manual_seed(0)).to(operand)
            if not operand.requires_grad:
                continue
            made = [call for call in before if call.live_output.requires_grad]
            outputs = [call.live_output for call in made]
            gradients = torch.autograd.grad((operand * weights).sum(), outputs, retain_graph=True, allow_unused=True)
            for call, gradient in zip(made, gradients, strict=True):
                if gradient is None or not gradient.any() or role in found:
                    continue
                rows = call.input if rows is None else rows
                if is_same(call.input, rows):
                    found[role] = call, gradient.flatten(0, -2).abs().sum(0) > 0
        return found, rows

    def _first_layer(self) -> tuple[dict[Role, tuple[Call, Tensor | None]], Tensor | None]:
        """Of a block that mixes tokens without a softmax: the first layer that is given the stream."""
        first = next((call for call in self.linears if find_sum(call.input, self.known) is not None), None)
        return ({}, None) if first is None else ({Role.QUERY: (first, None)}, first.input)

    def _output_projection(self, heads: Heads) -> Call | None:
        """The first layer behind attention, if the mixed values are what it is given."""
        later = next((call for call in self.linears if call.start > heads.end), None)
        if later is None or later.input is None or later.input.numel() != heads.mixed.numel():
            return None
        return later if torch.equal(later.input.flatten(), heads.mixed.flatten()) else None

    def _attention_module(
        self, projections: Mapping[Role, tuple[Call, Tensor | None]], heads: Heads, rows: Tensor
    ) -> tuple[str, int | str] | None:
        """The innermost module that is given the rows and makes queries, keys and values of them."""
        for call in sorted(self.calls, key=lambda call: -call.start):
            holds_all = all(call.holds(layer) for layer, _ in projections.values())
            if is_linear(call.module) or not holds_all or not call.start < heads.start < call.end:
                continue
            where = next((key for key, value in call.given.items() if is_same(value, rows)), None)
            if where is not None:
                return self._name(call), where
        return None

    # ---- what follows

    def _mlp(self, after: int) -> tuple[dict[Role, LinearLayer], MlpCore | None, Sum | None]:
        """The down projection, the layers that share the MLP's input, and how one gets from them to it."""
        for other in self.heads[1:]:  # attention to another text: its output is given, not computed
            cross = next((call for call in self.linears if call.start > other.end), None)
            if cross is not None:
                self.known["cross"] = cross.output
        last = self.heads[-1].end if self.heads else self.block.start
        later = [call for call in self.linears if call.start > max(after, last)]
        known, steps = dict(self.known), dict(self.steps)
        for down in reversed(later):
            if self._explain(after, down):
                return self._mlp_layers([call for call in later if call.end < down.start], down)
            self.known, self.steps = dict(known), dict(steps)
        others = [call for call in self.calls if call.start > max(after, last) and not is_linear(call.module)]
        for call in others:  # the outermost one first
            if self._explain(after, call):
                return {}, MlpCore(self._name(call)), find_sum(call.input, self.known)
            self.known, self.steps = dict(known), dict(steps)
        return {}, None, None

    def _explain(self, after: int, last: Call) -> bool:
        """Whether the block's output is a sum in which a call's output takes part, as it is or behind a norm."""
        if last.output is None or self.block.output is None or last.output.numel() != self.block.output.numel():
            return False
        self._add_steps(after=after, until=last.start)
        self.known[MLP] = last.output
        self._add_steps(after=last.end, until=self.block.end)
        found = find_sum(self.block.output, self.known)
        return found is not None and MLP in _sources(found, self.steps)

    def _mlp_layers(
        self, before: Sequence[Call], down: Call
    ) -> tuple[dict[Role, LinearLayer], MlpCore | None, Sum | None]:
        linear = {Role.MLP_OUT: self._layer(down)}
        first = next((call for call in before if find_sum(call.input, self._earlier(call)) is not None), None)
        if first is None:
            return linear, None, None
        sharing = [call for call in before if is_same(call.input, first.input)]
        activated = [call for call in sharing if self._activation(call) is not None]
        gate = activated[0] if len(sharing) > 1 and activated else None
        linear[Role.MLP_IN] = self._layer(next(call for call in sharing if call is not gate))
        if gate is not None:
            linear[Role.MLP_GATE] = self._layer(gate)
        return linear, self._core(sharing, down, first), find_sum(first.input, self._earlier(first))

    def _core(self, sharing: Sequence[Call], down: Call, first: Call) -> MlpCore | None:
        for call in sorted(self.calls, key=lambda call: -call.start):
            holds_all = all(call.holds(layer) for layer in (*sharing, down))
            if not is_linear(call.module) and holds_all and is_same(call.input, first.input):
                return MlpCore(module=self._name(call))
        for call in self.calls:
            if is_same(call.input, first.input) and is_same(call.output, down.input):
                return MlpCore(chain=(self._name(call),))
        activation = self._activation(first)
        if len(sharing) == 1 and activation is not None and is_same(activation.output, down.input):
            return MlpCore(chain=(self._name(first), self._name(activation)))
        return None

    def _activation(self, layer: Call) -> Call | None:
        """A module without layers that is given a layer's output."""
        return next((c for c in self.calls if not is_linear(c.module) and is_same(c.input, layer.output)), None)

    def _earlier(self, call: Call) -> dict[str, Tensor]:
        """Rows that are known when a call begins: not what comes behind it."""
        ends = {self._name(each): each.end for each in self.calls}
        return {name: rows for name, rows in self.known.items() if name != MLP and ends.get(name, 0) < call.start}

    def _add_steps(self, until: int, after: int = 0) -> None:
        """Modules without layers of their own whose input is a sum of known rows."""
        for call in self.calls:
            if (
                not after < call.start < until
                or is_linear(call.module)
                or _is_idle(call)
                or self._name(call) in self.steps
            ):
                continue
            if call.input is None or call.output is None or call.output.shape[:-1] != call.input.shape[:-1]:
                continue
            num_given = sum(isinstance(each, Tensor) for each in call.given.values())
            if num_given != 1 or any(True for _ in call.module.children()):
                continue
            found = find_sum(call.input, self.known)
            if found is not None:
                self.steps[self._name(call)], self.known[self._name(call)] = found, call.output

    def _name(self, call: Call) -> str:
        return call.name.removeprefix(f"{self.block.name}.")

    def _layer(self, call: Call, columns: Tensor | None = None) -> LinearLayer:
        own: Sequence[int] | None = None
        if columns is not None and not bool(columns.all()):
            own = tuple(columns.nonzero()[:, 0].tolist())
            together = range(own[0], own[-1] + 1)
            own = together if len(together) == len(own) else own
        return LinearLayer(f"{self._name(call)}.weight", isinstance(call.module, nn.Linear), own)


def _attention_sum(flow: RowFlow, mlp_input: Sum | None, output: Sum | None) -> Sum | None:
    """The stream with attention added once, if nothing behind it depends on anything else; in parallel, the output."""
    if mlp_input is None or output is None:
        return None
    names = {*_sources(mlp_input, flow.steps), *_sources(output, flow.steps)}
    sums = [mlp_input, output, *(flow.steps[name] for name in names if name in flow.steps)]
    parts = [{n: c for n, c in each.factors.items() if n in (STREAM, ATTENTION)} for each in sums]
    parts = [part for part in parts if part]
    if all(part == parts[0] and part.get(ATTENTION) == 1 and STREAM in part for part in parts):
        return Sum(parts[0])
    return None  # in parallel with the MLP, its sum is the whole block's, which `_mlp_sum` has


def _mlp_sum(flow: RowFlow, output: Sum | None) -> MlpSum | None:
    """The sum that holds the MLP's output, if all that leaves the block goes through it."""
    if output is None:
        return None
    behind: list[str] = []
    while MLP not in output.factors:
        if len(output.factors) != 1:
            return None  # the stream goes round it
        ((name, factor),) = output.factors.items()
        if factor != 1 or name not in flow.steps:
            return None
        behind.insert(0, name)
        output = flow.steps[name]
    if len(output.factors) == 1:
        return None
    factor = output.factors[MLP]
    return MlpSum(Sum({name: c / factor for name, c in output.factors.items()}), factor, tuple(behind))


def is_linear(module: nn.Module) -> bool:
    """A layer y = x·W + b, however it stores W (transformers' Conv1D has it the other way round)."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def is_same(one: object, other: object) -> bool:
    """Whether two things are the same rows."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.numel() != other.numel():
        return False
    return one is other or (one.shape[-1] == other.shape[-1] and torch.equal(one.flatten(), other.flatten()))


def _is_idle(call: Call) -> bool:
    return is_same(call.input, call.output)


def _sources(wanted: Sum, steps: Mapping[str, Sum]) -> set[str]:
    """Rows that a sum needs, directly or through steps."""
    names = set(wanted.factors)
    return names.union(*(_sources(steps[name], steps) for name in names if name in steps))
