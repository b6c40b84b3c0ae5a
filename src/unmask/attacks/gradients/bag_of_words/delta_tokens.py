"""The bag of words from differences of weights, each entry of which has an error of its own: AdamW's steps, and LoRA's.

*AdamW.* Its first step is no sign: φ = g/(|g| + ε), so that 1 − |φ| = ε/|g| tells the size of a gradient wherever it is
above the rounding of the weight, which is most entries of a layer or a factor at usual learning rates.

    φ = −(Δ + decay·W)/learning rate,   |g| = ε·|φ|/(a − b·|φ|),   σ_g = ε·a·σ_φ/(a − b·|φ|)²

with a = b = 1 for a first step. The factor A of an adapter whose B was zero has no gradient in the first step, and its
second one has a = (1 − β₁)/(1 − β₁²), b² = (1 − β₂)/(1 − β₂²). Entries that are too large to be told from a sign are
left out. *SGD.* g = −Δ/learning rate, with the weights' rounding as its error.

The columns of g are combinations of the batch's inputs: tokens are found by `weighted_pursuit.py`.

    claimed  what is left is what the errors leave (χ²/n ≈ 1), by few tokens and many entries that are known well; a
             token's gain is beyond noise; no other token could stand in its place, by the ratio of likelihoods; and no
             decoys could. Where errors are larger than they are said to be (noise, a learning rate that is off by 1e-5)
             tokens explain them too, and decoys in the place of the weakest ones do as well: then only tokens of twice
             their gain are claimed

Notation: σ_φ the rounding of the weights over the learning rate; β₁, β₂ = 0.9, 0.999 and ε = 1e-8 as every library has
them. Limits: one step with a gradient. In further ones the gradient drifts, by more than ε of it: `adamw_steps.py`
reads those of adapters. Tokens that are only labels leave no trace.
Cost: vocab·d·m multiplications a token, for at most 64 columns.
Source: measured for this project.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.gradients.bag_of_words.adamw_steps import find_adamw_tokens
from unmask.attacks.gradients.bag_of_words.noisy_tokens import is_adamw
from unmask.attacks.gradients.bag_of_words.weight_changes import (
    BETAS,
    EPSILON,
    DeltaTokens,
    WeightChange,
    adapter_changes,
    find_nothing,
    largest_step,
    last_place,
    layer_changes,
    measure_decay,
)
from unmask.evidence.gradients import GradientEvidence, Update
from unmask.linalg.atoms import chi_square_score
from unmask.linalg.decoys import make_decoys
from unmask.linalg.weighted_pursuit import WeightedPursuit, WeightedSupport, find_start
from unmask.models.adapter import Model
from unmask.progress import tell

_FLOAT32 = 1e-4  # of a column's median entry: what float32 leaves of a gradient that is a sum of much larger terms
_READABLE = 6.0  # roundings that a step must be short of its largest size
_MOST_COLUMNS = 64
_MOST_DECOYS = 2**13
_WEAK = 0.25  # of the tokens: if decoys could stand for more, errors are not what they are said to be
# Times the gain of the strongest that decoys stand for. Where errors were larger than they are said to be, 50 false
# atoms of one client had scores of 5 to 10, and its tokens of 12 and more.
_BEYOND_WEAK = 2.0
_MOST = 0.6  # of the width: tokens and positions
_SCORE, _CLAIMED = 5.0, 8.5  # as of `noisy_tokens.py`
_UNTOLD = (
    "the steps show too few gradients of block 0's weights, or too roughly: several sets of tokens would explain them"
)
_CONFUSED = 0.01  # of all batches: a token may be taken for any other of the vocabulary as often as that
_KNOWN = 0.3  # of a column's entries: with fewer it tells nothing that others do not
# Tokens of a column's known entries, and the entries' median (value/error)². Of 146 small random clients that were
# explained, 5 had false tokens: their entries are at 173 to 235, whatever the number of tokens.
_FEW, _PRECISE = 0.5, 400.0
_NEXT_TO = 1e-5  # of a learning rate: people choose numbers of one digit or two, and steps show five
_FITS = 2.0  # χ²/n: more is no noise of the size that is known; right tokens leave 0.7 to 1.3 (measured)


@dataclass(frozen=True)
class _Columns:
    """Gradients of block 0's inputs as (d, m), and the standard deviations of their errors."""

    name: str
    values: Float[Tensor, "d m"]
    sigma: Float[Tensor, "d m"]


