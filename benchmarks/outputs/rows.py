"""Rows of a table, one measurement each: written to a file after every row, so that a run can be resumed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable

from machine import machine
from outputs.prompts import markdown

Row = tuple[Callable[[], dict], dict]  # what measures it, and what it is about


def measure_rows(rows: Iterable[Row], options: argparse.Namespace) -> None:
    """Measure, print a table, write JSON after every row; with `--resume` those that are in the file are kept."""
    kept = {name: value for name, value in vars(options).items() if name not in ("data", "out", "resume")}
    kept["data"] = options.data and options.data.name
    found: list[dict] = json.loads(options.out.read_text())["rows"] if options.resume and options.out.exists() else []
    for make, about in rows:
        if any(about.items() <= row.items() for row in found):
            continue
        found.append({**about, **make()})
        document = {"machine": machine(), "mode": options.mode, "arguments": kept, "rows": found}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
        print(f"\n{found[-1]}", flush=True)
    print("\n" + markdown(found))
