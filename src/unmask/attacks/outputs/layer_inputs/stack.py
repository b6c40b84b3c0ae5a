"""A stack of known blocks, inverted block by block, and read as tokens at the bottom.

    z⁽ˡ⁾ → z⁽ˡ⁻¹⁾ → … → z⁽¹⁾ → tokens:   tᵢ is the token whose row, sent through block 0 behind t₀ … tᵢ₋₁, gives z⁽¹⁾ᵢ

The rule of what is claimed. A chain of exact pre-images proves that *some* stream leads to what was seen, never that it
is the client's: trained blocks have several (blocks.py). So continuous rows are never called recovered. Tokens are: if
the rows at the bottom are rows of the token embedding, the forward pass of those tokens is recomputed, and a token is
certain where it reproduces the evidence up to rounding while the next best token misses by `min_gap_decades` decades
more. Both errors are taken at the layer that was seen, in float64, behind the recomputed prefix. A wrong chain ends in
rows that are no tokens: NOTHING_FOUND, with a sentence that says how far exact pre-images went.

Notation: z⁽ˡ⁾ the stream after l blocks (evidence: l = `layer`); positions are those of the real tokens.
Limits: trained blocks: worst-direction errors grow by 1/σ_min a block (10 to 10⁵), and starts lead to wrong pre-images;
use a search over tokens there. Random weights: 12 blocks of GPT-2's shape to 1e-14.
Cost: blocks · tokens times that of one row (blocks.py); at the bottom one distance to the vocabulary a token.
Source: ours, measured in docs/outputs-blocks.md; that prompts are determined by states is SipIt's, arXiv 2510.15511.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.claims import claim_nothing
from unmask.attacks.outputs.block_step import BlockStep
from unmask.attacks.outputs.layer_inputs.blocks import BlockInversion, BlockInverter
from unmask.attacks.run import Progress, Run, silent
from unmask.errors import InputError
from unmask.evidence.outputs import HiddenEvidence, Site
from unmask.linalg.gap import Gap
from unmask.models.adapter import Model
from unmask.recovery import Aim, Certificate, Cost, RecoveredText, RecoveredTexts, Recovery, Status, searches_of
from unmask.shapes import Rows

_USED = ("states",)
_FAR = 0.1  # a relative error that only a wrong token has
_NEAR = 1e-3  # what rounding leaves of a zero in a forward pass of float32, generously; coarser evidence: its own
_NEAREST = 8  # tokens around a pre-image that are sent through block 0


@dataclass(frozen=True)
class StackInversion:
    """Block after block, the last one first; each works on the rows that the one above it gave exactly."""

    blocks: tuple[BlockInversion, ...]
    states: Rows  # the exact rows that enter the lowest block
    length: int  # of the text

    @property
    def num_exact(self) -> int:
        """How many leading rows have exact pre-images through all blocks."""
        return len(self.states)

    @property
    def amplification(self) -> float:
        """A first-order bound on the growth of errors through the stack: the product of the blocks' worst 1/σ_min."""
        product = 1.0
        for inversion in self.blocks:
            product *= inversion.amplification
        return product


def invert_stack(
    model: Model,
    states: Rows,
    *,
    top: int,
    bottom: int = 0,
    positions: Sequence[int] | None = None,
    inverter: BlockInverter | None = None,
    progress: Progress = silent,
) -> StackInversion:
    """Pre-images of the stream of one text after `top` blocks, down to the stream that enters block `bottom`."""
    if not 0 <= bottom <= top <= model.num_blocks:
        raise InputError(f"blocks must satisfy 0 ≤ bottom ≤ top ≤ {model.num_blocks}, got {bottom} and {top}")
    inverter = inverter or BlockInverter()
    places = list(range(len(states))) if positions is None else list(positions)
    rows, blocks = states.to(model.dtype), list[BlockInversion]()
    for block in reversed(range(bottom, top)):
        blocks.append(inverter.invert_block(model, block, rows, places[: len(rows)], progress))
        rows = blocks[-1].states
        if len(rows) == 0:
            break
    return StackInversion(tuple(blocks), rows, len(states))


