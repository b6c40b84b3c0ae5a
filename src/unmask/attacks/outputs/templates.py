"""What each token's state looks like before its context is known: one scan of the vocabulary, once for a model.

    h⁽ˡ⁾ at a position that holds token v  ~  N(T⁽ˡ⁾[v] + shift, Σ),    T⁽ˡ⁾[v] = h⁽ˡ⁾(v | a short common prefix)

T has a row for every token; shift and Σ are the mean and the covariance of h − T[v] over text that the model wrote
itself. Three tables are kept: at the layer that was seen, at one in the middle (from where a linear map to the layer
seen is still good, and where tokens are still easily told apart), and there once more without any prefix, for the first
position, whose state depends on its token alone.

Notation: l the layer that was seen, V the vocabulary, d the width.
Limits: T is a guess, never a proof: whatever it proposes is tested by a forward pass.
Cost: V·(l + 4l/3 …) rows through blocks, once: about a minute for SmolLM2's last layer on two cores, kept on disk.
Source: research notes, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.outputs.calibration import calibration_tokens
from unmask.attacks.outputs.continuation import Continuation
from unmask.attacks.progress import Progress, silent
from unmask.models.adapter import Model
from unmask.shapes import TokenBatch

_PREFIX_LENGTH = 1
_FIRST_USED = 2  # earlier positions take part in attention sinks and have states of another kind
_CHUNK = 2048  # rows that go through a block at once


@dataclass(frozen=True)
class TokenStates:
    """h | v ~ N(templates[v] + shift, covariance) after some number of blocks."""

    templates: Float[Tensor, "vocab d"]
    shift: Float[Tensor, " d"]
    covariance: Float[Tensor, "d d"]

    def spread(self) -> Float[Tensor, "d d"]:
        """The covariance of states of any token: between tokens and around them."""
        rows = self.templates.to(self.shift)
        return torch.cov(rows.T) + self.covariance


@dataclass(frozen=True)
class Templates:
    """The tables for states of one layer (`seen`), and for one in the middle, with and without a prefix."""

    middle_layer: int
    seen: TokenStates
    middle: TokenStates
    alone: TokenStates


def middle_layer_of(model: Model, layer: int) -> int:
    """A third of the way up the model, or half of the way to the layer that was seen."""
    return min(model.num_blocks // 3, layer // 2)


@torch.no_grad()
def measure_templates(model: Model, layer: int, normed: bool = False, progress: Progress = silent) -> Templates:
    """Scan the vocabulary and calibrate."""
    middle = middle_layer_of(model, layer)
    progress("writing text to calibrate with", 0, 1)
    tokens = calibration_tokens(model)
    states = model.hidden_states(tokens, num_blocks=layer)
    seen_states = model.final_norm(states[layer]) if normed else states[layer]
    after_prefix = Continuation.start(model, layer, middle_layer=middle, normed=normed)
    after_prefix = after_prefix.advanced(after_prefix.run(tokens[0, :_PREFIX_LENGTH])[1], _PREFIX_LENGTH)
    seen, mids = _scanned(after_prefix, "reading the vocabulary", progress)
    alone, _ = _scanned(Continuation.start(model, middle), "reading the vocabulary alone", progress)
    return Templates(
        middle,
        _calibrated(seen, seen_states, tokens),
        _calibrated(mids, states[middle], tokens),
        _exact(alone),
    )


def _scanned(context: Continuation, stage: str, progress: Progress) -> tuple[Tensor, Tensor]:
    """States and middle streams of every token in a context, rounded as they are kept on disk."""
    vocabulary = torch.arange(context.model.vocab_size, device=context.model.device)
    seen, middle = [], []
    for start in range(0, len(vocabulary), _CHUNK):
        progress(stage, start, len(vocabulary))
        trial = context.trial(vocabulary[start : start + _CHUNK])
        seen.append(trial.states.bfloat16())
        middle.append(trial.middle.bfloat16())
    return torch.cat(seen), torch.cat(middle)


def _calibrated(templates: Tensor, states: Float[Tensor, "batch length d"], tokens: TokenBatch) -> TokenStates:
    used = tokens[:, _FIRST_USED:].flatten()
    offsets = (states[:, _FIRST_USED:].flatten(0, 1) - templates[used]).double()
    shift = offsets.mean(0)
    centred = offsets - shift
    return TokenStates(templates, shift.float(), (centred.T @ centred / len(centred)).float())


def _exact(templates: Tensor) -> TokenStates:
    """States without context: all that they can be off by is the rounding of the table."""
    spread = (2.0**-8 * templates.float()).square().mean(0)
    return TokenStates(templates, torch.zeros_like(spread), torch.diag(spread))
