"""What each token's state looks like before its context is known: a linear model of it, fitted once for a layer.

    h⁽ˡ⁾ at a position that holds token v  ~  N(φ(v)·A + b, Σ),    φ(v) = the stream of v alone after one block

φ is one block's scan of the vocabulary; A, b and Σ are a ridge regression over text that the model wrote itself and
over random tokens. Fitted on every context at once, φ(v)·A is closer to what a token has in common in all of them than
the token's own state in any one context is, and it costs a thirtieth of a scan through all blocks.

Two layers are fitted: the one that was seen, and one in the middle, from where a linear map to the layer seen is still
good. Both are fitted once more for tokens without a context: the first position, whose states are of another kind.

Notation: l the layer that was seen, V the vocabulary, d the width.
Limits: a guess, never a proof: whatever it proposes is tested by a forward pass.
Cost: V rows through one block, 8·d tokens through l blocks: some 20 seconds for SmolLM2 on two cores, once: what was
fitted is kept on the disk.
Source: ours; it replaces a scan of the vocabulary at the layer itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.kept_fits import fit_once
from unmask.attacks.outputs.prompts.continuation import Continuation
from unmask.attacks.run import Progress, silent
from unmask.models.adapter import Model
from unmask.models.model_cache import compute_once, identity_of
from unmask.models.readouts import STREAM, Readout
from unmask.progress import tell
from unmask.shapes import TokenBatch

_FIRST_USED = 2  # earlier positions take part in attention sinks and have states of another kind
_CHUNK = 2048  # rows that go through a block at once
_RIDGE = 0.1  # in units of the features' variance
_LONE_SHARE = 2  # tokens without a context, in units of the width
_FITTED = ("slope", "shift", "covariance")
_VERSION = 3  # of what is kept on disk: raise it when the fit changes
_NUM_COLUMNS = 16  # that rule out most tokens that are not near one
_WORTH_KEEPING = 10**6  # numbers of an embedding; smaller models are fitted in no time


@dataclass(frozen=True)
class TokenStates:
    """h | v ~ N(features[v]·slope + shift, covariance) after some number of blocks."""

    features: Float[Tensor, "vocab d"]
    slope: Float[Tensor, "d m"]
    shift: Float[Tensor, " m"]
    covariance: Float[Tensor, "m m"]

    def means(self, tokens: Int[Tensor, " k"]) -> Float[Tensor, "k m"]:
        """The expected states of some tokens."""
        return self.features[tokens] @ self.slope + self.shift

    def only(self, tokens: Int[Tensor, " k"]) -> TokenStates:
        """The same of some tokens."""
        return replace(self, features=self.features[tokens])

    def near(self, token: int, reach: float, weights: Float[Tensor, " m"]) -> set[int]:
        """Tokens whose expected states lie around a token's, at most `reach` away, as they are compared with `weights`.

        The token itself is one of them.
        """
        own = self.means(torch.tensor([token], device=self.shift.device))[0]
        off = (self._first_columns - own[:_NUM_COLUMNS]) * weights[:_NUM_COLUMNS]
        close = (off.norm(dim=1) <= reach).nonzero()[:, 0]  # few are left
        return {token, *close[((self.means(close) - own) * weights).norm(dim=1) <= reach].tolist()}

    @cached_property
    def _first_columns(self) -> Float[Tensor, "vocab k"]:
        return self.features @ self.slope[:, :_NUM_COLUMNS] + self.shift[:_NUM_COLUMNS]

    @cached_property
    def between(self) -> Float[Tensor, "m m"]:
        """The covariance of what is expected of tokens."""
        return self.slope.T @ torch.cov(self.features.T) @ self.slope

    @cached_property
    def spread(self) -> Float[Tensor, "m m"]:
        """The covariance of states of any token: between tokens and around them."""
        return self.between + self.covariance


@dataclass(frozen=True)
class Tables:
    """States of the layer seen and of the one in the middle."""

    seen: TokenStates
    middle: TokenStates


@dataclass(frozen=True)
class Templates:
    """What is known of tokens in a context, and of tokens that come first."""

    layer: int
    middle_layer: int
    in_context: Tables
    alone: Tables


def middle_layer_of(model: Model, layer: int) -> int:
    """A third of the way up the model, or half of the way to the layer that was seen."""
    return min(model.num_blocks // 3, layer // 2)


def templates_for(model: Model, layer: int, readout: Readout = STREAM, progress: Progress = silent) -> Templates:
    """The templates of what is seen of a layer, fitted once and kept: while the model lives, and on the disk."""
    key = "templates", layer, readout
    return compute_once(model, key, lambda: _fit_once(model, layer, readout, progress))


def _fit_once(model: Model, layer: int, readout: Readout, progress: Progress) -> Templates:
    """The templates, those of a real model from the disk if they are there: but for the features, which are quick."""
    if model.vocab_size * model.width < _WORTH_KEEPING:
        return measure_templates(model, layer, readout, progress)
    name = f"{identity_of(model)} {layer} {readout} {_VERSION}"
    found = fit_once(
        "templates", name, lambda: _numbers(measure_templates(model, layer, readout, progress)), model.device
    )
    features = _features_of(model, progress)

    def states(place: str) -> TokenStates:
        return TokenStates(features, *(found[f"{place}.{part}"] for part in _FITTED))

    in_context, alone = (Tables(states(f"{each}.seen"), states(f"{each}.middle")) for each in ("in_context", "alone"))
    return Templates(layer, middle_layer_of(model, layer), in_context, alone)


def _numbers(templates: Templates) -> dict[str, Tensor]:
    """All that is fitted, by name."""
    tables = {"in_context": templates.in_context, "alone": templates.alone}
    return {
        f"{place}.{name}.{part}": getattr(getattr(table, name), part)
        for place, table in tables.items()
        for name in ("seen", "middle")
        for part in _FITTED
    }


def _features_of(model: Model, progress: Progress) -> Float[Tensor, "vocab d"]:
    return compute_once(model, "token features", lambda: compute_token_features(model, progress))


@torch.no_grad()
def measure_templates(model: Model, layer: int, readout: Readout = STREAM, progress: Progress = silent) -> Templates:
    """Scan the vocabulary through one block, and fit both layers in and without context."""
    middle = middle_layer_of(model, layer)
    features = _features_of(model, progress)
    lone = torch.randperm(model.vocab_size, generator=torch.Generator().manual_seed(0))[: _LONE_SHARE * model.width]
    alone = Continuation.start(model, layer, middle_layer=middle, readout=readout).trial(lone.to(model.device))
    tokens = compute_once(model, "calibration tokens", lambda: calibration_tokens(model))
    progress("calibrating", 0, 1)
    states = model.hidden_states(tokens, num_blocks=layer)
    used = tokens[:, _FIRST_USED:].flatten()
    streams = states[layer][:, _FIRST_USED:].flatten(0, 1)
    seen = torch.cat([readout(model, rows, torch.zeros_like(used[: len(rows)])) for rows in streams.split(_CHUNK)])
    in_context = Tables(
        fit_states(features, used, seen),
        fit_states(features, used, states[middle][:, _FIRST_USED:].flatten(0, 1)),
    )
    without = Tables(
        fit_states(features, alone.tokens, alone.states),
        fit_states(features, alone.tokens, alone.middle),
    )
    return Templates(layer, middle, in_context, without)


@torch.no_grad()
def compute_token_features(model: Model, progress: Progress = silent) -> Float[Tensor, "vocab d"]:
    """φ: every token alone, after one block."""
    context = Continuation.start(model, 1)
    vocabulary = torch.arange(model.vocab_size, device=model.device)
    parts = []
    for start in range(0, len(vocabulary), _CHUNK):
        progress("reading the vocabulary", start, len(vocabulary))
        parts.append(context.trial(vocabulary[start : start + _CHUNK]).states)
    return torch.cat(parts)


def fit_states(
    features: Float[Tensor, "vocab d"], tokens: Int[Tensor, " n"], states: Float[Tensor, "n m"]
) -> TokenStates:
    """Ridge regression of states on features, in float64, each feature in units of its deviation."""
    x, y = features[tokens].double(), states.double()
    x_mean, y_mean = x.mean(0), y.mean(0)
    scale = x.std(0).clamp_min(torch.finfo(torch.float32).tiny)
    x, y = (x - x_mean) / scale, y - y_mean
    gram = x.T @ x
    gram.diagonal().add_(_RIDGE * len(x))
    slope = torch.linalg.solve(gram, x.T @ y) / scale[:, None]
    residual = y - x * scale @ slope
    covariance = residual.T @ residual / len(residual)
    shift = y_mean - x_mean @ slope
    return TokenStates(features, slope.to(states), shift.to(states), covariance.to(states))


_NUM_WRITTEN = 40
_LENGTH = 40
_TOKENS_A_WIDTH = 8  # as many tokens in all, in units of the width: a regression has that many unknowns a coordinate


def calibration_tokens(model: Model, seed: int = 0) -> TokenBatch:
    """Text to calibrate with, made by the model itself: sequences of one length, the same for the same model and seed.

    Some are drawn from the model's own distribution, so that they look like what it reads; the others are tokens at
    random, so that nothing comes as a surprise. A model that cannot write gets random tokens alone, in the frame
    ([CLS], [SEP]) that its tokenizer puts around every text.
    """
    generator = torch.Generator().manual_seed(seed)
    length = min(_LENGTH, model.max_positions)
    writes = model.causal and model.unembedding is not None and hasattr(model.hf, "generate")
    num_sequences = max(_TOKENS_A_WIDTH * model.width // length, 2 * _NUM_WRITTEN)
    random = _random_tokens(model, (num_sequences - (_NUM_WRITTEN if writes else 0), length), generator)
    if not writes:
        return random
    starts = _random_tokens(model, (_NUM_WRITTEN, 1), generator)
    return torch.cat([_write_texts(model, starts, length, seed), random])


def _random_tokens(model: Model, shape: tuple[int, int], generator: torch.Generator) -> TokenBatch:
    tokens = torch.randint(0, model.vocab_size, shape, generator=generator)
    frame = model.frame_tokens
    if frame is not None and not model.causal and shape[1] > 2:
        tokens[:, 0], tokens[:, -1] = frame
    return tokens.to(model.device)


@torch.no_grad()
def _write_texts(model: Model, starts: Int[Tensor, "batch 1"], length: int, seed: int) -> TokenBatch:
    """What the model writes behind each start, drawn from its own distribution."""

    def go_on(tokens: TokenBatch, *_: object, **__: object) -> Tensor:
        tell("writing text to calibrate with", tokens.shape[1], length)
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

    tell("writing text to calibrate with", 1, length)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return model.hf.generate(
            starts,
            attention_mask=torch.ones_like(starts),
            stopping_criteria=[go_on],
            max_new_tokens=length - 1,
            min_new_tokens=length - 1,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=model.pad_token,
        )
