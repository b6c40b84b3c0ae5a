"""Learning attention with queries (arXiv 2601.16873), whole: every theorem's count beside ours, and what lies beyond.

    python benchmarks/run.py paper queries                       # everything, then the page and its plots
    python benchmarks/run.py paper queries --parts counts zeros  # some parts; others stay as they were measured
    python benchmarks/run.py paper queries --only-page           # the page and its plots from what is stored

Heads are Gaussian, entries of variance 1/d. Errors are relative, of the worst head. Queries are those of learning;
probing (about 60) and the fresh sequences (87 to 103) come on top. Seconds are CPU seconds with one thread.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import machine
from paper.queries_page import write_page
from queries.heads import random_heads
from queries.repetition import in_float32, subspace_heads
from torch import Tensor

from unmask.attacks.baselines.query_papers import PaperSingleHeadAttack
from unmask.attacks.queries.many_heads.circle_heads import CircleHeadsAttack
from unmask.attacks.queries.many_heads.known_subspaces import KnownSubspacesAttack
from unmask.attacks.queries.many_heads.multi_head import MultiHeadAttack
from unmask.attacks.queries.many_heads.orthogonal_heads import OrthogonalHeadsAttack
from unmask.attacks.queries.one_head.low_rank import LowRankAttack
from unmask.attacks.queries.one_head.noisy_head import NoisyAttack
from unmask.attacks.queries.one_head.signs import MembershipAttack
from unmask.attacks.queries.one_head.single_head import SingleHeadAttack
from unmask.attacks.queries.samples import SamplesAttack
from unmask.attacks.recover import recover_from_answers
from unmask.evidence.oracles import FunctionOracle, OracleEvidence
from unmask.evidence.samples import SampleEvidence
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Recovery, Status
from unmask.scores import score_heads

RESULTS = Path(__file__).parents[1] / "results" / "paper_queries.json"
DOCS = Path(__file__).parents[2] / "docs"
Function = Callable[[Tensor], Tensor]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure parts, keep each as soon as it is measured, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--bounded", nargs="+", default=list(BOUNDED), help="heads x width of the part 'bounded'")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="answers of the part 'bounded'")
    parser.add_argument("--only-page", action="store_true", help="measure nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args(arguments)
    if not options.docs.is_dir():
        parser.error(f"{options.docs} is no folder; make it first, or name another one with --docs")
    if options.only_page and not options.results.is_file():
        parser.error(f"{options.results} does not exist; measure some parts first, without --only-page")
    torch.set_num_threads(1)
    stored = json.loads(options.results.read_text()) if options.results.exists() else {}
    for part in [] if options.only_page else options.parts:
        rows = list[dict]() if part != "bounded" else keep_others(stored.get(part, {}).get("rows", []), options)
        for row in PARTS[part](options):
            print(part, *(f"{name} {value}" for name, value in row.items()), sep="  ", flush=True)
            rows.append(row)
            stored[part] = {"machine": machine(), "rows": rows}
            options.results.write_text(json.dumps(stored, indent=1) + "\n")
    write_page(stored, options.docs)


def keep_others(rows: list[dict], options: argparse.Namespace) -> list[dict]:
    """Rows of cases that are not measured again."""
    return [
        row
        for row in rows
        if f"{row['heads']}x{row['width']}" not in options.bounded or row["answers"] not in options.kinds
    ]


def measured(attack: Callable, heads: HeadWeights, answer: Function, max_norm: float | None = None) -> dict[str, Any]:
    """One recovery, scored."""
    evidence = OracleEvidence(FunctionOracle(answer), heads.v.shape[1], max_norm=max_norm)
    start = time.process_time()
    recovery: Recovery[HeadWeights] = attack(evidence)
    seconds = time.process_time() - start
    score = score_heads(recovery.value, heads)
    is_found = recovery.status is Status.RECOVERED
    return {
        "status": recovery.status.name,
        "error": score.worst_W_error if is_found else None,
        "v_error": score.worst_v_error if is_found else None,
        "false": is_found and bool(score.num_missing or score.num_extra or score.worst_W_error > 0.2),
        "queries": int(recovery.certificate.details.get("learning_queries", 0)),
        "seconds": round(seconds, 1),
    }


# ---- the theorems


def counts(options: argparse.Namespace) -> Iterator[dict]:
    """Every theorem's count of queries, and ours."""
    for d in (16, 64):
        head = random_heads(1, d)
        yield {"what": "Thm 4.1", "case": f"d = {d}", "count": d + d * d} | measured(SingleHeadAttack(), head, head)
    for d, r in ((64, 4), (128, 8)):
        head = random_heads(1, d, r)
        row = {"what": "Thm 5.1", "case": f"d = {d}, rank {r}", "count": r * (2 * d - r) + d}
        yield row | measured(LowRankAttack(rank=r), head, head)
    d, bits = 16, 32
    head = random_heads(1, d)
    unit = HeadWeights(W=head.W, v=head.v / head.v.norm())
    row = {"what": "Thm B.1", "case": f"signs, d = {d}, {bits} bits", "count": bits * (d * d + d)}
    yield row | measured(MembershipAttack(bits=bits), unit, lambda X: unit(X).sign())
    for H, r, d in ((4, 4, 16), (4, 8, 32), (8, 8, 64)):
        heads = subspace_heads(H, r, d, 0)
        # The same draws as in `subspace_heads`.
        generator = torch.Generator().manual_seed(0)
        Q = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q.T
        bases = list(Q[: H * r].reshape(H, r, d))
        case = f"{H} subspaces of width {r}, d = {d}"
        row = {"what": "Prop. C.2", "case": case, "count": H * (r * r + r)}
        yield row | measured(KnownSubspacesAttack(subspaces=bases), heads, heads)
        if d <= 32:
            row = {"what": "App. C, subspaces not known", "case": case, "count": None}
            yield row | measured(OrthogonalHeadsAttack(), heads, heads)
        row = {"what": "the same layer as any other", "case": case, "count": None}
        yield row | measured(MultiHeadAttack(), heads, heads)
    for H, d in ((4, 32), (8, 64)):
        heads = random_heads(H, d)
        row = {"what": "§7, several heads", "case": f"{H} heads, d = {d}", "count": 4 * H * d * d - 2 * H + 1}
        yield row | measured(MultiHeadAttack(), heads, heads)
    one, two = random_heads(1, 16), random_heads(1, 16, seed=1)
    split = HeadWeights(W=torch.cat([one.W, one.W]), v=torch.cat([two.v, one.v - two.v]))
    row = {
        "what": "Prop. 7.1",
        "case": "two heads with one W, d = 16, and one head with the sum of their v",
        "count": None,
    }
    yield row | measured(MultiHeadAttack(), one, split)


