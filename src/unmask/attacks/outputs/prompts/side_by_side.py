"""Several texts read side by side: what each of them wants to run next goes through the blocks in one pass.

    a reading runs until it needs rows:  yield RowPass  →  gets their Trial  →  goes on
    in turns:  the rows of all readings that wait, in one call a block;  each text's queries see its own keys alone

A pass costs about the same for one row as for thirty: weights are read from memory, and modules are called. So texts
that are read together share that cost. They don't wait for each other's positions: a text that guesses ahead and one
that tests candidates are in the same pass. Keys of texts of different lengths are padded, and padding gets the weight 0
in the softmax, so that a text's result does not depend on the others, up to the order of sums.

Notation: n rows of a pass, j tokens known before it; N and J the largest of both.
Limits: where positions are added to scores (ALiBi, a window), attention is computed text by text; all else is shared.
Cost: the rows that the texts would run by themselves, in about as many passes as the longest reading has. Memory: keys
and values of `_MOST_TEXTS` texts; a pass holds `_MOST_ROWS` rows, or one text's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from unmask.attacks.outputs.prompts.continuation import Continuation, Trial
from unmask.attacks.run import Progress
from unmask.models.adapter import Model

_MOST_TEXTS = 16
_MOST_ROWS = 512  # that go through a block at once: more of them share nothing that counts
_FEW_ROWS = 16  # passes of more rows are not padded: attention is computed text by text


@dataclass(frozen=True)
class RowPass:
    """Tokens to run behind a text: candidates for its next position, or, `in_order`, a guess for the next ones."""

    text: Continuation
    tokens: Int[Tensor, " n"]
    in_order: bool = False

    @property
    def positions(self) -> Int[Tensor, " n"]:
        """Where the tokens stand."""
        steps = torch.arange(len(self.tokens), device=self.tokens.device)
        return self.text.position + (steps if self.in_order else torch.zeros_like(steps))

    def run(self) -> Trial:
        """This pass by itself."""
        return self.text.run(self.tokens) if self.in_order else self.text.trial(self.tokens)


Result = TypeVar("Result")
Reading = Generator[RowPass, Trial, Result]


@torch.no_grad()
def read_side_by_side(readings: Iterable[Reading[Result]]) -> list[Result]:
    """Let all readings go on in turns, some at a time; their results, in order."""
    waiting = deque(enumerate(readings))
    results: dict[int, Result] = {}
    open_readings: dict[int, tuple[Reading[Result], RowPass]] = {}

    def go_on(number: int, reading: Reading[Result], trial: Trial | None) -> None:
        open_readings.pop(number, None)
        try:
            wanted = next(reading) if trial is None else reading.send(trial)
            open_readings[number] = reading, wanted
        except StopIteration as end:
            results[number] = end.value

    while waiting or open_readings:
        while waiting and len(open_readings) < _MOST_TEXTS:
            go_on(*waiting.popleft(), None)
        turn = dict(open_readings)
        trials = run_passes([wanted for _, wanted in turn.values()])
        for (number, (reading, _)), trial in zip(turn.items(), trials, strict=True):
            go_on(number, reading, trial)
    return [results[number] for number in sorted(results)]


def read_alone(reading: Reading[Result]) -> Result:
    """The result of one reading."""
    return read_side_by_side([reading])[0]


@dataclass
class SharedProgress:
    """How far all texts are together, told as one number of tokens."""

    progress: Progress
    total: int
    done: list[int] = field(default_factory=list)

    def add_text(self) -> Callable[[int], None]:
        """One more text; the function is told how much of it is read."""
        number = len(self.done)
        self.done.append(0)

        def tell(done: int) -> None:
            self.done[number] = done
            self.progress("reading texts", sum(self.done), self.total)

        return tell


def run_passes(passes: Sequence[RowPass]) -> list[Trial]:
    """The trials of all passes; those through the same blocks are run together, as far as memory allows."""
    trials: dict[int, Trial] = {}

    def kind(number: int) -> tuple[int, int, str]:
        text = passes[number].text
        return len(text.prefixes), text.middle_layer, repr(text.readout)

    for _, numbers in groupby(sorted(range(len(passes)), key=kind), key=kind):
        for chunk in _chunks(passes, list(numbers)):
            together = [passes[number] for number in chunk]
            trials.update(zip(chunk, _run_together(together), strict=True))
    return [trials[number] for number in range(len(passes))]


def _chunks(passes: Sequence[RowPass], numbers: list[int]) -> Iterable[list[int]]:
    """Passes of similar sizes, as many as may go together."""
    chunk: list[int] = []
    for number in sorted(numbers, key=lambda each: len(passes[each].tokens)):
        num_rows = sum(len(passes[each].tokens) for each in [*chunk, number])
        if chunk and num_rows > _MOST_ROWS:
            yield chunk
            chunk = []
        chunk.append(number)
    yield chunk


@torch.no_grad()
def _run_together(passes: Sequence[RowPass]) -> list[Trial]:
    """Passes through the same blocks, in one call a block."""
    if len(passes) == 1:
        return [passes[0].run()]
    text = passes[0].text
    model, sizes = text.model, [len(each.tokens) for each in passes]
    positions = torch.cat([each.positions for each in passes])
    x = middle = model.embed(torch.cat([each.tokens for each in passes]), positions)
    attention, keys, values = _Attention.of(model, passes), [], []
    for block in range(len(text.prefixes)):
        heads = model.queries_keys_values(block, model.attention_input(block, x), positions)
        mixed = attention(block, *heads)
        x = model.after_mlp(block, model.after_attention(block, x, mixed))
        keys.append(heads[1].split(sizes))
        values.append(heads[2].split(sizes))
        middle = x if block + 1 == text.middle_layer else middle
    seen = text.readout(model, x, positions)
    return [
        Trial(
            each.tokens, own_middle, own, tuple(part[number] for part in keys), tuple(part[number] for part in values)
        )
        for number, (each, own_middle, own) in enumerate(
            zip(passes, middle.split(sizes), seen.split(sizes), strict=True)
        )
    ]


@dataclass(frozen=True)
class _Attention:
    """Attention of several texts, each with its own keys: those that run few rows are padded and go together."""

    model: Model
    passes: Sequence[RowPass]
    padded: _Padding | None
    length: int  # of the longest text with its rows

    @classmethod
    def of(cls, model: Model, passes: Sequence[RowPass]) -> _Attention:
        """Decide which texts are padded."""
        few = [number for number, each in enumerate(passes) if len(each.tokens) <= _FEW_ROWS]
        length = max(each.text.num_known + (len(each.tokens) if each.in_order else 1) for each in passes)
        return cls(model, passes, _Padding.of([passes[number] for number in few], few) if few[1:] else None, length)

    def __call__(
        self, block: int, queries: Float[Tensor, "r h e"], keys: Float[Tensor, "r g e"], values: Float[Tensor, "r g e"]
    ) -> Float[Tensor, "r o"]:
        """What every row reads."""
        sizes = [len(each.tokens) for each in self.passes]
        parts = list(zip(*(rows.split(sizes) for rows in (queries, keys, values)), strict=True))
        mixed: dict[int, Tensor] = {}
        if self.padded is not None and self.model.score_bias(block, self.length) is None:
            mixed = self.padded(self.model, block, [parts[number] for number in self.padded.numbers])
        for number, each in enumerate(self.passes):
            if number not in mixed:
                mixed[number] = _attend_alone(each, block, *parts[number])
        return torch.cat([mixed[number] for number in range(len(self.passes))])


def _attend_alone(each: RowPass, block: int, queries: Tensor, keys: Tensor, values: Tensor) -> Float[Tensor, "n o"]:
    """What the rows of one pass read."""
    model, prefix = each.text.model, each.text.prefixes[block]
    if not each.in_order:
        return model.mix_behind(block, queries, keys, values, prefix.keys[None], prefix.values[None])[0]
    longer = prefix.extend(keys, values)
    allowed = torch.ones(len(queries), len(longer), dtype=torch.bool, device=queries.device).tril(len(prefix))
    return model.mix(block, queries[None], longer.keys[None], longer.values[None], allowed[None])[0]


@dataclass(frozen=True)
class _Padding:
    """Passes `numbers`, padded to N rows behind J tokens each."""

    passes: Sequence[RowPass]
    numbers: Sequence[int]
    allowed: Bool[Tensor, "texts N J+N"]  # the text's own prefix, and rows up to this one, or this one alone

    @classmethod
    def of(cls, passes: Sequence[RowPass], numbers: Sequence[int]) -> _Padding:
        """Which keys each row may see."""
        device = passes[0].tokens.device
        most, longest = max(len(each.tokens) for each in passes), max(each.text.num_known for each in passes)
        allowed = torch.zeros(len(passes), most, longest + most, dtype=torch.bool, device=device)
        itself = torch.eye(most, dtype=torch.bool, device=device)
        before = torch.ones_like(itself).tril()
        for number, each in enumerate(passes):
            allowed[number, :, : each.text.num_known] = True
            allowed[number, :, longest:] = before if each.in_order else itself
        return cls(passes, numbers, allowed)

    def __call__(self, model: Model, block: int, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> dict[int, Tensor]:
        """What the rows of each pass read, by its number."""
        prefixes = [each.text.prefixes[block] for each in self.passes]
        queries, keys, values = (pad_sequence(list(rows), batch_first=True) for rows in zip(*parts, strict=True))
        known_keys = pad_sequence([each.keys for each in prefixes], batch_first=True)
        known_values = pad_sequence([each.values for each in prefixes], batch_first=True)
        keys, values = torch.cat([known_keys, keys], 1), torch.cat([known_values, values], 1)
        mixed = model.mix(block, queries, keys, values, self.allowed)
        pairs = zip(self.numbers, self.passes, mixed, strict=True)
        return {number: rows[: len(each.tokens)] for number, each, rows in pairs}
