"""Where a model keeps what, found by asking it: two short texts go through it once, and the record is read.

    embedding   rows of the token, position and type embeddings, and the norms and projections up to block 0
    blocks      the roles of their layers (`roles.py`), and how scores become weights
    final norm  from the stream that leaves the last block to what the head is given
    head        from there to the output layer over the vocabulary

Cost: one pass of a few tokens.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unmask.errors import UnsupportedModelError
from unmask.models.attention import Scores
from unmask.models.inputs import no_cache, short_texts, training_mode
from unmask.models.record import Call, Kind, Record, record_pass
from unmask.models.roles import STREAM, BlockLayout, find_layout, is_same
from unmask.models.softmaxes import find_bound, find_heads, find_scores, is_causal, own_key, visible_scores
from unmask.models.wiring import RowFlow, Sum, find_sum

TOKEN, POSITION, TYPE = "token", "position", "type"  # rows of the embedding that are looked up
_TEXTS, _LENGTH = 2, 7
# What goes wrong in models that are put together in some other way.
FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, StopIteration, TypeError, ValueError),
)


@dataclass(frozen=True)
class EmbeddingLayout:
    """The stream that enters block 0. Position p has the row p + `offset`."""

    token: str
    position: str | None
    offset: int
    type: str | None
    output: Sum
    flow: RowFlow


@dataclass(frozen=True)
class BlockPlace:
    """A block: its module, the argument that holds the stream, what it returns besides, and its roles.

    `problem` says why its rows cannot be computed from its parts, if they cannot.
    """

    name: str
    rows: int | str
    returned: Any  # None where it is the stream alone
    layout: BlockLayout
    scores: Scores | None
    problem: str = ""


@dataclass(frozen=True)
class HeadLayout:
    """From the body's last hidden states (STREAM) to logits: rows that follow, or a module that is stopped on the way.

    Logits are `scale` times what the output layer gives, bounded by `softcap`.
    """

    input: Sum | None
    flow: RowFlow
    module: str | None
    scale: float
    softcap: float | None


@dataclass(frozen=True)
class ModelLayout:
    """All that attacks need to know of a model, by the names of its modules."""

    causal: bool
    embedding: EmbeddingLayout
    blocks: tuple[BlockPlace, ...]
    final: Sum
    final_flow: RowFlow
    head: HeadLayout | None
    beside: tuple[str, ...]  # modules of the body that are not on the way to its last hidden states (a pooler)
    takes_positions: bool
    width: int  # of the stream
    final_width: int  # of the body's last hidden states


@torch.enable_grad()
def ask_model(hf: Any, body: Any) -> tuple[ModelLayout, list[tuple[Tensor, Tensor]]]:
    """Run a model once, and find its parts; with them, what entered and left each block."""
    _require_one_id(hf, body)
    doing = "could not be run on two short texts"
    try:
        with training_mode(hf, False):
            record = record_pass(hf, **short_texts(hf, _TEXTS, _LENGTH))
        doing = "ran, but its parts could not be read"
        reader = _Reader(hf, body, record)
        return reader.layout(), [(call.input, call.output) for call in reader.blocks]
    except FAILURES as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UnsupportedModelError(f"{type(hf).__name__} {doing}: {reason}") from error


class _Reader:
    """Reads the record of a whole model."""

    def __init__(self, hf: Any, body: Any, record: Record) -> None:
        self.hf, self.body, self.record = hf, body, record
        self.body_names = {module: name for name, module in body.named_modules()}
        self.blocks = self._find_blocks()

    def layout(self) -> ModelLayout:
        """The whole model, block by block."""
        places = tuple(self._place(call) for call in self.blocks)
        heads = next(heads for call in self.blocks if (heads := find_heads(self.record, call)))
        final, flow = self._final()
        return ModelLayout(
            causal=is_causal(heads[0]),
            embedding=self._embedding(),
            blocks=places,
            final=final,
            final_flow=flow,
            head=self._head(final, flow),
            beside=self._beside(flow),
            takes_positions="position_ids" in inspect.signature(self.hf.forward).parameters,
            width=self.blocks[0].input.shape[-1],
            final_width=self._body_call().output.shape[-1],
        )

    def _find_blocks(self) -> list[Call]:
        """Calls of the members of the outermost list of modules that attention happens in."""
        attended = [each for each in self.record.operations if each.kind in (Kind.SOFTMAX, Kind.ATTENTION)]
        for _name, modules in self.body.named_modules():
            if not isinstance(modules, nn.ModuleList):
                continue
            calls = [call for call in self.record.calls if any(call.module is member for member in modules)]
            if any(call.holds(each) for call in calls for each in attended if each.operands[0].dim() > 2):
                return calls
        raise UnsupportedModelError(
            f"no attention was found in {type(self.hf).__name__}: no softmax over keys happens in a list of blocks"
        )

    def _place(self, call: Call) -> BlockPlace:
        rows = next(key for key, value in call.given.items() if is_same(value, call.input))
        layout = find_layout(self.record, call)
        heads = find_heads(self.record, call)
        returned = call.returned[1:] if isinstance(call.returned, (tuple, list)) else None
        return BlockPlace(
            self.body_names[call.module], rows, returned, layout, find_scores(heads[0]) if heads else None
        )

    # ---- embedding

    def _embedding(self) -> EmbeddingLayout:
        first = self.blocks[0]
        calls = [call for call in self.record.calls if call.end < first.start and not list(call.module.children())]
        tokens = self.hf.get_input_embeddings()
        own = next(call for call in calls if getattr(call.module, "weight", None) is tokens.weight)
        tokens, rows = own.module, {TOKEN: own.output}
        position, offset, kind = None, 0, None
        for call in calls:
            looked_up = None if call.module is tokens else _look_up(table_of(call.module), call.output)
            if looked_up is None:
                continue
            if looked_up == list(range(looked_up[0], looked_up[0] + _LENGTH)):
                position, offset = self.body_names[call.module], looked_up[0]
                rows[POSITION] = _spread(call.output)
            elif len(set(looked_up)) == 1:
                kind = self.body_names[call.module]
                rows[TYPE] = _spread(call.output)
        flow = self._steps([call for call in calls if self.body_names.get(call.module) not in (position, kind)], rows)
        output = find_sum(first.input, rows)
        if output is None:
            raise UnsupportedModelError(
                f"the stream that enters the first block of {type(self.hf).__name__} is not a sum of its embeddings"
            )
        return EmbeddingLayout(self.body_names[tokens], position, offset, kind, output, flow)

    def _steps(
        self, calls: Sequence[Call], rows: dict[str, Tensor], names: Mapping[nn.Module, str] | None = None
    ) -> RowFlow:
        """Modules that make rows of known rows; `rows` is extended by what they make."""
        steps: dict[str, Sum] = {}
        for call in calls:
            name = (names or self.body_names).get(call.module)
            if name is None or call.input is None or call.output is None or is_same(call.input, call.output):
                continue
            if not call.input.is_floating_point() or list(call.module.children()) or name in rows:
                continue
            found = find_sum(call.input, rows)
            if found is not None:
                steps[name], rows[name] = found, call.output
        return RowFlow(steps)

    # ---- behind the blocks

    def _final(self) -> tuple[Sum, RowFlow]:
        """From the last block to the body's last hidden states."""
        last = self.blocks[-1]
        body = self._body_call()
        rows = {STREAM: last.output}
        flow = self._steps([call for call in self.record.calls if last.end < call.start < body.end], rows)
        found = find_sum(body.output, rows)
        if found is None:
            raise UnsupportedModelError(
                f"what {type(self.body).__name__} makes of the stream behind its last block could not be found"
            )
        return found, flow

    def _head(self, final: Sum, flow: RowFlow) -> HeadLayout | None:
        """The language head, where there is one."""
        layer = self.hf.get_output_embeddings()
        call = next((each for each in self.record.calls if each.module is layer), None) if layer is not None else None
        whole = next(each for each in self.record.calls if each.module is self.hf)
        if call is None or self.body is self.hf:
            return None
        body = self._body_call()
        rows = {STREAM: body.output}
        names = {module: name for name, module in self.hf.named_modules()}
        flow = self._steps([each for each in self.record.calls if body.end < each.start < call.start], rows, names)
        given, module = find_sum(call.input, rows), None
        if given is None:
            around = [each for each in self.record.calls if each.holds(call) and is_same(each.input, body.output)]
            if not around:
                return None
            module = names[around[-1].module]
        logits, softcap = whole.output, None
        for each in self.record.operations:
            if each.kind is Kind.TANH and each.start > call.end and each.output.numel() == logits.numel():
                softcap = find_bound(logits, each.output)
                logits = each.operands[0].detach() * softcap
        scaled = find_sum(logits, {"logits": call.output})
        return None if scaled is None else HeadLayout(given, flow, module, scaled.factors["logits"], softcap)

    def _body_call(self) -> Call:
        """The outermost call, of a part of the body, in which all blocks run."""
        first, last = self.blocks[0], self.blocks[-1]
        return next(c for c in self.record.calls if c.module in self.body_names and c.holds(first) and c.holds(last))

    def _beside(self, flow: RowFlow) -> tuple[str, ...]:
        """Modules of the body that were called behind the last block, and lead nowhere."""
        last = self.blocks[-1]
        late = (self.body_names.get(call.module) for call in self.record.calls if call.start > last.end)
        children = {name.partition(".")[0] for name in late if name}
        return tuple(
            sorted(f"{name}." for name in children if not any(f"{step}.".startswith(f"{name}.") for step in flow.steps))
        )


