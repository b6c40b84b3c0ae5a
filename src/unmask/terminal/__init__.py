"""What people see in a terminal, and what machines read. Recovered text is hostile and is shown escaped."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from unmask.progress import shown_unless_watched, tell
from unmask.safe_text import make_safe as printable
from unmask.safe_text import quote_word
from unmask.wording import count_noun

if TYPE_CHECKING:
    from unmask.attacks.outputs.layer_inputs.preimages import Preimages
    from unmask.models import Model
    from unmask.models.catalog import ModelListing
    from unmask.recovery import Certificate, RecoveredText, RecoveredTexts, Recovery

_NAMED = 6  # tensors that are named before the others are counted


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
    """What takes time now, on standard error from the third second on, in a log too."""
    with shown_unless_watched(None):
        tell(what, 0, 1)
        yield


def print_models(listings: Sequence[ModelListing], json: bool) -> None:
    """The catalogue."""
    if json:
        print_json([asdict(listing) for listing in listings])
        return
    table = Table(
        "name", "family", "parameters", "download", "licence", "installed", title="Models without a model hub"
    )
    for listing in listings:
        table.add_row(
            listing.name,
            listing.family,
            f"{listing.num_parameters / 1e6:.0f} M",
            f"{listing.size_mb:.0f} MB",
            listing.licence,
            "yes" if listing.install_command is None else "no",
        )
    console = Console()
    console.print(table)
    for listing in listings:
        if listing.install_command is not None:  # a line of its own, never cut, to copy
            console.print(Text(f"install {listing.name}:"))
            console.print(Text(f"  {listing.install_command}"), soft_wrap=True)
    console.print("You can also use a local folder with safetensors or, with a network, a Hugging Face name.")


def print_observation(path: Path, what: str, model: str, json: bool, not_stated: Sequence[str] = ()) -> None:
    """What was written, options that would let more be proven, and the next step."""
    if json:
        print_json({"evidence": str(path), "holds": what, **({"not_stated": not_stated} if not_stated else {})})
        return
    console = Console()
    console.print(Text(f"wrote {path}: {what}. Keep it as private as the texts."))
    if not_stated:
        listed = " ".join(not_stated)
        console.print(Text(f"next: state what you know, so that more can be proven: {listed}", style="dim"))
    command = f"unmask recover text {quote_word(path)} --model {quote_word(model)}"
    console.print(Text(f"next: {command}", style="dim"), soft_wrap=True)


def text_recovery_document(recovery: Recovery[RecoveredTexts], model: Model) -> dict[str, Any]:
    """A recovery of texts as plain data."""

    def list_tokens(tokens: Iterable[int]) -> list[dict[str, Any]]:
        return [{"id": token, "text": model.decode([token])} for token in tokens]

    value = {
        "texts": [_text_document(text) for text in recovery.value.texts],
        "tokens": list_tokens(sorted(recovery.value.token_set)),
        "token_classes": [list_tokens(tokens) for tokens in recovery.value.token_classes],
    }
    return recovery_document(recovery, value)


def _text_document(text: RecoveredText) -> dict[str, Any]:
    """A text with what stays open about it; best guesses have no residual."""
    ambiguities = [{**asdict(open_point), "kind": open_point.kind.value} for open_point in text.ambiguities]
    return {**asdict(text), "residual": finite(text.residual), "ambiguities": ambiguities}


def inputs_recovery_document(recovery: Recovery[Preimages]) -> dict[str, Any]:
    """A recovery of a layer's inputs as plain data; the matrices themselves go to a file."""
    preimages = [
        {
            "residual": finite(preimage.residual),
            "certified": preimage.certified,
            "radius": finite(preimage.radius),
            "unique_within": finite(preimage.unique_within),
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
            "unit": certificate.unit,
            "holds": certificate.holds,
            "residual": finite(certificate.residual),
            "tolerance": finite(certificate.tolerance),
            "rejected": None if certificate.rejected is None else finite(certificate.rejected),
            "details": {name: finite(value) for name, value in certificate.details.items()},
        },
        "cost": asdict(recovery.cost),
        "used": list(recovery.used),
        "looked_for": sorted(aim.value for aim in recovery.looked_for),
    }


