"""`unmask wrap update`: gradients, weights and PEFT adapters on disk as evidence."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unmask.cli.options import (
    DeviceOption,
    DtypeName,
    JsonOption,
    ModelOption,
    OutOption,
    TaskName,
    UsageError,
    check_paths,
    load,
    usage,
)
from unmask.errors import InputError
from unmask.wording import count_noun

if TYPE_CHECKING:
    from torch import Tensor

    from unmask.evidence import GradientEvidence
    from unmask.models import Model


class StatePooling(StrEnum):
    """The state of a text that a classification head reads."""

    first = "first"
    last = "last"
    mean = "mean"


def wrap_update_command(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="safetensors or .npz, or a folder of a model or of a PEFT adapter.")
    ],
    model: ModelOption,
    out: OutOption,
    delta: Annotated[bool, typer.Option("--delta", help="FILE holds weights after − before, not gradients.")] = False,
    weights: Annotated[
        bool,
        typer.Option(
            "--weights", help="FILE holds the weights after training; the weights before are those of the model."
        ),
    ] = False,
    before: Annotated[
        Path | None, typer.Option(help="The weights, or the PEFT adapter, before training; FILE holds those after it.")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="Folder of the PEFT adapter that the server sent; FILE holds its gradients.")
    ] = None,
    task: Annotated[TaskName | None, typer.Option(help="What the client trained for. Default: inferred.")] = None,
    num_texts: Annotated[int | None, typer.Option(min=1, help="Number of texts, if known.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate of the local training, if known.")] = None,
    num_steps: Annotated[int | None, typer.Option(min=1, help="Number of local steps, if known.")] = None,
    local_batch_size: Annotated[int | None, typer.Option(min=1, help="Texts in one local step, if known.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd or adamw, if known.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay of the local training, if known.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of the local training, if known.")] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="1: one client's mean; more: a sum of updates.")] = None,
    all_tokens_predicted: Annotated[
        bool | None, typer.Option(help="Whether every token after the first has a label, if known.")
    ] = None,
    head: Annotated[
        Path | None,
        typer.Option(help="safetensors file with a classification head (labels, width) beside the model."),
    ] = None,
    pooling: Annotated[
        StatePooling | None, typer.Option(help="The state that the head reads, if known: first, last or mean.")
    ] = None,
    device: DeviceOption = "cpu",
    json: JsonOption = False,
) -> None:
    """Make evidence from an update that was captured elsewhere: gradients, weights before and after, a PEFT adapter.

    Example: [bold]unmask wrap update grads.safetensors -m ./round-17 -o update.safetensors[/bold]

    Weights: [bold]… after.safetensors --before before.safetensors[/bold], or [bold]… after.safetensors --weights[/bold]

    PEFT: [bold]… ./adapter-after --before ./adapter-before[/bold], or [bold]… grads.safetensors --adapter ./sent[/bold]
    """
    from unmask.terminal import print_observation, working

    check_paths(out, path, *([before] if before else []))
    _refuse_contradictions(delta, weights, before, adapter)
    with working(f"reading {path}"):
        from unmask.evidence import GradientEvidence
        from unmask.integrations.captured_files import read_tensors

        known: dict[str, Any] = {
            "task": None if task is None else task.value.replace("-", "_"),
            "num_texts": num_texts,
            "learning_rate": learning_rate,
            "num_steps": num_steps,
            "local_batch_size": local_batch_size,
            "optimizer": optimizer,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "num_clients": clients,
            "all_tokens_predicted": all_tokens_predicted,
            "pooling": None if pooling is None else pooling.value,
        }
        with usage():
            GradientEvidence({}, "", **known)
        known["head"] = None if head is None else _head(head)
        _refuse_other_files(path, before, adapter)
        tensors = read_tensors(path)
    loaded = load(model, DtypeName.float32, device)
    with working(f"wrapping {path}"):
        tensors, told = _read(loaded, path, tensors, delta, weights, before, adapter)
        evidence = GradientEvidence.of(loaded, tensors, **known, **told)
        evidence.save(out)
    kind = "weight differences" if told.get("update") == "delta" else "gradients"
    print_observation(
        out, f"{count_noun(len(evidence.gradients), 'tensor')} ({kind})", model, json, _not_stated(evidence, loaded)
    )


def _not_stated(evidence: GradientEvidence, model: Model) -> tuple[str, ...]:
    """Options that would let more be proven of this update, where they are known."""
    from unmask.evidence import Task, Update

    is_delta, task = evidence.update is Update.DELTA, evidence.task
    predicts = model.token_head is not None and task in (None, Task.NEXT_TOKEN)
    asked = {
        "--task": task is None and not evidence.all_tokens_predicted,
        "--num-texts": evidence.num_texts is None,
        "--clients": evidence.num_clients is None and not (evidence.all_tokens_predicted and evidence.num_texts),
        "--all-tokens-predicted": predicts and evidence.all_tokens_predicted is None,
        "--pooling": task is Task.CLASSIFICATION and evidence.pooling is None,
        "--learning-rate": is_delta and evidence.learning_rate is None,
        "--num-steps": is_delta and evidence.num_steps is None,
        "--optimizer": is_delta and evidence.optimizer is None,
    }
    return tuple(option for option, is_missing in asked.items() if is_missing)


def _refuse_contradictions(delta: bool, weights: bool, before: Path | None, adapter: Path | None) -> None:
    if delta and (weights or before is not None):
        raise UsageError("with --delta, FILE already holds differences; leave out --weights and --before")
    if adapter is not None and (weights or before is not None):
        raise UsageError("--adapter is for gradients of its factors; for an adapter before and after, give --before")


def _refuse_other_files(path: Path, before: Path | None, adapter: Path | None) -> None:
    """Adapters and weights that do not belong together."""
    from unmask.integrations.captured_files import is_adapter

    if adapter is not None and not is_adapter(adapter):
        raise InputError(f"--adapter {adapter} must be a folder that PEFT's save_pretrained wrote")
    if is_adapter(path) and before is None:
        raise InputError(
            f"{path} is a PEFT adapter, so it holds weights; give the adapter that the client started "
            "from with --before"
        )
    if before is not None and is_adapter(path) != is_adapter(before):
        raise InputError(
            f"one of {before} and {path} is a PEFT adapter and the other is not; give two adapters, "
            "or two files of weights"
        )


def _read(
    model: Model,
    path: Path,
    tensors: dict[str, Tensor],
    delta: bool,
    weights: bool,
    before: Path | None,
    adapter: Path | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors, and what the files tell beside them."""
    from unmask.evidence.foreign_files import refuse_other_evidence
    from unmask.integrations import captured_files as files

    refuse_other_evidence(path, tensors)
    if before is None and not weights:
        told: dict[str, Any] = {"update": "delta"} if delta else {}
        return tensors, told if adapter is None else {**told, **_adapter(adapter)}
    if before is not None and files.is_adapter(before):
        return files.subtract(tensors, files.read_tensors(before)), {"update": "delta", **_adapter(before)}
    from unmask.evidence.captured import name_tensors

    start = files.weights_of(model)
    if before is not None:
        start = files.read_tensors(before)
        files.require_start(model, start)
        start = name_tensors(model, start)
    return files.subtract(name_tensors(model, tensors), start), {"update": "delta"}


def _head(file: Path) -> Tensor:
    """The matrix of a file that holds one."""
    from unmask.integrations.captured_files import read_tensors

    matrices = {name: tensor for name, tensor in read_tensors(file).items() if tensor.ndim == 2}
    if len(matrices) != 1:
        raise InputError(f"--head {file} must hold one matrix (labels, width), got {sorted(matrices) or 'none'}")
    return next(iter(matrices.values()))


def _adapter(folder: Path) -> dict[str, Any]:
    """The factors that the server sent, and their scale."""
    from unmask.integrations.captured_files import read_scale, read_tensors

    factors = {name: tensor for name, tensor in read_tensors(folder).items() if ".lora_" in name}
    return {"adapters": factors, "adapter_scale": read_scale(folder, factors)}
