"""Heads from repeated tokens of bounded norm, and heads in orthogonal subspaces: conditioning, errors, queries.

    python benchmarks/run.py queries repetition [--seeds 3] [--out benchmarks/results/queries_repetition.json]

Conditioning: the factor from a relative error of F to an error of t, for one (u, y); then what is left of it end to
end, where all answers are fitted at once. Weights are Gaussian, entries of variance 1/d; tokens have norm 10 at most.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from machine import machine
from rich.console import Console
from rich.table import Table
from torch import Tensor

from unmask.attacks.queries.many_heads.orthogonal_heads import OrthogonalHeadsAttack
from unmask.attacks.queries.many_heads.repeated_tokens import choose_copies
from unmask.attacks.queries.many_heads.repetition import RepetitionAttack
from unmask.evidence.oracles import FunctionOracle, OracleEvidence
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Status
from unmask.scores.weights import score_heads

BOUND = 10.0
NUM_DRAWS = 300
SIZES = ((1, 8), (2, 8), (3, 8), (1, 16), (2, 16), (3, 16))
SUBSPACES = ((2, 4, 8), (4, 4, 16), (4, 8, 32))


def main() -> None:
    """Measure, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "queries_repetition.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    console.print(machine())
    found = {
        "conditioning": conditioning(),
        "repetition": [
            row for (H, d) in SIZES for kind in KINDS if (row := repetition(H, d, kind, options.seeds)) is not None
        ],
        "orthogonal": [orthogonal(*size, kind, options.seeds) for size in SUBSPACES for kind in ("float64", "float32")],
    }
    for name, rows in found.items():
        show(console, name, rows)
    for ratios in ("2H ratios of the theorem", "28 ratios, length 64"):
        rows = [row for row in found["conditioning"] if row["ratios"] == ratios]
        decades = [torch.tensor(row["dt_per_relative_error"]).log10().item() for row in rows]
        slope = statistics.linear_regression([row["heads"] for row in rows], decades).slope
        console.print(f"{ratios}: {slope:.1f} decades a head")
        found["conditioning"].append({"ratios": ratios, "decades_a_head": slope})
    options.out.write_text(json.dumps({"machine": machine(), "max_norm": BOUND, **found}, indent=1) + "\n")


def conditioning() -> list[dict]:
    """Median of max_h ‖∂t_h/∂F‖·‖F‖, for t of deviation 1.5 and Gaussian c; float64 sees five heads at the most."""
    rows = []
    for H in range(1, 6):
        few = torch.arange(1, 2 * H + 1, dtype=torch.float64)
        copies = torch.tensor(choose_copies(64, 28), dtype=torch.float64)
        for ratios, rho in {"2H ratios of the theorem": few, "28 ratios, length 64": copies / (64 - copies)}.items():
            generator = torch.Generator().manual_seed(H)
            c, t = torch.randn(2, NUM_DRAWS, H, generator=generator, dtype=torch.float64)
            sigmoids = torch.sigmoid(rho.log()[None, :, None] + 1.5 * t[:, None])
            J = torch.cat([sigmoids, c[:, None] * sigmoids * (1 - sigmoids)], dim=2)
            size = (sigmoids @ c[:, :, None])[..., 0].norm(dim=1)
            factor = (torch.linalg.pinv(J, rtol=1e-17)[:, H:].norm(dim=2).amax(1) * size).median()
            rows.append({"heads": H, "ratios": ratios, "dt_per_relative_error": float(factor)})
    return rows


def repetition(H: int, d: int, kind: str, seeds: int) -> dict | None:
    """The attack on a few random layers, in one kind of answers."""
    if kind == "2 decimals" and H > 2:
        return None  # mostly refused: the third head hides in the rounding
    runs = [run(RepetitionAttack(), gaussian_heads(H, d, seed), KINDS[kind], BOUND) for seed in range(seeds)]
    return {"heads": H, "width": d, "answers": kind, **summary(runs), "published_count": 4 * H * d**2 - 2 * H + 1}


def orthogonal(H: int, r: int, d: int, kind: str, seeds: int) -> dict:
    """Heads in orthogonal subspaces of width r."""
    runs = [run(OrthogonalHeadsAttack(), subspace_heads(H, r, d, seed), KINDS[kind], None) for seed in range(seeds)]
    return {"heads": H, "rank": r, "width": d, "answers": kind, **summary(runs)}


def run(
    attack: Callable, heads: HeadWeights, kind: Callable[[HeadWeights, Tensor], Tensor], bound: float | None
) -> dict:
    """One recovery, scored."""
    evidence = OracleEvidence(FunctionOracle(lambda X: kind(heads, X)), heads.v.shape[1], max_norm=bound)
    recovery = attack(evidence)
    score = score_heads(recovery.value, heads)
    return {
        "right": recovery.status is Status.RECOVERED and score.num_missing == score.num_extra == 0,
        "wrong": recovery.status is Status.RECOVERED and score.worst_W_error > 0.1,
        "error": score.worst_W_error,
        "estimated": recovery.certificate.details.get("estimated_error"),
        "queries": recovery.certificate.details["learning_queries"],
        "seconds": recovery.cost.seconds,
    }


def summary(runs: list[dict]) -> dict:
    """Counts over all runs; medians over those that recovered."""
    good = [run for run in runs if run["right"]]
    row = {"recovered": len(good), "of": len(runs), "wrong": sum(run["wrong"] for run in runs)}
    row["queries"] = statistics.median(run["queries"] for run in runs)
    row["seconds"] = round(statistics.median(run["seconds"] for run in runs), 2)
    if good:
        row["W_error"] = statistics.median(run["error"] for run in good)
        row["worst_W_error"] = max(run["error"] for run in good)
    if good and good[0]["estimated"] is not None:
        row["estimated_over_real"] = statistics.median(run["estimated"] / run["error"] for run in good)
    return row


def gaussian_heads(H: int, d: int, seed: int) -> HeadWeights:
    """Entries of variance 1/d."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(H, d, d, generator=generator, dtype=torch.float64) / d**0.5
    return HeadWeights(W=W, v=torch.randn(H, d, generator=generator, dtype=torch.float64) / d**0.5)


def subspace_heads(H: int, r: int, d: int, seed: int) -> HeadWeights:
    """Heads in random orthogonal subspaces (Assumption C.1 of arXiv 2601.16873)."""
    inner = gaussian_heads(H, r, seed)
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q.T
    bases = Q[: H * r].reshape(H, r, d)
    return HeadWeights(W=bases.mT @ inner.W @ bases, v=torch.einsum("hrd,hr->hd", bases, inner.v))


def in_float32(heads: HeadWeights, X: Tensor) -> Tensor:
    """All arithmetic of the layer in float32."""
    return HeadWeights(W=heads.W.float(), v=heads.v.float())(X.float()).double()


KINDS: dict[str, Callable[[HeadWeights, Tensor], Tensor]] = {
    "float64": lambda heads, X: heads(X),
    "float32": in_float32,
    "2 decimals": lambda heads, X: heads(X).round(decimals=2),
}


def show(console: Console, name: str, rows: list[dict]) -> None:
    """A table with a column for every field."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns, title=name)
    for row in rows:
        cells = (row.get(column, "") for column in columns)
        table.add_row(*(f"{cell:.2g}" if isinstance(cell, float) else str(cell) for cell in cells))
    console.print(table)


if __name__ == "__main__":
    main()
