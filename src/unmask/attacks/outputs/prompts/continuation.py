"""A text that is known up to a position: what its blocks keep, and which states candidates for the next tokens give.

In a causal model the state of layer l at position i is a function of tokens 0 … i. The known tokens' keys and values
are computed once; a candidate for the next token then costs one row through l blocks, whatever the length of the text.

Notation: x the stream that enters a block, one row a candidate; `middle` the stream after `middle_layer` blocks.
Cost: k candidates: k rows through l blocks. a guess of n tokens: n rows, all positions at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.outputs.block_step import BlockStep, Prefix, differentiate
from unmask.models.adapter import Model
from unmask.models.readouts import STREAM, Readout


@dataclass(frozen=True)
class Trial:
    """Rows behind a text, with the stream in the middle and the states that would be seen.

    They are candidates for the next position, or a guess for the next positions, one behind the other.
    """

    tokens: Int[Tensor, " k"]
    middle: Float[Tensor, "k d"]
    states: Float[Tensor, "k m"]
    keys: tuple[Float[Tensor, "k g e"], ...]
    values: tuple[Float[Tensor, "k g e"], ...]

    def only(self, index: int) -> Trial:
        """One of the candidates by itself; the others can be forgotten."""
        one = slice(index, index + 1)
        keys, values = (tuple(part[one].clone() for part in parts) for parts in (self.keys, self.values))
        return Trial(self.tokens[one], self.middle[one].clone(), self.states[one].clone(), keys, values)


@dataclass(frozen=True)
class Continuation:
    """What is known of a text, ready for its next token.

    `position` is that of the next token; `readout` says what is seen of the stream.
    """

    model: Model
    position: int
    middle_layer: int
    readout: Readout
    num_known: int
    prefixes: tuple[Prefix, ...]  # one a block: their number is the layer

    @classmethod
    def start(
        cls, model: Model, layer: int, *, position: int = 0, middle_layer: int = 0, readout: Readout = STREAM
    ) -> Continuation:
        """Nothing is known yet."""
        prefixes = tuple(Prefix.empty(model, block) for block in range(layer))
        return cls(model, position, middle_layer, readout, 0, prefixes)

    @torch.no_grad()
    def trial(self, tokens: Int[Tensor, " k"]) -> Trial:
        """The states of all candidates, in one batch."""
        x = middle = self.model.embed(tokens, torch.full_like(tokens, self.position))
        keys, values = [], []
        for block, prefix in enumerate(self.prefixes):
            stepped = BlockStep(self.model, block, self.position, prefix).run(x)
            x = stepped.outputs
            keys.append(stepped.keys)
            values.append(stepped.values)
            middle = x if block + 1 == self.middle_layer else middle
        seen = self.readout(self.model, x, torch.full_like(tokens, self.position))
        return Trial(tokens, middle, seen, tuple(keys), tuple(values))

    def accept(self, trial: Trial, index: int) -> Continuation:
        """The text with one of the candidates behind it."""
        return self._extend(trial, slice(index, index + 1))

    @torch.no_grad()
    def run(self, tokens: Int[Tensor, " n"]) -> Trial:
        """The states of a guess for the next n positions at once."""
        positions = self.position + torch.arange(len(tokens), device=tokens.device)
        x = middle = self.model.embed(tokens, positions)
        every_key, every_value = [], []
        for block, prefix in enumerate(self.prefixes):
            rows = self.model.attention_input(block, x)
            queries, keys, values = self.model.queries_keys_values(block, rows, positions)
            longer = prefix.extend(keys, values)
            allowed = torch.ones(len(tokens), len(longer), dtype=torch.bool, device=x.device).tril(len(prefix))
            mixed = self.model.mix(block, queries[None], longer.keys[None], longer.values[None], allowed[None])[0]
            x = self.model.after_mlp(block, self.model.after_attention(block, x, mixed))
            every_key.append(keys)
            every_value.append(values)
            middle = x if block + 1 == self.middle_layer else middle
        return Trial(tokens, middle, self.readout(self.model, x, positions), tuple(every_key), tuple(every_value))

    def advance(self, guess: Trial, num_tokens: int) -> Continuation:
        """The text with the first `num_tokens` of a guess behind it."""
        return self._extend(guess, slice(num_tokens)) if num_tokens else self

    def _extend(self, trial: Trial, chosen: slice) -> Continuation:
        """The text with some rows of a trial behind it."""
        pairs = zip(self.prefixes, trial.keys, trial.values, strict=True)
        prefixes = tuple(prefix.extend(keys[chosen], values[chosen]) for prefix, keys, values in pairs)
        number = len(trial.tokens[chosen])
        return replace(self, position=self.position + number, num_known=self.num_known + number, prefixes=prefixes)

    def jacobian(
        self, middle: Float[Tensor, " d"], through: Float[Tensor, "r m"] | None = None
    ) -> tuple[Float[Tensor, " m"], Float[Tensor, "r d"]]:
        """The state h that a stream x in the middle leads to, and M·∂h/∂x, last block first; None: all rows."""
        x, pulls = middle[None], []
        for block in range(self.middle_layer, len(self.prefixes)):
            x, pull = BlockStep(self.model, block, self.position, self.prefixes[block]).differentiate(x)
            pulls.append(pull)
        if self.readout != STREAM:
            where = torch.tensor([self.position], device=middle.device)
            x, pull = differentiate(lambda rows: self.readout(self.model, rows, where), x)
            pulls.append(pull)
        matrix = torch.eye(x.shape[1], dtype=x.dtype, device=x.device) if through is None else through
        for pull in reversed(pulls):
            matrix = pull(matrix)
        return x[0], matrix