def added(deviation: float, answer: Function, seed: int = 0) -> Function:
    """Errors between −τ and τ, new for every answer."""
    generator = torch.Generator().manual_seed(seed)
    return lambda X: answer(X) + deviation * (2 * torch.rand(len(X), generator=generator, dtype=torch.float64) - 1)


def repeating(largest: float, answer: Function) -> Function:
    """The oracle of Thm 6.1: errors of −τ or τ, the same for the same question."""

    def sign(row: Tensor) -> int:
        return 2 * (hashlib.blake2b(row.double().numpy().tobytes(), digest_size=1).digest()[0] % 2) - 1

    return lambda X: answer(X) + largest * torch.tensor([sign(row) for row in X], dtype=torch.float64)


def zeros(options: argparse.Namespace) -> Iterator[dict]:
    """Thm 6.1: the error against τ, where v has no zeros and where a third of it is zero."""
    d, bound = 32, 7.0
    drawn = random_heads(1, d)
    for name in ("no zeros", "a third of v zero"):
        sign = torch.where(drawn.v < 0, -1.0, 1.0)
        v = sign * drawn.v.abs().clamp_min(0.05)  # γ = 0.05: entries are zero or that large
        v = v * (torch.arange(d) % 3 != 0) if name != "no zeros" else v
        head = HeadWeights(W=drawn.W, v=v)
        B, gamma = float(head.W.abs().max()), float(v[v != 0].abs().min())
        kappa = B**-0.5
        for tau in (1e-6, 1e-5, 1e-4, 1e-3):
            tau_v = tau  # of a token of norm one
            slope = 1 / (math.exp(-1) / (1 + math.exp(-1)) ** 2)
            twice = 1 / (math.exp(-2) / (1 + math.exp(-2)) ** 2)
            limit = slope * B**1.5 * (tau + 2 * kappa * tau_v) / (gamma - tau_v)
            if name != "no zeros":  # v·(e_i + e_p) is off by 2·tau_v
                limit += twice * B**1.5 * (tau + 3 * kappa * tau_v) / (gamma - 2 * tau_v)
            row: dict[str, Any] = {"v": name, "τ": tau, "limit": limit}
            fresh, repeats = added(tau, head), repeating(tau, head)
            margins = (("paper", 0.0, fresh), ("paper, margin", gamma / 2, fresh))
            for label, margin, answer in (*margins, ("paper, repeats", gamma / 2, repeats)):
                attack = PaperSingleHeadAttack("basis", kappa, margin)
                evidence = OracleEvidence(FunctionOracle(answer), d)
                measured_v = evidence.ask(torch.eye(d, dtype=torch.float64)[:, None])
                W = attack.weights(evidence, measured_v, torch.Generator().manual_seed(0)).clamp(-B, B)
                row[label] = float((W - head.W[0]).abs().max()) if bool(W.isfinite().all()) else None
            for label, attack, answer in (
                ("ours", SingleHeadAttack(), added(tau, head)),
                ("ours, 16 passes", NoisyAttack(), added(tau, head)),
                ("ours, repeats", NoisyAttack(), repeats),
            ):
                recovery = attack(OracleEvidence(FunctionOracle(answer), d, max_norm=bound))
                is_whole = recovery.status is Status.RECOVERED
                row[label] = float((recovery.value.W[0] - head.W[0]).abs().max()) if is_whole else None
            yield row