def print_text_recovery(recovery: Recovery[RecoveredTexts], model: Model, json: bool) -> None:
    """Texts first, then why they can be believed."""
    if json:
        print_json(text_recovery_document(recovery, model))
        return
    console = Console()
    print_summary(console, recovery)
    if recovery.value.texts:
        has_rows = any(text.row is not None for text in recovery.value.texts)
        table = Table("", "text", "tokens", "vector" if has_rows else "times")
        for text in recovery.value.texts:
            last = text.count if text.row is None else text.row
            table.add_row(text.certainty, _render(text, recovery.reason), str(len(text.tokens)), str(last))
        console.print(table)
    elif recovery.value.token_set:
        words = " · ".join(printable(model.decode([token])) for token in sorted(recovery.value.token_set)[:200])
        console.print(Panel(Text(words), title=f"bag of words ({count_noun(len(recovery.value.token_set), 'token')})"))
    print_proof_and_cost(console, recovery)


def _render(text: RecoveredText, reason: str) -> Text:
    """The text, and under it, dim, what it could also be; not again what the reason says of all texts."""
    shown = Text(printable(text.text))
    for open_point in text.ambiguities:
        if open_point.reason in reason:
            continue
        is_plain = open_point.kind.value in ("count", "open_beginning")
        line = open_point.reason if is_plain else f"could also be another text: {open_point.reason}"
        shown.append(f"\n{printable(line)}", style="dim")
    return shown


def print_inputs_recovery(recovery: Recovery[Preimages], out: Path | None, json: bool) -> None:
    """How many inputs explain the output, and what is proved of each."""
    if json:
        print_json({**inputs_recovery_document(recovery), "written": None if out is None else str(out)})
        return
    console = Console()
    print_summary(console, recovery)
    if recovery.value.preimages:
        table = Table("pre-image", "residual", "distance to an exact one", "no other closer than")
        for number, preimage in enumerate(recovery.value.preimages, start=1):
            proved = (f"{preimage.radius:.1e}", f"{preimage.unique_within:.1e}") if preimage.certified else ("–", "–")
            table.add_row(str(number), f"{preimage.residual:.1e}", *proved)
        console.print(table)
    if out is not None and recovery.value.preimages:
        console.print(Text(f"wrote {out}. Keep it as private as the inputs."))
    print_proof_and_cost(console, recovery)


def write_preimages(recovery: Recovery[Preimages], path: Path) -> None:
    """All pre-images as tensors 'preimage.0', 'preimage.1' …, whole or not at all."""
    from unmask.evidence.files import write

    tensors = {f"preimage.{number}": preimage.X for number, preimage in enumerate(recovery.value.preimages)}
    if tensors:
        write(path, "preimages", tensors, {"status": recovery.status.name})


def print_summary(console: Console, recovery: Recovery[Any]) -> None:
    """How it ended, and why."""
    colour = "red" if recovery.status.conclusive else "yellow"
    summary = Text.assemble((recovery.status.name, f"bold {colour}"), f"  {recovery.status.value}\n", recovery.reason)
    console.print(Panel(summary, title="recovery"))


def print_proof_and_cost(console: Console, recovery: Recovery[Any]) -> None:
    """Why it can be believed, and what it took."""
    certificate = recovery.certificate
    if certificate.holds:
        console.print(Text(f"certificate: {certificate.claim}"))
        console.print(Text(f"  {describe_numbers(certificate)}"))
    elif recovery.status.conclusive:
        console.print(Text(f"no certificate: {recovery.unproven}"))
    cost = recovery.cost
    work = f"{cost.queries:,} queries asked" if cost.queries else f"{cost.candidates:,} candidates tested"
    console.print(Text(f"cost: {cost.seconds:.2f} s, {work}", style="dim"))
    if recovery.used:
        more = f" and {len(recovery.used) - _NAMED} more" if len(recovery.used) > _NAMED else ""
        console.print(Text(f"used: {', '.join(recovery.used[:_NAMED])}{more}", style="dim"))


def describe_numbers(certificate: Certificate) -> str:
    """The numbers behind a claim: counts with their unit, else the largest error accepted and the smallest rejected."""
    residual, tolerance = certificate.residual, certificate.tolerance
    if certificate.unit:
        return f"stated: {residual:.2g} {certificate.unit}, tolerance: {tolerance:.2g} {certificate.unit}"
    refused = "" if certificate.rejected is None else f", smallest rejected error {certificate.rejected:.1e}"
    return f"largest accepted error {residual:.1e}, tolerance {tolerance:.1e}{refused}"


def finite(value: float) -> float | None:
    """A number as JSON has it: None where it is infinite or none."""
    return value if abs(value) != float("inf") and value == value else None
