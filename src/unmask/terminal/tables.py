"""The tables of attacks and defences, for people and for machines."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from unmask.attacks.table import ATTACKS
from unmask.defences.oracles import ORACLE_DEFENCES
from unmask.defences.table import DEFENCES
from unmask.defences.vector_table import VECTOR_DEFENCES
from unmask.terminal import print_json


def print_attacks(as_json: bool) -> None:
    """Every attack with what it needs and claims."""
    rows = [
        {
            "name": name,
            "channel": kind.channel,
            "recovers": kind.secret.value,
            "needs": kind.needs,
            "works_on": kind.works_on,
            "claims": kind.claims,
            "limits": kind.limits,
            "source": kind.source,
            "is_baseline": kind.is_baseline,
            "example": kind.example,
            "settings": {each.name: each.expected for each in kind.settings} if as_json else {},
        }
        for name, kind in ATTACKS.items()
    ]
    hint = (
        "choose one with --attack NAME, or with `attacks` in a plan; --json shows claims, limits, settings and sources"
    )
    _print(rows, ("name", "channel", "recovers", "works_on", "is_baseline"), as_json, hint)


def print_defences(as_json: bool) -> None:
    """Every defence with what it protects."""
    of_vectors = {name: kind for name, kind in VECTOR_DEFENCES.items() if name not in DEFENCES}
    tables = (("updates, states and caches", DEFENCES), ("vectors", of_vectors), ("services", ORACLE_DEFENCES))
    rows = [
        {
            "name": name,
            "protects": subject,
            "does": kind.summary,
            "settings": ", ".join(map(str, kind.settings)),
            "example": kind.example,
        }
        for subject, table in tables
        for name, kind in table.items()
    ]
    hint = "choose one with --defence, or with `defences` in a plan; docs/defences.md shows what still leaks with each"
    _print(rows, ("name", "protects", "does", "example"), as_json, hint)


def _print(rows: list[dict[str, Any]], shown: tuple[str, ...], as_json: bool, hint: str) -> None:
    if as_json:
        print_json(rows)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in shown:
        table.add_column(column.replace("_", " "), overflow="fold", no_wrap=column == "name")
    for row in rows:
        table.add_row(*({True: "yes", False: ""}.get(row[column], row[column]) for column in shown))
    console = Console()
    console.print(table)
    console.print(hint, style="dim", highlight=False)
