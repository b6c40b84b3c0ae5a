"""Stored batches of a folder, gathered by cell: means, texts, seconds, machine."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paper.dager_cells import RIVALS, Cell
from result_lines import Result


@dataclass(frozen=True)
class Summary:
    """Batches of one cell on one machine with one budget."""

    cell: Cell
    settings: str
    machine: str
    results: tuple[Result, ...]

    @property
    def num_batches(self) -> int:
        """How many."""
        return len(self.results)

    @property
    def on_gpu(self) -> bool:
        """Whether the batches ran there."""
        return any(one.get("device") == "cuda" for one in self.results)

    def rouge(self) -> tuple[float, float]:
        """Means × 100."""
        first, second = (100 * statistics.fmean(one[name] for one in self.results) for name in ("rouge1", "rouge2"))
        return first, second

    def rouge_without_cut(self) -> tuple[float, float]:
        """As the authors derive it: batches of more tokens than the width count as 0."""
        kept = [one if one["tokens"] <= one["width"] else {"rouge1": 0.0, "rouge2": 0.0} for one in self.results]
        first, second = (100 * statistics.fmean(one[name] for one in kept) for name in ("rouge1", "rouge2"))
        return first, second

    def total(self, name: str) -> int:
        """A count, summed over batches."""
        return sum(one[name] for one in self.results)

    def median(self, name: str) -> float:
        """Of seconds."""
        return statistics.median(one[name] for one in self.results)


def read_results(folder: Path) -> list[Result]:
    """All lines of all files paper_dager*.jsonl; a line that a killed run left unfinished is passed over."""
    lines = [line for path in sorted(folder.glob("paper_dager*.jsonl")) for line in path.read_text().split("\n")[:-1]]
    return [json.loads(line) for line in lines]


def summarise(results: Iterable[Result]) -> list[Summary]:
    """Batches of the tables by cell, settings and machine, in the order of the files."""
    groups: defaultdict[tuple[Cell, str, str], dict[int, Result]] = defaultdict(dict)
    for result in results:
        spec = result["spec"]
        if "figure" not in spec:
            cell = Cell(spec["model"], spec["data"], spec["texts"], spec["attack"])
            groups[cell, spec["settings"], result["machine"]][spec["batch"]] = result
    return [Summary(*key, tuple(batches.values())) for key, batches in groups.items()]


def every_batch(summaries: Sequence[Summary], cell: Cell) -> Summary | None:
    """What stands in the tables of texts: all batches with one budget, on whatever machine each of them ran.

    Of a batch that ran twice, the run that found less.
    """
    chosen = best(summaries, cell)
    if chosen is None:
        return None
    alike = [one for one in summaries if one.cell == cell and one.settings == chosen.settings]
    batches: dict[int, Result] = {}
    for result in (result for one in alike for result in one.results):
        batch = result["spec"]["batch"]
        held = batches.get(batch, result)
        batches[batch] = min(held, result, key=lambda run: (run["exact"], run["rouge2"]))
    machines = dict.fromkeys(one.machine for one in alike)
    return Summary(cell, chosen.settings, "; ".join(machines), tuple(batches.values()))


def best(summaries: Sequence[Summary], cell: Cell) -> Summary | None:
    """Batches of one machine, for times: of rivals the larger budget, which the GPU has; else the most batches."""
    found = [one for one in summaries if one.cell == cell]
    return max(found, key=lambda one: (cell.attack in RIVALS and one.on_gpu, one.num_batches), default=None)
