"""The paper's attack on attention outputs (arXiv 2310.12462): what its parts cost, and what its constants are worth.

python benchmarks/run.py outputs hessian      closed form against torch.func.hessian, interleaved; ratios
python benchmarks/run.py outputs gamma        how far γ moves the minimum away from the input
python benchmarks/run.py outputs bounds       bounds over the largest values that ascent and draws find
python benchmarks/run.py outputs iterations   Newton steps against ln(‖X₀ − X*‖/ε); --plot FILE.svg needs matplotlib
python benchmarks/run.py outputs sketch       error and failure rate of sampled rows against matrix Chernoff

Layers: X of standard normal entries, W = AAᵀ/d^1.5 (positive definite, scores of size 1) or A/d (indefinite), V = A/√d.
Every mode writes --out (benchmarks/results/outputs_paper_MODE.json); a figure is drawn only where --plot says.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from machine import machine
from outputs import paper_bounds as bounds
from outputs.newton_matrices import GaussNewton, SampledRows, Sampling, row_probabilities, sample_rows, sketch_size
from torch import Tensor

from unmask.linalg.attention_loss import AttentionLoss
from unmask.linalg.softmax_attention import AttentionMap
from unmask.solvers.iterate import iterate
from unmask.solvers.newton import Dense, Newton, NewtonMatrix

RESULTS = Path(__file__).parents[1] / "results"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/outputs_paper_MODE.json")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of 'hessian'; the others use one")
    parser.add_argument("--repeats", type=int, default=7, help="of 'hessian'")
    parser.add_argument("--plot", type=Path, help="of 'iterations': an SVG; docs/newton_iterations.svg was drawn so")
    options = parser.parse_args(arguments)
    if options.plot and (options.mode != "iterations" or not importlib.util.find_spec("matplotlib")):
        parser.error("--plot is for 'iterations' and needs matplotlib: pip install 'unmask[plots]'")
    torch.set_num_threads(1)
    print(machine())
    rows = MODES[options.mode](options)
    table(rows)
    out = options.out or RESULTS / f"outputs_paper_{options.mode}.json"
    out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


def table(rows: Sequence[dict]) -> None:
    """Rows of the same columns."""
    shown = [[f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    names = list(rows[0])
    widths = [max(len(line[place]) for line in [names, *shown]) for place in range(len(names))]
    for line in [names, *shown]:
        print("  ".join(f"{word:>{width}}" for word, width in zip(line, widths, strict=True)), flush=True)


# Problems


def gaussian(seed: int, *shape: int) -> Tensor:
    """Standard normal entries."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(
    n: int, d: int, seed: int = 0, *, definite: bool = True, e: int | None = None
) -> tuple[AttentionLoss, Tensor]:
    """A layer's loss without γ, and the input that it is zero at."""
    A, X = gaussian(seed, d, d), gaussian(seed + 2, n, d)
    attention = AttentionMap(A @ A.T / d**1.5 if definite else A / d)
    V = gaussian(seed + 1, d, e or d) / math.sqrt(d)
    return AttentionLoss(attention, V, attention(X) @ V), X


def near(X: Tensor, distance: float, seed: int) -> Tensor:
    """A point at this relative distance."""
    away = gaussian(seed, *X.shape)
    return X + distance * X.norm() / away.norm() * away


def spectral(matrix: Tensor) -> float:
    """The largest singular value."""
    return float(torch.linalg.matrix_norm(matrix, 2))


# Modes


def hessian(options: argparse.Namespace) -> list[dict]:
    """Medians of interleaved runs, after one run of each that is not counted."""
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for n, d in ((8, 16), (16, 32), (32, 64)):
            loss, X = layer(n, d)
            loss = replace(loss, B=gaussian(7, n, d), gamma=0.1)
            automatic = torch.func.hessian(loss)
            ways = {"autograd": lambda X=X, way=automatic: way(X), "ours": lambda X=X, loss=loss: loss.at(X).hessian()}
            seconds = interleaved(ways, options.repeats)
            expected = automatic(X).reshape(n * d, n * d)
            rows.append(
                {
                    "threads": threads,
                    "n": n,
                    "d": d,
                    "ours_ms": 1e3 * seconds["ours"],
                    "autograd_ms": 1e3 * seconds["autograd"],
                    "ratio": seconds["autograd"] / seconds["ours"],
                    "relative_difference": float((loss.at(X).hessian() - expected).norm() / expected.norm()),
                }
            )
    torch.set_num_threads(1)
    return rows


