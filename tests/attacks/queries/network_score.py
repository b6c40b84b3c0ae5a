"""A recovered ReLU network against the true one, modulo what no query can tell apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from unmask.errors import InputError
from unmask.linalg.relu import PARALLEL_TOLERANCE, ReluNetwork, canonical_relu
from unmask.scores.inputs import relative_error

_NUM_INPUTS = 2000  # the relative error of a root mean square over so many is 2 %


@dataclass(frozen=True)
class NetworkScore:
    """Errors of the function and of the canonical neurons; a missing neuron counts as recovered as 0."""

    function_error: float  # root mean square over Gaussian inputs, relative
    worst_normal_error: float  # the worst neuron alone
    linear_error: float
    num_true: int  # canonical neurons
    num_missing: int
    num_extra: int


def score_network(
    recovered: ReluNetwork, true: ReluNetwork, seed: int = 0, tolerance: float = PARALLEL_TOLERANCE
) -> NetworkScore:
    """Compare two networks modulo the order, splitting and scaling of neurons, and those that do nothing.

        function_error = (Σ_x (f̂(x) − f(x))² / Σ_x f(x)²)^½,   worst_normal_error = max_j min_± ‖n̂_π(j) ∓ n_j‖ / ‖n_j‖

    Notation: x standard Gaussian; n_j the canonical true normals with the sign of a_j: neurons of opposite sign are
    never partners. π the one-to-one assignment with the least sum of errors.
    Limits: neurons are partners only if n̂ is a better guess than 0. A recovery that is not finite scores infinity.
    Source: as for `canonical_relu`.
    """
    if recovered.linear.shape != true.linear.shape or recovered.biases != true.biases:
        raise InputError(
            f"recovered must have the inputs of true, {tuple(true.linear.shape)} with biases {true.biases}, got "
            f"{tuple(recovered.linear.shape)} with biases {recovered.biases}"
        )
    found, network = canonical_relu(recovered, tolerance), canonical_relu(true, tolerance)
    n_hat, n = found.normals, network.normals
    apart = torch.minimum((n[:, None] - n_hat).norm(dim=2), (n[:, None] + n_hat).norm(dim=2))
    error = (apart / n.norm(dim=1)[:, None]).nan_to_num(nan=torch.inf).numpy()
    error = np.where((network.signs[:, None] == found.signs).numpy(), error, np.inf)
    matches = zip(*linear_sum_assignment(error.clip(max=1)), strict=True)
    matched = [error[i, j] for i, j in matches if error[i, j] < 1]
    num_missing = len(network) - len(matched)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(_NUM_INPUTS, len(true.linear) - true.biases, generator=generator, dtype=torch.float64)
    function_error = relative_error(recovered(x), true(x))
    return NetworkScore(
        function_error=function_error if np.isfinite(function_error) else float("inf"),
        worst_normal_error=max([*matched, *([1.0] if num_missing else [])], default=0.0),
        linear_error=relative_error(found.linear, network.linear),
        num_true=len(network),
        num_missing=num_missing,
        num_extra=len(found) - len(matched),
    )