def table_of(module: nn.Module) -> Tensor | None:
    """The rows that a module looks up: its weight, or the one matrix among its buffers (sinusoids)."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        return weight
    matrices = [each for each in module.buffers(recurse=False) if each.dim() == 2]
    return matrices[0] if len(matrices) == 1 else None


def _require_one_id(hf: Any, body: Any) -> None:
    """Refuse models to which a token is several ids, as its shape and its sound (RoCBERT): attacks know one."""
    others = [name for name in inspect.signature(body.forward).parameters if re.fullmatch(r"input_\w+_ids", name)]
    if others:
        raise UnsupportedModelError(
            f"a token enters {type(hf).__name__} as several ids (input_ids, {', '.join(others)}); only models that "
            "read one id a token can be attacked here"
        )


def _look_up(table: Any, rows: Tensor | None) -> list[int] | None:
    """Which row of a table stands at each position, the same in all texts; None if these are not its rows."""
    if not isinstance(table, Tensor) or table.dim() != 2 or rows is None or rows.shape[-1] != table.shape[1]:
        return None
    flat = rows.reshape(-1, rows.shape[-1])
    if len(flat) not in (_LENGTH, _TEXTS * _LENGTH):
        return None
    found = []
    for row in flat[:_LENGTH]:
        matches = (table.detach() == row).all(1).nonzero()
        if not len(matches):
            return None
        found.append(int(matches[0]))
    return found if all(torch.equal(part, flat[:_LENGTH]) for part in flat.split(_LENGTH)) else None


def _spread(rows: Tensor | None) -> Tensor:
    """Rows of one text, for all texts."""
    assert rows is not None
    return rows.reshape(-1, _LENGTH, rows.shape[-1]).expand(_TEXTS, -1, -1)


def ask_bias(body: Any, block: nn.Module, layout: ModelLayout, index: int, length: int) -> Tensor:
    """What a block's scores have beyond queries and keys, in a text of some length (h, length, length).

    Where a query does not see a key, as outside of a window, that is −∞. It is relative to the query's own key, as all
    else changes no weight.
    """
    rule = layout.blocks[index].scores
    assert rule is not None
    embedding = body.get_submodule(layout.embedding.token).weight
    tokens = torch.arange(length, device=embedding.device)[None] % embedding.shape[0]
    name = layout.blocks[index].layout.attention[0]  # type: ignore[index]
    record = record_pass(body, block.get_submodule(name), input_ids=tokens, **no_cache(body))
    call = next(each for each in record.calls if each.module is block.get_submodule(name))
    heads = find_heads(record, call)[0]
    q, k = heads.queries.detach(), heads.keys.detach()
    products = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-1, -2)
    added = (heads.scores.detach()[..., :length] - rule.bound(rule.scale * products))[0]
    hidden = ~visible_scores(heads.scores)[0, ..., :length]
    return (added - own_key(added)).masked_fill(hidden, torch.finfo(added.dtype).min / 2)