def interleaved(ways: dict[str, Callable[[], Tensor]], repeats: int) -> dict[str, float]:
    """Median seconds of each way."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if repeat:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


def gamma(options: argparse.Namespace) -> list[dict]:
    """Minimised from the input itself: what is lost is γ's doing. R bounds ‖W‖_F, ‖V‖_F and |b_ij|, as in the paper."""
    rows = []
    for n, d in ((4, 8), (8, 16)):
        loss, X = layer(n, d)
        R = max(1.0, float(loss.map.W.norm()), float(loss.V.norm()), float(loss.B.abs().max()))
        sizes = bounds.Sizes(
            n, spectral(loss.map.W), spectral(loss.V), float(loss.B.norm()), float(X.norm(dim=1).max())
        )
        lowest = float(torch.linalg.eigvalsh(loss.at(X).hessian())[0])
        choices = {f"{value:.0e}": value for value in (1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0)}
        choices |= {"ours, convex": bounds.convexity_gamma(sizes), "paper, ndR⁸": bounds.paper_gamma(n, d, R)}
        for name, value in choices.items():
            regular = replace(loss, gamma=value)
            first = iterate(Newton(matrix=GaussNewton(), line_search=True), regular, X, max_steps=300)
            last = iterate(Newton(matrix=Dense(1e-12), line_search=True), regular, first.state.x, max_steps=100)
            rows.append(
                {
                    "n": n,
                    "d": d,
                    "choice": name,
                    "gamma": value,
                    "relative_error": float((last.state.x - X).norm() / X.norm()),
                    "unexplained": float(last.state.point.c.norm() / loss.B.norm()),
                    "lowest_eigenvalue_at_input": lowest,
                    "ending": last.ending.name,
                }
            )
    return rows


def bounds_mode(options: argparse.Namespace) -> list[dict]:
    """K₂ against ascent; γ and the Hessian's constant against 200 draws (so their ratios are at most as large)."""
    rows = []
    for n, d in ((2, 4), (4, 8), (8, 16)):
        for causal in (False, True):
            for W_norm in (0.1, 1.0, 10.0):
                W = gaussian(0, d, d)
                attention = AttentionMap(W * W_norm / spectral(W), causal)
                generator = torch.Generator().manual_seed(0)
                climbed = bounds.largest_second_derivative(attention, 1.0, n, generator, num_starts=32, steps=400)
                sizes = bounds.Sizes(n, W_norm, 1.0, 1.0, 1.0)
                bend, change = drawn(attention, n)
                rows.append(
                    {
                        "n": n,
                        "d": d,
                        "causal": causal,
                        "W_norm": W_norm,
                        "K2": bounds.jacobian_lipschitz(W_norm, 1.0, n),
                        "K2_over_observed": bounds.jacobian_lipschitz(W_norm, 1.0, n) / climbed,
                        "notes_over_observed": math.sqrt(n) * (8 * W_norm**2 + 8 * W_norm) / climbed,
                        "gamma_over_observed": bounds.convexity_gamma(sizes) / bend,
                        "hessian_over_observed": bounds.hessian_lipschitz(sizes) / change,
                    }
                )
    return rows


def drawn(attention: AttentionMap, n: int) -> tuple[float, float]:
    """The largest −λ_min(∇²L)/2 and ‖ΔH‖/‖ΔX‖ of 200 draws; V, B and the longest token have norm 1."""
    d, bend, change = len(attention.W), 1e-300, 1e-300
    for seed in range(200):
        V, B, X, U = (gaussian(4 * seed + part, *shape) for part, shape in enumerate([(d, d), (n, d), (n, d), (n, d)]))
        loss = AttentionLoss(attention, V / spectral(V), B / B.norm())
        X = X / X.norm(dim=1).max()
        step = 1e-4 * U / U.norm()
        H, moved = loss.at(X).hessian(), loss.at(X - step).hessian()
        bend = max(bend, -float(torch.linalg.eigvalsh(H)[0]) / 2)
        change = max(change, spectral(H - moved) / 1e-4)
    return bend, change


