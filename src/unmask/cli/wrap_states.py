"""`unmask wrap hidden` and `unmask wrap cache`: states, keys and values on disk as evidence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unmask.cli.options import (
    CollectionOption,
    DeviceOption,
    DtypeName,
    JsonOption,
    ModelOption,
    OutOption,
    PrecisionName,
    SiteName,
    UsageError,
    check_paths,
    load,
)
from unmask.errors import InputError
from unmask.wording import count_noun

if TYPE_CHECKING:
    from torch import Tensor

    from unmask.evidence import CacheEvidence, HiddenEvidence


_MASKS = ("attention_mask", "mask")
_FILE = ".safetensors, .npy or .npz"
MaskOption = Annotated[
    Path | None,
    typer.Option(
        help="File with the tokenizer's attention_mask, (batch, length). Default: that of FILE, if it holds one; else "
        "every position is a token."
    ),
]
PrecisionOption = Annotated[
    PrecisionName | None,
    typer.Option("--dtype", help="Precision in which the service ran its model. Default: FILE's half precision."),
]


def wrap_hidden_command(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help=f"{_FILE}: states (batch, length, width), or those of all layers.")
    ],
    model: ModelOption,
    out: OutOption,
    layer: Annotated[
        int | None, typer.Option("--layer", "-l", min=0, help="How many blocks they have passed (0: the embeddings).")
    ] = None,
    site: Annotated[
        SiteName | None,
        typer.Option(help="Where they were taken. Default: the stream, after the final norm if their numbers show it."),
    ] = None,
    mask: MaskOption = None,
    collection: CollectionOption = None,
    dtype: PrecisionOption = None,
    device: DeviceOption = "cpu",
    json: JsonOption = False,
) -> None:
    """Make evidence from hidden states that were captured elsewhere: one layer's, or all that transformers returns.

    Example: [bold]unmask wrap hidden states.npy -m smollm2-135m -l 6 --mask mask.npy -o states.safetensors[/bold]

    In PyTorch: [bold]numpy.savez("states.npz", states=output.hidden_states[6], attention_mask=mask)[/bold]
    """
    from unmask.terminal import print_observation, working

    check_paths(out, path, *([mask] if mask else []))
    with working("loading torch"):
        from unmask.evidence import HiddenEvidence
        from unmask.evidence.foreign_files import read_arrays
    arrays = read_arrays(path)
    name = _choose_states(path, arrays, collection, layer)
    known = _mask(arrays, mask)
    is_last = layer is None and "last_hidden_state" in name
    if layer is None and not is_last and site is not SiteName.final_norm and arrays[name].ndim < 4:
        raise UsageError("--layer must be stated: how many blocks the states have passed (0: the embeddings)")
    loaded = load(model, DtypeName.float32, device)
    evidence = HiddenEvidence.of(
        loaded,
        arrays[name],
        layer=loaded.num_blocks if is_last else layer,
        site=None if site is None else site.value.replace("-", "_"),
        mask=known,
        compute_dtype=None if dtype is None else dtype.value,
    )
    evidence.save(out)
    texts, tokens = len(evidence.mask), int(evidence.mask.sum())
    print_observation(
        out,
        f"states of {count_noun(texts, 'text')} ({count_noun(tokens, 'token')}) after "
        f"{count_noun(evidence.layer, 'block')} ({evidence.site.value})",
        model,
        json,
        _not_stated(known, evidence),
    )


def wrap_cache_command(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help=f"{_FILE}: keys and values, each (batch, heads, length, width).")
    ],
    model: ModelOption,
    out: OutOption,
    layer: Annotated[int, typer.Option("--layer", "-l", min=0, help="The block that keeps them.")],
    mask: MaskOption = None,
    heads: Annotated[
        list[int] | None,
        typer.Option("--head", min=0, help="A key/value head that FILE holds, in its order; repeatable. Default: all."),
    ] = None,
    first_position: Annotated[int, typer.Option(min=0, help="First position that FILE holds.")] = 0,
    dtype: PrecisionOption = None,
    device: DeviceOption = "cpu",
    json: JsonOption = False,
) -> None:
    """Make evidence from a cache of keys (after rotary) and values that a serving stack kept.

    The arrays are called 'keys' and 'values', or as ONNX and others name them: 'past_key_values.6.key'.

    Example: [bold]unmask wrap cache cache.safetensors -m smollm2-135m -l 6 -o evidence.safetensors[/bold]

    In PyTorch: [bold]numpy.savez("cache.npz", keys=cache.layers[6].keys, values=cache.layers[6].values)[/bold]
    """
    from unmask.terminal import print_observation, working

    check_paths(out, path, *([mask] if mask else []))
    with working("loading torch"):
        from unmask.evidence import CacheEvidence
        from unmask.evidence.foreign_files import read_arrays
    arrays = read_arrays(path)
    parts = _choose_parts(path, arrays, layer)
    known = _mask(arrays, mask)
    loaded = load(model, DtypeName.float32, device)
    evidence = CacheEvidence.of(
        loaded,
        parts,
        layer=layer,
        heads=heads or None,
        mask=known,
        first_position=first_position,
        compute_dtype=None if dtype is None else dtype.value,
    )
    evidence.save(out)
    texts, length = evidence.mask.shape
    print_observation(
        out,
        f"{' and '.join(evidence.parts)} of block {layer} for {count_noun(texts, 'text')} "
        f"({count_noun(length, 'position')}, {count_noun(len(evidence.heads), 'head')})",
        model,
        json,
        _not_stated(known, evidence),
    )


def _choose_states(path: Path, arrays: dict[str, Tensor], asked: str | None, layer: int | None) -> str:
    """The name that was asked for, or of the only array, or of the only one of the layer."""
    from unmask.evidence.foreign_files import list_arrays, of_layer

    names = [name for name in arrays if name not in _MASKS] if asked is None else [asked]
    if layer is not None and len(names) > 1:
        names = [name for name in names if of_layer(name, layer)]
    if len(names) != 1 or names[0] not in arrays:
        wanted = "one array of states" if asked is None else f"an array '{asked}'"
        raise InputError(
            f"{path} must hold {wanted}{'' if layer is None else f' of layer {layer}'}, got {list_arrays(arrays)}; "
            "choose one with --collection NAME"
        )
    return names[0]


def _choose_parts(path: Path, arrays: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """Keys and values by their names, of one array also (2, batch, heads, length, width)."""
    from unmask.evidence.foreign_files import list_arrays, of_layer, part_of_cache

    rest = {name: array for name, array in arrays.items() if name not in _MASKS}
    only = next(iter(rest.values()), None)
    if len(rest) == 1 and only is not None and only.ndim == 5 and len(only) == 2:
        return {"keys": only[0], "values": only[1]}
    named = [(part, name) for name in rest if of_layer(name, layer) and (part := part_of_cache(name)) is not None]
    parts = {part: rest[name] for part, name in named}
    if not parts or len(parts) != len(named):
        raise InputError(
            f"{path} must hold an array 'keys' of layer {layer}, one 'values', or both, got {list_arrays(arrays)}; "
            "save them with numpy.savez('cache.npz', keys=keys, values=values)"
        )
    return parts


def _not_stated(known: Tensor | None, evidence: HiddenEvidence | CacheEvidence) -> tuple[str, ...]:
    """Texts of a batch are padded as a rule."""
    return ("--mask",) if known is None and min(evidence.mask.shape) > 1 else ()


def _mask(arrays: dict[str, Tensor], path: Path | None) -> Tensor | None:
    """The mask of its own file, or that beside the states."""
    from unmask.evidence.foreign_files import read_arrays

    masks = arrays if path is None else read_arrays(path)
    if path is not None and len(masks) == 1:
        return next(iter(masks.values()))
    named = [masks[name] for name in _MASKS if name in masks]
    if path is not None and not named:
        raise InputError(f"--mask {path} must hold one array, or one called 'attention_mask', got {sorted(masks)}")
    return named[0] if named else None
