"""A homogeneous ReLU network from its values: sweep a circle, then sweep what is left over until nothing is."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.networks.kinks import TooManyKinks
from unmask.attacks.queries.networks.relu_regions import Asked, Noise, Sweep, random_circle, sweep
from unmask.linalg.relu import ReluNetwork, canonical_relu

_NUM_HELD_OUT = 32
_MOST_PEELS = 6
_MOST_CIRCLES = 3
_MOST_POLISHED = 4096  # unknowns: a dense matrix of 200 MB, solved in half a minute on one core
_NUM_POLISHING = 4  # Gauss–Newton squares the error at each step, once signs are right
_BLURRED = 30.0  # times the root of the noise, which kinks at the narrowest gap that is measured (`Noise`) stay below
_EXPLAINED = 8.0  # times the blur, which is a standard deviation
_SAME = 30.0  # times the blur: normals that differ by less are one, which a wrong neuron and its removal must be
_NUM_WINDOWS, _NUM_IN_WINDOW, _WINDOW = 5, 8, 1e-3  # radians: of a thousand kinks one in three windows holds one
_LEAST_NOISE = 1.1e-16  # of the largest value: half a unit in the last place of float64


def measure_noise(asked: Asked, size: int, has_biases: bool, generator: torch.Generator) -> Noise:
    """The noise of a homogeneous function, whatever its cause: values on short arcs, against the sinusoid through them.

    The median of several arcs is taken, as one may hold a kink. Cost: 72 queries.
    """
    circle = random_circle(size, has_biases, generator)
    starts = torch.rand(_NUM_WINDOWS, generator=generator, dtype=torch.float64)
    starts = circle.start + (circle.end - circle.start - _WINDOW) * starts
    places = torch.linspace(0, _WINDOW, _NUM_IN_WINDOW, dtype=torch.float64)
    angles = starts[:, None] + places
    values = asked(circle(angles.flatten())).reshape(angles.shape)
    waves = torch.stack([places.cos(), places.sin()], dim=1)  # of the angle from the arc's start
    off = values.T - waves @ (torch.linalg.pinv(waves) @ values.T)
    deviation = off.square().sum(dim=0).div(_NUM_IN_WINDOW - 2).sqrt().median()
    elsewhere = asked(_directions(_NUM_HELD_OUT, size, has_biases, generator))  # arcs may lie where all is 0
    values = torch.cat([values.flatten(), elsewhere])
    least = _LEAST_NOISE * float(values.abs().max())
    return Noise(max(float(deviation), least), float(values.square().mean().sqrt()))


def learn_network(
    asked: Asked, size: int, has_biases: bool, noise: Noise, max_neurons: int, generator: torch.Generator
) -> Sweep:
    """All neurons of f(x) = ½·ℓᵀx + ½·Σ_j s_j·|n_jᵀx| from values of f.

    Close kinks are taken for one on the first circle; they show as what is left over, f − f̂, on the next: it is
    learned alike and added, until held-out values are explained or nothing gets better. Where that fails, or where
    kinks were so close that errors are large, it is begun anew with another circle.

    Notation: rows of width `size`, the last entry positive if `has_biases`.
    Limits: the smallest of m kinks' gaps is about 1/m², and errors are the noise over the smallest gap.
    Cost: (1 + o(1))·m·size queries: 2·size are for ℓ, and about 12 for each kink.
    Raises: TooManyKinks, where there are more than `max_neurons` on the first circle.
    Source: arXiv 2601.16873, §4.1 needs such a learner; this one is ours.
    """
    held_out = _directions(_NUM_HELD_OUT, size, has_biases, generator)
    values = asked(held_out)
    linear = None if has_biases else _linear_part(asked, size, generator)
    best, least = None, math.inf
    for _ in range(_MOST_CIRCLES):
        first = sweep(asked, random_circle(size, has_biases, generator), linear, noise, 0.0, max_neurons)
        found = _peel(asked, first, (held_out, values), noise, max_neurons, generator)
        error = _misfit(found.network, held_out, values)
        if best is None or error < least:
            best, least = found, error
        is_explained = least <= _EXPLAINED * (best.blur + noise.deviation)
        is_sharp = best.blur <= _BLURRED * math.sqrt(noise.deviation * noise.size)
        num_too_close = len(first.network) ** 2 * noise.narrowest / (2 * math.pi)  # pairs on any circle, expected
        if (is_explained and is_sharp) or num_too_close > 1:
            break
    assert best is not None
    return best


def _peel(
    asked: Asked,
    first: Sweep,
    held_out: tuple[Float[Tensor, "b k"], Float[Tensor, " b"]],
    noise: Noise,
    max_neurons: int,
    generator: torch.Generator,
) -> Sweep:
    """What the first circle gave, and what later ones find in the rest of f."""
    network, blur = first.network, first.blur
    size, has_biases = len(network.linear), network.biases
    for _ in range(_MOST_PEELS):
        error = _misfit(network, *held_out)
        if error <= _EXPLAINED * (blur + noise.deviation):
            break

        def left_over(x: Float[Tensor, "b k"], known: ReluNetwork = network) -> Float[Tensor, " b"]:
            return asked(x) - known.homogeneous(x)

        nothing = None if has_biases else torch.zeros_like(network.linear)
        circle = random_circle(size, has_biases, generator)
        try:
            more = sweep(left_over, circle, nothing, noise, blur, max_neurons)
        except TooManyKinks:
            break
        both, joint_blur = network + more.network, math.hypot(blur, more.blur)
        strength = float(both.normals.norm(dim=1).median()) if len(both) else 1.0
        better = canonical_relu(both, _SAME * joint_blur / strength)
        if _misfit(better, *held_out) < error:
            network, blur = better, joint_blur
    return Sweep(network, blur)


def polish(asked: Asked, found: Sweep, noise: Noise, generator: torch.Generator) -> Sweep:
    """Gauss–Newton steps on all normals and ℓ at once; what was found as it is, if they do not explain all values.

    Signs of n_jᵀx are known for almost all x, and given them f is linear in what is sought. Inputs so near to a kink
    that their sign is wrong stand out, and are left out.

    Limits: a dense least-squares problem; with more than 4,096 unknowns nothing is done. A missing neuron cannot be put
    in.
    Cost: 1.5 queries an unknown.
    """
    network = found.network
    num_unknowns = network.normals.numel() + network.linear.numel()
    if num_unknowns > _MOST_POLISHED:
        return found
    x = _directions(int(1.5 * num_unknowns), len(network.linear), network.biases, generator)
    values = asked(x)
    for _ in range(_NUM_POLISHING):
        sides = torch.sign(x @ network.normals.T) * network.signs
        jacobian = torch.cat([(sides[:, :, None] * x[:, None]).flatten(1), x], dim=1) / 2
        off = values - network.homogeneous(x)
        if float(off.square().mean().sqrt()) <= 2 * noise.deviation:
            break
        kept = off.abs() <= 6 * off.square().mean().sqrt()
        if int(kept.sum()) < num_unknowns:
            break
        change = torch.linalg.lstsq(jacobian[kept], off[kept][:, None]).solution[:, 0]
        normals = network.normals + change[: network.normals.numel()].reshape(network.normals.shape)
        linear = network.linear + change[network.normals.numel() :]
        network = ReluNetwork(normals, network.signs, linear, network.biases)
    is_explained = _misfit(network, x, values) <= _EXPLAINED * noise.deviation
    # Three queries for two unknowns: least squares spreads the noise with a factor of the order of one.
    return Sweep(network, noise.deviation) if is_explained else found


def _misfit(network: ReluNetwork, x: Float[Tensor, "b k"], values: Float[Tensor, " b"]) -> float:
    return float((values - network.homogeneous(x)).square().mean().sqrt())


def _linear_part(asked: Asked, size: int, generator: torch.Generator) -> Float[Tensor, " k"]:
    """ℓ from f(x) − f(−x) = ℓᵀx at an orthonormal basis of dense vectors, 2·size queries."""
    frame = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    there, back = asked(torch.cat([frame.T, -frame.T])).chunk(2)
    return frame @ (there - back)


def _directions(count: int, size: int, has_biases: bool, generator: torch.Generator) -> Float[Tensor, "b k"]:
    x = torch.randn(count, size, generator=generator, dtype=torch.float64)
    if has_biases:
        x[:, -1] = x[:, -1].abs() + 0.1  # s > 0, and so that x/s is of the size of inputs
    return x / x.norm(dim=1, keepdim=True)
