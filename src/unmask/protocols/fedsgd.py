"""FedSGD: the client computes one gradient on its batch and sends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence, Task
from unmask.models.adapter import Model
from unmask.protocols.batch import Batch, Texts, make_batch

Pooling = Literal["last", "first", "mean"]


def observe_gradients(
    model: Model,
    texts: Texts,
    *,
    task: Task | str = Task.NEXT_TOKEN,
    labels: Sequence[int] | None = None,
    num_labels: int = 2,
    pooling: Pooling | None = None,
    padding_side: Literal["left", "right"] = "right",
    max_length: int | None = None,
    train_mode: bool = False,
    parameters: Sequence[str] | None = None,
    seed: int = 0,
) -> GradientEvidence:
    """What an honest-but-curious server sees of one client step on `texts`.

    The loss is the mean over targets (next-token) or over texts (classification), in the model's own precision.
    Classification uses the model's own head if it has one, else a fresh linear head of `num_labels` outputs on the
    `pooling` of the last states (decoders: last token; encoders: first, that is [CLS]). `labels` are drawn at random
    when not given. `train_mode` keeps dropout on. `parameters` keeps only gradients whose names contain one of them.
    """
    task = _task(task)
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(model, texts, padding_side=padding_side, max_length=max_length)
    was_training = model.hf.training
    model.hf.train(train_mode)
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # dropout masks
            if task is Task.NEXT_TOKEN:
                loss = next_token_loss(model, batch)
            else:
                chosen = _labels(labels, len(batch.tokens), num_labels, generator).to(model.device)
                loss = _classification_loss(model, batch, chosen, num_labels, pooling, generator)
            gradients = _gradients(model, loss, parameters)
    finally:
        model.hf.train(was_training)
    return GradientEvidence(
        gradients=gradients,
        model_fingerprint=model.fingerprint(),
        task=task,
        num_texts=len(batch.tokens),
        compute_dtype=model.dtype,
    )


def next_token_loss(model: Model, batch: Batch) -> Tensor:
    """Mean cross-entropy of each real token given the ones before it, as transformers computes it from labels."""
    if model.unembedding is None:
        raise InputError(
            f"next-token training needs a language head, and this {model.family} model has none; "
            "use task='classification', or load a model with a head"
        )
    if batch.tokens.shape[1] < 2:
        raise InputError("next-token training needs a text of at least two tokens: one to read and one to predict")
    labels = batch.tokens.masked_fill(~batch.mask, -100)
    return model.hf(input_ids=batch.tokens, attention_mask=batch.mask.long(), labels=labels).loss


def _classification_loss(
    model: Model,
    batch: Batch,
    labels: Tensor,
    num_labels: int,
    pooling: Pooling | None,
    generator: torch.Generator,
) -> Tensor:
    states = model.body(input_ids=batch.tokens, attention_mask=batch.mask.long()).last_hidden_state
    own_head = getattr(model.hf, "score", None)
    if own_head is None and hasattr(model.hf, "classifier"):
        return model.hf(input_ids=batch.tokens, attention_mask=batch.mask.long(), labels=labels).loss
    pooled = _pool(states, batch, pooling or ("last" if model.causal else "first"))
    if own_head is not None:
        logits = own_head(pooled)
    else:
        head = torch.randn(model.width, num_labels, generator=generator).to(pooled) * 0.02
        logits = pooled @ head
    return functional.cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, labels)


def _pool(states: Tensor, batch: Batch, pooling: Pooling) -> Tensor:
    rows = torch.arange(len(states), device=states.device)
    match pooling:
        case "last":
            return states[rows, batch.last]
        case "first":
            return states[rows, batch.mask.int().argmax(1)]
        case "mean":
            weights = batch.mask.to(states.dtype)
            return (states * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
    raise InputError(f"pooling must be 'last', 'first' or 'mean', got {pooling!r}")


def _labels(given: Sequence[int] | None, count: int, num_labels: int, generator: torch.Generator) -> Tensor:
    if given is None:
        return torch.randint(num_labels, (count,), generator=generator)
    if len(given) != count:
        raise InputError(f"there are {count} texts but {len(given)} labels")
    return torch.tensor(list(given))


def _gradients(model: Model, loss: Tensor, patterns: Sequence[str] | None) -> dict[str, Tensor]:
    wanted = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (patterns is None or any(pattern in name for pattern in patterns))
    }
    if not wanted:
        raise InputError(f"no trainable parameter has a name that contains one of {list(patterns or [])}")
    gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {name: g.detach() for name, g in zip(wanted, gradients, strict=True) if g is not None}


def _task(task: Task | str) -> Task:
    try:
        return Task(task)
    except ValueError:
        names = ", ".join(repr(member.value) for member in Task)
        raise InputError(f"task must be one of {names}, got {task!r}") from None