@dataclass(frozen=True)
class StackAttack:
    """Texts from the stream after some blocks, by inverting them one by one.

    `max_steps`: of the damped method, for each row and start. `min_gap_decades`: how much worse than the token the next
    best one must explain the evidence.
    """

    max_steps: int = 40
    min_gap_decades: float = 1.0

    def __call__(self, evidence: HiddenEvidence, model: Model, progress: Progress = silent) -> Recovery[RecoveredTexts]:
        """Run the attack; the evidence and the model are left as they are."""
        run = Run(progress=progress)
        if not model.causal or evidence.site is not Site.STREAM:
            why = "blocks are inverted position by position, which needs the stream of a causal model"
            return claim_nothing(run, Status.NOT_APPLICABLE, why, _USED)
        if model.problem:
            return claim_nothing(run, Status.NOT_APPLICABLE, model.problem, _USED)
        precise = model.to(dtype=torch.float64, num_blocks=max(evidence.layer, 1))
        readings = [
            self._read(precise, states[mask], mask.nonzero()[:, 0].tolist(), evidence.layer, progress)
            for states, mask in zip(evidence.states.to(model.device), evidence.mask.to(model.device), strict=True)
            if mask.any()
        ]
        return _recovery(readings, model, run)

    def _read(self, model: Model, seen: Rows, positions: list[int], layer: int, progress: Progress) -> StackReading:
        """One text: the blocks above the first one, then tokens, then the check of the whole forward pass."""
        rows, rounding = seen.double(), max(_NEAR, torch.finfo(seen.dtype).eps)
        stack = invert_stack(
            model,
            rows,
            top=layer,
            bottom=min(layer, 1),
            positions=positions,
            inverter=BlockInverter(self.max_steps),
            progress=progress,
        )
        tokens, others = list[int](), list[int]()
        step = BlockStep.first(model, 0, positions[0])
        for index, (position, row) in enumerate(zip(positions, stack.states, strict=False)):
            progress("reading tokens", index, len(positions))
            step = BlockStep(model, 0, position, step.prefix)
            best, other, error = self._token(step, row, through_block=layer > 0)
            if error > _FAR:
                break
            tokens.append(best)
            others.append(other)
            stepped = step.run(_embed(model, [best], position))
            step = step.following(stepped.keys, stepped.values)
        errors, refused = _forward_errors(model, rows, positions, layer, tokens, others)
        return StackReading(tuple(tokens), errors, refused, stack, self.min_gap_decades, rounding)

    def _token(self, step: BlockStep, row: Float[Tensor, " d"], *, through_block: bool) -> tuple[int, int, float]:
        """The token that explains a row best, the next best, and the best one's relative error."""
        model, position = step.model, step.position
        table = _embed(model, torch.arange(model.vocab_size, device=model.device), position)
        if not through_block:
            errors = (table - row).norm(dim=1) / row.norm()
            best, other = errors.topk(2, largest=False).indices.tolist()
            return best, other, float(errors[best])
        usual = table.norm(dim=1).median()
        found: dict[int, float] = {}
        for start in (row, row * (usual / row.norm())):
            preimage, _ = BlockInverter(self.max_steps).invert_row(step, row, start)
            near = (table - preimage.row).norm(dim=1).topk(min(_NEAREST, len(table)), largest=False).indices
            errors = (step(table[near]) - row).norm(dim=1) / row.norm()
            found |= dict(zip(near.tolist(), errors.tolist(), strict=True))
            best, other = sorted(found, key=found.__getitem__)[:2]
            if Gap(found[best], found[other]).decades >= self.min_gap_decades and found[best] <= _FAR:
                break
        return best, other, found[best]


