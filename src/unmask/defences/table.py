"""The table of defences of updates, hidden states and caches, by name, as in `noise:sigma=1e-4,relative=true`.

On hidden states each token's row is one tensor: 'int8' has a scale for each token, relative noise is relative to each
token's own state, 'clip' bounds the norm of all states together. On caches each token's keys and values of one head
are one tensor; 'cloak' is for caches alone. Secure aggregation has no line here: it needs several
clients (`--clients`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, TypeVar

import torch

from unmask.defences.clip import clip_norm
from unmask.defences.cloak import cloak_cache
from unmask.defences.noise import add_gaussian_noise, add_laplace_noise
from unmask.defences.prune import keep_largest, keep_random
from unmask.defences.quantise import quantise_bf16, quantise_fp8, quantise_fp16, quantise_int8
from unmask.defences.tensorwise import AnyTensors
from unmask.defences.withhold import withhold
from unmask.evidence.caches import CacheEvidence
from unmask.evidence.outputs import HiddenEvidence
from unmask.specs import Kind, Spec, flag, names, number

_SIGMA = number("sigma", "a finite number from 0 on", lambda value: 0 <= value < math.inf)
_NORM = number("norm", "a finite number above 0", lambda value: 0 < value < math.inf)
_SHARE = number("share", "a number from 0 to 1", lambda value: 0 <= value <= 1)
_RELATIVE = flag("relative", default=False)
_STOCHASTIC = flag("stochastic", default=False)
_PATTERN = names("pattern", "parts of names, joined by +")

DEFENCES: Mapping[str, Kind] = {
    "noise": Kind(
        "noise:sigma=1e-4",
        "Gaussian noise of standard deviation sigma on every entry; of sigma times each tensor's rms if relative",
        lambda evidence, generator, sigma, relative: add_gaussian_noise(evidence, sigma, generator, relative),
        (_SIGMA, _RELATIVE),
    ),
    "laplace": Kind(
        "laplace:sigma=1e-4",
        "Laplace noise of standard deviation sigma on every entry; of sigma times each tensor's rms if relative",
        lambda evidence, generator, sigma, relative: add_laplace_noise(evidence, sigma, generator, relative),
        (_SIGMA, _RELATIVE),
    ),
    "clip": Kind(
        "clip:norm=1",
        "the norm of the whole update is at most this; its direction stays",
        lambda evidence, generator, norm: clip_norm(evidence, norm),
        (_NORM,),
    ),
    "topk": Kind(
        "topk:share=0.01",
        "only the largest entries of the whole update are sent, exactly this share of all; the others are zero",
        lambda evidence, generator, share: keep_largest(evidence, share),
        (_SHARE,),
    ),
    "random": Kind(
        "random:share=0.1",
        "each entry is sent with this probability, as it is, and is zero otherwise",
        lambda evidence, generator, share: keep_random(evidence, share, generator),
        (_SHARE,),
    ),
    "int8": Kind(
        "int8:stochastic=true",
        "255 levels for each tensor; entries go to the nearest, or to a random neighbour, right on average",
        lambda evidence, generator, stochastic: quantise_int8(evidence, generator if stochastic else None),
        (_STOCHASTIC,),
    ),
    "fp8": Kind(
        "fp8",
        "float8 (e4m3fn) with a scale for each tensor: three bits of mantissa",
        lambda evidence, generator: quantise_fp8(evidence),
    ),
    "fp16": Kind(
        "fp16",
        "float16: ten bits of mantissa, and an even grid below 6e-5",
        lambda evidence, generator: quantise_fp16(evidence),
    ),
    "bf16": Kind(
        "bf16",
        "bfloat16: seven bits of mantissa, the range of float32",
        lambda evidence, generator: quantise_bf16(evidence),
    ),
    "withhold": Kind(
        "withhold:pattern=wte+wpe",
        "tensors whose names contain one of the patterns are not sent; the others are, as they are",
        lambda evidence, generator, pattern: withhold(evidence, pattern),
        (_PATTERN,),
    ),
    "cloak": Kind(
        "cloak",
        "of caches alone: each head's keys and values are mixed by a secret matrix that the server keeps",
        lambda evidence, generator: cloak_cache(evidence, generator),
    ),
}


AnyStates = TypeVar("AnyStates", HiddenEvidence, CacheEvidence)


class Defence(Spec):
    """A defence with its settings: evidence in, evidence out."""

    noun: ClassVar[str] = "defence"
    table: ClassVar[Mapping[str, Kind]] = DEFENCES

    def __call__(self, evidence: AnyTensors, generator: torch.Generator) -> AnyTensors:
        """The evidence as the adversary sees it; a defence without chance leaves the generator alone."""
        changed: AnyTensors = self.kind.make(evidence, generator, **self.settings)
        return changed


def parse_defence(text: str) -> Defence:
    """The defence that a text names."""
    return Defence.parse(text)


def defend_states(evidence: AnyStates, defence: Defence, generator: torch.Generator) -> AnyStates:
    """The states as a service hands them out, or the cache as it keeps it, behind a defence; padding stays zero."""
    return defence(evidence, generator)
