"""The hidden size and the output layer of a language model from what its service shows of logits.

    python benchmarks/run.py queries logits [--only 'top 20'] [--sampled] [--out benchmarks/results/queries_logits.json]

SmolLM2-135M (width 576, vocabulary 49,152) behind examples/openai_service.py, over HTTP on this machine. Every row is
a way that the service answers; the attack is told nothing, it probes. `queries` are answers that were asked for, one
prompt each. `error of W` is the auditor's: the relative residual of the best linear map to the true output layer.
`--sampled` adds the way of one token an answer, about 400,000 answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from machine import machine

from unmask.attacks.queries.output_layer.attack import OutputLayerAttack
from unmask.evidence.logits import LogitEvidence
from unmask.integrations.openai import connect
from unmask.integrations.openai.client import OpenAIClient
from unmask.models import Model, load_model
from unmask.scores.weights import score_up_to_linear_map

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from openai_service import Policy, make_server  # noqa: E402 (the path comes first)

NUM_TOKENS = 1024
MAX_PROMPTS = 1600
FULL = {"full_logits": True}
CASES: dict[str, dict[str, Any]] = {
    "full logits, float32": FULL,
    "full logits, bfloat16 model": FULL,
    "full logits, 2 decimals": FULL | {"decimals": 2},
    "full logits, 1 decimal": FULL | {"decimals": 1},
    "full logits, integers": FULL | {"decimals": 0},
    "full logits, noise 0.1": FULL | {"noise": 0.1},
    "full logits, noise 1": FULL | {"noise": 1.0},
    "top 20, bias": {},
    "top 5, bias": {"max_logprobs": 5},
    "top 20, bias, 2 decimals": {"decimals": 2},
    "top 20, bias, noise 0.1": {"noise": 0.1},
    "top 1, bias": {"max_logprobs": 1},
    "top 20, bias after": {"bias_after": True},
}
SAMPLED = {"top 20, bias after, sampled token told": {"bias_after": True, "show_sampled": True}}


def main() -> None:
    """Measure every case, print a table, write JSON after each; rows of cases that are not run again are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases whose name starts so")
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "queries_logits.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    print(f"{'service':<40} {'status':<16} {'size':>7} {'prompts':>7} {'tokens':>6} {'queries':>8} fall  error of W  s")
    rows = {row["service"]: row for row in json.loads(options.out.read_text())["rows"]} if options.out.exists() else {}
    for name, policy in (CASES | (SAMPLED if options.sampled else {})).items():
        if options.only and not name.startswith(options.only):
            continue
        model = load_model("smollm2-135m", dtype=torch.bfloat16 if "bfloat16" in name else torch.float32)
        rows[name] = {"service": name} | measured(model, Policy(**policy))
        print(line(rows[name]), flush=True)
        document = {"machine": machine(), "model": "smollm2-135m", "rows": list(rows.values())}
        options.out.write_text(json.dumps(document, indent=2) + "\n")


def measured(model: Model, policy: Policy) -> dict[str, Any]:
    """One service, probed and attacked."""
    server = make_server(model, policy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    started = time.perf_counter()
    try:
        oracle = connect(OpenAIClient(f"http://127.0.0.1:{server.server_address[1]}", "smollm2", api_key_env=None))
        evidence = LogitEvidence(oracle)
        recovery = OutputLayerAttack(num_tokens=NUM_TOKENS, max_prompts=MAX_PROMPTS)(evidence)
    finally:
        server.shutdown()
        server.server_close()
    found = recovery.value
    details = recovery.certificate.details
    return {
        "status": recovery.status.name,
        "reason": recovery.reason,
        "hidden_size": found.hidden_size,
        "at_least": found.at_least,
        "affine_size": found.affine_size,
        "prompts": found.num_prompts,
        "tokens": len(found.tokens),
        "probe_requests": oracle.support.num_requests,
        "queries": recovery.cost.queries,
        "paid": len(evidence.ledger),
        "fall_decades": details.get("fall_decades"),
        "noise_of_a_logit": details.get("noise_of_a_logit"),
        "certificate": [recovery.certificate.residual, recovery.certificate.tolerance, recovery.certificate.rejected]
        if recovery.certificate.holds
        else None,
        "relative_residual": details.get("relative_residual"),
        "error_of_W": error_of(found.W, found.tokens, model) if found.hidden_size else None,
        "seconds": time.perf_counter() - started,
    }


def error_of(W_hat: torch.Tensor, tokens: torch.Tensor, model: Model) -> float:
    """The auditor's score, with the mean over tokens taken away on both sides."""
    assert model.unembedding is not None
    W = model.unembedding.detach().double()[tokens]
    return score_up_to_linear_map(W_hat, W - W.mean(0))


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    size = str(row["hidden_size"] or (f"≥ {row['at_least']}" if row["at_least"] else "–"))
    fall = "   –" if row["fall_decades"] is None else f"{row['fall_decades']:4.1f}"
    error = "        –" if row["error_of_W"] is None else f"{row['error_of_W']:9.1e}"
    return (
        f"{row['service']:<40} {row['status']:<16} {size:>7} {row['prompts']:>7,} {row['tokens']:>6,} "
        f"{row['queries']:>8,} {fall} {error} {row['seconds']:4.0f}"
    )


if __name__ == "__main__":
    main()
