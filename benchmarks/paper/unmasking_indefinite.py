"""Indefinite W: whether the input is among the pre-images that are found, by size, sharpness and what is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from outputs.attention_layers import random_layer
from paper.homotopies import Dilation, Shift, follow
from torch import Tensor

from unmask.attacks.outputs.layer_inputs.attack import AttentionAttack
from unmask.attacks.outputs.layer_inputs.problem import pose
from unmask.evidence.outputs import AttentionEvidence
from unmask.scores.inputs import relative_error

RIGHT = 1e-8
NUM_STARTS = 64  # at the most; with nothing known, half as many beyond 8 tokens
# n, d, sharpness, causal, problems
GRID = (
    (4, 8, 1.0, False, 4),
    (8, 16, 1.0, False, 4),
    (8, 16, 3.0, False, 4),
    (16, 32, 1.0, False, 3),
    (32, 64, 1.0, False, 1),
    (8, 16, 1.0, True, 3),
    (16, 32, 1.0, True, 3),
    (16, 32, 3.0, False, 2),
)
_LARGEST = {"search": 16, "shift": 16, "dilation": 16, "norms": 32}  # tokens up to which a way is tried
_CAUSAL_WAYS = ("search", "norms")


def measure_indefinite(small: bool = False) -> Iterator[dict]:
    """One row for each size, sharpness and way."""
    for n, d, sharpness, causal, problems in [(*GRID[0][:-1], 1)] if small else GRID:
        for way, find in WAYS.items():
            if n > _LARGEST[way] or (causal and way not in _CAUSAL_WAYS):
                continue
            cells = [
                judge(find, *random_layer("gauss", n, d, sharpness, seed, causal=causal)) for seed in range(problems)
            ]
            yield {
                "n": n,
                "d": d,
                "sharpness": sharpness,
                "causal": causal,
                "way": way,
                "problems": problems,
                "any_preimage": sum(cell["preimages"] > 0 for cell in cells),
                "input_found": sum(cell["best_error"] <= RIGHT for cell in cells),
                "input_to_1e-4": sum(cell["best_error"] <= 1e-4 for cell in cells),
                "recovered": sum(cell["status"] == "RECOVERED" for cell in cells),
                "wrong": sum(cell["status"] == "RECOVERED" and cell["first_error"] > RIGHT for cell in cells),
                "most_preimages": max(cell["preimages"] for cell in cells),
                "seconds": sorted(cell["seconds"] for cell in cells)[len(cells) // 2],
            }


def judge(find: Callable[[AttentionEvidence, Tensor], tuple[str, list[Tensor]]], evidence, X: Tensor) -> dict:
    """What a way finds, against the input, and CPU seconds."""
    started = time.process_time()
    status, found = find(evidence, X)
    seconds = time.process_time() - started
    errors = [relative_error(each, X) for each in found]
    best, first = (min(errors), errors[0]) if errors else (float("inf"), float("inf"))
    return {"status": status, "preimages": len(found), "best_error": best, "first_error": first, "seconds": seconds}


def by_search(evidence: AttentionEvidence, X: Tensor) -> tuple[str, list[Tensor]]:
    """The attack as it is, with as many starts as those with norms have."""
    num_starts = NUM_STARTS if len(evidence.output) <= 8 else NUM_STARTS // 2
    recovery = AttentionAttack(num_starts=num_starts)(evidence)
    return recovery.status.name, [preimage.X for preimage in recovery.value.preimages]


def by_norms(evidence: AttentionEvidence, X: Tensor) -> tuple[str, list[Tensor]]:
    """The norms of the rows are known."""
    recovery = AttentionAttack(num_normed_starts=NUM_STARTS)(replace(evidence, row_norms=X.norm(dim=1)))
    return recovery.status.name, [preimage.X for preimage in recovery.value.preimages]


def by_curve(kind: type[Shift] | type[Dilation]) -> Callable[[AttentionEvidence, Tensor], tuple[str, list[Tensor]]]:
    """The curve of a homotopy, up to six passages of τ = 1."""

    def find(evidence: AttentionEvidence, X: Tensor) -> tuple[str, list[Tensor]]:
        problem = pose(evidence).problem()
        return "", [problem.lift(root) for root in follow(kind(problem))]

    return find


WAYS = {"search": by_search, "shift": by_curve(Shift), "dilation": by_curve(Dilation), "norms": by_norms}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for row in measure_indefinite():
        print(row, flush=True)
