"""A clock that goes on with the work, and what whoever watches an attack does not learn by it."""

from __future__ import annotations

from itertools import pairwise

from torch.overrides import TorchFunctionMode

from unmask.progress import Pace

FEW = 10_000  # calls of torch, with a tiny model: some seconds at a usual model's size
MOSTLY = 0.5


class WorkClock(TorchFunctionMode):
    """A clock that goes on with each call of torch, and notes what is told, and when."""

    def __init__(self, few: int = FEW) -> None:
        super().__init__()
        self.few, self.now, self.told, self.unknown = few, 0, [("the start", 0)], 0
        self.wrong: list[str] = []
        self.pace = Pace(lambda: self.now)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.now += 1
        self.unknown += self.now > self.few and self.pace.seconds_left is None
        return func(*args, **(kwargs or {}))

    def hear(self, step: str, done: int, total: int) -> None:
        self.pace(step, done, total)
        self.told.append((step, self.now))
        if not step.strip() or not 0 <= done <= total:
            self.wrong.append(f"'{step}', {done} of {total}")

    def faults(self) -> list[str]:
        """Times at which whoever watches does not learn what is done, or for the most part how long it will take."""
        faults = self.wrong if len(self.told) > 1 else ["nothing is told"]
        gaps = pairwise([*self.told, ("the end", self.now)])
        faults += [f"{end - begin} calls after '{step}'" for (step, begin), (_, end) in gaps if end - begin > self.few]
        if self.unknown > MOSTLY * self.now:
            faults.append(f"the time that is left is not known for {self.unknown} of {self.now} calls")
        return faults
