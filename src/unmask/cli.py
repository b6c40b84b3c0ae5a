"""The command line. Commands import what they need when they run, so that `--help` answers at once.

Exit codes: 0 done · 1 a gate of a plan crossed · 2 bad input or tool error · 3 inconclusive · 4 usage.
"""

from __future__ import annotations

import functools
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

try:
    from typer import _click as click  # newer typers carry a click of their own, whose exceptions are not click's
except ImportError:
    import click  # type: ignore[no-redef]

from unmask.errors import InputError, UnmaskError

if TYPE_CHECKING:
    from unmask.models import Model

EXIT_DONE, EXIT_ERROR, EXIT_INCONCLUSIVE, EXIT_USAGE = 0, 2, 3, 4
EXIT_INTERRUPTED = 130  # as shells say it

app = typer.Typer(
    name="unmask",
    help="Shows, exactly, what a transformer gives away. For auditing your own models and systems, with consent.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    add_completion=False,
)
observe = typer.Typer(help="Make evidence: what an adversary would see.", no_args_is_help=True)
recover = typer.Typer(help="Recover the secret from evidence.", no_args_is_help=True)
app.add_typer(observe, name="observe")
app.add_typer(recover, name="recover")


class TaskName(StrEnum):
    """Tasks by their command-line names."""

    next_token = "next-token"
    classification = "classification"
    masked_token = "masked-token"


