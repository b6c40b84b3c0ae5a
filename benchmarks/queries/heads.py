"""Several heads from queries: error and queries against the degrees of freedom, for sizes, defences, odd layers.

    python benchmarks/run.py queries sizes [--cases 8x64 12x768x64] [--seeds 3] [--device cuda]
    python benchmarks/run.py queries defended      # rounding, noise, bounds on the norms of tokens
    python benchmarks/run.py queries odd           # equal, parallel, opposite, silent, too many heads; random oracles
    python benchmarks/run.py queries vectors       # answers in R^p
    python benchmarks/run.py queries slopes        # queries against d, H and r: log-log slopes
    python benchmarks/run.py queries trained       # the attention layers of SmolLM2-135M

Heads are random: W of variance 1/d, low rank as a product of Gaussians; v of variance 1/d. Errors are those of the
worst head, relative. Queries are those of learning; probing (about 40) and the fresh sequences (48) come on top.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from machine import machine
from torch import Tensor

import unmask
from unmask.attacks.queries.many_heads.multi_head import MultiHeadAttack
from unmask.attacks.queries.many_heads.vector_heads import VectorHeadsAttack
from unmask.attacks.recover import recover_from_answers
from unmask.evidence.oracles import FunctionOracle, OracleEvidence
from unmask.linalg.heads import HeadWeights
from unmask.models.heads import layer_heads
from unmask.recovery import Recovery
from unmask.scores import score_heads

SIZES = ("1x64", "1x256", "2x8", "4x32", "8x64", "16x64", "32x64", "8x64x8", "8x128x16", "16x128x8")
Function = Callable[[Tensor], Tensor]


def main() -> None:
    """Measure one mode, print a table, write JSON."""
    modes = {f.__name__: f for f in (sizes, defended, odd, vectors, slopes, trained)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=modes)
    parser.add_argument("--cases", nargs="+", default=SIZES, help="heads x width [x rank]")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", nargs="+", type=int, default=[0, 15, 29])
    parser.add_argument("--dtypes", nargs="+", choices=("float64", "float32"), default=["float64", "float32"])
    parser.add_argument("--polish", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    where = machine() if options.device == "cpu" else f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(where)
    rows = []
    for row in modes[options.mode](options):
        print("  ".join(f"{name} {shown(value)}" for name, value in row.items()), flush=True)
        rows.append(row)
        if options.out:
            content = {"machine": where, "mode": options.mode, "rows": rows}
            options.out.write_text(json.dumps(content, indent=1) + "\n")


def dtypes(options: argparse.Namespace) -> list[torch.dtype]:
    """The precisions in which services compute."""
    return [getattr(torch, name) for name in options.dtypes]


def shown(value: Any) -> str:
    """A number or a word, as tables have it."""
    return f"{value:.2g}" if isinstance(value, float) and not 0.1 <= abs(value) < 1e4 else str(value)


def random_heads(
    num_heads: int, width: int, rank: int | None = None, seed: int = 0, num_outputs: int | None = None
) -> HeadWeights:
    """Gaussian heads in float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if rank is None:
        W = normal(num_heads, width, width) / math.sqrt(width)
    else:
        W = normal(num_heads, width, rank) @ normal(num_heads, width, rank).mT / math.sqrt(width * rank)
    outputs = () if num_outputs is None else (num_outputs,)
    return HeadWeights(W=W, v=normal(num_heads, width, *outputs) / math.sqrt(width))


def as_dtype(heads: HeadWeights, dtype: torch.dtype, device: str) -> tuple[HeadWeights, Function]:
    """The heads as a service of that precision has them, and the service."""
    stored = HeadWeights(W=heads.W.to(device, dtype), v=heads.v.to(device, dtype))
    return stored, lambda X: stored(X.to(device, dtype))


