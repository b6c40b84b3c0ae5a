"""What a token's state looks like in an encoder before its context is known: a linear model, fitted once for a layer.

    h⁽ˡ⁾ at a position that holds token v  ~  N(φ(v)·A + b, Σ),    φ(v) = the embedding of v at position 0

A, b and Σ are a ridge regression over random tokens in texts of several lengths, in the frame ([CLS], [SEP]) that the
tokenizer puts around every text. φ costs a row of the embedding; neither the stream after one block nor both
together ranks better.

Some tokens are *crowded*: a vocabulary holds thousands that were hardly ever trained on ('[unused12]', rare
characters), all with nearly the same embedding. What the model expects of them lies in the middle of everything, so at
late layers all of them rank before a function word that behaves unlike its embedding. They are marked, and a search
tests a few of them at a time instead of all of them first.

Notation: l the layer that was seen, V the vocabulary, d the width.
Limits: a guess, never a proof. One text, not a pair: token types are 0.
Cost: 32·d tokens through l blocks and one regression: about 5 seconds for MiniLM on one core.
Source: as templates.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unmask.attacks.outputs.prompts.templates import TokenStates, fit_states
from unmask.attacks.run import Progress, silent
from unmask.models.adapter import Model
from unmask.models.model_cache import compute_once
from unmask.shapes import TokenBatch

_LENGTHS = (6, 10, 16, 24, 32, 48)
_TOKENS_A_WIDTH = 32  # calibration tokens, in units of the width; 64 gives three more in a hundred at the last layer
_NEIGHBOUR = 0.6  # cosine of centred embeddings; two words that mean the same have less
_CROWD = 0.005  # share of the vocabulary that must be this near
_SAMPLE = 2000  # tokens that neighbours are counted among


@dataclass(frozen=True)
class EncoderTemplates:
    """The states expected of tokens, and which tokens can hardly be told from thousands of others."""

    layer: int
    normed: bool  # states are seen behind the model's final norm
    states: TokenStates
    crowded: Bool[Tensor, " vocab"]


def encoder_templates_for(
    model: Model, layer: int, normed: bool = False, progress: Progress = silent
) -> EncoderTemplates:
    """The templates of a layer, fitted once and kept while the model lives."""
    key = "encoder templates", layer, normed
    return compute_once(model, key, lambda: measure_encoder_templates(model, layer, normed, progress))


@torch.no_grad()
def measure_encoder_templates(model: Model, layer: int, normed: bool, progress: Progress = silent) -> EncoderTemplates:
    """Fit a layer's states over random texts of several lengths."""
    everyone = torch.arange(model.vocab_size, device=model.device)
    features = model.embed(everyone, torch.zeros_like(everyone))
    generator = torch.Generator().manual_seed(0)
    tokens, states = [], []
    for number, length in enumerate(_LENGTHS):
        progress("calibrating", number, len(_LENGTHS))
        texts = random_texts(model, length, generator)
        inner = slice(1, -1)  # frames are known; where there are none, two tokens a text are lost
        tokens.append(texts[:, inner].flatten())
        seen = model.hidden_states(texts, num_blocks=layer)[layer][:, inner].flatten(0, 1)
        states.append(model.final_norm(seen) if normed else seen)
    fitted = fit_states(features, torch.cat(tokens), torch.cat(states))
    return EncoderTemplates(layer, normed, fitted, crowded_tokens(features))


def random_texts(model: Model, length: int, generator: torch.Generator) -> TokenBatch:
    """Random tokens of one length in the tokenizer's frame: this length's share of all calibration tokens."""
    length = min(length, model.max_positions)
    num_texts = max(2, _TOKENS_A_WIDTH * model.width // (len(_LENGTHS) * length))
    texts = torch.randint(0, model.vocab_size, (num_texts, length), generator=generator)
    if model.frame_tokens is not None:
        texts[:, 0], texts[:, -1] = model.frame_tokens
    return texts.to(model.device)


def crowded_tokens(features: Float[Tensor, "vocab d"]) -> Bool[Tensor, " vocab"]:
    """Tokens whose embedding nearly coincides with that of a good many others; none, where that is the rule."""
    sample = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))[:_SAMPLE].to(features.device)
    centred = torch.nn.functional.normalize(features - features.mean(0), dim=1)
    neighbours = ((centred @ centred[sample].T) > _NEIGHBOUR).sum(1)
    crowded = neighbours > max(_CROWD * len(sample), 2)
    return crowded if crowded.double().mean() < 0.5 else torch.zeros_like(crowded)
