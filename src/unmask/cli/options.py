"""Options that commands share, exit codes, and the model that an option names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unmask.errors import InputError, UnmaskError
from unmask.whole_files import require_place

if TYPE_CHECKING:
    from unmask.models import Model

EXIT_DONE, EXIT_ERROR, EXIT_INCONCLUSIVE, EXIT_USAGE = 0, 2, 3, 4
EXIT_INTERRUPTED = 130  # as shells say it


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


class PrecisionName(StrEnum):
    """Precisions that a service may run in."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class SiteName(StrEnum):
    """Places of a model where states are taken."""

    stream = "stream"
    final_norm = "final-norm"
    attention = "attention"
    mean = "mean"


class PoolingName(StrEnum):
    """How the states of a text become one vector."""

    mean = "mean"
    cls = "cls"
    last = "last"
    weighted_mean = "weighted-mean"


class PartsName(StrEnum):
    """What is seen of a cache."""

    both = "both"
    keys = "keys"
    values = "values"


class CacheStorageName(StrEnum):
    """Types that a cache is stored in."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float8 = "float8_e4m3fn"
    int8 = "int8"


class StorageName(StrEnum):
    """Types in which a store keeps vectors."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    int8 = "int8"


class Side(StrEnum):
    """Sides of padding."""

    right = "right"
    left = "left"


AttackOption = Annotated[
    str | None, typer.Option("--attack", help="Name of an attack (see `unmask attacks`). Default: the one that fits.")
]
ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="Catalogue name, folder or Hugging Face name (see `unmask models`).")
]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Evidence file to write (safetensors).")]
TextOption = Annotated[
    Path,
    typer.Option(
        "--text", "-t", help="UTF-8 file, one text per line (in a .tsv: the first column); - for standard input."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
DeviceOption = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1 …")]
DtypeOption = Annotated[DtypeName, typer.Option(help="Precision in which the model runs.")]
DefenceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--defence", help="Defence applied to the evidence; repeatable, applied in order: noise:sigma=1e-4, int8 …"
    ),
]
PoolingOption = Annotated[
    PoolingName | None, typer.Option(help="How the model pools. Default: as its folder says, or as is usual.")
]
CollectionOption = Annotated[
    str | None,
    typer.Option("--collection", "-c", help="Name of the collection, table, column or array, if there are several."),
]
PrefixOption = Annotated[str, typer.Option(help="Text put before every text, for example 'query: '.")]
MaxLengthOption = Annotated[int | None, typer.Option(min=1, help="Cut texts to N tokens.")]
PaddingOption = Annotated[Side, typer.Option(help="Side on which shorter texts are padded.")]


def text_file(path: Path) -> Path:
    """The file of `--text`, `-` being standard input."""
    return Path("/dev/stdin") if str(path) == "-" else path


class UsageError(InputError):
    """A call that is wrong whatever the files and the model are."""


@contextmanager
def usage() -> Iterator[None]:
    """What is wrong inside is wrong with the call; for checks before anything is read or loaded."""
    try:
        yield
    except UnmaskError as error:
        raise UsageError(str(error)) from None


def check_paths(out: Path, *read: Path) -> None:
    """Refuse what cannot be written, before anything is computed, and a capture, which may be the only one there is."""
    for path in read:
        if path.exists() and out.exists() and path.samefile(out):
            raise UsageError(f"--out {out} is the file that is read; name another one")
    require_place(out)


def read_option(value: str | None) -> str | None:
    """The text of an option, or of the file that @FILE names."""
    if value is None or not value.startswith("@"):
        return value
    path = Path(value[1:])
    if not path.is_file():
        raise InputError(f"there is no file {path}; give the text itself, or @FILE for a file that contains it")
    return path.read_text(encoding="utf-8")


def load(name: str, dtype: DtypeName, device: str) -> Model:
    """The model of `--model`, on the device that was asked for."""
    from unmask.terminal import working

    with working("loading the model"):
        import torch

        from unmask.models import load_model

        try:
            torch.device(device)
        except RuntimeError:
            raise UsageError(f"--device must be cpu, cuda or cuda:N, got {device!r}") from None
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise InputError(f"--device {device} was asked for, but torch sees no CUDA device here; use --device cpu")
        return load_model(name, dtype=getattr(torch, dtype.value), device=device)


def refuse_unprintable(attack: str | None) -> None:
    """Refuse attacks whose results a command cannot show, before anything is asked or computed."""
    from unmask.attacks.table import ATTACKS, Secret
    from unmask.specs import split_text

    kind = ATTACKS.get(split_text(attack or "")[0])
    if kind is not None and kind.secret is Secret.OUTPUT_LAYER:
        raise UsageError(f"the attack '{attack}' has a command of its own: unmask recover output-layer --help")
    if kind is not None and (kind.secret is Secret.NETWORK or (kind.secret is Secret.INPUTS and kind.is_baseline)):
        raise UsageError(
            f"this command cannot show what the attack '{attack}' finds ({kind.claims}); run it from Python, as "
            "unmask.recover_weights(oracle, width=…, attack=…) or unmask.recover_inputs(evidence, attack=…)"
        )
