"""The baselines of the prompt attack: gradient-guided search in the manner of SipIt, and the plain vocabulary scan.

    g = ∇ₓ ½‖h(x) − h‖²,    x ← x − step·(mean norm of an embedding)·g/‖g‖,    test the nearest untested embeddings to x

A position is found when a tested token's state agrees to a relative 1e-4. The known tokens' keys and values are cached,
so a gradient is one row through the blocks and back, and a test a few rows through them, for either method.

Where SipIt is left, it is in the baseline's favour: 32 of the nearest tokens are tested at a step in one batch (it
tests one; on a processor 32 take little longer), the gradient is normalised (at first positions states are a hundred
times larger, and no plain step size fits both), the step shrinks from step to step, and a position that was not found
goes on with the true token.

Notation: x the embedding that is moved, h(x) its state after l blocks behind the known tokens, V the vocabulary.
Cost: a step is a forward and a backward pass of one row, a forward pass of `tested` rows, and V·d for the distances.
Source: arXiv 2510.15511 (SipIt), its gradient-based policy; written anew here, the authors' code was not run.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unmask.attacks.outputs.prompts.continuation import Continuation
from unmask.models import Model

AGREES = 1e-4


@dataclass(frozen=True)
class Position:
    """How the search at one position ended."""

    found: bool
    num_steps: int
    num_candidates: int
    cpu_seconds: float


@dataclass(frozen=True)
class GradientSearch:
    """Settings: length of the first step by the mean norm of an embedding, its decay, tokens tested a step, steps."""

    step: float = 1.0
    decay: float = 0.98
    tested: int = 32
    max_steps: int = 200

    def read(
        self, model: Model, layer: int, tokens: Sequence[int], states: Tensor, where: Collection[int]
    ) -> list[Position]:
        """Some positions of a text, each behind the true tokens before it."""
        text, positions = Continuation.start(model, layer), []
        for place, token in enumerate(tokens[: max(where) + 1]):
            if place in where:
                positions.append(self.search(text, states[place], token))
            text = followed(text, token)
        return positions

    def search(self, text: Continuation, state: Tensor, true_token: int) -> Position:
        """One position; the true token only tells whether the right one was found."""
        started = time.process_time()
        rows = vocabulary_rows(text)
        squares, size = rows.square().sum(1), rows.norm(dim=1).mean()
        x, untested = rows.mean(0), torch.zeros(len(rows), device=rows.device)
        found, steps, candidates = None, 0, 0
        while found is None and steps < self.max_steps and candidates < len(rows):
            gradient = state_gradient(text, x, state)
            x = x - self.step * self.decay**steps * size * gradient / gradient.norm().clamp_min(1e-30)
            nearest = (squares - 2 * rows @ x + untested).topk(min(self.tested, len(rows) - candidates), largest=False)
            untested[nearest.indices] = torch.inf
            found = agreeing(text, nearest.indices, state)
            steps, candidates = steps + 1, candidates + len(nearest.indices)
        return Position(found == true_token, steps, candidates, time.process_time() - started)


def best_step(
    sizes: Sequence[float],
    model: Model,
    layer: int,
    tokens: Sequence[int],
    states: Tensor,
    where: Collection[int],
    search: GradientSearch,
) -> tuple[float, list[dict]]:
    """The step size that finds most, in the least time, on a text that is not measured later; and all trials."""
    trials = []
    for size in sizes:
        positions = replace(search, step=size).read(model, layer, tokens, states, where)
        found, seconds = sum(p.found for p in positions), sum(p.cpu_seconds for p in positions)
        trials.append({"step": size, "positions": len(positions), "found": found, "cpu_seconds": seconds})
    return min(trials, key=lambda trial: (-trial["found"], trial["cpu_seconds"]))["step"], trials


def scan_rate(text: Continuation, batch: int = 512, repeats: int = 3) -> float:
    """Candidates a second of CPU time in batches of some size, the best of several."""
    tokens = torch.arange(min(batch, text.model.vocab_size), device=text.model.device)
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        text.trial(tokens)
        seconds.append(time.process_time() - started)
    return len(tokens) / min(seconds)


def state_gradient(text: Continuation, x: Tensor, state: Tensor) -> Tensor:
    """∇ₓ ½‖h(x) − h‖²; weights get no gradient."""
    x = x.detach().requires_grad_(True)
    loss = (differentiable_state(text, x) - state).square().sum() / 2
    return torch.autograd.grad(loss, x)[0]


def differentiable_state(text: Continuation, x: Tensor) -> Tensor:
    """h(x): what `Continuation.trial` computes for a token, for any row, with derivatives."""
    model, rows = text.model, x[None]
    positions = torch.tensor([text.position], device=x.device)
    for block, prefix in enumerate(text.prefixes):
        queries, keys, values = model.queries_keys_values(block, model.attention_input(block, rows), positions)
        longer = prefix.extend(keys, values)
        allowed = torch.ones(1, 1, len(longer), dtype=torch.bool, device=x.device)
        mixed = model.mix(block, queries[None], longer.keys[None], longer.values[None], allowed)[0]
        rows = model.after_attention(block, rows, mixed)
        rows = model.after_mlp(block, rows)
    return text.readout(model, rows, positions)[0]


@torch.no_grad()
def vocabulary_rows(text: Continuation) -> Tensor:
    """Every token's embedding at the position asked for."""
    tokens = torch.arange(text.model.vocab_size, device=text.model.device)
    return text.model.embed(tokens, torch.full_like(tokens, text.position))


def agreeing(text: Continuation, tokens: Tensor, state: Tensor) -> int | None:
    """The token whose state is the one seen, if any of these is."""
    distances = (text.trial(tokens).states - state).norm(dim=1) / state.norm()
    place = int(distances.argmin())
    return int(tokens[place]) if float(distances[place]) <= AGREES else None


def followed(text: Continuation, token: int) -> Continuation:
    """The text with a token behind it."""
    return text.accept(text.trial(torch.tensor([token], device=text.model.device)), 0)
