"""`unmask recover weights`: what a service that answers over HTTP tells of the attention layer behind it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from unmask.cli.options import EXIT_DONE, EXIT_INCONCLUSIVE, AttackOption, JsonOption, UsageError, refuse_unprintable
from unmask.errors import InputError

if TYPE_CHECKING:
    from unmask.attacks.queries.profile import OracleProfile
    from unmask.evidence.ledger import Ledger
    from unmask.evidence.oracles import OracleEvidence

LedgerOption = Annotated[
    Path | None,
    typer.Option(help="File that stores every answer. Default: a file in this folder, named after host and width."),
]


def recover_weights_command(
    oracle: Annotated[str, typer.Option(help="URL that answers POST {'sequences': …} with {'answers': …}.")],
    width: Annotated[int, typer.Option(min=1, help="Width of a token.")],
    attack: AttackOption = None,
    ledger: LedgerOption = None,
    no_ledger: Annotated[
        bool, typer.Option("--no-ledger", help="Do not save answers; a stopped run must start over.")
    ] = False,
    budget: Annotated[
        int | None, typer.Option(min=0, help="Limit on paid answers, including those of earlier runs.")
    ] = None,
    max_norm: Annotated[
        float | None, typer.Option(help="Largest norm of a token to send. Default: found by probing.")
    ] = None,
    api_key_env: Annotated[str, typer.Option(help="Environment variable that holds the key.")] = "UNMASK_API_KEY",
    concurrency: Annotated[int, typer.Option(min=1, help="Number of requests sent at the same time.")] = 8,
    per_request: Annotated[int, typer.Option(min=1, help="Sequences in a request.")] = 64,
    timeout: Annotated[float, typer.Option(help="Time limit of one request, in seconds.")] = 30.0,
    retries: Annotated[int, typer.Option(min=0, help="How often a failed request is repeated.")] = 6,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the weights (safetensors).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the queries.")] = 0,
    json: JsonOption = False,
) -> None:
    """Recover the heads of an attention layer, and a network behind them, from answers alone. Tests the answers first.

    Every answer is stored in the ledger: the same command continues a stopped run and pays for no answer twice.
    Exit code 3: the attack was inconclusive; that does not mean 'safe'.

    Example: [bold]unmask recover weights --oracle http://127.0.0.1:8000/ --width 16 --out weights.safetensors[/bold]

    Another: [bold]unmask recover weights --oracle https://api.example/f --width 64 --budget 50000 --json[/bold]
    """
    from unmask.attacks.recover import recover_from_answers
    from unmask.attacks.table import DEFAULT
    from unmask.evidence.oracles import OracleEvidence
    from unmask.integrations.http import HttpOracle
    from unmask.terminal import note, working
    from unmask.terminal.weights import print_oracle_profile, print_weights_recovery, write_weights

    refuse_unprintable(attack)
    if ledger is not None and no_ledger:
        raise UsageError("--ledger and --no-ledger cannot be used together; leave one of them out")
    if out is not None and not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}; create it before paying for answers")
    service = HttpOracle(oracle, api_key_env, concurrency, per_request, timeout, retries)
    path = None if no_ledger else ledger or default_ledger(service.name, width)
    with _open_ledger(path, budget, f"{service.name}, tokens of {width}") as book:
        evidence = OracleEvidence(service, width, book, max_norm)
        with working("probing the oracle"):
            profile = _probe(evidence, seed) if attack in (None, DEFAULT) else None
        if path is not None and ledger is None:
            note(f"answers are saved in {path} (--ledger: another file; --no-ledger: do not save)")
        if profile is not None and not json:
            print_oracle_profile(profile)
        recovery = recover_from_answers(evidence, profile=profile, attack=attack, seed=seed)
    written = write_weights(recovery, service.name, out) if out is not None else None
    print_weights_recovery(recovery, profile, book, written, json)
    raise typer.Exit(EXIT_DONE if recovery.status.conclusive else EXIT_INCONCLUSIVE)


def default_ledger(name: str, width: int) -> Path:
    """A file in the working directory, named after the service's host and the width of its tokens."""
    host = re.sub(r"[^\w.-]", "_", urlsplit(name).netloc)
    return Path(f"unmask-{host}-width-{width}.sqlite")


@contextmanager
def _open_ledger(path: Path | None, budget: int | None, about: str) -> Iterator[Ledger]:
    """The ledger. Whoever interrupts is told what it keeps; one that kept nothing is not left behind."""
    from unmask.evidence.ledger import Ledger
    from unmask.terminal import note

    book = Ledger(path, budget=budget, about=about)
    try:
        yield book
    except KeyboardInterrupt:
        note(
            f"{len(book):,} paid answers are lost, because --no-ledger was given"
            if path is None
            else f"{path} has the {len(book):,} paid answers; the same command continues from there"
        )
        raise
    finally:
        book.close()
        if path is not None and not len(book):
            path.unlink(missing_ok=True)


def _probe(evidence: OracleEvidence, seed: int) -> OracleProfile | None:
    """What probing tells; None where the budget ends before, which the attack then says in its own words."""
    import torch

    from unmask.attacks.queries.profile import probe_oracle
    from unmask.evidence.ledger import BudgetSpent

    try:
        return probe_oracle(evidence, torch.Generator().manual_seed(seed))
    except BudgetSpent:
        return None
