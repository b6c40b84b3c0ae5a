"""The map of the leak: what each protocol and defence leaves of a client's texts, and what it costs the update.

python benchmarks/run.py gradients leak_map --data texts.tsv [--draws 3] [--models minilm-l6] [--only lora int8 …]
python benchmarks/run.py gradients leak_map --processes 15 --limit 300      many cores, one thread for each cell
python benchmarks/run.py gradients leak_map --show          the tables, the plot and the page of what was measured

`--data` is a file with one text a line, up to its first tab; without it, texts are invented. Each draw takes texts of
its own, and adapters of later rounds were trained on others. A cell that ends is appended to --out
(benchmarks/results/leak_map.jsonl) and is not measured again; one that is stopped after --limit seconds says so.
`against_papers.py` has DAGER under noise.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
from gradients.client_cell import AGGREGATE, TASKS, ClientCell, draw_texts, measure_cell
from gradients.leak_map_show import show
from invented import invented
from machine import machine

import unmask

RESULTS = Path(__file__).parents[1] / "results" / "leak_map.jsonl"
STOPPED = "STOPPED"
DEFENCES = (
    "",
    *(f"noise:sigma={sigma}" for sigma in ("1e-8", "1e-7", "1e-6", "1e-5", "1e-4", "1e-3", "1e-2")),
    *(f"laplace:sigma={sigma}" for sigma in ("1e-5", "1e-4", "1e-3")),
    *("bf16", "fp16", "fp8", "int8", "int8:stochastic=true"),
    *(f"topk:share={share}" for share in ("0.1", "0.01", "0.001")),
    *("random:share=0.5", "clip:norm=1", "withhold:pattern={embeddings}", "withhold:pattern={first}"),
    *(f"{AGGREGATE}{clients}" for clients in (2, 4)),
)
LATER = "steps=2"  # of earlier rounds, on other texts
PROTOCOLS = (
    *(f"fedavg:local_steps={steps},learning_rate=0.01" for steps in (1, 4, 10, 20)),
    *(f"fedavg:local_steps={steps},optimizer=adamw,weight_decay=0.01" for steps in (1, 4)),
    *(
        f"dpsgd:noise_multiplier={sigma},max_grad_norm=1.0,dataset_size=1000"
        for sigma in ("1e-05", "0.0001", "0.001", "0.01", "0.1", "1.0")
    ),
    "lora:rank=8",
    *(f"lora:rank={rank},{LATER}" for rank in (4, 8, 32)),
)
STEPS = (  # of LoRA clients, which a decoder's tokens are read from
    f"lora:rank=8,{LATER},local_steps=4,optimizer=sgd,local_learning_rate=0.01",
    *(f"lora:rank=8,{LATER},local_steps={steps}" for steps in (1, 2, 3, 4)),
    *(f"lora:rank=8,local_steps={steps}" for steps in (2, 3, 4)),
)
# Flower's template for LLMs (FlowerTune), and its settings changed in turn. With dropout, clients train as they do.
_ROUND = "local_steps=10,max_grad_norm=1.0"
FLOWER = (
    f"lora:rank=32,alpha=64,dropout=0.075,{_ROUND}",
    f"lora:rank=32,alpha=64,{_ROUND}",
    "lora:rank=32,alpha=64,local_steps=10",
    f"lora:rank=32,alpha=64,{_ROUND},batch_size=8",
    f"lora:rank=32,alpha=64,{_ROUND},weight_decay=0.01",
    f"lora:rank=32,alpha=64,{_ROUND},optimizer=sgd,local_learning_rate=0.01",
    *(f"lora:rank=32,alpha=64,local_steps={steps},max_grad_norm=1.0" for steps in (2, 4)),
    f"lora:rank=8,{_ROUND}",
    f"lora:rank=32,alpha=64,{LATER},{_ROUND}",
)
DECODER, ENCODER = TASKS
CELLS = (
    *(ClientCell(model, "fedsgd", defence) for defence in DEFENCES for model in TASKS),
    *(ClientCell(model, protocol) for protocol in PROTOCOLS for model in TASKS),
    *(ClientCell(model, f"lora:rank=8,{LATER}", texts=16) for model in TASKS),
    *(ClientCell(DECODER, protocol) for protocol in STEPS),
    *(ClientCell(DECODER, protocol, texts=texts) for protocol in FLOWER for texts in (16,)),
    *(ClientCell(DECODER, f"lora:rank=32,alpha=64,{_ROUND}", texts=texts) for texts in (4, 8)),
)


def main() -> None:
    """Measure the cells that are missing, or show what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a text a line, up to its first tab; else texts are invented")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--first-draw", type=int, default=0)
    parser.add_argument("--models", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--texts", type=int, nargs="+", help="other numbers of texts than the cells' own")
    parser.add_argument("--only", nargs="+", default=[""], help="cells whose protocol or defence contains one of these")
    parser.add_argument("--show", action="store_true", help="tables, plot and page of what was measured")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON lines")
    parser.add_argument("--processes", type=int, default=1, help="cells at a time, one thread each")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one cell")
    parser.add_argument("--total", type=float, default=float("inf"), help="seconds for all of them")
    options = parser.parse_args()
    if not options.show and min(options.texts or [1]) < 1:
        parser.error(f"--texts must be 1 or more, got {options.texts}")
    if not options.show and not any(wanted_cells(options)):
        parser.error(f"no client's protocol or defence contains {' or '.join(options.only)}")
    if not options.show:
        measure(options)
    show(in_order(read(options.out)), draw=options.out.resolve() == RESULTS)


def read(path: Path) -> list[dict[str, Any]]:
    """Every cell that was measured."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def in_order(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As the table of clients has them, whenever they were measured."""
    places = {(cell.protocol, cell.defence): place for place, cell in reversed(list(enumerate(CELLS)))}
    return sorted(cells, key=lambda c: (places.get((c["protocol"], c["defence"]), len(CELLS)), c["texts"], c["draw"]))


def wanted_cells(options: argparse.Namespace) -> Iterator[ClientCell]:
    """The cells that are asked for: all of a draw before the next one."""
    for draw in range(options.first_draw, options.first_draw + options.draws):
        chosen = (
            replace(cell, draw=draw, texts=texts)
            for cell in CELLS
            for texts in options.texts or [cell.texts]
            if cell.model in options.models and any(part in f"{cell.protocol} {cell.defence}" for part in options.only)
        )
        yield from dict.fromkeys(chosen)


def measure(options: argparse.Namespace) -> None:
    """The missing cells, one line each, every one in a process of its own that is stopped after the limit."""
    source = options.data.stem if options.data else "invented"
    done = {(*(c[key] for key in asdict(CELLS[0])), c["data"]) for c in read(options.out)}
    waiting = [cell for cell in wanted_cells(options) if (*asdict(cell).values(), source) not in done]
    running: dict[ClientCell, tuple[SpawnProcess, float]] = {}
    spawn, begun = multiprocessing.get_context("spawn"), time.monotonic()
    while waiting or running:
        while waiting and len(running) < options.processes:
            cell = waiting.pop(0)
            process = spawn.Process(target=measure_into, args=(cell, options.data, options.out))
            process.start()
            running[cell] = process, time.monotonic()
        for cell, (process, since) in list(running.items()):
            seconds = time.monotonic() - since
            is_late = seconds > options.limit or time.monotonic() - begun > options.total
            if process.is_alive() and not is_late:
                continue
            del running[cell]
            if process.is_alive():
                process.kill()
                if seconds > options.limit:
                    stopped = {"status": STOPPED, "reason": f"stopped after {seconds:.0f} s", "seconds": seconds}
                    append(options.out, asdict(cell) | {"data": source, "machine": machine()} | stopped)
            process.join()
            print(f"{seconds:5.0f} s  {process.exitcode}  {len(waiting)} wait  {asdict(cell)}", flush=True)
        if time.monotonic() - begun > options.total:
            waiting.clear()
        time.sleep(0.1)


def measure_into(cell: ClientCell, data: Path | None, out: Path) -> None:
    """Measure one cell, and append it."""
    torch.set_num_threads(1)
    count = cell.num_drawn + cell.texts  # a batch more, that the client has not seen: what chance would give
    if data is None:
        drawn = draw_texts(invented(1000), count, cell.draw)
    else:
        drawn = draw_texts([line.split("\t")[0] for line in data.read_text().splitlines() if line], count, cell.draw)
    measured = measure_cell(unmask.load_model(cell.model), cell, drawn[: cell.num_drawn], drawn[cell.num_drawn :])
    append(out, measured | {"data": data.stem if data else "invented"})


def append(path: Path, cell: dict[str, Any]) -> None:
    """One line more."""
    with path.open("a") as file:
        file.write(json.dumps(cell) + "\n")


if __name__ == "__main__":
    main()
