"""The map of the leak as one page, in the report's style: choose a measure, filter clients, open a cell's draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradients.leak_map_clients import Client, join, wilson
from jinja2 import FileSystemLoader
from markupsafe import Markup

from unmask.report.html.page_data import as_script
from unmask.report.html.render import content_security_policy, make_environment, read_asset
from unmask.safe_text import make_safe

TEMPLATES = Path(__file__).parent / "templates"
MEASURES = (("certain", "certain texts"), ("guessed", "texts, guesses included"), ("tokens", "tokens"))
COLUMNS = (
    *("draw", "data", "status", "tokens", "false tokens", "by chance", "certain", "false certain"),
    *("guessed right", "ROUGE-1", "seconds", "reason"),
)
GROUPS = (
    ("One gradient, under a defence", "fedsgd"),
    ("Local steps on the whole model", "fedavg"),
    ("DP-SGD", "dpsgd"),
    ("LoRA: adapters alone", "lora"),
)
LEVELS = ((0.0, "none"), (0.25, "1"), (0.5, "2"), (0.95, "3"), (1.01, "4"))


def write_page(clients: Sequence[Client], path: Path) -> None:
    """Write the page; it loads nothing, and runs its own script alone."""
    environment = make_environment(FileSystemLoader(TEMPLATES))
    style = read_asset("report.css") + (TEMPLATES / "leak_map.css").read_text()
    script = (TEMPLATES / "leak_map.js").read_text()
    places = {id(client): place for place, client in enumerate(clients)}
    cells = [cell for client in clients for cell in client.draws]
    page = environment.get_template("leak_map.html.j2").render(
        policy=content_security_policy(style, script),
        style=Markup(style),
        script=Markup(script),
        measures=MEASURES,
        models=_models(clients),
        num_draws=len({cell["draw"] for cell in cells}),
        sources=", ".join(sorted({make_safe(cell["data"]) for cell in cells})),
        machines="; ".join(sorted({make_safe(cell["machine"]) for cell in cells})),
        groups=[
            {"name": name, "rows": rows}
            for name, kind in GROUPS
            if (rows := _rows([c for c in clients if c.protocol.split(":")[0] == kind], _models(clients), places))
        ],
        data=as_script(
            {
                "columns": COLUMNS,
                "cells": [
                    {"shown": {key: shown(client, key) for key, _ in MEASURES}, "draws": _draws(client)}
                    for client in clients
                ],
            }
        ),
    )
    path.write_text(page, encoding="utf-8")


def shown(client: Client, measure: str) -> dict[str, str]:
    """What a cell says, and how strongly it is coloured."""
    if not client.ended:
        return {"label": f"stopped after {client.draws[0]['seconds']:.0f} s", "level": "stopped"}
    late = f", {client.num_stopped} stopped" if client.num_stopped else ""
    if measure == "tokens":
        share, (low, high) = client.median("recall"), client.span("recall")
        false = f", {client.total('false')} false" if client.total("false") else ""
        label = f"{share:.0%} ({low:.0%} to {high:.0%}){false}" if high else "nothing read"
    else:
        hits = client.total("exact" if measure == "certain" else "guessed")
        share, (low, high) = hits / client.num_texts, wilson(hits, client.num_texts)
        tokens = client.median("recall")
        nothing = f"no text; {tokens:.0%} of tokens" if tokens else "nothing read"
        label = f"{hits} of {client.num_texts} ({low:.0%} to {high:.0%})" if hits else nothing
    return {"label": label + late, "level": next(level for most, level in LEVELS if share <= most)}


def _models(clients: Sequence[Client]) -> list[str]:
    return sorted({client.model for client in clients})


def _rows(clients: Sequence[Client], models: Sequence[str], places: dict[int, int]) -> list[dict[str, Any]]:
    rows = []
    for protocol, defence, batch in dict.fromkeys((c.protocol, c.defence, c.batch) for c in clients):
        own = {c.model: c for c in clients if (c.protocol, c.defence, c.batch) == (protocol, defence, batch)}
        ended = [cell for client in own.values() for cell in client.ended]
        epsilons = [cell["epsilon"] for cell in ended if cell["epsilon"] is not None]
        rows.append(
            {
                "protocol": protocol,
                "defence": defence,
                "texts": make_safe(batch),
                "epsilon": join(epsilons, ".2g") if epsilons else "",
                "cosine": join([cell["cosine"] for cell in ended], ".2f") if defence and ended else "",
                "cells": [
                    shown(own[model], "certain") | {"place": places[id(own[model])]} if model in own else None
                    for model in models
                ],
            }
        )
    return rows


def _draws(client: Client) -> list[list[str]]:
    return [
        [
            str(cell["draw"]),
            make_safe(cell["data"]),
            cell["status"].replace("_", " ").lower(),
            *(
                [
                    f"{cell['recall']:.0%} of {cell['tokens']}",
                    *(str(cell[key]) for key in ("false",)),
                    f"{cell['chance']:.1%}",
                    *(str(cell[key]) for key in ("certain", "false_certain", "guessed")),
                    f"{cell['rouge1']:.2f}",
                ]
                if "recall" in cell
                else ["–"] * 7
            ),
            f"{cell['seconds']:.0f}",
            make_safe(cell["reason"], 400),
        ]
        for cell in client.draws
    ]
