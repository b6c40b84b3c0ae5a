"""Several texts read side by side: what each of them wants to run next goes through the blocks in one pass.

    a reading runs until it needs rows:  yield RowPass  →  gets their Trial  →  goes on
    in turns:  the rows of all readings that wait, in one call a block;  each text's queries see its own keys alone

A pass costs about the same for one row as for thirty: weights are read from memory, and modules are called. So texts
that are read together share that cost. They don't wait for each other's positions: a text that guesses ahead and one
that tests candidates are in the same pass. Keys of texts of different lengths are padded, and padding gets the weight 0
in the softmax, so that a text's result does not depend on the others, up to the order of sums.

Notation: n rows of a pass, j tokens known before it; N and J the largest of both.
Limits: where positions are added to scores (ALiBi, a window), attention is computed text by text; all else is shared.
Cost: memory for `_MOST_TEXTS` texts: their keys and values, and scores of `_MOST_ENTRIES` entries a head.
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

from unmask.attacks.outputs.block_step import Prefix
from unmask.attacks.outputs.prompts.continuation import Continuation, Trial
from unmask.attacks.run import Progress
from unmask.models.adapter import Model

_MOST_TEXTS = 16
_MOST_ROWS = 128  # a pass of more rows gains nothing from company, and runs by itself
_MOST_ENTRIES = 2**21  # of the scores of one head, all texts together


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
    """Passes of similar sizes whose padded scores fit into the budget."""
    chunk: list[int] = []
    for number in sorted(numbers, key=lambda each: len(passes[each].tokens)):
        rows = len(passes[number].tokens)
        known = max(passes[each].text.num_known for each in [*chunk, number])
        if chunk and (rows > _MOST_ROWS or (len(chunk) + 1) * rows * (rows + known) > _MOST_ENTRIES):
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
    """Attention of several texts at once: row r is row `slots[r]` of text `texts[r]`."""

    model: Model
    passes: Sequence[RowPass]
    texts: Int[Tensor, " r"]
    slots: Int[Tensor, " r"]
    allowed: Bool[Tensor, "texts N J+N"]  # the text's own prefix, and rows up to this one, or this one alone
    length: int  # of the longest text with its rows

    @classmethod
    def of(cls, model: Model, passes: Sequence[RowPass]) -> _Attention:
        """Where rows of all texts are when they are padded."""
        device = passes[0].tokens.device
        sizes = torch.tensor([len(each.tokens) for each in passes], device=device)
        most, longest = int(sizes.max()), max(each.text.num_known for each in passes)
        texts = torch.arange(len(passes), device=device).repeat_interleave(sizes)
        slots = torch.cat([torch.arange(len(each.tokens), device=device) for each in passes])
        allowed = torch.zeros(len(passes), most, longest + most, dtype=torch.bool, device=device)
        itself = torch.eye(most, dtype=torch.bool, device=device)
        before = torch.ones_like(itself).tril()
        for number, each in enumerate(passes):
            allowed[number, :, : each.text.num_known] = True
            allowed[number, :, longest:] = before if each.in_order else itself
        length = max(int(each.positions[-1]) - each.text.position + each.text.num_known + 1 for each in passes)
        return cls(model, passes, texts, slots, allowed, length)

    def __call__(
        self, block: int, queries: Float[Tensor, "r h e"], keys: Float[Tensor, "r g e"], values: Float[Tensor, "r g e"]
    ) -> Float[Tensor, "r o"]:
        """What every row reads."""
        prefixes = [each.text.prefixes[block] for each in self.passes]
        if self.model.score_bias(block, self.length) is not None:
            return self._one_by_one(block, prefixes, queries, keys, values)
        behind = [
            torch.cat([pad_sequence(known, batch_first=True), self._pad(own)], 1)
            for known, own in (([each.keys for each in prefixes], keys), ([each.values for each in prefixes], values))
        ]
        return self.model.mix(block, self._pad(queries), *behind, self.allowed)[self.texts, self.slots]

    def _pad(self, rows: Float[Tensor, "r h e"]) -> Float[Tensor, "texts N h e"]:
        padded = rows.new_zeros(*self.allowed.shape[:2], *rows.shape[1:])
        padded[self.texts, self.slots] = rows
        return padded

    def _one_by_one(
        self, block: int, prefixes: Sequence[Prefix], queries: Tensor, keys: Tensor, values: Tensor
    ) -> Float[Tensor, "r o"]:
        """The same where a key's weight depends on where it stands, which padding would change."""
        mixed = []
        sizes = [len(each.tokens) for each in self.passes]
        parts = zip(self.passes, prefixes, *(rows.split(sizes) for rows in (queries, keys, values)), strict=True)
        for each, prefix, q, k, v in parts:
            if not each.in_order:
                mixed.append(self.model.mix_behind(block, q, k, v, prefix.keys[None], prefix.values[None])[0])
                continue
            longer = prefix.extend(k, v)
            allowed = torch.ones(len(q), len(longer), dtype=torch.bool, device=q.device).tril(len(prefix))
            mixed.append(self.model.mix(block, q[None], longer.keys[None], longer.values[None], allowed[None])[0])
        return torch.cat(mixed)
