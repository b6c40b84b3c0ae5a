"""Functions of sequences, (batch, length, width) → (batch,): a few are attention layers, most only look like one."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]
Make = Callable[[int, torch.Generator], Function]


class Weights:
    """Random matrices and vectors of a width, drawn one after the other."""

    def __init__(self, width: int, generator: torch.Generator) -> None:
        self.width, self.generator = width, generator

    def matrix(self) -> Tensor:
        """Entries of the order of one, scores of the order of the tokens' product."""
        return torch.randn(self.width, self.width, generator=self.generator, dtype=torch.float64) / self.width**0.5

    def vector(self) -> Tensor:
        """Entries of the order of one."""
        return torch.randn(self.width, generator=self.generator, dtype=torch.float64)


def attention(weights: Weights, heads: int = 1, temperature: float = 1.0) -> Function:
    """Σ_h Σ_i softmax_i(x_iᵀ W_h x_n)·v_hᵀ x_i."""
    parts = [(weights.matrix() / temperature, weights.vector()) for _ in range(heads)]

    def answer(X: Tensor) -> Tensor:
        scores = [(X @ (W @ X[:, -1, :, None]))[..., 0] for W, _ in parts]
        mixed = [(s.softmax(1)[..., None] * X).sum(1) @ v for s, (_, v) in zip(scores, parts, strict=True)]
        return torch.stack(mixed).sum(0)

    return answer


def service(layer: Function, show: Function) -> Function:
    """A layer behind a service that clips, rounds or refuses: the layer is its secret, so it is compared with."""

    def answer(X: Tensor) -> Tensor:
        return show(X)

    answer.behind = layer  # type: ignore[attr-defined]
    return answer


def _real(heads: int, temperature: float = 1.0) -> Make:
    return lambda width, generator: attention(Weights(width, generator), heads, temperature)


def _vector_attention(width: int, generator: torch.Generator) -> Function:
    w = Weights(width, generator)
    functions = [attention(w, 1) for _ in range(3)]
    return lambda X: torch.stack([function(X) for function in functions], dim=1)


def _plus(size: float, what: str) -> Make:
    """An attention layer plus something that is none."""

    def make(width: int, generator: torch.Generator) -> Function:
        w = Weights(width, generator)
        layer, A, a = attention(w), w.matrix(), w.vector()
        extras: dict[str, Function] = {
            "constant": lambda X: torch.ones(len(X), dtype=X.dtype),
            "linear": lambda X: X[:, -1] @ a,
            "quadratic": lambda X: ((X[:, -1] @ A) * X[:, -1]).sum(1),
            "tanh": lambda X: (X @ a).tanh().mean(1),
            "sine": lambda X: (5 * X[:, 0] @ a).sin(),
            "hash": lambda X: _hash(X),
            "length": lambda X: torch.full((len(X),), math.log(X.shape[1]), dtype=X.dtype),
        }

        def both(X: Tensor) -> Tensor:
            return layer(X) + size * extras[what](X)

        return service(layer, both) if what == "hash" else both  # a hash is noise that repeats, and is said to be

    return make


def _hash(X: Tensor) -> Tensor:
    """A number in (−1, 1) for each sequence that looks random, always the same for the same sequence."""
    folded = (X * torch.arange(1, X[0].numel() + 1, dtype=X.dtype).view(X.shape[1:])).sum((1, 2))
    return torch.frac((folded * 12.9898).sin() * 43758.5453)


def _formula(function: Callable[[Tensor, Weights], Function]) -> Make:
    def make(width: int, generator: torch.Generator) -> Function:
        return function(torch.zeros(0), Weights(width, generator))

    return make


def _linear(_: Tensor, w: Weights) -> Function:
    a = w.vector()
    return lambda X: X.mean(1) @ a


def _last(_: Tensor, w: Weights) -> Function:
    a = w.vector()
    return lambda X: X[:, -1] @ a


def _sum(_: Tensor, w: Weights) -> Function:
    a = w.vector()
    return lambda X: X.sum(1) @ a