class DtypeName(StrEnum):
    """Precisions that a client may train in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float64 = "float64"


class Side(StrEnum):
    """Sides of padding."""

    right = "right"
    left = "left"


ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="Catalogue name, folder or Hugging Face name (see `unmask models`).")
]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Evidence file to write (safetensors).")]
TextOption = Annotated[
    Path, typer.Option("--text", "-t", help="UTF-8 file, one text a line; of a .tsv file the first column.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, for machines.")]
DeviceOption = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1 …")]
DtypeOption = Annotated[DtypeName, typer.Option(help="Precision in which the client runs its model.")]
PaddingOption = Annotated[Side, typer.Option(help="Side on which shorter texts are padded.")]


@app.command()
def models(json: JsonOption = False) -> None:
    """List the real weights that install without a model hub.

    Example: [bold]unmask models[/bold]
    """
    from unmask.models.catalog import list_models
    from unmask.show import print_models

    print_models(list_models(), json)


@observe.command("gradients")
def observe_gradients_command(
    model: ModelOption,
    text: TextOption,
    out: OutOption,
    task: Annotated[TaskName, typer.Option(help="What the client trains for.")] = TaskName.next_token,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Use only the first N texts.")] = None,
    padding: PaddingOption = Side.right,
    max_length: Annotated[int | None, typer.Option(min=1, help="Cut texts to N tokens.")] = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Lines are pairs of texts, a tab between; of a .tsv two columns.")
    ] = False,
    parameters: Annotated[
        list[str] | None, typer.Option("--keep", help="Keep only gradients whose name contains this; repeatable.")
    ] = None,
    train_mode: Annotated[bool, typer.Option("--train-mode", help="Keep dropout on, as in real training.")] = False,
    protocol: Annotated[
        str, typer.Option(help="How the client makes its update: fedsgd, fedavg:…, dpsgd:…, lora:…")
    ] = "fedsgd",
    defence: Annotated[
        list[str] | None,
        typer.Option(help="What the update goes through before it is sent, in order; repeatable: noise:sigma=1e-4"),
    ] = None,
    clients: Annotated[
        int, typer.Option(min=1, help="Deal the texts to N clients; only the sum of their updates is seen.")
    ] = 1,
    dtype: DtypeOption = DtypeName.float32,
    device: DeviceOption = "cpu",
    seed: Annotated[int, typer.Option(help="Seeds labels, masks, dropout, a fresh head and defences.")] = 0,
    json: JsonOption = False,
) -> None:
    """Make a client's update: the gradients that a federated-learning server sees.

    Example: [bold]unmask observe gradients -m smollm2-135m -t texts.txt -o update.safetensors[/bold]

    Another: [bold]… --protocol fedavg:local_steps=4,learning_rate=0.01 --defence clip:norm=1 --defence int8[/bold]
    """
    import torch

    from unmask.defences import parse_defence, secure_aggregate
    from unmask.protocols.specs import parse_protocol
    from unmask.show import print_observation, working

    client = parse_protocol(protocol)
    defences = [parse_defence(part) for part in defence or ()]
    texts = read_pairs(text, batch_size) if pairs else read_texts(text, batch_size)
    if clients > len(texts) or (clients > 1 and client.name == "dpsgd"):
        raise InputError(
            f"--clients {clients} needs as many texts, and the file has {len(texts)}; with dpsgd it cannot be used, as "
            "clients of one seed would draw the same noise"
        )
    with working("loading the model"):
        loaded = _load(model, dtype, device)
    with working(f"computing gradients of {len(texts)} texts"):
        options = {} if parameters is None else {"parameters": parameters}
        generator, sent = torch.Generator().manual_seed(seed), []
        for number in range(clients):
            update = client(
                loaded,
                texts[number::clients],
                task=task.value.replace("-", "_"),
                padding_side=padding.value,
                max_length=max_length,
                train_mode=train_mode,
                seed=seed,
                **options,
            )
            sent.append(functools.reduce(lambda seen, step: step(seen, generator), defences, update.evidence))
        evidence = sent[0] if clients == 1 else secure_aggregate(sent)
        evidence.save(out)
    budget = f"; ε = {update.epsilon:.3g} at δ = {update.delta:g}" if update.delta else ""
    print_observation(out, f"{len(evidence.gradients)} tensors of {len(texts)} texts{budget}", json)


@observe.command("hidden")
def observe_hidden_command(
    model: ModelOption,
    text: TextOption,
    out: OutOption,
    layer: Annotated[int, typer.Option("--layer", "-l", min=0, help="After this many blocks; 0: embeddings.")],
    batch_size: Annotated[int | None, typer.Option(min=1, help="Use only the first N texts.")] = None,
    padding: PaddingOption = Side.right,
    dtype: DtypeOption = DtypeName.float32,
    device: DeviceOption = "cpu",
    json: JsonOption = False,
) -> None:
    """Make a dump of hidden states, as a split-inference service hands them out.

    Example: [bold]unmask observe hidden -m smollm2-135m -t texts.txt -l 6 -o states.safetensors[/bold]
    """
    from unmask.protocols import observe_hidden
    from unmask.show import print_observation, working

    texts = read_texts(text, batch_size)
    with working("loading the model"):
        loaded = _load(model, dtype, device)
    with working(f"computing states of {len(texts)} texts"):
        evidence = observe_hidden(loaded, texts, layer=layer, padding_side=padding.value)
        evidence.save(out)
    print_observation(out, f"states of {len(texts)} texts after {layer} blocks", json)


@recover.command("text")
def recover_text_command(
    evidence: Annotated[Path, typer.Argument(help="Evidence file from `unmask observe`, or a captured update.")],
    model: ModelOption,
    device: DeviceOption = "cpu",
    confirm: Annotated[bool, typer.Option("--confirm", help="Test every prefix again in a later block.")] = False,
    seed: Annotated[int, typer.Option(help="Seeds the attack's random probes.")] = 0,
    json: JsonOption = False,
) -> None:
    """Recover the texts behind a client's update. Exit code 3: the attack could not tell, which is not 'safe'.

    Example: [bold]unmask recover text update.safetensors -m smollm2-135m[/bold]
    """
    from unmask.attacks.text import recover_text
    from unmask.evidence import load_evidence
    from unmask.show import print_text_recovery, progress_bar, working

    seen = load_evidence(evidence)
    with working("loading the model"):
        loaded = _load(model, DtypeName.float32, device)
    with progress_bar() as progress:
        recovery = recover_text(seen, loaded, progress=progress, confirm=confirm, seed=seed)
    print_text_recovery(recovery, loaded, json)
    raise typer.Exit(EXIT_DONE if recovery.status.conclusive else EXIT_INCONCLUSIVE)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the evidence and the result.")] = Path(
        "runs/demo"
    ),
    num_texts: Annotated[int, typer.Option(min=1, max=16, help="How many texts the client holds.")] = 8,
) -> None:
    """Take a client's gradients on real weights and recover its texts, with controls.

    Example: [bold]unmask demo --out runs/demo[/bold]
    """
    from unmask.demo import run_demo

    raise typer.Exit(EXIT_DONE if run_demo(out, num_texts) else EXIT_ERROR)


def read_texts(path: Path, limit: int | None) -> list[str]:
    """Texts of a file, one a line, empty lines left out; of a TSV the first column."""
    lines = _lines(path)
    if path.suffix == ".tsv":
        lines = [line.split("\t")[0] for line in lines]
    texts = [line for line in lines if line.strip()][:limit]
    if not texts:
        raise InputError(f"{path} holds no text; give one text a line")
    return texts


def read_pairs(path: Path, limit: int | None) -> list[tuple[str, str]]:
    """Pairs of texts of a file, one a line with a tab between the two; of a TSV the first two columns."""
    columns = [line.split("\t", -1 if path.suffix == ".tsv" else 1) for line in _lines(path) if line.strip()][:limit]
    for number, parts in enumerate(columns, start=1):
        if len(parts) < 2:
            raise InputError(f"pair {number} of {path} has no tab; give two texts a line with a tab between them")
    if not columns:
        raise InputError(f"{path} holds no pair; give two texts a line with a tab between them")
    return [(parts[0], parts[1]) for parts in columns]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise InputError(f"there is no file {path}; give a UTF-8 file with one text a line") from None
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text ({error}); give one text a line") from None


def _load(name: str, dtype: DtypeName, device: str) -> Model:
    import torch

    from unmask.models import load_model

    try:
        torch.device(device)
    except RuntimeError:
        raise InputError(f"--device must be cpu, cuda or cuda:N, got {device!r}") from None
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"--device {device} was asked for, but torch sees no CUDA device here; use --device cpu")
    return load_model(name, dtype=getattr(torch, dtype.value), device=device)


def main() -> None:
    """Entry point: callers' mistakes become one paragraph and an exit code, never a traceback."""
    try:
        code = app(standalone_mode=False)
    except UnmaskError as error:
        code = _complain(str(error), EXIT_ERROR)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = EXIT_USAGE
    except click.ClickException as error:
        error.show()
        code = EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except MemoryError:
        code = _complain("out of memory; use fewer texts or a smaller model", EXIT_ERROR)
    except OSError as error:
        code = _complain(f"the system refused: {error}", EXIT_ERROR)
    if code == EXIT_INTERRUPTED:
        _complain("stopped; nothing that was written is lost", code)
    sys.exit(code if isinstance(code, int) else EXIT_DONE)


def _complain(message: str, code: int) -> int:
    from rich.console import Console
    from rich.text import Text

    from unmask.show import printable

    Console(stderr=True).print(Text.assemble(("unmask: ", "bold red"), printable(message, longest=4000)))
    return code
