"""One sweep over a circle: a homogeneous ReLU network from its kinks and from the gradients between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.networks.kinks import Angles, find_kinks, fit_sinusoid
from unmask.linalg.relu import ReluNetwork

# A homogeneous function on rows of width k.
Asked = Callable[[Float[Tensor, "b k"]], Float[Tensor, " b"]]

_FIRST_STEP = 0.02  # of half a region: one region in a hundred has a corner nearer than this and is measured again
_SMALLER, _MOST_ATTEMPTS = 0.1, 4  # steps down to 2e-5: nearer corners are those of kinks that are too close anyway
_WIDEST = 0.3  # radians that are used of half a region; far away from the middle corners come nearer
_IN_PLANE = 0.6  # of half a region: where its sinusoid is read
_LARGEST_BATCH = 2**24  # numbers in one question, 128 MiB
_CHECKED = 10.0  # times the noise: a smaller step would make more of the noise than this
_VISIBLE = 30.0  # times the noise: what chance does not reach in a million comparisons, with a reserve for its estimate
_ABOVE_BLUR = 3.0  # times the blur, a standard deviation: what it makes of a value is no kink
_WORTH_A_CIRCLE = 10.0  # times the root of the noise: more makes circles in float32 fail that need not
_ENDS = 1e-4  # radians that are kept from s = 0 on the half circle


@dataclass(frozen=True, eq=False)
class Circle:
    """The unit circle in the plane of two orthonormal vectors, or the half of it on which s > 0."""

    p: Float[Tensor, " k"]
    q: Float[Tensor, " k"]
    start: float
    end: float
    rest: Float[Tensor, "k-2 k"]  # an orthonormal basis of what is orthogonal to the plane

    def __call__(self, angle: Angles) -> Float[Tensor, "b k"]:
        """The points at these angles."""
        return angle.cos()[:, None] * self.p + angle.sin()[:, None] * self.q


def random_circle(size: int, has_biases: bool, generator: torch.Generator) -> Circle:
    """A circle in a random plane. With biases s is the last entry, and the half circle has s = s₀·cos θ > 0."""
    frame = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q.T
    p, q, rest = frame[0], frame[1], frame[2:]
    if has_biases:
        turn = torch.atan2(q[-1], p[-1])
        p, q = turn.cos() * p + turn.sin() * q, turn.cos() * q - turn.sin() * p
        return Circle(p, q, -torch.pi / 2 + _ENDS, torch.pi / 2 - _ENDS, rest)
    start = float(torch.pi * torch.rand((), generator=generator, dtype=torch.float64))
    return Circle(p, q, start, start + torch.pi, rest)


@dataclass(frozen=True)
class Noise:
    """What a value on a unit vector is off by, and the root mean square of such values."""

    deviation: float
    size: float

    @property
    def narrowest(self) -> float:
        """The gap of kinks, in radians, below which a gradient between them is worth less than another circle.

        It is off by noise/(0.01·gap); at this gap, by ten times the root of the noise.
        """
        return _WORTH_A_CIRCLE * math.sqrt(self.deviation / self.size) if self.size else 0.0


@dataclass(frozen=True, eq=False)
class Sweep:
    """What one circle gave: a network, and what its values on unit vectors may be off by because of noise."""

    network: ReluNetwork
    blur: float


def sweep(
    asked: Asked, circle: Circle, linear: Float[Tensor, " k"] | None, scale: Noise, blur: float, max_kinks: int
) -> Sweep:
    """A homogeneous ReLU network from its values on, and near, one circle.

        n_j = ∇f after kink j − ∇f before it,   s_j = sign(n_jᵀ·u′(θ_j)),   ℓ = ∇f before the first + after the last

    Notation: u(θ) the circle's points; `linear` is ℓ where it is known, which is without biases: then the last
    gradient is ℓ less the first, as f(x) − f(−x) = ℓᵀx. `scale`: of values. `blur`: what f may be off by besides,
    as it was learned in part; smaller kinks are left alone.
    Limits: kinks that were taken for one give one wrong normal, to be seen on another circle. So are kinks too close
    for a gradient between them.
    Cost: (k + 1) queries a region, and those of `find_kinks`.
    Source: ours; differences of gradients across a kink: Milli et al., arXiv 1807.05185.
    """
    noise, has_biases = scale.deviation, linear is None
    threshold = max(_VISIBLE * noise, _ABOVE_BLUR * blur)
    kinks = find_kinks(lambda angle: asked(circle(angle)), circle.start, circle.end, threshold, max_kinks)
    kinks = _apart(kinks, scale.narrowest)
    if linear is None:
        edges = torch.cat([torch.tensor([circle.start]), kinks, torch.tensor([circle.end])]).double()
    elif len(kinks):
        edges = torch.cat([kinks[-1:] - torch.pi, kinks])  # the last region is the first one, seen from behind
    else:
        edges = kinks.new_zeros(1)
    gradients, errors = region_gradients(asked, circle, (edges[1:] + edges[:-1]) / 2, edges.diff() / 2, noise, blur)
    if linear is None:
        linear = gradients[0] + gradients[-1]
    elif len(kinks):
        gradients = torch.cat([gradients, (linear - gradients[0])[None]])
    normals = gradients.diff(dim=0) if len(kinks) else gradients.new_zeros(0, len(circle.p))
    ahead = circle(kinks + torch.pi / 2)
    network = ReluNetwork(normals, torch.sign((normals * ahead).sum(dim=1)), linear, has_biases)
    # Errors are independent from region to region; each enters two normals.
    return Sweep(network, float((2 * errors.square()).sum().sqrt()))


def _apart(kinks: Angles, narrowest: float) -> Angles:
    """The kinks, those closer than `narrowest` replaced by the middle of their row."""
    group = torch.cat([torch.zeros(min(1, len(kinks))), (kinks.diff() >= narrowest).cumsum(0)]).long()
    num_groups = int(group[-1]) + 1 if len(group) else 0
    sums = kinks.new_zeros(num_groups).index_add(0, group, kinks)
    return sums / torch.bincount(group, minlength=num_groups)


def region_gradients(
    asked: Asked, circle: Circle, middle: Angles, half_width: Angles, noise: float, blur: float
) -> tuple[Float[Tensor, "r k"], Float[Tensor, " r"]]:
    """∇f in each region, and what each entry of it may be off by.

    In the plane by the sinusoid through two points, in the other directions by differences from the middle. One more
    value is foretold: where that fails a corner was crossed, and the step is made smaller.
    """
    width = half_width.clamp(max=_WIDEST)
    steps = _FIRST_STEP * width
    gradients, errors = circle.p.new_zeros(len(middle), len(circle.p)), torch.full_like(middle, torch.inf)
    todo = torch.arange(len(middle))
    at_once = max(1, _LARGEST_BATCH // (len(circle.p) * (len(circle.rest) + 3)))
    for _ in range(_MOST_ATTEMPTS):
        missed = []
        for part in todo.split(at_once):
            found, off = _measure(asked, circle, middle[part], width[part], steps[part])
            error = off.clamp_min(noise) / steps[part]
            is_better = error < errors[part]
            gradients[part[is_better]], errors[part[is_better]] = found[is_better], error[is_better]
            missed.append(off > _CHECKED * noise + blur * steps[part])
        todo = todo[torch.cat(missed)] if missed else todo
        if len(todo) == 0:
            break
        steps[todo] *= _SMALLER
    return gradients, errors


def _measure(
    asked: Asked, circle: Circle, middle: Angles, width: Angles, step: Float[Tensor, " r"]
) -> tuple[Float[Tensor, "r k"], Float[Tensor, " r"]]:
    """Gradients of regions and the error of the value that they foretell."""
    num_regions, num_rest = len(middle), len(circle.rest)
    before, after = middle - _IN_PLANE * width, middle + _IN_PLANE * width
    centre = circle(middle)
    beside = centre[:, None] + step[:, None, None] * circle.rest
    # As far away as the others and with equal shares of all of them, so that it sees a corner that one has crossed;
    # signs alternate, so that the error of the middle, which all differences have, does not add up.
    shares = (1 - 2 * (torch.arange(num_rest) % 2)) / max(1, num_rest) ** 0.5
    mixed = centre + step[:, None] * (shares.to(centre) @ circle.rest)
    points = torch.cat([circle(before)[:, None], circle(after)[:, None], mixed[:, None], beside], dim=1)
    values = asked(points.flatten(0, 1)).reshape(num_regions, num_rest + 3)
    wave = fit_sinusoid(before, values[:, 0], after, values[:, 1])
    slopes = (values[:, 3:] - wave(middle)[:, None]) / step[:, None]
    ahead = circle(before + torch.pi / 2)
    gradient = wave.value[:, None] * circle(before) + wave.slope[:, None] * ahead + slopes @ circle.rest
    foretold = (mixed * gradient).sum(dim=1)
    return gradient, (foretold - values[:, 2]).abs()
