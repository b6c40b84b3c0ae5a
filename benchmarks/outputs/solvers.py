"""Inputs of one attention layer from its output: success, certificates, speed against other solvers, scaling.

    python benchmarks/run.py outputs definite      # 100 problems with sym(W) positive definite
    python benchmarks/run.py outputs indefinite    # distinct pre-images, and whether the true one is among them
    python benchmarks/run.py outputs causal        # position by position
    python benchmarks/run.py outputs unique        # is RECOVERED ever said where a second pre-image exists?
    python benchmarks/run.py outputs peers [--sizes 8x16 16x32]
    python benchmarks/run.py outputs slopes        # seconds against n and d

Start: the output itself, for all methods. Right means: relative error of X at most 1e-8.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from machine import machine
from outputs.attention_layers import random_layer
from outputs.peers import PEERS
from torch import Tensor

from unmask.attacks.outputs.layer_inputs.attack import AttentionAttack
from unmask.attacks.outputs.layer_inputs.preimages import Preimages
from unmask.attacks.outputs.layer_inputs.problem import pose
from unmask.recovery import Recovery, Status
from unmask.scores.inputs import relative_error

RIGHT = 1e-8
DEFINITE_SIZES = ((4, 16), (8, 16), (8, 32), (16, 32), (32, 64))


def main() -> None:
    """Measure one mode, print a table, write JSON."""
    modes = {f.__name__: f for f in (definite, indefinite, causal, unique, peers, slopes)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=modes)
    parser.add_argument("--sizes", nargs="+", type=lambda text: tuple(map(int, text.split("x"))))
    parser.add_argument("--problems", type=int, help="problems of each kind")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine())
    rows = modes[options.mode](options.sizes, options.problems)
    if options.out:
        options.out.write_text(json.dumps({"machine": machine(), "mode": options.mode, "rows": rows}, indent=1) + "\n")


def definite(sizes: list | None, problems: int | None) -> list[dict]:
    """Families pd and pdskew, sharpness 1 and 3: from X₀ = Y alone, and the whole attack."""
    rows = []
    kinds = itertools.product(sizes or DEFINITE_SIZES, ("pd", "pdskew"), (1.0, 3.0))
    for (n, d), family, sharpness in kinds:
        for seed in range(problems or 5):
            evidence, X = random_layer(family, n, d, sharpness, seed)
            rows.append(
                {"n": n, "d": d, "family": family, "sharpness": sharpness, "seed": seed, **measure(evidence, X)}
            )
        show(rows[-(problems or 5) :])
    show(rows, "all")
    return rows


def indefinite(sizes: list | None, problems: int | None) -> list[dict]:
    """W = s·G/d: how many distinct pre-images, and is the true one among them."""
    rows = []
    attack = AttentionAttack(num_starts=192, max_steps=100)
    for (n, d), sharpness in itertools.product(sizes or ((2, 4), (3, 6), (4, 8), (8, 8), (8, 16)), (1.0, 3.0)):
        for seed in range(problems or 10):
            evidence, X = random_layer("gauss", n, d, sharpness, seed)
            found = {"n": n, "d": d, "family": "gauss", "sharpness": sharpness, "seed": seed}
            rows.append({**found, **judged(attack(evidence), X)})
        show(rows[-(problems or 10) :])
    return rows


def causal(sizes: list | None, problems: int | None) -> list[dict]:
    """Position by position, definite and indefinite W."""
    rows = []
    for (n, d), family in itertools.product(sizes or ((4, 8), (8, 16), (16, 32), (32, 64)), ("pd", "pdskew", "gauss")):
        for seed in range(problems or 5):
            evidence, X = random_layer(family, n, d, 1.0, seed, causal=True)
            found = {"n": n, "d": d, "family": family, "sharpness": 1.0, "seed": seed}
            rows.append({**found, **judged(AttentionAttack()(evidence), X)})
        show(rows[-(problems or 5) :])
    return rows


def unique(sizes: list | None, problems: int | None) -> list[dict]:
    """Small problems, where hundreds of starts see nearly every pre-image: does RECOVERED survive them?"""
    rows = []
    default, thorough = AttentionAttack(), AttentionAttack(num_starts=600, num_row_starts=600, max_steps=150, seed=1)
    small = sizes or ((2, 2), (3, 3), (3, 6), (4, 4), (4, 8))
    for (n, d), family, sharpness, masked in itertools.product(small, ("pd", "pdskew"), (1.0, 3.0), (False, True)):
        for seed in range(1000, 1000 + (problems or 10)):
            evidence, X = random_layer(family, n, d, sharpness, seed, causal=masked)
            row = {"n": n, "d": d, "family": family, "sharpness": sharpness, "causal": masked, "seed": seed}
            row |= judged(default(evidence), X)
            row["all_preimages"] = len(thorough(evidence).value)
            rows.append(row)
    said = [row for row in rows if row["status"] == "RECOVERED"]
    wrong = [row for row in said if row["all_preimages"] != 1 or row["first_error"] > RIGHT]
    several = sum(row["all_preimages"] > 1 for row in rows)
    print(
        f"{len(rows)} problems, {several} with several pre-images; RECOVERED {len(said)}, of these wrong {len(wrong)}"
    )
    return rows


def peers(sizes: list | None, problems: int | None) -> list[dict]:
    """The same unreduced problem for all; ours reduces it by itself, and that is part of its time."""
    attack = AttentionAttack()
    rows = []
    for (n, d), family in itertools.product(sizes or ((8, 16), (16, 32)), ("pd", "pdskew")):
        row: dict = {"n": n, "d": d, "family": family}
        times: dict[str, list[float]] = {}
        rights: Counter[str] = Counter()
        for seed in range(problems or 3):
            evidence, X = random_layer(family, n, d, 1.0, 700 + seed)
            posed = pose(evidence)
            whole = posed.whole_problem()
            methods: dict[str, Callable[[], Tensor | None]] = {"ours": lambda posed=posed: solved(attack, posed)}
            methods |= {name: (lambda peer=peer, whole=whole: whole.lift(peer(whole))) for name, peer in PEERS.items()}
            reduced = posed.problem()
            methods["scipy trf, our reduction"] = lambda p=reduced: p.lift(PEERS["scipy trf"](p))
            solved(attack, posed)  # warm-up
            for name, method in methods.items():
                started = time.perf_counter()
                found = method()
                times.setdefault(name, []).append(time.perf_counter() - started)
                rights[name] += found is not None and relative_error(found, X) <= RIGHT
        ours = statistics.median(times["ours"])
        for name, seconds in times.items():
            middle = statistics.median(seconds)
            row[name] = {"seconds": middle, "ratio": middle / ours, "right": rights[name], "of": problems or 3}
            print(f"{n:>4}×{d:<4} {family:<7} {name:<26} {middle:>9.4f} s {middle / ours:>8.1f}×  {rights[name]} right")
        rows.append(row)
    return rows


def slopes(sizes: list | None, problems: int | None) -> list[dict]:
    """Seconds of the solver (without search and certificate) against n at d = 64 and against d at n = 16."""
    attack, rows = AttentionAttack(), []
    for axis, grid in {"n": [(n, 64) for n in (8, 16, 32, 64)], "d": [(16, d) for d in (32, 64, 128, 256)]}.items():
        points = []
        for n, d in sizes or grid:
            posed = [pose(random_layer("pd", n, d, 1.0, seed)[0]) for seed in range(problems or 3)]
            solved(attack, posed[0])
            seconds = statistics.median(timed(lambda p=p: solved(attack, p)) for p in posed)
            points.append((n if axis == "n" else d, seconds))
            rows.append({"axis": axis, "n": n, "d": d, "seconds": seconds})
            print(f"{n:>4}×{d:<4} {seconds:.4f} s")
        x, y = [math.log(value) for value, _ in points], [math.log(seconds) for _, seconds in points]
        print(f"log-log slope in {axis}: {statistics.linear_regression(x, y).slope:.2f}")
    return rows


def measure(evidence, X: Tensor) -> dict:
    """From X₀ = Y alone, then the whole attack with its search and its certificate."""
    attack = AttentionAttack()
    started = time.perf_counter()
    alone = solved(attack, pose(evidence))
    seconds = time.perf_counter() - started
    row = judged(attack(evidence), X)
    error = math.inf if alone is None else relative_error(alone, X)
    return {"error_from_Y": error, "solver_seconds": seconds, **row}


def solved(attack: AttentionAttack, posed) -> Tensor | None:
    """The deterministic part: reduce, and solve from Y."""
    problem = posed.problem()
    x = attack.solve(problem)
    return None if x is None else problem.lift(x)


def judged(recovery: Recovery[Preimages], X: Tensor) -> dict:
    """What came out, against the secret."""
    found = recovery.value.preimages
    errors = [relative_error(preimage.X, X) for preimage in found]
    return {
        "status": recovery.status.name,
        "preimages": len(found),
        "certified": sum(preimage.certified for preimage in found),
        "first_error": errors[0] if errors else math.inf,
        "best_error": min(errors, default=math.inf),
        "power": recovery.value.num_converged / max(1, recovery.value.num_starts),
        "seconds": recovery.cost.seconds,
    }


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def show(rows: list[dict], name: str | None = None) -> None:
    """One line for rows of one kind."""
    first = rows[0]
    kind = name or f"{first['n']}×{first['d']} {first['family']} s={first['sharpness']:g}"
    alone = (
        f"right from Y alone {sum(row['error_from_Y'] <= RIGHT for row in rows)}; " if "error_from_Y" in first else ""
    )
    certified = sum(row["first_error"] <= RIGHT and row["certified"] == row["preimages"] for row in rows)
    recovered = [row for row in rows if row["status"] == Status.RECOVERED.name]
    print(
        f"{kind:<22} {len(rows):>4} problems; {alone}first pre-image right and all certified "
        f"{certified}; among them {sum(row['best_error'] <= RIGHT for row in rows)}; RECOVERED {len(recovered)}, wrong "
        f"{sum(row['first_error'] > RIGHT for row in recovered)}; pre-images "
        f"{dict(sorted(Counter(row['preimages'] for row in rows).items()))}; median "
        f"{statistics.median(row['seconds'] for row in rows):.2f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
