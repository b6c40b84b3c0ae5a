"""`unmask recover output-layer`: what a service's log-probabilities tell of the model behind it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unmask.cli.options import EXIT_DONE, EXIT_INCONCLUSIVE, JsonOption
from unmask.errors import InputError

if TYPE_CHECKING:
    from unmask.attacks.queries.output_layer.logit_spectrum import OutputLayer
    from unmask.integrations.openai.probe import Support
    from unmask.recovery import Recovery


def recover_output_layer_command(
    server: Annotated[str, typer.Option(help="Address of an OpenAI-style server, without '/v1'.")],
    model: Annotated[str, typer.Option("--model", "-m", help="The model's name, as the server knows it.")],
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions instead of /v1/completions.")] = False,
    api_key_env: Annotated[str, typer.Option(help="Environment variable that holds the key.")] = "OPENAI_API_KEY",
    tokens: Annotated[
        int, typer.Option(min=32, help="Largest number of tokens to read; must exceed the hidden size.")
    ] = 4096,
    max_prompts: Annotated[int, typer.Option(min=64, help="Largest number of prompts to send.")] = 16384,
    budget: Annotated[
        int | None, typer.Option(min=0, help="Limit on paid answers; probing adds about 60 requests.")
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="File that stores every answer, so that a stopped run can continue.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the output layer (safetensors).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and tokens.")] = 0,
    json: JsonOption = False,
) -> None:
    """Recover the hidden size and the output layer of a language model from its log-probabilities.

    First tests what the server supports. Exit code 3: the attack was inconclusive; that does not mean 'safe'.

    Example: [bold]unmask recover output-layer --server http://127.0.0.1:8000 --model smollm2-135m[/bold]
    """
    from unmask.attacks.queries.output_layer.attack import OutputLayerAttack
    from unmask.evidence.ledger import Ledger
    from unmask.evidence.logits import LogitEvidence
    from unmask.integrations.openai import connect
    from unmask.integrations.openai.client import OpenAIClient
    from unmask.progress import shown_unless_watched, tell
    from unmask.terminal import working

    if out is not None and not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}; create it before paying for answers")
    with working("probing the server"):
        oracle = connect(OpenAIClient(server, model, chat, api_key_env))
    evidence = LogitEvidence(oracle, Ledger(ledger, budget=budget, about=oracle.name))
    with shown_unless_watched(None):
        attack = OutputLayerAttack(tokens, max_prompts, first_prompts=min(64, max_prompts), seed=seed)
        recovery = attack(evidence, tell)
    evidence.ledger.close()
    if out is not None:
        _write(recovery, out)
    _print(recovery, oracle.support, json)
    raise typer.Exit(EXIT_DONE if recovery.status.conclusive else EXIT_INCONCLUSIVE)


def _write(recovery: Recovery[OutputLayer], path: Path) -> None:
    """The matrix and the tokens of its rows, whole or not at all; nothing if nothing is known."""
    from unmask.evidence.files import write

    layer = recovery.value
    if layer.at_least:
        tensors = {"W": layer.W, "tokens": layer.tokens, "singular_values": layer.singular_values}
        write(path, "output layer", tensors, {"hidden_size": layer.hidden_size, "status": recovery.status.name})


def _print(recovery: Recovery[OutputLayer], support: Support, json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from unmask.terminal import print_json, print_proof_and_cost, print_summary, printable, recovery_document

    layer = recovery.value
    if json:
        value: dict[str, Any] = {
            "hidden_size": layer.hidden_size,
            "at_least": layer.at_least,
            "affine_size": layer.affine_size,
            "prompts": layer.num_prompts,
            "tokens": len(layer.tokens),
            "support": dict(support.describe()),
        }
        print_json(recovery_document(recovery, value))
        return
    console = Console()
    table = Table("the server", "found", title="What the server supports")
    for name, found in support.describe():
        table.add_row(name, printable(found))
    console.print(table)
    print_summary(console, recovery)
    print_proof_and_cost(console, recovery)