def _quadratic(_: Tensor, w: Weights) -> Function:
    A = w.matrix()
    return lambda X: ((X.mean(1) @ A) * X[:, -1]).sum(1)


def _tanh_network(_: Tensor, w: Weights) -> Function:
    A, a = w.matrix(), w.vector()
    return lambda X: (X.mean(1) @ A).tanh() @ a


def _tanh_of_attention(_: Tensor, w: Weights) -> Function:
    layer = attention(w)
    return lambda X: layer(X).tanh()


def _relu_of_attention(_: Tensor, w: Weights) -> Function:
    layer = attention(w)
    return lambda X: layer(X).relu()


def _constant(_: Tensor, w: Weights) -> Function:
    return lambda X: torch.full((len(X),), 1.5, dtype=X.dtype)


def _zero(_: Tensor, w: Weights) -> Function:
    return lambda X: torch.zeros(len(X), dtype=X.dtype)


def _nan_at_times(_: Tensor, w: Weights) -> Function:
    layer = attention(w)
    return service(layer, lambda X: torch.where(_hash(X).abs() < 0.02, math.nan, layer(X)))


def _infinite_far_out(_: Tensor, w: Weights) -> Function:
    layer = attention(w)
    return service(layer, lambda X: torch.where(X.norm(dim=2).amax(1) > 10, math.inf, layer(X)))


def _always_nan(_: Tensor, w: Weights) -> Function:
    return lambda X: torch.full((len(X),), math.nan, dtype=X.dtype)


def _piecewise(_: Tensor, w: Weights) -> Function:
    one, two = attention(w), attention(w)
    return lambda X: torch.where(X[:, -1, 0] > 0, one(X), two(X))


def _piecewise_in_length(_: Tensor, w: Weights) -> Function:
    one, two = attention(w), attention(w)
    return lambda X: one(X) if X.shape[1] <= 3 else two(X)


def _two_layers(_: Tensor, w: Weights) -> Function:
    W, A, layer = w.matrix(), w.matrix(), attention(w)

    def answer(X: Tensor) -> Tensor:
        return layer(X + (X @ W @ X.transpose(1, 2)).softmax(2) @ X @ A)

    return answer


def _position_dependent(_: Tensor, w: Weights) -> Function:
    W, v = w.matrix(), w.vector()

    def answer(X: Tensor) -> Tensor:
        scores = (X @ (W @ X[:, -1, :, None]))[..., 0] + 0.5 * torch.arange(X.shape[1], dtype=X.dtype)
        return (scores.softmax(1)[..., None] * X).sum(1) @ v

    return answer


def _alternating(_: Tensor, w: Weights) -> Function:
    layer = attention(w)
    return lambda X: layer(X * (1 + 0.3 * (torch.arange(X.shape[1], dtype=X.dtype) % 2))[:, None])


def _linear_attention(_: Tensor, w: Weights) -> Function:
    W, v = w.matrix(), w.vector()
    return lambda X: ((X @ (W @ X[:, -1, :, None])) * X).mean(1) @ v


def _sigmoid_attention(_: Tensor, w: Weights) -> Function:
    W, v = w.matrix(), w.vector()
    return lambda X: ((X @ (W @ X[:, -1, :, None])).sigmoid() * X).sum(1) @ v


def _hard_attention(_: Tensor, w: Weights) -> Function:
    W, v = w.matrix(), w.vector()

    def answer(X: Tensor) -> Tensor:
        best = (X @ (W @ X[:, -1, :, None]))[..., 0].argmax(1)
        return X[torch.arange(len(X)), best] @ v

    return answer


def _attention_to_others(_: Tensor, w: Weights) -> Function:
    """The last token asks and is not read."""
    W, v = w.matrix(), w.vector()

    def answer(X: Tensor) -> Tensor:
        others = X[:, :-1] if X.shape[1] > 1 else X
        scores = (others @ (W @ X[:, -1, :, None]))[..., 0]
        return (scores.softmax(1)[..., None] * others).sum(1) @ v

    return answer