# ---- beyond the theorems

BOUNDED = ("2x16", "3x16", "4x16", "8x16", "2x32", "3x32", "4x32", "8x32", "2x64", "3x64", "4x64", "8x64")
KINDS: dict[str, Callable[[HeadWeights], Function]] = {
    "float64": lambda heads: heads,
    "float32": lambda heads: lambda X: in_float32(heads, X),
    "6 decimals": lambda heads: lambda X: heads(X).round(decimals=6),
    "4 decimals": lambda heads: lambda X: heads(X).round(decimals=4),
    "2 decimals": lambda heads: lambda X: heads(X).round(decimals=2),
    "noise 1e-3": lambda heads: gaussian_noise(heads, 1e-3),
}


def gaussian_noise(heads: HeadWeights, deviation: float) -> Function:
    """Noise that is new for every answer."""
    generator = torch.Generator().manual_seed(0)
    return lambda X: heads(X) + deviation * torch.randn(len(X), generator=generator, dtype=torch.float64)


def bounded(options: argparse.Namespace) -> Iterator[dict]:
    """Token norms of 4√d at most."""
    for case in options.bounded:
        H, d = map(int, case.split("x"))
        for kind in options.kinds:
            heads = random_heads(H, d, seed=1)
            row = {"heads": H, "width": d, "answers": kind}
            found = measured(CircleHeadsAttack(), heads, KINDS[kind](heads), 4 * math.sqrt(d))
            yield row | found | {"per_dof": found["queries"] / (H * d * (d + 1))}


