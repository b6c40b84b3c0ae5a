"""What LLM federations send: few digits, noise, LoRA beyond its rank, AdamW, local steps. Tokens and texts, by draws.

python benchmarks/run.py gradients federations --data texts.tsv [--draws 3] [--only lora bf16] [--models smollm2-135m]
python benchmarks/run.py gradients federations --show                   the table of what was measured

`--data` is a file with one text a line, up to its first tab; each draw takes texts of its own, and the adapters of
later rounds were trained on others. Every cell is appended to --out as it ends; one that is there is not measured
again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from machine import machine

import unmask
from unmask.defences import parse_defence
from unmask.models import Model
from unmask.protocols.table import parse_protocol

RESULTS = Path(__file__).parents[1] / "results" / "federations.jsonl"
TASKS = {"smollm2-135m": "next_token", "minilm-l6": "classification"}
LATER = "steps=2"  # of earlier rounds, on other texts
BLURS = ("bf16", "fp16", "fp8", "int8", "topk:share=0.1", "noise:sigma=1e-5", "noise:sigma=1e-4")
# Flower's template for LLMs (FlowerTune), and its settings switched off in turn. With dropout clients train as they do.
_ROUND = "local_steps=10,max_grad_norm=1.0"
FLOWER = (
    (f"lora:rank=32,alpha=64,dropout=0.075,{_ROUND}", 16),
    (f"lora:rank=32,alpha=64,{_ROUND}", 16),
    (f"lora:rank=32,alpha=64,{_ROUND}", 8),
    (f"lora:rank=32,alpha=64,{_ROUND}", 4),
    ("lora:rank=32,alpha=64,local_steps=10", 16),
    (f"lora:rank=32,alpha=64,{_ROUND},batch_size=8", 16),
    (f"lora:rank=32,alpha=64,{_ROUND},weight_decay=0.01", 16),
    (f"lora:rank=32,alpha=64,{_ROUND},optimizer=sgd,local_learning_rate=0.01", 16),
    *((f"lora:rank=32,alpha=64,local_steps={steps},max_grad_norm=1.0", 16) for steps in (2, 4)),
    *((f"lora:rank=8,local_steps={steps},max_grad_norm=1.0", 16) for steps in (2, 4, 10)),
    (f"lora:rank=8,dropout=0.075,{_ROUND}", 16),
    (f"lora:rank=32,alpha=64,{LATER},local_steps=1,max_grad_norm=1.0", 16),
    (f"lora:rank=32,alpha=64,{LATER},{_ROUND}", 16),
    *((f"lora:rank=8,{LATER},local_steps={steps}", 8) for steps in (2, 3, 4)),
    *((f"lora:rank=8,local_steps={steps}", 8) for steps in (3, 4)),
)
# (model, protocol, number of texts); a defence stands behind a plus
CELLS = (
    *((name, f"fedsgd + {blur}", 8) for blur in BLURS for name in TASKS),
    *((name, f"fedavg:local_steps={steps},learning_rate=0.01", 8) for steps in (1, 4, 10, 20) for name in TASKS),
    *(("smollm2-135m", f"lora:rank={rank},{LATER}", count) for rank in (4, 8, 32) for count in (8, 16)),
    *(("minilm-l6", f"lora:rank={rank},{LATER}", count) for rank in (8, 32) for count in (8, 16)),
    *(("smollm2-135m", f"lora:rank=8,{LATER},local_steps=1", count) for count in (4, 8, 16)),
    *(("smollm2-135m", "lora:rank=8,local_steps=2", count) for count in (4, 8, 16)),
    ("smollm2-135m", f"lora:rank=8,{LATER},local_steps=4,optimizer=sgd,local_learning_rate=0.01", 4),
    *(
        ("smollm2-135m", f"fedavg:local_steps={steps},optimizer=adamw,weight_decay=0.01", count)
        for steps in (1, 4)
        for count in (4, 16)
    ),
    *(("smollm2-135m", protocol, count) for protocol, count in FLOWER),
)
NUM_EARLIER = 4


def main() -> None:
    """Measure the cells that are missing, or show what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a text a line, up to its first tab")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[""], help="cells whose protocol contains one of these")
    parser.add_argument("--models", nargs="+", default=list(TASKS))
    parser.add_argument("--show", action="store_true", help="the table of what was measured")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON lines")
    parser.add_argument("--threads", type=int, help="of torch")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if not options.show:
        if options.data is None:
            parser.error("--data is needed to measure: a file with one text a line")
        measure(options)
    show(read(options.out))


