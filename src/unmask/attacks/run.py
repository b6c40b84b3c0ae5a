"""One run of an attack: its clock, its random numbers, and whoever watches it; handed down instead of each of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from unmask.progress import Progress as Progress
from unmask.progress import silent as silent
from unmask.recovery import Cost


@dataclass
class Run:
    """Begins when it is made. Equal seeds give equal runs."""

    seed: int = 0
    progress: Progress = silent
    started: float = field(default_factory=time.perf_counter, init=False)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def cost(self, **counts: int) -> Cost:
        """The seconds so far, and what was counted."""
        return Cost(seconds=time.perf_counter() - self.started, **counts)
