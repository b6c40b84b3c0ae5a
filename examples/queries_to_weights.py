"""What the answers of an attention layer give away: its weights. Then what a bound on tokens leaves of it.

python examples/queries_to_weights.py
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from attention_service import DrawnLayer, readout_vector

import unmask

SERVICE = Path(__file__).with_name("attention_service.py")
NUM_HEADS, WIDTH, LONGEST = 4, 16, 4.0


@contextmanager
def serving(*options: str) -> Iterator[unmask.HttpOracle]:
    """The service as a process of its own: 4 heads, and answers that are rounded to two decimals."""
    layer = ("--heads", str(NUM_HEADS), "--width", str(WIDTH), "--decimals", "2")
    with subprocess.Popen([sys.executable, SERVICE, *layer, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield unmask.HttpOracle(process.stdout.readline().strip())
        finally:
            process.terminate()


# What nobody but the service knows, to compare with.
layer = DrawnLayer(NUM_HEADS, WIDTH, WIDTH // NUM_HEADS, seed=0).heads()
secret = unmask.HeadWeights(W=layer.W, v=layer.v @ readout_vector(WIDTH, seed=0))

# Rounding does not help: tokens as long as the asker likes make it small. A bound on their norms does.
with serving() as oracle, serving("--max-norm", str(LONGEST)) as bounded:
    recovery = unmask.recover_weights(oracle, width=WIDTH)
    rest = unmask.recover_weights(bounded, width=WIDTH)
    single_tokens = LONGEST * torch.eye(WIDTH, dtype=torch.float64)[:, None]
    sum_v = unmask.OracleEvidence(bounded, WIDTH).ask(single_tokens) / LONGEST

score = unmask.score_heads(recovery.value, secret)
print(f"{recovery.status.name}: {len(recovery.value)} heads from {recovery.cost.queries:,} answers of two decimals")
print(f"  fresh sequences are answered as the service does, up to {recovery.certificate.residual:.0e} of an answer")
print(f"  error of the weights: W {score.worst_W_error:.0e}, v {score.worst_v_error:.0e} in the worst head")

off = float((sum_v - secret.v.sum(0)).norm() / secret.v.sum(0).norm())
print(f"with tokens up to a norm of {LONGEST:g}: {rest.status.name}, {len(rest.value)} heads")
print(f"  what is left: the sum of all v, from single tokens, up to {off:.1%}; fewer heads may fall: docs/queries.md")
