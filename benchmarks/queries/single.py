"""One attention head from queries: the paper's learners beside ours, in one run, with slopes beside the theorems'.

    python benchmarks/run.py queries one-head [--out benchmarks/results/queries_single.json] [--only widths noise …]

widths    error of W against d, float64 and float32 (Thm 4.1)
rank      queries against the degrees of freedom; nuclear norm against the adaptive scheme (Thm 5.1)
noise     error against τ, decimals, passes and the length of tokens (Thm 6.1)
bits      error against bits, from signs alone (Thm B.1)

W_ij and v_i are Gaussian of variance 1/d; errors are relative, ‖Ŵ − W‖/‖W‖, the median over seeds. 'Nothing' says that
a score was lost, or that fresh sequences refused what was learned.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from machine import machine
from rich.console import Console
from rich.table import Table
from torch import Tensor

from unmask.attacks.baselines.query_papers import NuclearNormAttack, PaperSingleHeadAttack
from unmask.attacks.queries.one_head.low_rank import LowRankAttack
from unmask.attacks.queries.one_head.noisy_head import NoisyAttack
from unmask.attacks.queries.one_head.signs import MembershipAttack
from unmask.attacks.queries.one_head.single_head import SingleHeadAttack
from unmask.evidence.oracles import FunctionOracle, OracleEvidence
from unmask.linalg.heads import HeadWeights
from unmask.scores.inputs import relative_error

BOUND = 7.0  # on token norms, about √d at d = 32
RIGHT = 1e-4  # relative error: what counts as a success of a low-rank learner


def main() -> None:
    """Measure, print tables, write JSON."""
    parts = {f.__name__: f for f in (widths, rank, noise, bits)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=120)
    console.print(machine())
    found: dict[str, object] = {"machine": machine()}
    for name in options.only:
        started = time.perf_counter()
        found[name] = parts[name](console)
        console.print(f"{name}: {time.perf_counter() - started:.0f} s")
    if options.out:
        options.out.write_text(json.dumps(_standard(found), indent=1) + "\n")


def widths(console: Console) -> dict:
    """Thm 4.1: d + d² queries each; what is left of the digits."""
    rows = []
    for d in (16, 32, 64, 128, 256):
        for dtype in (torch.float64, torch.float32):
            seeds = range(1 if d == 256 else 3)
            ours = [learned(SingleHeadAttack(), random_head(d, seed), dtype=dtype) for seed in seeds]
            row = {"d": d, "oracle": str(dtype).removeprefix("torch."), "degrees_of_freedom": d + d * d}
            row["queries"] = statistics.median(one["queries"] for one in ours)
            row["ours"] = statistics.median(one["error"] for one in ours)
            row["ours_seconds"] = statistics.median(one["seconds"] for one in ours)
            for probes in ("basis", "random"):
                attack = PaperSingleHeadAttack(probes, kappa=1.0 if probes == "basis" else 0.5)
                row[f"paper, {probes}"] = statistics.median(raw(attack, random_head(d, s), dtype) for s in seeds)
            rows.append(row)
    show(console, "Thm 4.1: error of W against the width", rows)
    exact = [row for row in rows if row["oracle"] == "float64"]
    slopes = {"queries against d (theorem: 2)": slope([r["d"] for r in exact], [r["queries"] for r in exact])}
    return {"rows": rows, "slopes": told(console, slopes)}


def rank(console: Console) -> dict:
    """Thm 5.1: how many queries low rank takes."""
    rows = []
    for d, r in ((64, 4), (128, 2), (128, 4), (128, 8), (128, 16), (256, 16)):
        head, freedom = random_head(d, rank=r), r * (2 * d - r)
        row: dict = {"d": d, "r": r, "r(2d − r)": freedom}
        for name, attack, dtype in (
            ("known", LowRankAttack(rank=r), torch.float64),
            ("unknown", LowRankAttack(), torch.float64),
            ("unknown, float32", LowRankAttack(), torch.float32),
        ):
            one = learned(attack, head, dtype=dtype)
            row |= {f"{name}: queries/DoF": (one["queries"] - d) / freedom, f"{name}: error": one["error"]}
        rows.append(row)
    show(console, "Thm 5.1, adaptive: queries beyond those for v, and errors", rows)
    known = [row for row in rows if row["d"] == 128]
    counts = [row["known: queries/DoF"] * row["r(2d − r)"] for row in known]
    slopes = {"queries against r at d = 128 (theorem: 1)": slope([row["r"] for row in known], counts)}

    phases, d, r = [], 32, 2
    freedom = r * (2 * d - r)
    for ratio in (1.0, 1.5, 2.0, 2.5, 3.0):
        heads = [random_head(d, seed, rank=r) for seed in range(4)]
        nuclear = [raw(NuclearNormAttack(int(ratio * freedom), max_steps=1500), head) for head in heads]
        row = {"n/DoF": ratio, "nuclear norm: right of 4": sum(error < RIGHT for error in nuclear)}
        budget = [learned(LowRankAttack(rank=r), head, budget=60 + d + int(ratio * freedom)) for head in heads]
        phases.append(row | {"adaptive: right of 4": sum(one["error"] < RIGHT for one in budget)})
    show(console, f"Thm 5.1, d = {d}, r = {r}: success against the number of measurements", phases)
    return {"rows": rows, "phases": phases, "slopes": told(console, slopes)}


def noise(console: Console) -> dict:
    """Thm 6.1: the error is linear in τ, and falls with the length of tokens and the root of passes."""
    d, slopes = 32, {}
    head = random_head(d)
    additive, rounding = [], []
    for tau in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2):
        additive.append({"τ": tau, **compared(head, partial(added, tau))})
    show(console, f"Thm 6.1: additive noise of deviation τ, d = {d}, token norms up to {BOUND:g}", additive)
    for decimals in (6, 4, 3, 2):
        rounding.append({"decimals": decimals, **compared(head, partial(rounded, decimals))})
    show(console, f"Thm 6.1: answers rounded to decimals, token norms up to {BOUND:g}", rounding)
    taus = [row["τ"] for row in additive]
    slopes["error against τ, ours (theorem: 1)"] = slope(taus, [row["ours, 16 passes"] for row in additive])
    passes = [2, 4, 8, 16, 32, 64]
    by_pass = [learned(NoisyAttack(n), head, added(1e-3), max_norm=BOUND)["error"] for n in passes]
    slopes["error against passes (averaging: −½)"] = slope(passes, by_pass)
    bounds = [7.0, 70.0, 700.0, 7000.0]
    by_length = [learned(SingleHeadAttack(), head, added(1e-3), max_norm=bound)["error"] for bound in bounds]
    slopes["error against the bound on norms (symmetry: −1)"] = slope(bounds, by_length)
    free = [
        {"oracle": name, "ours, no bound on norms": learned(SingleHeadAttack(), head, after())["error"]}
        for name, after in (("τ = 1e-2", partial(added, 1e-2)), ("2 decimals", partial(rounded, 2)))
    ]
    show(console, "Without a bound on norms", free)
    return {
        "additive": additive,
        "rounding": rounding,
        "passes": dict(zip(map(str, passes), by_pass, strict=True)),
        "bounds": dict(zip(map(str, bounds), by_length, strict=True)),
        "free": free,
        "slopes": told(console, slopes),
    }


def bits(console: Console) -> dict:
    """Thm B.1: signs alone; a bit of every weight for a query."""
    d, rows = 16, []
    for num_bits in (12, 16, 24, 32, 40, 48):
        head = random_head(d)
        unit = HeadWeights(W=head.W, v=head.v / head.v.norm())
        one = learned(MembershipAttack(bits=num_bits), unit, torch.sign)
        per_weight = one["queries"] / (d * d + d)
        rows.append(
            {"bits": num_bits, "error": one["error"], "queries a weight": per_weight, "queries": one["queries"]}
        )
    show(console, f"Thm B.1: signs only, d = {d}", rows)
    line = statistics.linear_regression([row["bits"] for row in rows], [math.log2(row["error"]) for row in rows])
    return {"rows": rows, "slopes": told(console, {"log₂ error against bits (bisection: −1)": line.slope})}


def compared(head: HeadWeights, after: Callable[[], Callable[[Tensor], Tensor]]) -> dict:
    """The paper's probes and ours, at the same bound on norms; the error that ours tells."""
    many = learned(NoisyAttack(), head, after(), max_norm=BOUND)
    kappa = float(head.W.abs().max()) ** -0.5  # Thm 6.1's, from the best bound that there is
    return {
        "paper, basis": raw(PaperSingleHeadAttack("basis", kappa), head, after=after()),
        "ours, 1 pass": learned(SingleHeadAttack(), head, after(), max_norm=BOUND)["error"],
        "ours, 16 passes": many["error"],
        "told": many["told"],
    }


