"""An asker that can be killed: many questions, each step's depending on the answers of the one before."""

from __future__ import annotations

import sys
from contextlib import closing

import torch

from unmask.evidence.ledger import Ledger
from unmask.evidence.oracles import OracleEvidence
from unmask.integrations.http import HttpOracle

WIDTH, CONCURRENCY, PER_REQUEST, NUM_STEPS, NUM_EACH = 8, 4, 16, 15, 100


def asked(url: str, path: str | None) -> tuple[list[float], int]:
    """All answers, and how many were paid for now."""
    oracle = HttpOracle(url, concurrency=CONCURRENCY, per_request=PER_REQUEST, backoff_seconds=0.05)
    with closing(Ledger(path, about=oracle.name)) as ledger:
        evidence = OracleEvidence(oracle, WIDTH, ledger)
        generator = torch.Generator().manual_seed(0)
        heard = [torch.zeros(1, dtype=torch.float64)]
        for _ in range(NUM_STEPS):
            drawn = torch.randn(NUM_EACH, 2, WIDTH, generator=generator, dtype=torch.float64)
            heard.append(evidence.ask(heard[-1].mean() + drawn))
        return torch.cat(heard[1:]).tolist(), ledger.num_paid


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(repr(asked(*sys.argv[1:])))