def measured(
    heads: HeadWeights,
    function: Function,
    attack: Callable[[OracleEvidence], Recovery],
    device: str = "cpu",
    max_norm: float | None = None,
) -> dict[str, Any]:
    """One recovery and its score."""
    evidence = OracleEvidence(FunctionOracle(function), heads.v.shape[1], max_norm=max_norm, device=device)
    start = time.perf_counter()
    recovery = attack(evidence)
    seconds = time.perf_counter() - start
    score = score_heads(recovery.value, heads)
    details = recovery.certificate.details
    return {
        "status": recovery.status.name,
        "W": score.worst_W_error,
        "v": score.worst_v_error,
        "missing": score.num_missing,
        "extra": score.num_extra,
        "fresh": recovery.certificate.residual,
        "allowed": recovery.certificate.tolerance,
        "queries": int(details["learning_queries"]),
        "per_dof": details["learning_queries_per_degree_of_freedom"],
        "seconds": round(seconds, 2),
    }


def worst(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Several seeds as one row: the worst errors, the mean of costs."""
    statuses = sorted({row["status"] for row in rows})
    merged: dict[str, Any] = {"seeds": len(rows), "status": "/".join(statuses)}
    merged |= {name: max(row[name] for row in rows) for name in ("W", "v", "missing", "extra", "fresh", "allowed")}
    return merged | {name: statistics.mean(row[name] for row in rows) for name in ("queries", "per_dof", "seconds")}


def sizes(options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Heads, width and rank, in both precisions."""
    for case in options.cases:
        num_heads, width, *rank = map(int, case.split("x"))
        for dtype in dtypes(options):
            rows = []
            for seed in range(options.seeds):
                heads = random_heads(num_heads, width, rank[0] if rank else None, seed)
                stored, function = as_dtype(heads, dtype, options.device)
                attack = MultiHeadAttack(polish=options.polish, seed=seed)
                rows.append(measured(stored, function, attack, options.device))
            name = str(dtype).removeprefix("torch.")
            yield {"heads": num_heads, "width": width, "rank": rank[0] if rank else width, "dtype": name} | worst(rows)


def defended(options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """What rounding, noise and bounds on norms leave, for 1, 2 and 8 heads."""
    for num_heads, width in ((1, 64), (2, 16), (8, 64)):
        heads = random_heads(num_heads, width, seed=1)
        defences: dict[str, Function] = {
            "none": heads,
            "6 decimals": lambda X, heads=heads: heads(X).mul(1e6).round() / 1e6,
            "4 decimals": lambda X, heads=heads: heads(X).mul(1e4).round() / 1e4,
            "2 decimals": lambda X, heads=heads: heads(X).mul(1e2).round() / 1e2,
            "noise 1e-3": lambda X, heads=heads: noisy(heads(X)),
        }
        for max_norm in (None, 1e5, 1e4, 4 * math.sqrt(width)):
            for name, function in defences.items():
                row = measured(heads, function, recover_from_answers, max_norm=max_norm)
                yield {"heads": num_heads, "width": width, "defence": name, "norm": max_norm or "any"} | row


def noisy(answers: Tensor, sigma: float = 1e-3) -> Tensor:
    """Answers with noise that is new every time."""
    return answers + sigma * torch.randn(len(answers), dtype=answers.dtype)


def odd(options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Layers that are not in general position, and oracles that are no layers: nothing may be invented."""
    heads, more = random_heads(4, 16, seed=1), random_heads(2, 16, seed=2)
    noise = torch.Generator().manual_seed(0)

    def with_heads(W: Tensor, v: Tensor) -> HeadWeights:
        return HeadWeights(W=torch.cat([heads.W, W]), v=torch.cat([heads.v, v]))

    first = heads.W[:1]
    layers = {
        "general position": heads,
        "two equal W": with_heads(first, more.v[:1]),
        "a head with v = 0": with_heads(more.W[:1], 0 * more.v[:1]),
        "a head with W = 0": with_heads(0 * first, more.v[:1]),
        "W = 0 alone": HeadWeights(W=0 * first, v=heads.v[:1]),
        "W and 2 W": with_heads(2 * first, more.v[:1]),
        "W and 1.1 W": with_heads(1.1 * first, more.v[:1]),
        "W, 1.5 W and 3 W": with_heads(torch.cat([1.5 * first, 3 * first]), more.v),
        "W and -W": with_heads(-first, more.v[:1]),
        "W and -2 W": with_heads(-2 * first, more.v[:1]),
        "opposite v": HeadWeights(W=heads.W[:2], v=torch.stack([heads.v[0], -heads.v[0]])),
        "all v = 0": HeadWeights(W=heads.W, v=0 * heads.v),
        "as many heads as the width": random_heads(16, 16, seed=2),
        "one head more than the width": random_heads(17, 16, seed=2),
        "one W a hundred times larger": HeadWeights(W=torch.cat([100 * first, heads.W[1:]]), v=heads.v),
        "one v 10,000 times smaller": HeadWeights(W=heads.W, v=torch.cat([1e-4 * heads.v[:1], heads.v[1:]])),
    }
    for name, layer in layers.items():
        yield {"layer": name} | measured(layer, layer, recover_from_answers)
    oracles: dict[str, Function] = {
        "random numbers": lambda X: torch.randn(len(X), generator=noise),
        "a hash": lambda X: torch.sin(1e4 * X.sum((1, 2))),
        "tanh of a layer": lambda X: heads(X).tanh(),
    }
    for name, function in oracles.items():
        yield {"layer": name} | measured(heads, function, recover_from_answers)


def read_out(heads: HeadWeights) -> HeadWeights:
    """Heads with one number for an answer: a random direction of theirs."""
    generator = torch.Generator().manual_seed(0)
    return HeadWeights(W=heads.W, v=heads.v @ torch.randn(heads.v.shape[2], generator=generator, dtype=torch.float64))


def vectors(options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Answers in R^p: queries against d² + (H + 1)·d."""
    for num_heads, width, num_outputs in ((1, 16, 16), (4, 32, 32), (8, 64, 64), (16, 64, 64), (4, 32, 4)):
        for dtype in dtypes(options):
            heads = random_heads(num_heads, width, seed=1, num_outputs=num_outputs)
            stored, function = as_dtype(heads, dtype, options.device)
            row = measured(stored, function, VectorHeadsAttack(), options.device)
            least = width**2 + (num_heads + 1) * width
            name = str(dtype).removeprefix("torch.")
            head = {"heads": num_heads, "width": width, "outputs": num_outputs, "dtype": name}
            yield head | row | {"queries_over_d²+(H+1)d": row["queries"] / least}


def slopes(options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Exponents of the number of queries: 2 in d, 1 in H, and 1 in r where r is far below d."""
    families = {
        "d (H = 4)": [(width, random_heads(4, width, seed=1)) for width in (32, 64, 128, 256)],
        "H (d = 64)": [(num_heads, random_heads(num_heads, 64, seed=1)) for num_heads in (2, 4, 8, 16, 32)],
        "r (H = 4, d = 256)": [(rank, random_heads(4, 256, rank, seed=1)) for rank in (4, 8, 16, 32)],
    }
    for name, layers in families.items():
        points = []
        for size, heads in layers:
            row = measured(heads, heads, MultiHeadAttack())
            points.append((size, row["queries"]))
            yield {"against": name, "at": size} | row
        logs = [(math.log(size), math.log(queries)) for size, queries in points]
        yield {"against": name, "slope": statistics.linear_regression(*zip(*logs, strict=True)).slope}


def trained(options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Real weights: an attention module of SmolLM2-135M (9 heads of rank 64, width 576) with a random readout.

    All tokens stand at one position, so that the rotary embedding cancels. What its heads read of a token before the
    norm is not asked: tokens are what comes out of it.
    """
    model = unmask.load_model("smollm2-135m")
    for layer in options.layers:
        heads = read_out(layer_heads(model, layer))
        for dtype in dtypes(options):
            stored, function = as_dtype(heads, dtype, options.device)
            row = measured(stored, function, MultiHeadAttack(), options.device)
            yield {"layer": layer, "dtype": str(dtype).removeprefix("torch.")} | row


if __name__ == "__main__":
    main()