def learned(
    attack: Callable,
    head: HeadWeights,
    after: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
    max_norm: float | None = None,
    budget: int | None = None,
) -> dict:
    """A whole attack with its verdict, against the secret."""
    evidence = oracle(head, after, dtype, max_norm)
    evidence.ledger.budget = budget
    recovery = attack(evidence)
    is_whole = len(recovery.value) == 1 and bool(recovery.value.W.isfinite().all())
    return {
        "error": relative_error(recovery.value.W[0], head.W[0]) if is_whole else math.inf,
        "queries": recovery.certificate.details["learning_queries"],
        "told": recovery.certificate.details.get("estimated_error"),
        "seconds": recovery.cost.seconds,
        "status": recovery.status.name,
    }


def raw(
    attack: PaperSingleHeadAttack | NuclearNormAttack,
    head: HeadWeights,
    dtype: torch.dtype = torch.float64,
    after: Callable[[Tensor], Tensor] | None = None,
) -> float:
    """The error of what the paper's formula gives, whether or not a verdict would let it pass."""
    evidence = oracle(head, after, dtype)
    v = evidence.ask(torch.eye(evidence.width, dtype=torch.float64)[:, None])
    W = attack.weights(evidence, v, torch.Generator().manual_seed(0))
    return relative_error(W, head.W[0]) if W.isfinite().all() else math.inf


