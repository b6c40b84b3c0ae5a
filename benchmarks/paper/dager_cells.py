"""Cells of DAGER's tables: which model, set, batch size and attack; how many batches; on which device; in which order.

A cell's name is model/set/texts/attack, as in 'gpt2/cola/8/ours'. Attacks:

    ours    the attack of this package that fits the model, on the part of the update that it reads
    dager   DAGER as published (`attacks/baselines/dager.py`), swept as its authors tune it (`dager_sweep.py`)
    tag     TAG, arXiv 2103.06819, our implementation (`baselines/tag.py`)
    lamp    LAMP, arXiv 2202.08827, our implementation (`baselines/lamp.py`)

Order: the first batch of every cell, then its second and third, up to 10, 30 and 100; cheap cells first.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch

from paper.dager_models import ENTRIES
from published import published_cells, published_hours

RIVALS = ("tag", "lamp")
LARGEST_RIVAL = 4  # texts: beyond, a batch of a rival costs more than the whole table of ours
LARGEST_DAGER_ENCODER = 2  # texts: Algorithm 3 is exponential in the length
LEVELS = (1, 3, 10, 30, 100)
SIZES = (1, 2, 4, 8)
# CPU cells that a core cannot do in minutes: (attack, model) → texts from which a GPU is needed.
GPU_FROM = {("ours", "gpt2"): 65, ("ours", "gpt2-nexttoken"): 65, ("dager", "gpt2"): 32, ("dager", "bert"): 2}
GPU_FROM |= {("dager", "gpt2-nexttoken"): 32, ("ours", "smollm2"): 33}
GPU_FROM |= {(rival, model): 1 for rival in RIVALS for model in ("gpt2", "bert")}
GPU_FROM |= {(rival, "minilm"): 2 for rival in RIVALS}
# Rough seconds of a batch of one text, to sort by; a GPU divides them all alike.
SECONDS = {"ours": 1.0, "dager": 20.0, "tag": 300.0, "lamp": 400.0}


@dataclass(frozen=True)
class Cell:
    """A cell that can be run."""

    model: str
    data: str
    texts: int
    attack: str

    @property
    def name(self) -> str:
        """What --cells matches."""
        return f"{self.model}/{self.data}/{self.texts}/{self.attack}"

    @property
    def needs_gpu(self) -> bool:
        """Whether a processor core would take more than minutes a batch."""
        least = GPU_FROM.get((self.attack, self.model))
        return ENTRIES[self.model].needs_gpu or (least is not None and self.texts >= least)

    @property
    def cost(self) -> float:
        """Seconds a batch, roughly: for the order only."""
        depth = {"gpt2-large": 3.0, "llama2-7b": 0.3, "llama2-7b-deep": 3.0, "bert": 4.0}.get(self.model, 1.0)
        length = {"cola": 1.0, "sst2": 2.5, "rotten_tomatoes": 2.5}.get(self.data, 1.0)
        return SECONDS[self.attack] * depth * length * self.texts


@dataclass(frozen=True)
class Spec:
    """One batch. Whatever changes its result is in here, but for the code itself; equal specs need no second run."""

    model: str
    data: str
    texts: int
    attack: str
    batch: int
    seed: int
    data_sha256: str
    settings: str  # of the attack, where they are not its defaults: budgets

    @property
    def cell(self) -> Cell:
        """The cell that the batch counts in."""
        return Cell(self.model, self.data, self.texts, self.attack)

    @property
    def key(self) -> str:
        """A hash of the spec."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def all_cells() -> list[Cell]:
    """Every cell of Tables 1, 2, 3, 5 and 6 that is ever run, and the same of real weights."""
    asked = [(cell.model, cell.data, cell.method, cell.texts) for cell in published_cells()] + list(published_hours())
    cells = [cell for row in asked for cell in cells_of(*row)]
    cells += [Cell("minilm", data, texts, "ours") for data in _SETS for texts in SIZES]
    cells += [Cell("minilm", data, texts, rival) for rival in RIVALS for data in _SETS for texts in (1, 2, 4)]
    cells += [Cell("minilm", data, texts, "dager") for data in _SETS for texts in (1, 2)]
    cells += [Cell("smollm2", "rotten_tomatoes", texts, attack) for texts in (16, 32) for attack in ("ours", "dager")]
    cells += [Cell("llama2-7b-deep", "rotten_tomatoes", texts, "ours") for texts in (1, 16, 64)]
    return list(dict.fromkeys(cells))


def cells_of(model: str, data: str, method: str, texts: int) -> list[Cell]:
    """The cells whose results stand beside a published number."""
    if method in ("TAG", "LAMP"):
        return [Cell(model, data, texts, method.lower())] if texts <= LARGEST_RIVAL else []
    cells = [Cell(model, data, texts, "ours")]
    if not model.startswith("llama") and (model != "bert" or texts <= LARGEST_DAGER_ENCODER):
        cells.append(Cell(model, data, texts, "dager"))
    return cells


def why_not_run(model: str, method: str, texts: int) -> str:
    """Why a published number has none of ours beside it."""
    if method in ("TAG", "LAMP") and texts > LARGEST_RIVAL:
        return f"not run: rivals up to {LARGEST_RIVAL} texts"
    if method in ("TAG", "LAMP"):
        return "not run: no time left on a GPU"
    cell = Cell(model, "cola", texts, "ours")
    return "not run: needs a GPU" if cell.needs_gpu else "not run: no time on this machine"


def choose(patterns: Sequence[str], device: str, data: Iterable[str]) -> list[Cell]:
    """Cells that match a pattern (all if there is none) and can be run on the device."""
    sets = set(data)
    return [
        cell
        for cell in all_cells()
        if cell.data in sets
        and (device != "cpu" or not cell.needs_gpu)
        and (not patterns or any(fnmatch(cell.name, pattern) for pattern in patterns))
    ]


def in_order(cells: Iterable[Cell], num_batches: int) -> list[tuple[Cell, int]]:
    """Cells with the numbers of their batches, a level at a time, cheap cells first."""
    by_cost = sorted(cells, key=lambda cell: cell.cost)
    levels = [0, *(level for level in LEVELS if level < num_batches), num_batches]
    return [
        (cell, batch) for start, stop in itertools.pairwise(levels) for cell in by_cost for batch in range(start, stop)
    ]


_SETS = ("cola", "sst2", "rotten_tomatoes")
