"""What defences of stored embeddings leave: of the search (neighbours that stay), and of the texts (those recovered).

    python benchmarks/run.py outputs vectors-utility [--model minilm-l6] [--data FILE.tsv] [--corpus 500] [--texts 0]
    python benchmarks/run.py outputs vectors-utility --draw FOUND.json FIGURE.svg      needs matplotlib

Of each defence: recall@10 among `--corpus` texts, and of the first `--texts` of at most `--max-length` tokens how many
the attack recovers exactly, how many it is certain of, and seconds a text. `--texts 0` measures the search alone.
Texts are invented where no file is given; of a file, the first column of each line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from machine import machine
from outputs.encoders import read_lines

from unmask.attacks.recover import recover_text
from unmask.defences.vector_table import VectorDefence, parse_vector_defence
from unmask.evidence.vectors import VectorEvidence
from unmask.models import Model, load_model
from unmask.protocols.vectors import observe_vectors
from unmask.scores.reading import normalise_text
from unmask.scores.retrieval import neighbour_recall

DEFENCES = (
    *("none", "fp16", "int8", "signs", "cut:dimensions=192", "cut:dimensions=96", "cut:dimensions=48", "rotate"),
    *(f"noise:sigma={sigma}" for sigma in (0.001, 0.003, 0.01, 0.03, 0.1)),
    *(f"private:epsilon={epsilon}" for epsilon in (1, 10, 100, 1000)),
)


def main() -> None:
    """Measure every defence, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm-l6")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--skip", type=int, default=0, help="lines of the file that are left out")
    parser.add_argument("--corpus", type=int, default=500, help="texts that are searched")
    parser.add_argument("--texts", type=int, default=0, help="texts that are attacked")
    parser.add_argument("--max-length", type=int, default=12, help="tokens of a text that is attacked")
    parser.add_argument("--attack", default="default", help="with settings that bound its budget")
    parser.add_argument("--defences", nargs="+", default=list(DEFENCES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("JSON", "SVG"), help="draw what --out wrote before")
    options = parser.parse_args()
    if options.draw:
        return draw(json.loads(options.draw[0].read_text(encoding="utf-8"))["utility"], options.draw[1])
    print(machine())
    model = load_model(options.model, device=options.device)
    lines = list(dict.fromkeys(read_lines(options.data, options.skip, options.corpus)))[: options.corpus]
    corpus = observe_vectors(model, lines)
    short = [place for place, line in enumerate(lines) if len(model.encode(line)) <= options.max_length + 2]
    attacked = short[: options.texts]
    rows = []
    for text in options.defences:
        seen = _defend(corpus, None if text == "none" else parse_vector_defence(text), options.seed)
        row: dict[str, Any] = {"defence": text, "recall_at_10": neighbour_recall(corpus.vectors, seen.vectors)}
        if attacked:
            row |= measure_leak(seen, model, [lines[place] for place in attacked], attacked, options.attack)
        rows.append(row)
        print(
            "  ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{value}" for name, value in row.items())
        )
    if options.out:
        found = {"machine": machine(), "corpus": len(lines), "utility": rows}
        options.out.write_text(json.dumps(found, indent=2) + "\n")


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Texts that are read against neighbours that stay: good defences are at the lower right."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "unmask"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    at_once: dict[tuple[float, float], list[str]] = {}
    for row in rows:
        at_once.setdefault((round(row["recall_at_10"], 2), row["exact"] / row["texts"]), []).append(row["defence"])
    for (recall, leak), names in at_once.items():
        axes.plot(recall, leak, "o", color="tab:blue")
        axes.annotate(", ".join(names), (recall, leak), (0, 6), textcoords="offset points", rotation=35, fontsize=8)
    axes.set(
        xlabel="neighbours that stay (recall@10)", ylabel="texts read exactly", xlim=(-0.03, 1.15), ylim=(-0.05, 1.2)
    )
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    figure.savefig(file, bbox_inches="tight", metadata={"Date": None})


def _defend(evidence: VectorEvidence, defence: VectorDefence | None, seed: int) -> VectorEvidence:
    return evidence if defence is None else defence(evidence, torch.Generator().manual_seed(seed))


def measure_leak(
    evidence: VectorEvidence, model: Model, lines: Sequence[str], places: Sequence[int], attack: str
) -> dict[str, Any]:
    """Attack vectors together: exact texts, certain ones, false ones among these, and seconds a text."""
    start = time.perf_counter()
    recovery = recover_text(evidence.select(places), model, attack=attack)
    seconds = (time.perf_counter() - start) / len(lines)
    exact = certain = false = 0
    for text in recovery.value.texts:
        is_right = _read(model, text.tokens) == _read(model, model.encode(lines[text.row]))
        exact += is_right
        certain += text.certain
        false += text.certain and not is_right
    return {"texts": len(lines), "exact": exact, "certain": certain, "false": false, "seconds_a_text": seconds}


def _read(model: Model, tokens: Sequence[int]) -> str:
    special = model.special_tokens
    return normalise_text(model.decode([token for token in tokens if token not in special]), True)


if __name__ == "__main__":
    main()
