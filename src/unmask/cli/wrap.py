"""`unmask wrap`: evidence from another system's files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unmask.cli.options import (
    CollectionOption,
    DeviceOption,
    DtypeName,
    JsonOption,
    ModelOption,
    OutOption,
    PoolingOption,
    PrefixOption,
    check_paths,
    load,
)
from unmask.cli.wrap_states import wrap_cache_command, wrap_hidden_command
from unmask.cli.wrap_update import wrap_update_command
from unmask.errors import InputError
from unmask.wording import count_noun

wrap = typer.Typer(help="Make evidence from another system's files.", no_args_is_help=True)


wrap.command("update")(wrap_update_command)
wrap.command("hidden")(wrap_hidden_command)
wrap.command("cache")(wrap_cache_command)


@wrap.command("store")
def wrap_store_command(
    path: Annotated[
        Path, typer.Argument(help="Folder or file of a store: FAISS, Chroma, Qdrant, LanceDB, Parquet, .npy, a dump …")
    ],
    model: ModelOption,
    out: OutOption,
    collection: CollectionOption = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Read only the first N vectors.")] = None,
    pooling: PoolingOption = None,
    normalise: Annotated[
        bool | None, typer.Option(help="Whether vectors were scaled to length 1. Default: inferred from their lengths.")
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(min=1, help="How many numbers the vectors have, if they were shortened.")
    ] = None,
    prefix: PrefixOption = "",
    device: DeviceOption = "cpu",
    json: JsonOption = False,
) -> None:
    """Read the vectors from a vector database's files, or from .npy or .npz. The documents in it are not read.

    Example: [bold]unmask wrap store ./chroma --model minilm-l6 --collection notes -o vectors.safetensors[/bold]

    Another: [bold]unmask wrap store index.faiss -m minilm-l6 --limit 20 -o vectors.safetensors[/bold]
    """
    from unmask.terminal import print_observation, working

    check_paths(out, path)
    if not path.exists():
        raise InputError(f"there is no file or folder {path}")
    with working("loading torch"):
        from unmask.integrations.stores import read_store
    loaded = load(model, DtypeName.float32, device)
    with working(f"reading {path}"):
        stored = read_store(path, collection, limit, loaded.final_width)
        if dimensions is None and (width := stored.vectors.shape[1]) < loaded.final_width:
            raise InputError(
                f"the vectors have {width} numbers and this {loaded.family} model makes {loaded.final_width}; load the "
                f"model that made them, or pass --dimensions {width} if they were shortened"
            )
        evidence = stored.evidence(
            loaded,
            pooling=pooling.value.replace("-", "_") if pooling else None,
            normalise=normalise,
            dimensions=dimensions,
            prefix=prefix,
        )
        evidence.save(out)
    recipe = evidence.recipe
    kind = f"{recipe.pooling.value}, {'length 1' if recipe.normalise else 'as pooled'}"
    print_observation(
        out,
        f"{count_noun(len(stored.ids), 'vector')} of {evidence.width} numbers ({kind}); {stored.about}",
        model,
        json,
    )


@wrap.command("logits")
def wrap_logits_command(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help=".npy or .npz: one row of logits or log-probabilities per prompt.")
    ],
    model: ModelOption,
    out: OutOption,
    collection: CollectionOption = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Read only the first N rows.")] = None,
    prefix: PrefixOption = "",
    device: DeviceOption = "cpu",
    json: JsonOption = False,
) -> None:
    """Turn rows of next-token logits into last hidden states.

    Each row must hold one number for every token of the vocabulary.

    Example: [bold]unmask wrap logits rows.npy -m smollm2-135m -o vectors.safetensors[/bold]
    """
    from unmask.terminal import print_observation, working

    check_paths(out, path)
    with working("loading torch"):
        from unmask.evidence.next_token import vectors_of_logits
        from unmask.integrations.stores.arrays import read_rows
    rows = read_rows(path, collection, limit)
    loaded = load(model, DtypeName.float32, device)
    with working(f"solving for {count_noun(len(rows), 'state')}"):
        evidence = vectors_of_logits(loaded, rows, prefix=prefix)
        evidence.save(out)
    print_observation(out, f"{count_noun(len(rows), 'last state')} of {evidence.width} numbers", model, json)
