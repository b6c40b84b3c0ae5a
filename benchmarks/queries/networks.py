"""Two-layer ReLU networks and one-layer transformers from queries: errors and queries a parameter.

    python benchmarks/run.py queries relu [--cases 16x16 784x128b] [--seeds 2] [--dtype float32]
    python benchmarks/run.py queries transformers [--cases 1x64x256 8x64x64]

Cases are width x neurons (b: with biases), and heads x width x neurons. Weights are Gaussian of variance 1/width, those
of outputs of variance 1/neurons. `error` is that of the function: on 2,000 Gaussian inputs, or on 200 random sequences
of five tokens. Queries are those of learning; `front_door` all of `recover_weights`, which is not told what to expect.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import machine

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.attacks.queries.network_score import score_network
from tests.attacks.queries.random_networks import oracle_of_network, random_layers, random_transformer

import unmask
from unmask.attacks.queries.networks.relu_network import ReluNetworkAttack
from unmask.attacks.queries.networks.transformer import TransformerAttack
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Recovery
from unmask.scores import score_heads

NETWORKS = ("16x16", "16x64", "16x256", "64x256", "784x32b", "784x128b")
TRANSFORMERS = ("1x8x8", "1x64x256", "2x8x8", "3x16x48", "4x20x32")


def main() -> None:
    """Measure one mode, print a table, write JSON."""
    modes = {"relu": (relu, NETWORKS), "transformers": (transformers, TRANSFORMERS)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=modes)
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine())
    measure, cases = modes[options.mode]
    rows = []
    for case in options.cases or cases:
        seeds = [measure(case, seed, getattr(torch, options.dtype)) for seed in range(options.seeds)]
        row = {"case": case, "dtype": options.dtype, "status": "/".join(sorted({one["status"] for one in seeds}))}
        row |= {name: max(one[name] for one in seeds) for name in ("error", "W")}
        averaged = ("queries", "front_door", "per_parameter", "seconds")
        row |= {name: statistics.mean(one[name] for one in seeds) for name in averaged if name in seeds[0]}
        print(
            "  ".join(
                f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
            )
        )
        rows.append(row)
    if options.out:
        options.out.write_text(json.dumps({"machine": machine(), "mode": options.mode, "rows": rows}, indent=1) + "\n")


def relu(case: str, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """One network."""
    width, num_neurons = map(int, case.removesuffix("b").split("x"))
    has_biases = case.endswith("b")
    layers = random_layers(width, num_neurons, seed, has_biases)
    start = time.perf_counter()
    recovery = ReluNetworkAttack(biases=has_biases, seed=seed)(oracle_of_network(layers, dtype))
    seconds = time.perf_counter() - start
    error = score_network(recovery.value, layers.described).function_error
    return {"error": error, "W": 0.0, "seconds": seconds} | costs(recovery)


def transformers(case: str, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """One transformer: its heads, and its function."""
    num_heads, width, num_neurons = map(int, case.split("x"))
    model = random_transformer(num_heads, width, random_layers(width, num_neurons, seed), seed)
    start = time.perf_counter()
    recovery = TransformerAttack(many_heads=num_heads > 1, seed=seed)(model.evidence(dtype))
    seconds = time.perf_counter() - start
    found, like = recovery.value.W, torch.ones(len(model.W), width, dtype=torch.float64)
    heads = HeadWeights(W=found, v=torch.ones(len(found), width, dtype=torch.float64))
    W = score_heads(heads, HeadWeights(W=model.W, v=like)).worst_W_error
    X = torch.randn(200, 5, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    error = float("nan")
    if recovery.value.network is not None:
        expected = model(X)
        error = float((recovery.value(X) - expected).norm() / expected.norm())
    unnamed = unmask.recover_weights(model.evidence(dtype).oracle, width=width, seed=seed)
    front_door = float(unnamed.cost.queries) if unnamed.status is recovery.status else float("nan")
    return {"error": error, "W": W, "seconds": seconds, "front_door": front_door} | costs(recovery)


def costs(recovery: Recovery[Any]) -> dict[str, Any]:
    """Status and queries."""
    details = recovery.certificate.details
    return {
        "status": recovery.status.name,
        "queries": float(details["learning_queries"]),
        "per_parameter": details["learning_queries_per_degree_of_freedom"],
    }


if __name__ == "__main__":
    main()