def iterations(options: argparse.Namespace) -> list[dict]:
    """Medians over 10 layers of the first step at which ‖X_T − X*‖ ≤ ε‖X*‖."""
    n, d = 4, 8
    rows_of_sketch = 4 * sketch_size(n * d, 0.5, 0.1)
    ways: dict[str, NewtonMatrix] = {
        "dense": Dense(),
        "gauss-newton": GaussNewton(),
        f"sampled, {rows_of_sketch} rows": SampledRows(rows_of_sketch),
    }
    rows = []
    for definite, (name, matrix) in product((True, False), ways.items()):
        for distance in (1e-1, 1e-2, 1e-3, 1e-4):
            paths = [path(*layer(n, d, seed, definite=definite), distance, matrix) for seed in range(0, 100, 10)]
            for epsilon in (1e-6, 1e-8, 1e-10, 1e-12):
                counts = [next((k for k, error in enumerate(one) if error <= epsilon), math.inf) for one in paths]
                middle = float(statistics.median(counts))
                rows.append(
                    {
                        "definite": definite,
                        "matrix": name,
                        "start": distance,
                        "epsilon": epsilon,
                        "logarithm": math.log(distance / epsilon),
                        "reached": sum(map(math.isfinite, counts)),
                        "of": len(counts),
                        "median_steps": middle if math.isfinite(middle) else None,
                    }
                )
    if options.plot:
        plot(rows, options.plot)
    return rows


def path(loss: AttentionLoss, X: Tensor, distance: float, matrix: NewtonMatrix) -> list[float]:
    """Relative errors at the start and after each step, until they are rounding."""
    errors: list[float] = []
    start = near(X, distance, seed=99)
    watch = lambda _, state: errors.append(float((state.x - X).norm() / X.norm()))  # noqa: E731
    iterate(Newton(1e-16, matrix), loss, start, max_steps=40, watch=watch)
    return errors


def plot(rows: Sequence[dict], file: Path) -> None:
    """Steps against the logarithm, a colour for each matrix."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name in dict.fromkeys(row["matrix"] for row in rows):
        chosen = [row for row in rows if row["matrix"] == name and row["definite"] and row["reached"] == row["of"]]
        axes.plot([row["logarithm"] for row in chosen], [row["median_steps"] for row in chosen], "o", label=name)
    axes.set(xlabel="ln(‖X₀ − X*‖ / ε)", ylabel="steps (median of 10 layers, W positive definite)")
    axes.legend()
    figure.savefig(file, bbox_inches="tight")


def sketch(options: argparse.Namespace) -> list[dict]:
    """The Jacobian of a layer with 8 outputs for each input: 16 unknowns, 128 rows; 300 sketches, 20 of large ones."""
    loss, X = layer(4, 4, e=32)
    J = torch.einsum("iamb,ae->iemb", loss.at(X).attention.jacobian(), loss.V).reshape(-1, X.numel())
    values = torch.linalg.svdvals(J)
    whiten = torch.linalg.inv(torch.linalg.qr(J)[1])
    dimensions = {Sampling.LEVERAGE: float(len(values)), Sampling.NORMS: float((values / values[-1]).square().sum())}
    rows, delta = [], 0.1
    for sampling, dimension in dimensions.items():
        probabilities = row_probabilities(J, sampling)
        for epsilon in (0.9, 0.5, 0.25):
            promised = sketch_size(dimension, epsilon, delta)
            for share in (1.0, 0.1, 0.03):
                size, generator = max(1, round(share * promised)), torch.Generator().manual_seed(0)
                errors: list[float] = []
                for _ in range(300 if size < 10_000 else 20):
                    sampled = sample_rows(J, probabilities, size, generator) @ whiten
                    errors.append(float((torch.linalg.eigvalsh(sampled.mT @ sampled) - 1).abs().max()))
                rows.append(
                    {
                        "sampling": sampling.name.lower(),
                        "dimension": dimension,
                        "epsilon": epsilon,
                        "delta": delta,
                        "sketch": size,
                        "of_promised": share,
                        "rows_of_J": len(J),
                        "sketches": len(errors),
                        "median_error": statistics.median(errors),
                        "failure_rate": sum(error > epsilon for error in errors) / len(errors),
                    }
                )
    return rows


MODES = {"hessian": hessian, "gamma": gamma, "bounds": bounds_mode, "iterations": iterations, "sketch": sketch}

if __name__ == "__main__":
    main()
