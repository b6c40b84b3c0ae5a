"""Networks with one layer of ReLUs: their function, and the shortest description that no query can tell apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from unmask.errors import InputError

# Normals whose directions are closer than this are one neuron: learning in float64 turns them by less than 1e-8
# up to 64 neurons for every input, and two neurons so close differ by less than 1e-6 of themselves everywhere.
PARALLEL_TOLERANCE = 1e-6
# Coefficients of the least-squares problem for orientations are ±1 up to the error of the normals times their
# condition number; halfway to the next integer is where rounding stops to mean anything.
_CLEARLY_ONE = 0.1


@dataclass(frozen=True, eq=False)
class ReluNetwork:
    """A two-layer ReLU network, described by what its function determines.

        f(x) = Σ_j a_j·relu(b_jᵀx) = ½·ℓᵀx + ½·Σ_j s_j·|n_jᵀx|

    Notation: n_j = ±a_j·b_j normals of the kinks, s_j = sign a_j, ℓ = Σ_j a_j·b_j the linear part. With `biases`, x
    stands for (x, 1): the last entries of n_j and ℓ belong to the biases.
    Limits: f determines n_j up to its sign, s_j and ℓ. On which side a neuron is active, o_j·n_j = a_j·b_j, shows in
    ℓ = Σ_j o_j·n_j alone; `orientation` is None where that has no clear solution (always if m > d).
    """

    normals: Float[Tensor, "m k"]
    signs: Float[Tensor, " m"]
    linear: Float[Tensor, " k"]
    biases: bool = False

    def __post_init__(self) -> None:
        """Check that the shapes fit together."""
        fits = self.normals.ndim == 2 and self.signs.ndim == 1 and self.linear.ndim == 1
        if not fits or self.normals.shape != (len(self.signs), len(self.linear)):
            raise InputError(
                "normals must be (neurons, inputs), signs (neurons,) and linear (inputs,), got "
                f"{tuple(self.normals.shape)}, {tuple(self.signs.shape)} and {tuple(self.linear.shape)}"
            )

    def __len__(self) -> int:
        """The number of neurons."""
        return len(self.signs)

    def __call__(self, x: Float[Tensor, "b d"]) -> Float[Tensor, " b"]:
        """f of a batch of inputs."""
        x = x.to(self.linear)
        return self.homogeneous(torch.cat([x, x.new_ones(len(x), 1)], dim=1) if self.biases else x)

    def homogeneous(self, x: Float[Tensor, "b k"]) -> Float[Tensor, " b"]:
        """f̃(x, s) = s·f(x/s), which without biases is f itself."""
        return (x @ self.linear + (x @ self.normals.T).abs() @ self.signs) / 2

    def to(self, like: Tensor) -> ReluNetwork:
        """The same on the device, and in the precision, of a tensor."""
        return ReluNetwork(self.normals.to(like), self.signs.to(like), self.linear.to(like), self.biases)

    def __add__(self, other: ReluNetwork) -> ReluNetwork:
        """The sum of two functions: all neurons of both."""
        normals, signs = torch.cat([self.normals, other.normals]), torch.cat([self.signs, other.signs])
        return ReluNetwork(normals, signs, self.linear + other.linear, self.biases)

    @property
    def orientation(self) -> Float[Tensor, " m"] | None:
        """o with ℓ = Σ_j o_j·n_j, o_j = ±1; None where least squares gives no such answer.

        Limits: normals must be linearly independent, so m ≤ d. The bias of the output adds to the last entry of ℓ,
        which is left out.
        """
        num_inputs = len(self.linear) - self.biases
        if not 0 < len(self) <= num_inputs:
            return None
        normals, linear = self.normals[:, :num_inputs].T, self.linear[:num_inputs]
        found = torch.linalg.lstsq(normals, linear[:, None], driver="gelsd").solution[:, 0]
        is_clear = bool(((found.abs() - 1).abs() < _CLEARLY_ONE).all())
        misfit = torch.linalg.vector_norm(normals @ found.sign() - linear)
        return found.sign() if is_clear and misfit <= _CLEARLY_ONE * torch.linalg.vector_norm(linear) else None

    def layers(self) -> tuple[Float[Tensor, "w k"], Float[Tensor, " w"]]:
        """B and a of a network Σ_j a_j·relu(B_jᵀx) with this function.

        Where the orientation is known these are the neurons themselves, up to the scale of each, and with biases one
        constant neuron for the bias of the output. Elsewhere two more neurons carry the linear part that is left.
        """
        orientation = self.orientation
        oriented = self.normals * self.signs[:, None] * (1 if orientation is None else orientation[:, None])
        left = self.linear - self.signs @ oriented
        if orientation is not None:
            left = torch.cat([torch.zeros_like(left[:-1]), left[-1:]]) if self.biases else torch.zeros_like(left)
        if not bool(left.any()):
            return oriented, self.signs
        return torch.cat([oriented, left[None] / 2, -left[None] / 2]), torch.cat([self.signs, self.signs.new([1, -1])])


def canonical_relu(network: ReluNetwork, tolerance: float = PARALLEL_TOLERANCE) -> ReluNetwork:
    """The shortest description of the same function: parallel neurons merged, those that do nothing dropped.

        s₁|n₁ᵀx| + s₂|n₂ᵀx| → s|nᵀx|,    s·‖n‖ = s₁‖n₁‖ + s₂‖n₂‖,    n on their common line

    Notation: parallel means ‖n̂₁ ∓ n̂₂‖ ≤ tolerance; nothing means ‖n‖ ≤ tolerance·max_j ‖n_j‖.
    Limits: closeness is chained, and the line of the largest is kept.
    Source: arXiv 2601.16873, §4.1 (what queries determine).
    """
    normals, signs = network.normals.detach().double(), network.signs.detach().double()
    size = torch.linalg.vector_norm(normals, dim=1)
    is_some = size > 0
    normals, signs, size = normals[is_some], signs[is_some], size[is_some]
    if len(size) == 0:
        return ReluNetwork(normals, signs, network.linear, network.biases)
    unit = normals / size[:, None]
    # 1 − |cos| loses half of the digits, so lines that it calls near are compared by their difference.
    near = (unit @ unit.T).abs() >= 1 - tolerance**2 - 1e-12
    i, j = near.nonzero(as_tuple=True)
    apart = torch.minimum((unit[i] - unit[j]).norm(dim=1), (unit[i] + unit[j]).norm(dim=1))
    near[i, j] = apart <= tolerance
    num_groups, group = connected_components(near.cpu().numpy(), directed=False)
    member = torch.from_numpy(group == np.arange(num_groups)[:, None]).to(size)  # (groups, neurons)
    strength = member @ (signs * size)
    lines = unit[(member * size).argmax(dim=1)]
    kept = strength.abs() > tolerance * size.max()
    return ReluNetwork((lines * strength.abs()[:, None])[kept], strength[kept].sign(), network.linear, network.biases)
