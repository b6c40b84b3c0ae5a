"""`unmask observe`: make evidence."""

from __future__ import annotations

from typing import Annotated

import typer

from unmask.audit.cases.data import read_pairs, read_texts
from unmask.cli.options import (
    CacheStorageName,
    DefenceOption,
    DeviceOption,
    DtypeName,
    DtypeOption,
    JsonOption,
    MaxLengthOption,
    ModelOption,
    OutOption,
    PaddingOption,
    PartsName,
    PoolingOption,
    PrefixOption,
    Side,
    SiteName,
    StorageName,
    TaskName,
    TextOption,
    check_paths,
    load,
    text_file,
    usage,
)
from unmask.wording import count_noun

observe = typer.Typer(help="Make evidence: what an adversary would see.", no_args_is_help=True)


@observe.command("gradients")
def observe_gradients_command(
    model: ModelOption,
    text: TextOption,
    out: OutOption,
    task: Annotated[
        TaskName | None,
        typer.Option(
            help="What the client trains for. Default: next-token if the model supports it, else classification."
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Use only the first N texts.")] = None,
    padding: PaddingOption = Side.right,
    max_length: MaxLengthOption = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Each line holds two texts, separated by a tab (in a .tsv: two columns).")
    ] = False,
    parameters: Annotated[
        list[str] | None,
        typer.Option("--keep", help="Keep only gradients whose name contains this, to get a smaller file; repeatable."),
    ] = None,
    train_mode: Annotated[bool, typer.Option("--train-mode", help="Keep dropout on, as in real training.")] = False,
    protocol: Annotated[
        str, typer.Option(help="How the client makes its update: fedsgd, fedavg:…, dpsgd:…, lora:…")
    ] = "fedsgd",
    defence: DefenceOption = None,
    clients: Annotated[
        int, typer.Option(min=1, help="Split the texts among N clients; the server sees only the sum of their updates.")
    ] = 1,
    dtype: DtypeOption = DtypeName.float32,
    device: DeviceOption = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of labels, masks, dropout, a new head and defences.")] = 0,
    json: JsonOption = False,
) -> None:
    """Make a client's update: the gradients that a federated-learning server sees.

    Example: [bold]unmask observe gradients -m smollm2-135m -t texts.txt -o update.safetensors[/bold]

    Another: [bold]… --protocol fedavg:local_steps=4,learning_rate=0.01 --defence clip:norm=1 --defence int8[/bold]
    """
    from unmask.terminal import print_observation, working

    check_paths(out, text_file(text))
    texts = read_pairs(text_file(text), batch_size) if pairs else read_texts(text_file(text), batch_size)
    with working("loading torch"), usage():
        import torch

        from unmask.defences import parse_defence
        from unmask.observe import observe_update
        from unmask.protocols.table import ClientOptions, parse_protocol

        client = parse_protocol(protocol)
        defences = [parse_defence(part) for part in defence or ()]
    loaded = load(model, dtype, device)
    with working(f"computing gradients of {count_noun(len(texts), 'text')}"):
        options: ClientOptions = {
            "task": task.value.replace("-", "_") if task else None,
            "padding_side": padding.value,
            "max_length": max_length,
            "train_mode": train_mode,
            "seed": seed,
        }
        if parameters is not None:
            options["parameters"] = parameters
        generator = torch.Generator().manual_seed(seed)
        update = observe_update(loaded, texts, client, defences, num_clients=clients, generator=generator, **options)
        update.evidence.save(out)
    budget = f"; ε = {update.epsilon:.3g} at δ = {update.delta:g}" if update.delta else ""
    print_observation(
        out,
        f"{count_noun(len(update.evidence.gradients), 'tensor')} of {count_noun(len(texts), 'text')}{budget}",
        model,
        json,
    )


@observe.command("hidden")
def observe_hidden_command(
    model: ModelOption,
    text: TextOption,
    out: OutOption,
    layer: Annotated[
        int | None,
        typer.Option(
            "--layer",
            "-l",
            min=0,
            help="Read the states after this many blocks (0: the embeddings). Default: after all blocks.",
        ),
    ] = None,
    site: Annotated[
        SiteName,
        typer.Option(
            help="Which states to take: the stream, after the final norm, one attention module, or a text's mean."
        ),
    ] = SiteName.stream,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Use only the first N texts.")] = None,
    max_length: MaxLengthOption = None,
    padding: PaddingOption = Side.right,
    defence: DefenceOption = None,
    dtype: DtypeOption = DtypeName.float32,
    device: DeviceOption = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the defences.")] = 0,
    json: JsonOption = False,
) -> None:
    """Make a dump of hidden states, as a split-inference service sends them.

    Example: [bold]unmask observe hidden -m smollm2-135m -t texts.txt -l 6 -o states.safetensors[/bold]

    Another: [bold]… --site final-norm --defence int8 --defence noise:sigma=0.05,relative=true[/bold]
    """
    from unmask.terminal import print_observation, working

    check_paths(out, text_file(text))
    texts = read_texts(text_file(text), batch_size)
    with working("loading torch"), usage():
        import torch

        from unmask.defences import defend_states, parse_defence
        from unmask.protocols import observe_hidden

        defences = [parse_defence(part) for part in defence or ()]
    loaded = load(model, dtype, device)
    with working(f"computing states of {count_noun(len(texts), 'text')}"):
        place = site.value.replace("-", "_")
        evidence = observe_hidden(
            loaded, texts, layer=layer, site=place, padding_side=padding.value, max_length=max_length
        )
        generator = torch.Generator().manual_seed(seed)
        for step in defences:
            evidence = defend_states(evidence, step, generator)
        evidence.save(out)
    print_observation(
        out,
        f"states of {count_noun(len(texts), 'text')} after {count_noun(evidence.layer, 'block')} ({place})",
        model,
        json,
    )


@observe.command("cache")
def observe_cache_command(
    model: ModelOption,
    text: TextOption,
    out: OutOption,
    layer: Annotated[int, typer.Option("--layer", "-l", min=0, help="The block whose cache the adversary sees.")] = 0,
    parts: Annotated[PartsName, typer.Option(help="Which part of the cache the adversary sees.")] = PartsName.both,
    heads: Annotated[
        list[int] | None,
        typer.Option("--head", min=0, help="A key/value head that the adversary sees; repeatable. Default: all."),
    ] = None,
    first_position: Annotated[int, typer.Option(min=0, help="First position that the adversary sees.")] = 0,
    num_positions: Annotated[
        int | None, typer.Option(min=1, help="How many positions the adversary sees. Default: all.")
    ] = None,
    storage: Annotated[
        CacheStorageName | None,
        typer.Option(help="Type in which the cache is stored; int8 has a scale for each token and head."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Use only the first N texts.")] = None,
    max_length: MaxLengthOption = None,
    defence: DefenceOption = None,
    dtype: DtypeOption = DtypeName.float32,
    device: DeviceOption = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the defences.")] = 0,
    json: JsonOption = False,
) -> None:
    """Make a dump of a cache of keys and values, as a serving stack stores it.

    Example: [bold]unmask observe cache -m smollm2-135m -t texts.txt -l 15 --storage int8 -o cache.safetensors[/bold]

    Another: [bold]… -l 0 --parts keys --head 0 --first-position 16 --num-positions 16 --defence cloak[/bold]
    """
    from unmask.terminal import print_observation, working

    check_paths(out, text_file(text))
    texts = read_texts(text_file(text), batch_size)
    with working("loading torch"), usage():
        import torch

        from unmask.defences import defend_states, parse_defence
        from unmask.protocols import observe_cache

        defences = [parse_defence(part) for part in defence or ()]
    loaded = load(model, dtype, device)
    with working(f"filling the cache with {count_noun(len(texts), 'text')}"):
        evidence = observe_cache(
            loaded,
            texts,
            layer=layer,
            parts=parts.value,
            heads=heads or None,
            first_position=first_position,
            num_positions=num_positions,
            dtype=storage.value if storage else None,
            max_length=max_length,
        )
        generator = torch.Generator().manual_seed(seed)
        for step in defences:
            evidence = defend_states(evidence, step, generator)
        evidence.save(out)
    what = " and ".join(evidence.parts)
    print_observation(
        out,
        f"{what} of block {layer} for {count_noun(len(texts), 'text')} "
        f"({count_noun(evidence.mask.shape[1], 'position')})",
        model,
        json,
    )


@observe.command("vectors")
def observe_vectors_command(
    model: ModelOption,
    text: TextOption,
    out: OutOption,
    pooling: PoolingOption = None,
    normalise: Annotated[
        bool | None, typer.Option(help="Whether vectors have length 1. Default: as the model's folder says.")
    ] = None,
    dimensions: Annotated[int | None, typer.Option(min=1, help="Keep only the first N numbers.")] = None,
    prefix: PrefixOption = "",
    dtype: Annotated[
        StorageName, typer.Option(help="Type in which vectors are stored; int8 has a scale for each vector.")
    ] = StorageName.float32,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Use only the first N texts.")] = None,
    max_length: MaxLengthOption = None,
    defence: DefenceOption = None,
    device: DeviceOption = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the defences.")] = 0,
    json: JsonOption = False,
) -> None:
    """Make embeddings of texts, one vector per text, as a vector database stores them.

    Example: [bold]unmask observe vectors -m minilm-l6 -t texts.txt -o vectors.safetensors[/bold]

    Another: [bold]… --dtype int8 --defence rotate[/bold]. Vectors of a real store: [bold]unmask wrap store[/bold]
    """
    from unmask.terminal import print_observation, working

    check_paths(out, text_file(text))
    texts = read_texts(text_file(text), batch_size)
    with working("loading torch"), usage():
        import torch

        from unmask.defences import parse_vector_defence
        from unmask.protocols import observe_vectors

        defences = [parse_vector_defence(part) for part in defence or ()]
    loaded = load(model, DtypeName.float32, device)
    with working(f"computing vectors of {count_noun(len(texts), 'text')}"):
        evidence = observe_vectors(
            loaded,
            texts,
            pooling=pooling.value.replace("-", "_") if pooling else None,
            normalise=normalise,
            dimensions=dimensions,
            prefix=prefix,
            dtype=dtype.value,
            max_length=max_length,
        )
        generator = torch.Generator().manual_seed(seed)
        for step in defences:
            evidence = step(evidence, generator)
        evidence.save(out)
    kind = evidence.recipe.pooling.value
    print_observation(
        out, f"{count_noun(len(texts), 'vector')} of {evidence.width} numbers ({kind}, {dtype.value})", model, json
    )