@torch.no_grad()
def find_delta_tokens(evidence: GradientEvidence, model: Model) -> DeltaTokens:
    """Tokens from the difference of block 0's query, key and value weights, or of their adapters' factors A."""
    if evidence.update is not Update.DELTA:
        return find_nothing("the update is no difference of weights")
    tell("reading the steps of block 0's weights", 0, 1)
    held = [*layer_changes(evidence, model), *adapter_changes(evidence, model)]
    columns = list(_columns(_with_decay(evidence, held), held))
    if not columns:
        drifting = [one for one in held if is_adamw(evidence, one.delta) and one.num_gradients > 1]
        if drifting:
            return find_adamw_tokens(evidence, model, drifting)
        return find_nothing("no difference of block 0's weights tells gradients")
    values, sigma = (torch.cat([getattr(one, part) for one in columns], dim=1) for part in ("values", "sigma"))
    everyone = torch.arange(model.vocab_size, device=model.device)
    words, places, shift = model.first_input_parts(everyone, model.max_positions)
    atoms = torch.cat([words, places, shift[None], model.token_type_directions])
    most = int(_MOST * model.width)
    found = WeightedPursuit(atoms, values, sigma, _SCORE).search(most, find_start(atoms, values, sigma, most))
    used = tuple(one.name for one in columns)
    details = {"delta_misfit": found.misfit, "delta_tokens": float(len(found.chosen))}
    if not found.chosen or found.is_full or found.misfit > _FITS:
        return find_nothing(_unexplained(evidence, found.misfit), used, details)
    if not _is_told(values, sigma, len(found.chosen)):
        return find_nothing(_UNTOLD, used, details)
    scores = chi_square_score(found.gains, values.shape[1])
    alone = found.gains - found.rivals > 2 * math.log(model.vocab_size / _CONFUSED)
    tell("comparing tokens with decoys", 0, 1)
    decoys = make_decoys(words.float().cpu(), _MOST_DECOYS, torch.Generator().manual_seed(0)).to(words)
    num_weak = _count_replaceable(found, atoms, decoys, values, sigma)
    if num_weak > _WEAK * len(found.chosen):
        return find_nothing(_UNTOLD, used, details)
    weak = found.gains.sort().values[:num_weak]
    strong = found.gains > _BEYOND_WEAK * (weak.max() if num_weak else 0.0)
    chosen = torch.tensor(found.chosen, device=scores.device)
    tokens = chosen[(chosen < model.vocab_size) & (scores > _CLAIMED) & alone & strong]
    return DeltaTokens(tokens.sort().values.cpu(), _CONFUSED, used, details)


def _count_replaceable(
    found: WeightedSupport,
    atoms: Float[Tensor, "v d"],
    decoys: Float[Tensor, "k d"],
    values: Float[Tensor, "d m"],
    sigma: Float[Tensor, "d m"],
) -> int:
    """How many of the weakest atoms twice as many decoys explain as well: 1, 2, 4 … of them are tried."""
    order, number, weak = found.gains.argsort().tolist(), 0, 1
    while weak <= len(order):
        kept = atoms[[found.chosen[place] for place in order[weak:]]]
        search = WeightedPursuit(torch.cat([kept, decoys]), values, sigma, _SCORE)
        if search.search(len(kept) + 2 * weak, range(len(kept))).misfit > _FITS:
            break
        number, weak = weak, 2 * weak
    return number