@dataclass(frozen=True)
class StackReading:
    """One text as it was read: errors of its rows at the layer that was seen, and those of the next best tokens."""

    tokens: tuple[int, ...]
    errors: Float[Tensor, " n"]
    refused: Float[Tensor, " n"]
    stack: StackInversion
    min_gap_decades: float
    rounding: float  # errors up to this are explained by the evidence's precision

    @property
    def num_certain(self) -> int:
        """Leading tokens that reproduce their rows, where the next best ones clearly do not."""
        pairs = zip(self.errors.tolist(), self.refused.tolist(), strict=True)
        clear = [error <= self.rounding and Gap(error, other).decades >= self.min_gap_decades for error, other in pairs]
        return clear.index(False) if False in clear else len(clear)

    @property
    def is_whole(self) -> bool:
        """Whether every token of the text is certain."""
        return self.num_certain == self.stack.length


def _forward_errors(
    model: Model, rows: Rows, positions: Sequence[int], layer: int, tokens: list[int], others: list[int]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Relative errors of the recomputed rows, and of each row when its token is replaced by the next best."""
    n = len(tokens)
    if n == 0:
        return rows.new_zeros(0), rows.new_zeros(0)
    texts = torch.tensor([tokens] * (n + 1), device=rows.device)
    texts[1:].diagonal().copy_(torch.tensor(others, device=rows.device))
    places = torch.tensor(positions[:n], device=rows.device).expand(n + 1, -1)
    with torch.no_grad():
        states = model.hidden_states(texts, num_blocks=layer, positions=places)[layer]
    errors = (states - rows[:n]).norm(dim=2) / rows[:n].norm(dim=1)
    return errors[0], errors[1:].diagonal()


@torch.no_grad()
def _embed(model: Model, tokens: Int[Tensor, " n"] | list[int], position: int) -> Rows:
    """The stream that enters block 0, for tokens at one position."""
    ids = torch.as_tensor(tokens, device=model.device)
    return model.embed(ids, torch.full_like(ids, position))


def _cost(run: Run, candidates: int = 0, forward_passes: int = 0) -> Cost:
    return run.cost(candidates=candidates, forward_passes=forward_passes)


def _recovery(readings: list[StackReading], model: Model, run: Run) -> Recovery[RecoveredTexts]:
    """Status, reason and certificate of a batch."""
    texts = []
    for reading in readings:
        tokens = reading.tokens[: reading.num_certain]
        if tokens:
            residual = float(reading.errors[: len(tokens)].max())
            texts.append(RecoveredText(tokens, model.decode(tokens), reading.is_whole, residual))
    texts.sort(key=lambda text: (not text.certain, text.residual))
    num_tokens, num_certain = (sum(counts) for counts in _counts(readings))
    exact = min((reading.stack.num_exact / reading.stack.length for reading in readings), default=0.0)
    chain = f"exact pre-images reach the bottom for {exact:.0%} of the rows of the worst text"
    if not texts:
        why = f"{chain}, but no row there is one of a token: a zero residual is not a recovery"
        return claim_nothing(run, Status.NOTHING_FOUND, why, _USED)
    whole = num_certain == num_tokens
    searches = searches_of(Aim.TOKENS, Aim.TEXTS, stopped=not whole)
    reason = f"{num_certain} of {num_tokens} tokens, leading ones of each text, reproduce the states; {chain}"
    refused = min(float(reading.refused[: reading.num_certain].min()) for reading in readings if reading.num_certain)
    residual = max(text.residual for text in texts)
    certificate = Certificate(
        claim="the forward pass of the tokens reproduces the states, and no other token at a position does",
        residual=residual,
        tolerance=Gap(residual, refused).threshold,
        rejected=refused,
        details={"amplification": max(reading.stack.amplification for reading in readings)},
    )
    value = RecoveredTexts(tuple(texts), frozenset(token for text in texts for token in text.tokens))
    status = Status.RECOVERED if whole else Status.PARTIAL
    return Recovery(value, status, reason, certificate, _cost(run, num_tokens, len(readings)), _USED, searches)


def _counts(readings: list[StackReading]) -> tuple[list[int], list[int]]:
    return [reading.stack.length for reading in readings], [reading.num_certain for reading in readings]