def multiples(options: argparse.Namespace) -> Iterator[dict]:
    """A further head λW beside four heads, by the front door; and more heads than the root of the width."""
    heads, more = random_heads(4, 16, seed=1), random_heads(1, 16, seed=2)
    for factor in (-0.5, -1.0, -2.0, -3.0, -10.0, 0.0, 2.0):
        layer = HeadWeights(W=torch.cat([heads.W, factor * heads.W[:1]]), v=torch.cat([heads.v, more.v]))
        yield {"layer": f"W and {factor:g} W"} | measured(recover_from_answers, layer, layer)
    for H, d in ((8, 16), (12, 16), (16, 64)):
        layer = random_heads(H, d, seed=1)
        yield {"layer": f"{H} heads, d = {d}"} | measured(recover_from_answers, layer, layer)
    chance = torch.Generator().manual_seed(0)
    controls: dict[str, Function] = {
        "numbers by chance": lambda X: torch.randn(len(X), generator=chance, dtype=torch.float64),
        "one token linear, two by chance": lambda X: (
            X[:, 0].sum(1) if X.shape[1] == 1 else torch.randn(len(X), generator=chance, dtype=torch.float64)
        ),
    }
    for name, answer in controls.items():
        for label, attack in (
            ("circle-heads", CircleHeadsAttack()),
            ("known-subspaces", KnownSubspacesAttack(subspaces=list(torch.eye(16).reshape(4, 4, 16)))),
        ):
            yield {"layer": f"{name} ({label})"} | measured(attack, heads, answer, 16.0)


def samples(options: argparse.Namespace) -> Iterator[dict]:
    """Samples instead of queries: one head, Gaussian tokens of four a sequence, scores of deviation `spread`."""
    for d, spread, noise, seeds in ((8, 1.0, 0.0, 6), (8, 1.0, 1e-3, 6), (8, 3.0, 0.0, 6), (16, 1.0, 0.0, 3)):
        for ratio in (1.05, 1.25, 1.5, 2.0, 3.0, 5.0):
            runs = [sampled(d, spread, noise, ratio, seed) for seed in range(seeds)]
            errors = [run["error"] for run in runs if run["error"] is not None]
            row = {"width": d, "spread": spread, "noise": noise, "per_weight": ratio, "of": seeds}
            row |= {"recovered": len(errors), "error": statistics.median(errors) if errors else None}
            yield row | {"false": sum(run["false"] for run in runs)}
    chance = [sampled(8, 1.0, None, 5.0, seed) for seed in range(6)]
    row = {"width": 8, "spread": 1.0, "noise": None, "per_weight": 5.0, "of": 6, "error": None}
    yield row | {"recovered": sum(run["error"] is not None for run in chance), "false": 0}


def sampled(d: int, spread: float, noise: float | None, ratio: float, seed: int) -> dict:
    """One recovery from samples; without `noise` answers are by chance."""
    head = random_heads(1, d, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    weights = d * d + d
    num = math.ceil(ratio * weights)
    num += max(32, math.ceil(num / 9))  # a tenth is held out, 32 at least
    X = torch.randn(num, 4, d, generator=generator, dtype=torch.float64) * math.sqrt(spread) / d**0.25
    answers, drawn = head(X), torch.randn(num, generator=generator, dtype=torch.float64)
    size = float(answers.std())
    answers = drawn * size if noise is None else answers + noise * size * drawn
    recovery = SamplesAttack(seed=seed)(SampleEvidence(X, answers))
    is_found = recovery.status is Status.RECOVERED
    error = score_heads(recovery.value, head).worst_W_error if is_found else None
    return {"error": error, "false": noise is not None and is_found and error > 0.2}


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[dict]]] = {
    "counts": counts,
    "zeros": zeros,
    "samples": samples,
    "multiples": multiples,
    "bounded": bounded,
}

if __name__ == "__main__":
    main()
