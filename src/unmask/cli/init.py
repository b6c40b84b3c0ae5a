"""`unmask init`: a plan to start from. It runs unchanged, and its comments say what to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from unmask.cli.options import EXIT_DONE, JsonOption
from unmask.errors import InputError

PLAN = "plan.toml"
MODEL = "minilm-l6"

_TEMPLATE = """\
# What can others learn about your texts from what your system shares? docs/plans.md has every key.
#
#   unmask audit @PLAN@ --out @RUNS@ --dry-run   lists the cases, and says which cannot run
#   unmask audit @PLAN@ --out @RUNS@             runs them; continues after Ctrl-C
#   unmask report @RUNS@                         writes report.html
#
# Unchanged, this plan ends with exit code 1: the cases without a defence cross the gate.

title = "A first audit"
gates = ["no near-exact text"] # what must not happen, in every group without gates of its own

# Your texts: one per line, in a file beside this plan. 'invented' is built in: 16 invented texts.
# [data.mine]
# file = "texts.txt"
# limit = 100

# A client of a federation trains on its texts; the server sees the update. Every combination of the lists is a case.
[[gradients]]
models = [@MODEL@] # a name of `unmask models`, a folder, a Hugging Face name
data = ["invented"] # or "mine"
batch_sizes = [1] # texts of one update, drawn from the data
protocols = ["fedsgd"] # also "fedavg:local_steps=4,learning_rate=0.01", "dpsgd:…", "lora:rank=8"
defences = ["none", "noise:sigma=1e-2"] # see `unmask defences`; a list inside is applied in order
seeds = [0] # with several, the report shows intervals

# A device runs a part of the model and sends the hidden states to a server.
[[outputs]]
models = [@MODEL@]
data = ["invented"]
layers = ["last"] # after this many blocks; 0: the embeddings
defences = ["none"] # also "int8", "noise:sigma=0.5,relative=true"

# A serving stack caches keys and values of prompts. For decoders.
# [[caches]]
# models = ["smollm2-135m"]
# layers = [0]
# storages = ["bfloat16"]

# A vector database stores one vector per text.
# [[vectors]]
# models = ["minilm-l6"]
# storages = ["float32", "int8"]

# A service answers with log-probabilities. For decoders; it has its own gates.
# [[queries]]
# models = ["smollm2-135m"]
# secrets = ["output-layer"]
# gates = ["no weights", "no hidden size"]

# A device computes one attention layer and sends its output to a server. The layers are random; no model is needed.
# [[inputs]]
# secrets = ["random:tokens=8,width=16"]
# gates = ["no inputs"]

# A control: under this noise nothing can be found. If it leaks, do not trust the other results.
[[gradients]]
models = [@MODEL@]
batch_sizes = [1]
defences = ["noise:sigma=1000"]
gates = []
"""


def init_command(
    where: Annotated[
        Path,
        typer.Argument(metavar="[FOLDER | PLAN.toml]", help="Where to write the plan; folders are created as needed."),
    ] = Path(PLAN),
    model: Annotated[
        str, typer.Option("--model", "-m", help="Catalogue name, folder or Hugging Face name (see `unmask models`).")
    ] = MODEL,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing plan.")] = False,
    json: JsonOption = False,
) -> None:
    """Write a commented plan that you can run unchanged, and print the next commands.

    Example: [bold]unmask init[/bold] or [bold]unmask init audit/plan.toml --model ./my-model[/bold]
    """
    from rich.console import Console
    from rich.text import Text

    from unmask.terminal import print_json, printable

    path = where if where.suffix == ".toml" else where / PLAN
    if path.is_dir() or (path.exists() and not force):
        advice = "name another file" if path.is_dir() else "name another file, or overwrite it with --force"
        raise InputError(f"{path} is there already; {advice}")
    commands = write_plan(path, model)
    if json:
        print_json({"plan": str(path), "next": commands})
    else:
        console = Console()
        console.print(Text(f"wrote {printable(str(path), longest=4000)}; next:"), soft_wrap=True)
        for command in commands:
            console.print(Text(f"  {printable(command, longest=4000)}"), soft_wrap=True)
    raise typer.Exit(EXIT_DONE)


def write_plan(path: Path, model: str) -> list[str]:
    """Write the plan, whole or not at all, and give the commands that come next."""
    from unmask.audit.findings.folder import write_whole
    from unmask.safe_text import quote_word

    if not model.isprintable() or not model:
        raise InputError(f"--model must be a name or a folder, got {model!r}")
    plan, runs = quote_word(path), quote_word(path.parent / "runs" / "audit")
    commands = [
        f"unmask audit {plan} --out {runs} --dry-run",
        f"unmask audit {plan} --out {runs}",
        f"unmask report {runs}",
    ]
    parts = {"@PLAN@": plan, "@RUNS@": runs} if str(path).isprintable() else {"@PLAN@": PLAN, "@RUNS@": "runs/audit"}
    text = _TEMPLATE
    for name, value in {**parts, "@MODEL@": json.dumps(model, ensure_ascii=False)}.items():
        text = text.replace(name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return commands