def read(path: Path) -> list[dict[str, Any]]:
    """Every cell that was measured."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(options: argparse.Namespace) -> None:
    """The missing cells, one line each."""
    texts = [line.split("\t")[0] for line in options.data.read_text().splitlines() if line]
    done = {(c["model"], c["protocol"], c["texts"], c["data"], c["draw"]) for c in read(options.out)}
    models: dict[str, Model] = {}
    for name, protocol, count in CELLS:
        for draw in range(options.draws):
            wanted = name in options.models and any(part in protocol for part in options.only)
            if not wanted or (name, protocol, count, options.data.stem, draw) in done:
                continue
            model = models.setdefault(name, unmask.load_model(name))
            cell = measure_cell(model, TASKS[name], protocol, draw_texts(texts, count + NUM_EARLIER, draw), count)
            cell = {"model": name, "protocol": protocol, "texts": count, "data": options.data.stem, "draw": draw} | cell
            with options.out.open("a") as file:
                file.write(json.dumps(cell) + "\n")
            print({key: value for key, value in cell.items() if key not in ("machine", "reason")}, flush=True)


def draw_texts(texts: list[str], count: int, draw: int) -> list[str]:
    """Texts of one draw; equal draws have equal texts."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(draw)).tolist()
    return [texts[place] for place in order[:count]]


def measure_cell(model: Model, task: str, protocol: str, texts: list[str], count: int) -> dict[str, Any]:
    """One client, one attack, and the scores that only an auditor can give."""
    options: dict[str, Any] = {"earlier_texts": texts[count:]} if f",{LATER}" in protocol else {}
    options |= {"train_mode": True} if "dropout" in protocol else {}
    protocol, _, defence = protocol.partition(" + ")
    evidence = parse_protocol(protocol)(model, texts[:count], task=task, **options).evidence
    if defence:
        evidence = parse_defence(defence)(evidence, torch.Generator().manual_seed(count))
    sequences = [tuple(model.encode(text)) for text in texts[:count]]
    everyone = {token for tokens in sequences for token in tokens}
    # The last token of a next-token text is only a label, which reaches no adapter; rows of a tied embedding show it.
    reaches = {token for tokens in sequences for token in (tokens[:-1] if task == "next_token" else tokens)}
    held = everyone if protocol.startswith("fed") else reaches
    started = time.perf_counter()
    recovery = unmask.recover_text(evidence, model)
    seconds = time.perf_counter() - started
    found = recovery.value.token_set
    certain = [text.tokens for text in recovery.value.certain]
    return {
        "status": recovery.status.name,
        "reason": recovery.reason,
        "tokens": len(held),
        "recall": len(found & held) / len(held),
        "false": len(found - everyone),
        "certain": len(certain),
        "false_certain": sum(tokens not in sequences for tokens in certain),
        "exact": sum(tokens in certain for tokens in sequences),
        "guessed": sum(tokens in {text.tokens for text in recovery.value.texts} for tokens in sequences),
        "seconds": seconds,
        "machine": machine(),
    }


def show(cells: list[dict[str, Any]]) -> None:
    """A line for each client, over its draws."""
    print("| model | client | texts | draws | recall of tokens | false | texts certain | with guesses | seconds |")
    print("| --- | --- | --: | --: | --- | --: | --- | --- | --- |")
    for name, protocol, count in CELLS:
        own = [c for c in cells if (c["model"], c["protocol"], c["texts"]) == (name, protocol, count)]
        if own:
            recall, seconds = ([cell[key] for cell in own] for key in ("recall", "seconds"))
            exact, guessed = (", ".join(f"{cell[key]}" for cell in own) for key in ("exact", "guessed"))
            print(
                f"| {name} | `{protocol}` | {count} | {len(own)} | {statistics.median(recall):.2f} "
                f"({min(recall):.2f}–{max(recall):.2f}) | {sum(cell['false'] for cell in own)} | {exact} of {count} | "
                f"{guessed} of {count} | "
                f"{min(seconds):.0f}–{max(seconds):.0f} |"
            )


if __name__ == "__main__":
    main()
