"""The bag of words behind several AdamW steps of LoRA's factors A in block 0: what LLM federations send.

Each column of the factor's gradients is a combination of the same few inputs in every step, and changes little from
step to step. `adam_channel.py` has what Adam makes of it, `support_growth.py` the tokens that explain it.

    claimed  all of these hold, or nothing is:
             · every layer is explained: `_UNEXPLAINED` of it at most is left to tokens that were not found, and steps
               are within `_MOST_MISFIT` roundings of what tokens explain
             · the search has settled: what is left of the steps is rounding, or a second search from fresh sites ends
               with the same tokens
             · tokens are found only above every decoy; decoys lie as near to tokens as tokens lie to each other
             · most strong tokens are sure: their score is far beyond noise, and each explains the steps better
               than any token or decoy near it would, by a ratio of likelihoods of n·v/`_CONFUSED`

Notation: n tokens chosen out of v. Expected false: the chance that one of the n should be one of v others, given the
model of the steps.
Limits: the learning rate, the number of steps and the same batch in each are assumed; a fresh optimiser; float32
factors; models without learned positions. Dropout, many tokens (265 of them behind 64 columns) and adapters whose
gradients change much from step to step leave a search that does not settle: nothing is claimed. Tokens that are only
labels leave no trace.
Cost: as in `sparse_posterior.py`: one to six minutes for SmolLM2-135M on one core, seconds on a GPU.
Source: measured for this project.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.gradients.bag_of_words.weight_changes import (
    BETAS,
    EPSILON,
    DeltaTokens,
    WeightChange,
    find_nothing,
)
from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.adam_channel import AdamSteps
from unmask.linalg.decoys import make_decoys
from unmask.linalg.sparse_posterior import SparsePosterior
from unmask.linalg.support_growth import STRONG, GrownSupport, grow_support
from unmask.models.adapter import Model

_MOST_PROFILES = 3
_MOST_STEPS = 100  # no drift that three profiles show goes on for longer
_MOST_COLUMNS = 64
_MOST_DECOYS = 2**14
# Roundings that the steps may be away from what tokens explain. Right tokens left 190 to 800 after ten steps of first
# rounds; a search that settled on 18 of 129 tokens of a later round, two of them false, left 52,000.
_MOST_MISFIT = 2000.0
_UNEXPLAINED = 0.1  # of a layer; right tokens leave 0.08 at most, shuffled updates 0.3 and more (measured)
# Score of a token that is claimed. What the model of the steps leaves out, which is little of them but the same in all
# columns, lends scores of up to 25 to tokens that do not occur (measured).
_CLAIMED = 30.0
_CONFUSED = 0.01  # by the ratio of likelihoods, of all batches: some token may be taken for another as often
_FALSE = 0.01  # of the tokens claimed: of held-out batches 1 of 252
_SURE = 0.75  # of the strong tokens; right ones 0.8 and more, searches among wrong ones 0.7 at most (measured)
_DRIFT = (
    "an adaptive optimiser (Adam) took several steps: the gradient drifts between them by more than the epsilon that "
    "tells its size, so that block 0's weights show little more than signs; and no embedding rows tell tokens"
)


@torch.no_grad()
def find_adamw_tokens(evidence: GradientEvidence, model: Model, changes: Sequence[WeightChange]) -> DeltaTokens:
    """Tokens behind the changes of block 0's factors A after several steps of AdamW; none of whole layers."""
    used = tuple(change.name for change in changes)
    factors = [change for change in changes if change.is_factor and change.begins_at_zero == changes[0].begins_at_zero]
    everyone = torch.arange(model.vocab_size, device=model.device)
    words, places, _ = model.first_input_parts(everyone, 1)
    if not factors or evidence.learning_rate is None or len(places) or factors[0].num_steps > _MOST_STEPS:
        return find_nothing(_DRIFT, used)
    words, device = words.float().cpu(), _device_of(words)
    steps = AdamSteps(factors[0].num_steps, factors[0].begins_at_zero, _MOST_PROFILES, EPSILON, BETAS, device)
    measured, sigma, layers = _read(factors, evidence.learning_rate, evidence.weight_decay or 0.0)
    decoys = make_decoys(words, _MOST_DECOYS, torch.Generator().manual_seed(0))
    dictionary, measured, sigma = (part.to(device) for part in (torch.cat([words, decoys]), measured, sigma))
    posterior = SparsePosterior(dictionary, measured, sigma, steps, layers)
    found = grow_support(posterior, model.vocab_size)
    details = {
        "adamw_misfit": found.misfit,
        "adamw_unexplained": found.unexplained,
        "adamw_tokens": float(len(found.chosen)),
    }
    tokens, expected_false = _judge(found, model.vocab_size)
    if not tokens:
        return find_nothing(f"{_DRIFT}. {_explain(found)}", used, details)
    names = tuple(factor.name for factor in factors)
    return DeltaTokens(torch.tensor(sorted(tokens)), expected_false, names, details)


def _read(
    factors: Sequence[WeightChange], learning_rate: float, weight_decay: float
) -> tuple[Float[Tensor, "d m"], Float[Tensor, "d m"], list[slice]]:
    """The sums of steps of all factors as columns, their errors, and which columns are whose."""
    parts, layers, begin = [], [], 0
    for factor in factors:
        step, error = factor.read_step(learning_rate, weight_decay)
        step, error = (part[: _MOST_COLUMNS // len(factors)].cpu() for part in (step, error))
        parts.append((step.T, error.T))
        layers.append(slice(begin, begin := begin + len(step)))
    return torch.cat([step for step, _ in parts], 1), torch.cat([error for _, error in parts], 1), layers


def _judge(found: GrownSupport, vocab_size: int) -> tuple[list[int], float]:
    """The tokens that may be claimed, and how many of them are false on average."""
    num_chosen = len(found.chosen)
    is_explained = found.misfit <= _MOST_MISFIT and found.unexplained <= _UNEXPLAINED
    if not num_chosen or not found.is_settled or not is_explained:
        return [], 0.0
    least = math.log(num_chosen * vocab_size / _CONFUSED)
    sure = (found.scores > _CLAIMED) & (found.margins > least)
    if int(sure.sum()) < _SURE * int((found.scores > STRONG).sum()):
        return [], 0.0
    tokens = [atom for atom, is_sure in zip(found.chosen, sure.tolist(), strict=True) if is_sure]
    return tokens, _FALSE * len(tokens)


def _explain(found: GrownSupport) -> str:
    """What the search has left, in words."""
    return (
        f"A search for tokens that explain all steps chose {len(found.chosen)}; they leave {found.misfit:.0f} "
        f"roundings and {found.unexplained:.0%} of a layer, so that none is certain; dropout, other texts in each step "
        "and very many tokens hide them"
    )


def _device_of(words: Tensor) -> torch.device:
    """A GPU with float64, if the model is on one."""
    return words.device if words.device.type == "cuda" else torch.device("cpu")
