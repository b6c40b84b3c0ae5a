"""The map of the leak: what each protocol and defence leaves of a client's texts, and what it costs the update.

python benchmarks/run.py gradients leak_map [--models smollm2-135m minilm-l6] [--texts 4 16] [--only noise int8 …]
python benchmarks/run.py gradients leak_map --show          the tables and plots of what was measured
python benchmarks/run.py gradients leak_map --models minilm-l6 --texts 2 4 8 --only fedavg --out fedavg.jsonl

Every cell is appended to --out (benchmarks/results/leak_map.jsonl) as it ends; a cell that is there is not measured
again. Where noise is added, the token sets of DAGER as published, with fixed tolerances, are read from the same update;
against_papers.py has it tuned.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from gradients.leak_map_show import show
from invented import invented
from machine import machine

import unmask
from unmask.attacks.baselines.dager import Dager, FrameTokens
from unmask.attacks.baselines.dager_claim import AcceptedSequences, TokenSets
from unmask.attacks.baselines.dager_spans import SequenceCheck
from unmask.attacks.run import Progress
from unmask.defences import measure_distortion, parse_defence, secure_aggregate
from unmask.evidence import GradientEvidence
from unmask.models import Model
from unmask.protocols.dpsgd import PrivateUpdate
from unmask.protocols.table import parse_protocol
from unmask.scores import score_texts

AGGREGATE = "aggregate:clients="
RESULTS = Path(__file__).parents[1] / "results" / "leak_map.jsonl"
TASKS = {"smollm2-135m": "next_token", "minilm-l6": "classification"}
EMBEDDINGS = {"smollm2-135m": "embed_tokens", "minilm-l6": "embeddings."}
FIRST_BLOCKS = {
    "smollm2-135m": "embed_tokens+layers.0.+layers.1.",
    "minilm-l6": "embeddings.+encoder.layer.0.+encoder.layer.1.",
}
# (protocol, defence); {embeddings} and {first} are names of the model's own parameters.
CELLS = (
    ("fedsgd", ""),
    *(("fedsgd", f"noise:sigma={sigma}") for sigma in ("1e-9", "1e-8", "1e-7", "1e-6", "1e-5", "1e-4", "1e-3", "1e-2")),
    *(("fedsgd", f"laplace:sigma={sigma}") for sigma in ("1e-5", "1e-4", "1e-3")),
    ("fedsgd", "clip:norm=1"),
    *(("fedsgd", f"topk:share={share}") for share in ("0.1", "0.01", "0.001")),
    *(("fedsgd", f"random:share={share}") for share in ("0.5", "0.1")),
    ("fedsgd", "bf16"),
    ("fedsgd", "fp8"),
    ("fedsgd", "int8"),
    ("fedsgd", "int8:stochastic=true"),
    ("fedsgd", "withhold:pattern={embeddings}"),
    ("fedsgd", "withhold:pattern={first}"),
    ("fedavg:local_steps=1,learning_rate=0.01", ""),
    *((f"fedavg:local_steps={steps},learning_rate=0.01", "") for steps in (4, 10)),
    ("fedavg:local_steps=4,learning_rate=5e-05,optimizer=adamw,weight_decay=0.01", ""),
    *(
        (f"dpsgd:noise_multiplier={sigma},max_grad_norm=1.0,dataset_size=1000", "")
        for sigma in ("1e-06", "1e-05", "0.0001", "0.001", "0.01", "0.1", "1.0")
    ),
    ("lora:rank=8", ""),
    ("lora:rank=8,steps=1", ""),
    *(("fedsgd", f"{AGGREGATE}{clients}") for clients in (2, 4)),
)


class TokensOnly(Dager):
    """The faithful DAGER up to its token sets, which is all that noise leaves of it."""

    def grow_prefixes(
        self, sets: TokenSets, check: SequenceCheck, frame: FrameTokens, num_texts: int | None, progress: Progress
    ) -> AcceptedSequences:
        """None."""
        return AcceptedSequences([], 0)

    def search_products(
        self, sets: TokenSets, check: SequenceCheck, frame: FrameTokens, num_texts: int | None, progress: Progress
    ) -> AcceptedSequences:
        """None."""
        return AcceptedSequences([], 0)


def main() -> None:
    """Measure the cells that are missing, or show what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(TASKS))
    parser.add_argument("--texts", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--only", nargs="+", default=[""], help="cells whose protocol or defence contains one of these")
    parser.add_argument("--show", action="store_true", help="tables and plots of what was measured")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON lines")
    parser.add_argument("--threads", type=int, help="of torch")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if not options.show:
        for name in options.models:
            measure(name, options.texts, options.only, options.out)
    show(read(options.out), draw=options.out == RESULTS)


def read(path: Path) -> list[dict[str, Any]]:
    """Every cell that was measured."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(name: str, counts: list[int], only: list[str], path: Path) -> None:
    """The missing cells of a model, one line each."""
    done = {(cell["model"], cell["texts"], cell["protocol"], cell["defence"]) for cell in read(path)}
    model = unmask.load_model(name)
    for count in counts:
        for protocol, defence in CELLS:
            wanted = any(part in f"{protocol} {defence}" for part in only)
            if wanted and (name, count, protocol, defence) not in done:
                cell = measure_cell(name, model, count, protocol, defence)
                with path.open("a") as file:
                    file.write(json.dumps(cell) + "\n")
                print({key: cell[key] for key in cell if key not in ("machine", "reason")}, flush=True)


def measure_cell(name: str, model: Model, count: int, protocol: str, defence: str) -> dict[str, Any]:
    """One client, one protocol, one defence, one attack, and the score that only an auditor can give."""
    clients = int(defence.removeprefix(AGGREGATE)) if defence.startswith(AGGREGATE) else 1
    texts = [tuple(model.encode(text)) for text in invented(clients * count)]
    update = parse_protocol(protocol)(model, texts[:count], task=TASKS[name])
    evidence = defended(name, model, update, defence, [texts[n * count : (n + 1) * count] for n in range(1, clients)])
    distortion = measure_distortion(update.evidence, evidence)
    started = time.perf_counter()
    recovery = unmask.recover_text(evidence, model)
    seconds = time.perf_counter() - started
    # The last token of a next-token text is only a label: it leaves no vector among the inputs.
    held = {token for tokens in texts for token in (tokens[:-1] if TASKS[name] == "next_token" else tokens)}
    found = recovery.value.token_set
    certain = [text.tokens for text in recovery.value.certain]
    score = score_texts(recovery.value.expand(), texts)
    return {
        "model": name,
        "texts": count,
        "protocol": protocol,
        "defence": defence,
        "status": recovery.status.name,
        "reason": recovery.reason,
        "token_precision": len(found & held) / len(found) if found else None,
        "token_recall": len(found & held) / len(held),
        "exact": score.exact_rate,
        "certain": len(certain),
        "false_certain": sum(tokens not in texts for tokens in certain),
        "rouge1": score.rouge1,
        "rouge2": score.rouge2,
        "cosine": distortion.cosine,
        "relative_norm": distortion.relative_norm,
        "epsilon": update.epsilon if update.epsilon < float("inf") else None,
        "seconds": seconds,
        "dager_recall": dager_recall(evidence, model, held) if "noise" in defence or not defence else None,
        "machine": machine(),
    }


def defended(name: str, model: Model, update: PrivateUpdate, defence: str, others: list[Any]) -> GradientEvidence:
    """What the server sees: the update after a defence, or the sum with the updates of other clients."""
    if not defence:
        return update.evidence
    if others:
        return secure_aggregate(
            [update.evidence, *(unmask.observe_gradients(model, texts, task=TASKS[name]) for texts in others)]
        )
    text = defence.format(embeddings=EMBEDDINGS[name], first=FIRST_BLOCKS[name])
    return parse_defence(text)(update.evidence, torch.Generator().manual_seed(0))


def dager_recall(evidence: GradientEvidence, model: Model, held: set[int]) -> float:
    """The share of the tokens that the faithful DAGER's token sets hold."""
    return len(TokensOnly()(evidence, model).value.token_set & held) / len(held)


if __name__ == "__main__":
    main()