def random_head(d: int, seed: int = 0, rank: int | None = None) -> HeadWeights:
    """Gaussian weights, |W y| and |v| about 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator, dtype=torch.float64)

    W = normal(d, d) if rank is None else normal(d, rank) @ normal(rank, d) / rank**0.5
    return HeadWeights(W=W / d**0.5, v=normal(d) / d**0.5)


def oracle(
    head: HeadWeights,
    after: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
    max_norm: float | None = None,
) -> OracleEvidence:
    """The head, computed in `dtype`, its answers changed by `after`."""
    inside = HeadWeights(W=head.W.to(dtype), v=head.v.to(dtype))

    def answer(sequences: Tensor) -> Tensor:
        answers = inside(sequences.to(dtype)).double()
        return answers if after is None else after(answers)

    return OracleEvidence(FunctionOracle(answer), head.v.shape[1], max_norm=max_norm)


def added(deviation: float) -> Callable[[Tensor], Tensor]:
    """Gaussian noise, new for every answer."""
    generator = torch.Generator().manual_seed(0)
    return lambda answers: answers + deviation * torch.randn(answers.shape, generator=generator, dtype=torch.float64)


def rounded(decimals: int) -> Callable[[Tensor], Tensor]:
    """Answers to some decimals."""
    return lambda answers: answers.round(decimals=decimals)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope in logarithms."""
    return statistics.linear_regression([math.log(value) for value in x], [math.log(value) for value in y]).slope


def told(console: Console, slopes: dict[str, float]) -> dict[str, float]:
    """Print slopes, and pass them on."""
    for name, value in slopes.items():
        console.print(f"  {name}: {value:.2f}")
    return slopes


def show(console: Console, title: str, rows: list[dict]) -> None:
    """A table of rows with the same names."""
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*[_text(value) for value in row.values()])
    console.print(table)


def _standard(found: object) -> object:
    """JSON knows no infinity: an error of a recovery that was withdrawn, or is not finite, is null."""
    if isinstance(found, dict):
        return {name: _standard(value) for name, value in found.items()}
    if isinstance(found, list):
        return [_standard(value) for value in found]
    return None if found == math.inf else found


def _text(value: object) -> str:
    if value == math.inf:
        return "nothing"
    if isinstance(value, float):
        return f"{value:.3g}" if 0.01 <= abs(value) < 1e4 else f"{value:.1e}"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