def _asks_with_the_mean(_: Tensor, w: Weights) -> Function:
    W, v = w.matrix(), w.vector()

    def answer(X: Tensor) -> Tensor:
        scores = (X @ (W @ X.mean(1)[..., None]))[..., 0]
        return (scores.softmax(1)[..., None] * X).sum(1) @ v

    return answer


def _normed_tokens(_: Tensor, w: Weights) -> Function:
    layer = attention(w)
    return lambda X: layer(X / X.norm(dim=2, keepdim=True).clamp_min(1e-6))


def _maximum(_: Tensor, w: Weights) -> Function:
    a = w.vector()
    return lambda X: (X @ a).amax(1)


def _log_sum_exp(_: Tensor, w: Weights) -> Function:
    a = w.vector()
    return lambda X: (X @ a).logsumexp(1)


def _times_length(_: Tensor, w: Weights) -> Function:
    layer = attention(w)
    return lambda X: layer(X) * X.shape[1]


def _saturating(_: Tensor, w: Weights) -> Function:
    layer = attention(w)
    return service(layer, lambda X: layer(X).clamp(-2, 2))


def _changes_its_weights(_: Tensor, w: Weights) -> Function:
    """Another layer after 100 answers; no attack ends before."""
    one, two, count = attention(w), attention(w), [0]

    def answer(X: Tensor) -> Tensor:
        count[0] += len(X)
        return one(X) if count[0] <= 100 else two(X)

    return answer


def _noise(_: Tensor, w: Weights) -> Function:
    return lambda X: torch.randn(len(X), generator=w.generator, dtype=X.dtype)


def _noisy_attention(_: Tensor, w: Weights) -> Function:
    layer = attention(w)
    return service(layer, lambda X: layer(X) + 1e-4 * torch.randn(len(X), generator=w.generator, dtype=X.dtype))


def _float16_attention(_: Tensor, w: Weights) -> Function:
    layer = attention(w)
    return service(layer, lambda X: layer(X).half().double())


def _wrong_shape(_: Tensor, w: Weights) -> Function:
    return lambda X: X


def _too_few_answers(_: Tensor, w: Weights) -> Function:
    layer = attention(w)
    return lambda X: layer(X)[: max(1, len(X) - 1)]


def _hashes(_: Tensor, w: Weights) -> Function:
    return _hash


def _tiny(_: Tensor, w: Weights) -> Function:
    layer = attention(w)
    return lambda X: 1e-200 * layer(X)


def _huge(_: Tensor, w: Weights) -> Function:
    layer = attention(w)
    return lambda X: 1e200 * layer(X)


_FORMULAS = (
    *(_linear, _last, _sum, _quadratic, _tanh_network, _tanh_of_attention, _relu_of_attention, _constant, _zero),
    *(_nan_at_times, _infinite_far_out, _always_nan, _piecewise, _piecewise_in_length, _two_layers, _alternating),
    *(_position_dependent, _linear_attention, _sigmoid_attention, _hard_attention, _attention_to_others),
    *(_asks_with_the_mean, _normed_tokens, _maximum, _log_sum_exp, _times_length, _saturating, _changes_its_weights),
    *(_noise, _noisy_attention, _float16_attention, _wrong_shape, _too_few_answers, _hashes, _tiny, _huge),
)
ZOO: dict[str, Make] = {
    "attention, 1 head": _real(1),
    "attention, 3 heads": _real(3),
    "attention, cold": _real(1, 0.05),
    "attention, hot": _real(1, 50.0),
    "attention, vectors": _vector_attention,
    **{function.__name__.strip("_").replace("_", " "): _formula(function) for function in _FORMULAS},
    **{
        f"attention + {size:g}·{what}": _plus(size, what)
        for what in ("constant", "linear", "quadratic", "tanh", "sine", "hash", "length")
        for size in (1.0, 1e-3, 1e-6)
    },
}
