"""The clients of the map of the leak, and what was measured of each over draws of texts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Cell = dict[str, Any]


@dataclass(frozen=True)
class Client:
    """A client, and what was measured of it, a cell for each draw; `ended` leaves out those that were stopped."""

    model: str
    protocol: str
    defence: str
    texts: int
    data: str
    draws: tuple[Cell, ...]

    @property
    def batch(self) -> str:
        """How many texts, and where they are from."""
        return f"{self.texts} of {self.data}"

    @property
    def ended(self) -> list[Cell]:
        return [cell for cell in self.draws if "recall" in cell]

    @property
    def num_stopped(self) -> int:
        return len(self.draws) - len(self.ended)

    @property
    def num_texts(self) -> int:
        """Texts of all draws, those of other clients in a sum included."""
        clients = int(self.defence.rpartition("clients=")[2]) if "clients=" in self.defence else 1
        return clients * self.texts * len(self.ended)

    def total(self, key: str) -> int:
        return sum(cell[key] for cell in self.ended)

    def median(self, key: str) -> float:
        return statistics.median(cell[key] for cell in self.ended)

    def span(self, key: str) -> tuple[float, float]:
        values = [cell[key] for cell in self.ended]
        return min(values), max(values)


def clients_of(cells: Sequence[Cell]) -> list[Client]:
    """Cells of one client together, in the order in which they were measured."""
    keys = ("model", "protocol", "defence", "texts", "data")
    grouped: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        grouped.setdefault(tuple(cell[key] for key in keys), []).append(cell)
    return [Client(*key, tuple(draws)) for key, draws in grouped.items()]


def wilson(hits: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share, by Wilson's score."""
    z, share = 1.96, hits / total
    centre, spread = share + z * z / (2 * total), z * ((share * (1 - share) + z * z / (4 * total)) / total) ** 0.5
    scale = 1 + z * z / total
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def join(numbers: Sequence[float], style: str) -> str:
    """The least and the largest, or one of them where they look the same."""
    return "–".join(dict.fromkeys(format(number, style) for number in (min(numbers), max(numbers))))
