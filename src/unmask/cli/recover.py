"""`unmask recover`: evidence in, secret out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unmask.cli.options import (
    EXIT_DONE,
    EXIT_INCONCLUSIVE,
    AttackOption,
    DeviceOption,
    DtypeName,
    JsonOption,
    ModelOption,
    check_paths,
    load,
    read_option,
    refuse_unprintable,
    usage,
)
from unmask.cli.output_layer import recover_output_layer_command
from unmask.cli.weights import recover_weights_command
from unmask.cli.words import describe_in_options
from unmask.errors import InputError

recover = typer.Typer(help="Recover the secret from evidence.", no_args_is_help=True)
recover.command("weights")(recover_weights_command)
recover.command("output-layer")(recover_output_layer_command)


@recover.command("text")
def recover_text_command(
    evidence: Annotated[Path, typer.Argument(help="Evidence file: gradients, hidden states, a cache or vectors.")],
    model: ModelOption,
    attack: AttackOption = None,
    known_beginning: Annotated[
        str | None,
        typer.Option(
            help="Text that every prompt starts with, for example a chat template or 'query: '; @FILE reads a file. "
            "For states and caches of decoders, and for vectors."
        ),
    ] = None,
    device: DeviceOption = "cpu",
    effort: Annotated[
        int,
        typer.Option(
            min=1, help="Try N times as often while texts are missing. For updates of encoders, and for vectors."
        ),
    ] = 1,
    proof: Annotated[
        Path | None,
        typer.Option(help="Write what is claimed, for `unmask verify PROOF` on another machine (JSON)."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the attack's random choices.")] = 0,
    json: JsonOption = False,
) -> None:
    """Recover texts from an update, hidden states, a cache or embeddings.

    Exit code 3: the attack was inconclusive; that does not mean 'safe'.

    Example: [bold]unmask recover text update.safetensors -m smollm2-135m[/bold]

    Another: [bold]unmask recover text states.safetensors -m smollm2-135m --attack stack --json[/bold]

    Embeddings: [bold]unmask recover text vectors.safetensors -m minilm-l6[/bold]

    A third: [bold]unmask recover text cache.safetensors -m smollm2-135m --known-beginning @template.txt[/bold]
    """
    from unmask.attacks.table import DEFAULT, Secret, parse_attack
    from unmask.terminal import print_text_recovery, working

    beginning = read_option(known_beginning)
    if proof is not None:
        check_paths(proof, evidence)
    with working("loading torch"):
        from unmask.attacks.recover import channel_of, recover_text
        from unmask.evidence import load_evidence

        seen = load_evidence(evidence)
        channel = channel_of(seen)
        with usage():
            parse_attack(attack or DEFAULT, channel, Secret.TEXTS, Secret.TOKENS)
    loaded = load(model, DtypeName.float32, device)
    recovery = recover_text(seen, loaded, attack=attack, known_beginning=beginning, effort=effort, seed=seed)
    if proof is not None:
        from unmask.verification import prove

        prove(evidence, loaded, model, recovery).write(proof)
    print_text_recovery(describe_in_options(recovery), loaded, json)
    raise typer.Exit(EXIT_DONE if recovery.status.conclusive else EXIT_INCONCLUSIVE)


@recover.command("inputs")
def recover_inputs_command(
    evidence: Annotated[
        Path, typer.Argument(help="Evidence file of one attention layer, or a stack: W, V and its output.")
    ],
    attack: AttackOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the pre-images (safetensors).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the search's starting points.")] = 0,
    json: JsonOption = False,
) -> None:
    """Recover the inputs of an attention layer from its output. Exit code 3: the attack was inconclusive.

    Make the file in Python: [bold]unmask.AttentionEvidence(W=W, V=V, output=B).save("layer.safetensors")[/bold]

    Example: [bold]unmask recover inputs layer.safetensors --out inputs.safetensors[/bold]
    """
    from unmask.attacks.recover import recover_inputs
    from unmask.evidence import AttentionEvidence, AttentionStackEvidence, load_evidence
    from unmask.terminal import print_inputs_recovery, write_preimages

    refuse_unprintable(attack)
    seen = load_evidence(evidence)
    if not isinstance(seen, AttentionEvidence | AttentionStackEvidence):
        raise InputError(
            f"{evidence} contains {type(seen).__name__}, but inputs are recovered from AttentionEvidence; use "
            "`unmask recover text` for gradients and hidden states"
        )
    recovery = recover_inputs(seen, attack=attack, seed=seed)
    if out is not None:
        write_preimages(recovery, out)
    print_inputs_recovery(recovery, out, json)
    raise typer.Exit(EXIT_DONE if recovery.status.conclusive else EXIT_INCONCLUSIVE)
