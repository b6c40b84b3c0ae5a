"""The layers of a model, and what each attack can recover."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unmask.attacks.reach import find_reach
from unmask.models.adapter import Model
from unmask.models.catalog import load_pretrained
from unmask.models.linear import Role
from unmask.models.load import is_encoder_decoder, load_encoder_decoder, load_model
from unmask.terminal import print_json, printable


def check_models(name: str, json: bool) -> None:
    """Load a model by a name or a folder, and check it; of an encoder–decoder both sides."""
    hf, tokenizer = load_pretrained(name)
    if not is_encoder_decoder(hf):
        print_model_check(name, load_model(hf, tokenizer=tokenizer), json)
        return
    both = load_encoder_decoder(hf, tokenizer=tokenizer)
    sides = {f"{name}, encoder": both.encoder, f"{name}, decoder": both.decoder}
    if json:
        print_json([check_document(side, model) for side, model in sides.items()])
        return
    for side, model in sides.items():
        print_model_check(side, model, json=False)


def print_model_check(name: str, model: Model, json: bool) -> None:
    """The check of a model that was loaded by a name."""
    found = check_document(name, model)
    if json:
        print_json(found)
        return
    console = Console()
    console.print(Text(printable(f"{name}: {model.family}, {_facts(model)}", longest=400)))
    roles = Table("role", *(f"blocks {group['blocks']}" for group in found["roles"]), title="Layers found")
    for role in Role:
        roles.add_row(role.value, *(Text(printable(group["layers"].get(role.value, "—"))) for group in found["roles"]))
    console.print(roles)
    reach = Table("from", "recovered", "why not more", title="What leaks from complete evidence")
    for line in found["reach"]:
        reach.add_row(line["evidence"], line["gives"], Text(printable(line["why"], longest=1000)))
    console.print(reach)
    if model.problem:
        console.print(Text(printable(f"Limited: {model.problem}.", longest=1000)))


def check_document(name: str, model: Model) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "name": name,
        "family": model.family,
        "direction": "causal" if model.causal else "bidirectional",
        "blocks": model.num_blocks,
        "width": model.width,
        "vocabulary": model.vocab_size,
        "heads": model.num_heads,
        "key_value_heads": model.num_key_value_heads,
        "positions": "learned" if model.position_embedding else "not learned",
        "problem": model.problem,
        "roles": _roles(model),
        "reach": [asdict(line) for line in find_reach(model)],
    }


def _facts(model: Model) -> str:
    direction = "causal" if model.causal else "bidirectional"
    heads = f"{model.num_heads} heads"
    if model.num_key_value_heads != model.num_heads:
        heads += f" in {model.num_key_value_heads} groups"
    positions = "learned positions" if model.position_embedding else "no learned positions"
    blocks = f"{model.num_blocks} blocks of width {model.width}"
    return f"{direction}, {blocks}, {heads}, {positions}, {model.vocab_size} tokens"


def _roles(model: Model) -> list[dict[str, Any]]:
    """Layers by role, once for each stretch of blocks that have the same."""
    groups: list[dict[str, Any]] = []
    for block in range(model.num_blocks):
        place = model.layout.blocks[block]
        layers = {role.value: _describe(layer.module, layer.columns) for role, layer in place.layout.linear.items()}
        if groups and groups[-1]["layers"] == layers:
            groups[-1]["last"] = block
        else:
            groups.append({"first": block, "last": block, "layers": layers})
    return [
        {"blocks": str(g["first"]) if g["first"] == g["last"] else f"{g['first']}–{g['last']}", "layers": g["layers"]}
        for g in groups
    ]


def _describe(module: str, columns: Any) -> str:
    if columns is None:
        return module
    if isinstance(columns, range):
        return f"{module}, columns {columns.start}–{columns.stop - 1}"
    return f"{module}, {len(columns)} columns"
