"""`unmask verify`: evidence and texts in, what the evidence says of each text out; nothing is searched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unmask.cli.options import EXIT_DONE, EXIT_INCONCLUSIVE, DeviceOption, DtypeName, JsonOption, UsageError, load
from unmask.errors import InputError

if TYPE_CHECKING:
    from unmask.models import Model
    from unmask.proof.verdicts import Verdict

EXIT_REFUTED = 1


def verify_command(
    target: Annotated[
        Path, typer.Argument(metavar="EVIDENCE", help="Evidence file; or a proof that `unmask recover --proof` wrote.")
    ],
    texts: Annotated[
        Path | None,
        typer.Option("--texts", "-t", help="UTF-8 file, one text per line, of all that the batch holds."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Catalogue name, folder or Hugging Face name. Default: the proof's."),
    ] = None,
    device: DeviceOption = "cpu",
    json: JsonOption = False,
) -> None:
    """Check texts against evidence, without any search: certain, one of a class, refuted or undecided.

    Exit codes: 0 every text is certain or one of a class, 1 one is refuted, 2 bad input, 3 one is undecided.

    Example: [bold]unmask verify update.safetensors --texts found.txt -m smollm2-135m[/bold]

    A proof of somebody else: [bold]unmask verify proof.json[/bold]
    """
    if target.is_dir():
        raise InputError(f"{target} is a folder; give an evidence file, or a proof that `unmask recover --proof` wrote")
    if target.suffix == ".json":
        if texts is not None:
            raise UsageError("a proof names its texts; leave --texts out, or give the evidence file")
        verdict, loaded = _verify_proof(target, model, device)
    else:
        if texts is None or model is None:
            raise UsageError(
                "an evidence file needs the texts to check and the model: unmask verify EVIDENCE --texts FILE --model M"
            )
        verdict, loaded = _verify_texts(target, texts, model, device)
    _print(verdict, loaded, json)
    raise typer.Exit(_exit_code(verdict))


def _verify_texts(target: Path, texts: Path, name: str, device: str) -> tuple[Verdict, Model]:
    from unmask.cli.options import text_file
    from unmask.evidence import load_evidence
    from unmask.terminal import working

    try:
        lines = text_file(texts).read_text(encoding="utf-8-sig").replace("\r\n", "\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the file of texts {texts} cannot be read: {error}") from None
    with working("loading torch"):
        from unmask.verification import verify

        seen = load_evidence(target)
    loaded = load(name, DtypeName.float32, device)
    return verify(seen, loaded, [line for line in lines if line.strip()]), loaded


def _verify_proof(target: Path, name: str | None, device: str) -> tuple[Verdict, Model]:
    from unmask.evidence import load_evidence
    from unmask.terminal import note, working

    with working("loading torch"):
        from unmask.verification import ProofError, ProofFile, check_proof, digest_of

        proof = ProofFile.read(target)
        evidence = Path(proof.evidence)
        places = [evidence, target.parent / evidence, target.parent / evidence.name]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise ProofError(f"the evidence of this proof, {proof.evidence}, is not here; put it beside {target}")
        if digest_of(found) != proof.sha256:
            raise ProofError(f"{found} is not the evidence that the proof was made of: its SHA-256 is another one")
        seen = load_evidence(found)
    loaded = load(name or proof.model, DtypeName.float32, device)
    note(f"{target}: {proof.status}, {len(proof.claims)} claimed texts of {found}")
    return check_proof(proof, seen, loaded), loaded


def _exit_code(verdict: Verdict) -> int:
    from unmask.proof.verdicts import Decision

    decisions = {text.decision for text in verdict.texts}
    if Decision.REFUTED in decisions:
        return EXIT_REFUTED
    return EXIT_INCONCLUSIVE if Decision.UNDECIDED in decisions else EXIT_DONE


def _print(verdict: Verdict, model: Model, json: bool) -> None:
    from unmask.terminal import print_json, suppress_broken_pipe

    document = _document(verdict, model)
    if json:
        print_json(document)
        return
    from rich.console import Console
    from rich.text import Text

    from unmask.safe_text import make_safe

    with suppress_broken_pipe():
        console = Console()
        for text in document["texts"]:
            times = f" × {text['count']}" if text["count"] > 1 else ""
            number = (
                "" if text["misfit"] is None else f"  [{text['misfit']:.1e} of at most {document['tolerance']:.1e}]"
            )
            console.print(Text(f"{text['decision']:<13} {make_safe(text['text'])!r}{times}{number}"), soft_wrap=True)
            for reason in [*(point["reason"] for point in text["open"]), *([text["why"]] if text["why"] else [])]:
                console.print(Text(f"{'':<13} {make_safe(reason)}", style="dim"), soft_wrap=True)
        console.print(Text(f"ground: {document['ground']}"), soft_wrap=True)
        for problem in document["problems"]:
            console.print(Text(f"open: {make_safe(problem)}", style="dim"), soft_wrap=True)


def _document(verdict: Verdict, model: Model) -> dict[str, Any]:
    """A verdict as plain data; `why` is not repeated where an open point says it."""
    from unmask.terminal import finite

    texts = []
    for text in verdict.texts:
        points = [
            {"kind": point.kind.value, "reason": point.reason, "position": point.position, "tokens": list(point.tokens)}
            for point in text.points
        ]
        texts.append(
            {
                "text": model.decode(text.text.tokens),
                "tokens": list(text.text.tokens),
                "decision": text.decision.name.lower().replace("_", " "),
                "count": text.count,
                "misfit": finite(text.misfit),
                "open": points,
                "why": "" if points else text.why,
            }
        )
    return {
        "texts": texts,
        "ground": verdict.ground.value,
        "tolerance": verdict.tolerance,
        "whole_batch": verdict.is_whole,
        "problems": list(verdict.problems),
    }
