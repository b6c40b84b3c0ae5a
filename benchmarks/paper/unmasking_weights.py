"""Stacks of layers, weights that are wrong, and the constants of the paper's lemmas beside what is seen."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch
from outputs import paper_bounds as bounds
from outputs.attention_layers import random_layer
from outputs.paper import gaussian, spectral
from torch import Tensor

from unmask.attacks.outputs.layer_inputs.attention_stack import AttentionStackAttack
from unmask.attacks.outputs.layer_inputs.problem import pose
from unmask.attacks.recover import recover_inputs
from unmask.evidence.outputs import AttentionEvidence
from unmask.evidence.stacks import AttentionLayer, AttentionStackEvidence
from unmask.linalg.attention_loss import AttentionLoss
from unmask.linalg.softmax_attention import AttentionMap
from unmask.recovery import Status
from unmask.scores.inputs import relative_error

RIGHT = 1e-8
LEVELS = (1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2)
RADII = (1.1, 1.5, 2.0, 3.0, 4.0)  # the paper has R > 1
_DRAWS = 60
_MAX_CHAINS = 4


# Stacks


def random_stack(n: int, d: int, num_layers: int, sharpness: float, seed: int, width: int | None = None):
    """Definite layers with rotations as V, the last with `width` columns; and the input."""
    layers, (_, X) = list[AttentionLayer](), random_layer("pd", n, d, sharpness, 90_000 + seed)
    output = X
    for index in range(num_layers):
        weights, _ = random_layer("pd", n, d, sharpness, 1000 * seed + index)
        V = torch.linalg.qr(weights.V).Q
        if width is not None and index == num_layers - 1:
            V = torch.cat([V, gaussian(seed, d, width - d) / d**0.5], dim=1)
        layers.append(AttentionLayer(weights.W, V))
        output = AttentionMap(weights.W)(output) @ V
    return AttentionStackEvidence(tuple(layers), output), X


def measure_stacks(small: bool = False) -> Iterator[dict]:
    """Two to four definite layers; noise in place of the output, where the last V is wide, is the control."""
    sizes = ((4, 16, 1.0),) if small else ((4, 16, 1.0), (8, 16, 3.0), (16, 32, 3.0))
    for n, d, sharpness in sizes:
        for num_layers in (2,) if small else (1, 2, 3, 4):
            cells, said = [], Counter[str]()
            for seed in range(2 if small else 3):
                evidence, X = random_stack(n, d, num_layers, sharpness, seed)
                started = time.process_time()
                recovery = AttentionStackAttack(max_chains=_MAX_CHAINS)(evidence)
                seconds = time.process_time() - started
                found = recovery.value.preimages
                error = min((relative_error(each.X, X) for each in found), default=math.inf)
                radius = min((each.radius for each in found), default=math.inf)
                is_inside = not math.isfinite(radius) or any(
                    float((each.X - X).norm()) <= each.radius for each in found
                )
                growth = recovery.certificate.details.get("amplification", math.inf)
                cells.append((recovery.status, error, radius, growth, seconds, is_inside))
                wide, _ = random_stack(n, d, num_layers, sharpness, seed, width=d + 4)
                noise = gaussian(seed + 7, *wide.output.shape)
                noise = noise * float(wide.output.norm() / noise.norm())
                said[recover_inputs(replace(wide, output=noise)).status.name] += 1
            statuses, errors, radii, growths, times, inside = zip(*cells, strict=True)
            yield {
                "n": n,
                "d": d,
                "sharpness": sharpness,
                "layers": num_layers,
                "problems": len(cells),
                "right": sum(error <= RIGHT for error in errors),
                "recovered": sum(status is Status.RECOVERED for status in statuses),
                "wrong": sum(s is Status.RECOVERED and e > 1e-6 for s, e in zip(statuses, errors, strict=True)),
                "inside_radius": sum(inside),
                "median_error": statistics.median(errors),
                "median_radius": statistics.median(radii),
                "median_amplification": statistics.median(growths),
                "noise": dict(said),
                "seconds": statistics.median(times),
            }


# Wrong weights


def measure_sensitivity(small: bool = False) -> Iterator[dict]:
    """W or V off by a relative error, the output that of the right ones; what is said with and without redundancy."""
    n, d = (4, 8) if small else (8, 16)
    for name in ("W", "V"):
        for level in LEVELS[:2] if small else LEVELS:
            cells, said = [], {kind: Counter[str]() for kind in ("square", "wide", "norms")}
            for seed in range(1 if small else 4):
                evidence, X = random_layer("pd", n, d, 1.0, 300 + seed)
                wrong = _disturb(evidence, name, level, seed)
                recovery = recover_inputs(wrong)
                said["square"][recovery.status.name] += 1
                errors = [relative_error(each.X, X) for each in recovery.value.preimages]
                cells.append((min(errors, default=math.inf), *_predict(evidence, wrong, X)))
                V = torch.cat([evidence.V, gaussian(seed, d, 4) / d**0.5], dim=1)
                wide = replace(evidence, V=V, output=AttentionMap(evidence.W)(X) @ V)
                said["wide"][recover_inputs(_disturb(wide, name, level, seed)).status.name] += 1
                known = replace(wrong, row_norms=X.norm(dim=1))
                said["norms"][recover_inputs(known).status.name] += 1
            measured, predicted, worst = (statistics.median(column) for column in zip(*cells, strict=True))
            yield {
                "wrong": name,
                "level": level,
                "n": n,
                "d": d,
                "problems": len(cells),
                "error": measured,
                "first_order": predicted,
                "worst_case": worst,
                **{f"said_{kind}": dict(counts) for kind, counts in said.items()},
            }


def _disturb(evidence: AttentionEvidence, name: str, level: float, seed: int) -> AttentionEvidence:
    right = getattr(evidence, name)
    noise = gaussian(seed + 1, *right.shape)
    return replace(evidence, **{name: right + level * noise * float(right.norm() / noise.norm())})


def _predict(evidence: AttentionEvidence, wrong: AttentionEvidence, X: Tensor) -> tuple[float, float]:
    """‖J⁻¹·δ‖/‖X‖ and ‖J⁻¹‖‖δ‖/‖X‖, δ what the wrong weights give for X less the output, V eliminated."""
    problem = pose(evidence).whole_problem()
    moved = AttentionMap(wrong.W)(X) @ wrong.V @ torch.linalg.inv(evidence.V) - AttentionMap(evidence.W)(X)
    J = problem.jacobian(X.reshape(-1))
    step = torch.linalg.solve(J, moved.reshape(-1))
    worst = float(moved.norm() / torch.linalg.svdvals(J)[-1])
    return float(step.norm() / X.norm()), worst / float(X.norm())


# Lemmas


def measure_bounds(small: bool = False) -> Iterator[dict]:
    """‖W‖_F = ‖V‖_F = ‖X‖_F = R, |b_ij| ≤ R: eigenvalues and change of ∇²L, our bounds, and Lemmas 4.4 and 4.5."""
    for n, d in ((2, 4),) if small else ((2, 4), (4, 8), (8, 16)):
        for R in RADII[:2] if small else RADII:
            bend, change, at = 1e-300, 1e-300, list[bounds.Sizes]()
            for seed in range(5 if small else _DRAWS):
                W, V, B, X, U = (
                    gaussian(5 * seed + part, *shape)
                    for part, shape in enumerate([(d, d), (d, d), (n, d), (n, d), (n, d)])
                )
                W, V, X = (R * matrix / matrix.norm() for matrix in (W, V, X))
                B = R * B / B.abs().max()
                loss, step = AttentionLoss(AttentionMap(W), V, B), 1e-4 * U / U.norm()
                H, moved = loss.at(X).hessian(), loss.at(X - step).hessian()
                bend = max(bend, -float(torch.linalg.eigvalsh(H)[0]) / 2)
                change = max(change, spectral(H - moved) / 1e-4)
                at.append(bounds.Sizes(n, spectral(W), spectral(V), float(B.norm()), float(X.norm(dim=1).max())))
            yield {
                "n": n,
                "d": d,
                "R": R,
                "draws": len(at),
                "negative_eigenvalue": bend,
                "our_gamma": max(map(bounds.convexity_gamma, at)),
                "paper_gamma": bounds.paper_gamma(n, d, R),
                "hessian_change": change,
                "our_lipschitz": max(map(bounds.hessian_lipschitz, at)),
                "paper_lipschitz": bounds.paper_lipschitz(n, d, R),
            }