def _is_told(values: Float[Tensor, "d m"], sigma: Float[Tensor, "d m"], num_tokens: int) -> bool:
    """Whether few tokens explain many entries that are known well: else other tokens would explain them too."""
    known = sigma.isfinite()
    precision = float((values / sigma)[known].square().median())
    return num_tokens < _FEW * float(known.sum(0).double().median()) and precision > _PRECISE


def _columns(evidence: GradientEvidence, held: Sequence[WeightChange]) -> Iterator[_Columns]:
    """Gradients behind differences, equally many columns of each: those of which most entries are known."""
    for one in held:
        if is_adamw(evidence, one.delta):
            read = _read_adam(evidence, one)
        else:
            read = _read_sgd(evidence, one) if one.is_factor else None  # whole layers are the noisy test's
        if read is not None:
            values, sigma = read
            typical = torch.where(sigma.isfinite(), values.abs(), math.nan).nanmedian(1, keepdim=True).values
            sigma = (sigma.square() + (_FLOAT32 * typical.nan_to_num(0.0)).square()).sqrt()
            known = sigma.isfinite().double().mean(1)
            best = known.topk(min(_MOST_COLUMNS // len(held), len(known))).indices
            best = best[known[best] > _KNOWN]
            if len(best):
                yield _Columns(one.name, values[best].T, sigma[best].T)


def _read_adam(
    evidence: GradientEvidence, held: WeightChange
) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m d"]] | None:
    """The gradient behind the one step of AdamW that had one, and its errors; None after other numbers of steps."""
    if held.num_gradients != 1:
        return None
    number = held.num_steps
    a, b = ((1 - beta) / (1 - beta**number) for beta in BETAS)
    b = math.sqrt(b)
    rate = evidence.learning_rate or largest_step(held) * b / a
    rate = rate if evidence.learning_rate else _as_stated(rate)
    step, rounding = held.read_step(rate, evidence.weight_decay or 0.0)
    room = a - b * step.abs()
    is_readable = room > _READABLE * b * rounding
    room = room.clamp_min(1e-9)
    sigma = EPSILON * a * rounding / room.square()
    return EPSILON * step / room, torch.where(is_readable, sigma, math.inf)


def _with_decay(evidence: GradientEvidence, held: Sequence[WeightChange]) -> GradientEvidence:
    """The evidence with the learning rate and the decay that AdamW's step shows, where nobody states the decay."""
    if evidence.weight_decay is not None or evidence.adapters:
        return evidence
    steps = (measure_decay(one) for one in held if one.num_steps == 1 and is_adamw(evidence, one.delta))
    found = {step for step in steps if step is not None}
    if len(found) != 1 or evidence.learning_rate not in (None, next(iter(found))[0]):
        return evidence
    ((rate, decay),) = found
    return replace(evidence, learning_rate=rate, weight_decay=decay)


def _as_stated(rate: float) -> float:
    """The number of two digits next to a measured learning rate, where it is as near as rounding lets it be."""
    written = float(f"{rate:.1e}")
    return written if abs(written / rate - 1) < _NEXT_TO else rate


def _read_sgd(evidence: GradientEvidence, held: WeightChange) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m d"]]:
    """The mean gradient of the steps, up to the learning rate if that is not known, and the weights' rounding."""
    before, change, number = held.weights.double(), held.delta.double(), evidence.num_steps or 1
    scale = (evidence.learning_rate or 1.0) * number
    decay = (evidence.learning_rate or 0.0) * (evidence.weight_decay or 0.0) * number
    rounding = last_place(before, before + change, held.delta.dtype) * math.sqrt(number / 12)
    return -(change + decay * before) / scale, rounding / scale


def _unexplained(evidence: GradientEvidence, misfit: float) -> str:
    steps = "an unknown number of" if evidence.num_steps is None else str(evidence.num_steps)
    return (
        f"no tokens explain the difference of block 0's weights down to their rounding (χ²/n {misfit:.1f}, where 1 is "
        f"expected), after {steps} steps: the client trained with dropout or more steps, or noise was added"
    )
