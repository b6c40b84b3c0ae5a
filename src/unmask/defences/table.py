"""The table of defences that one update can go through: name, function, settings, promise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unmask.defences.clip import clip_norm
from unmask.defences.noise import add_gaussian_noise, add_laplace_noise
from unmask.defences.prune import keep_largest, keep_random
from unmask.defences.quantise import quantise_bf16, quantise_fp8, quantise_int8
from unmask.defences.withhold import withhold
from unmask.evidence.gradients import GradientEvidence


@dataclass(frozen=True)
class Setting:
    """A setting: what it must be, a default unless it must be given, and `take`, which reads a text or a value.

    `take` raises for what it cannot take.
    """

    name: str
    expected: str
    take: Callable[[Any], Any]
    default: Any = None

    def __str__(self) -> str:
        default = "" if self.default is None else f", {written(self.default)} unless given"
        return f"{self.name} ({self.expected}{default})"


@dataclass(frozen=True)
class DefenceKind:
    """A line of the table; `apply` takes evidence, a generator and the settings by name."""

    example: str
    promise: str
    apply: Callable[..., GradientEvidence]
    settings: tuple[Setting, ...] = ()


def written(value: Any) -> str:
    """A setting's value as a text that `take` reads back exactly."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "+".join(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _number(name: str, expected: str, is_inside: Callable[[float], bool]) -> Setting:
    def take(value: Any) -> float:
        if isinstance(value, bool) or not is_inside(float(value)):
            raise ValueError(value)
        return float(value)

    return Setting(name, expected, take)


def _flag(value: Any) -> bool:
    return {"true": True, "false": False}[str(value).lower()]


def _names(value: Any) -> tuple[str, ...]:
    names = tuple(value.split("+") if isinstance(value, str) else value)
    if not names or not all(isinstance(name, str) and name and name.strip() == name for name in names):
        raise ValueError(value)
    if any(sign in name for name in names for sign in ",+"):
        raise ValueError(value)
    return names


_SIGMA = _number("sigma", "a finite number from 0 on", lambda value: 0 <= value < math.inf)
_NORM = _number("norm", "a finite number above 0", lambda value: 0 < value < math.inf)
_SHARE = _number("share", "a number from 0 to 1", lambda value: 0 <= value <= 1)
_RELATIVE = Setting("relative", "true or false", _flag, False)
_STOCHASTIC = Setting("stochastic", "true or false", _flag, False)
_PATTERN = Setting("pattern", "parts of names, joined by +", _names)

DEFENCES: Mapping[str, DefenceKind] = {
    "noise": DefenceKind(
        "noise:sigma=1e-4",
        "Gaussian noise of standard deviation sigma on every entry; of sigma times each tensor's rms if relative",
        lambda evidence, generator, sigma, relative: add_gaussian_noise(evidence, sigma, generator, relative),
        (_SIGMA, _RELATIVE),
    ),
    "laplace": DefenceKind(
        "laplace:sigma=1e-4",
        "Laplace noise of standard deviation sigma on every entry; of sigma times each tensor's rms if relative",
        lambda evidence, generator, sigma, relative: add_laplace_noise(evidence, sigma, generator, relative),
        (_SIGMA, _RELATIVE),
    ),
    "clip": DefenceKind(
        "clip:norm=1",
        "the norm of the whole update is at most this; its direction stays",
        lambda evidence, generator, norm: clip_norm(evidence, norm),
        (_NORM,),
    ),
    "topk": DefenceKind(
        "topk:share=0.01",
        "only the largest entries of the whole update are sent, exactly this share of all; the others are zero",
        lambda evidence, generator, share: keep_largest(evidence, share),
        (_SHARE,),
    ),
    "random": DefenceKind(
        "random:share=0.1",
        "each entry is sent with this probability, as it is, and is zero otherwise",
        lambda evidence, generator, share: keep_random(evidence, share, generator),
        (_SHARE,),
    ),
    "int8": DefenceKind(
        "int8:stochastic=true",
        "255 levels for each tensor; entries go to the nearest, or to a random neighbour, right on average",
        lambda evidence, generator, stochastic: quantise_int8(evidence, generator if stochastic else None),
        (_STOCHASTIC,),
    ),
    "fp8": DefenceKind(
        "fp8",
        "float8 (e4m3fn) with a scale for each tensor: three bits of mantissa",
        lambda evidence, generator: quantise_fp8(evidence),
    ),
    "bf16": DefenceKind(
        "bf16",
        "bfloat16: seven bits of mantissa, the range of float32",
        lambda evidence, generator: quantise_bf16(evidence),
    ),
    "withhold": DefenceKind(
        "withhold:pattern=wte+wpe",
        "tensors whose names contain one of the patterns are not sent; the others are, as they are",
        lambda evidence, generator, pattern: withhold(evidence, pattern),
        (_PATTERN,),
    ),
}
