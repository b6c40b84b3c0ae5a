"""FedSGD: the client computes one gradient on its batch and sends it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence, Task
from unmask.models.adapter import Model
from unmask.protocols.batch import Batch, Texts, make_batch
from unmask.protocols.masking import mask_tokens, masked_token_loss

Pooling = Literal["last", "first", "mean"]
_HEAD_SCALE = 0.02  # the standard deviation that transformers initialises heads with


def observe_gradients(
    model: Model,
    texts: Texts,
    *,
    task: Task | str = Task.NEXT_TOKEN,
    labels: Sequence[int] | None = None,
    num_labels: int = 2,
    pooling: Pooling | None = None,
    mask_share: float = 0.15,
    padding_side: Literal["left", "right"] = "right",
    max_length: int | None = None,
    train_mode: bool = False,
    parameters: Sequence[str] | None = None,
    seed: int = 0,
) -> GradientEvidence:
    """What an honest-but-curious server sees of one client step on `texts`.

    The loss is the mean over targets (next-token, masked-token) or over texts (classification), as transformers
    computes it. A text may be a pair, a tuple of two texts, where the model has token types.
    Classification uses the model's own head if it has one, else a fresh linear head of `num_labels` outputs on the
    `pooling` of the last states (decoders: last token; encoders: first, that is [CLS]). `labels` are drawn at random
    when not given. Masked-token training hides `mask_share` of the tokens (`masking.py`) and predicts them with the
    model's own head if it has one, else with its token embeddings on the last states, a tied output layer.
    `train_mode` keeps dropout on. `parameters` keeps only gradients whose names contain one of them.
    """
    task = _task(task)
    pooling = pooling or ("last" if model.causal else "first")
    if pooling not in get_args(Pooling):
        raise InputError(f"pooling must be one of {', '.join(get_args(Pooling))}, got {pooling!r}")
    if pooling == "first" and model.causal:
        raise InputError("the first state of a causal model knows only the first token; use pooling 'last' or 'mean'")
    if isinstance(parameters, str):
        raise InputError("parameters must be a list of name parts, got one string; put it into a list")
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(model, texts, padding_side=padding_side, max_length=max_length)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), _mode(model, train_mode):
        torch.manual_seed(seed)  # dropout masks
        if task is Task.NEXT_TOKEN:
            loss = next_token_loss(model, batch)
        elif task is Task.MASKED_TOKEN:
            loss = masked_token_loss(model, *mask_tokens(model, batch, mask_share, generator))
        else:
            loss = _classification_loss(model, batch, labels, num_labels, pooling, generator)
        gradients = _gradients(model, loss, parameters)
    return GradientEvidence(
        gradients=gradients,
        model_fingerprint=model.fingerprint(),
        task=task,
        num_texts=len(batch.tokens),
        compute_dtype=model.dtype,
    )


@contextmanager
def _mode(model: Model, train_mode: bool) -> Iterator[None]:
    """Dropout on or off; afterwards every module is as it was, frozen ones included."""
    before = {module: module.training for module in model.hf.modules()}
    model.hf.train(train_mode)
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def next_token_loss(model: Model, batch: Batch) -> Tensor:
    """Mean cross-entropy of each real token given the ones before it, as transformers computes it from labels.

    Under left padding the last padding position predicts the first token, as for every client that only masks the
    labels of padding.
    """
    if model.unembedding is None or not model.causal:
        raise InputError(
            f"next-token training needs a causal model with a language head, and this {model.family} model is none; "
            "use task='classification', or load another model"
        )
    if batch.tokens.shape[1] < 2:
        raise InputError("next-token training needs a text of at least two tokens: one to read and one to predict")
    labels = batch.tokens.masked_fill(~batch.mask, -100)
    return model.hf(input_ids=batch.tokens, attention_mask=batch.mask.long(), labels=labels).loss


def _classification_loss(
    model: Model,
    batch: Batch,
    labels: Sequence[int] | None,
    num_labels: int,
    pooling: Pooling,
    generator: torch.Generator,
) -> Tensor:
    inputs = batch.inputs
    head = getattr(model.hf, "score", None) or getattr(model.hf, "classifier", None)
    num_labels = num_labels if head is None else int(model.config.num_labels)
    chosen = _labels(labels, len(batch.tokens), num_labels, generator).to(model.device)
    if head is not None and not model.causal:
        return model.hf(**inputs, labels=chosen).loss
    pooled = _pool(model.body(**inputs).last_hidden_state, batch, pooling)
    if head is None:
        logits = pooled @ (torch.randn(model.width, num_labels, generator=generator).to(pooled) * _HEAD_SCALE)
    else:
        logits = head(pooled)
    return functional.cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, chosen)


def _pool(states: Tensor, batch: Batch, pooling: Pooling) -> Tensor:
    rows = torch.arange(len(states), device=states.device)
    if pooling == "last":
        return states[rows, batch.last]
    if pooling == "first":
        return states[rows, batch.mask.int().argmax(1)]
    weights = batch.mask.to(states.dtype)
    return (states * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)


def _labels(given: Sequence[int] | None, count: int, num_labels: int, generator: torch.Generator) -> Tensor:
    if given is None:
        return torch.randint(num_labels, (count,), generator=generator)
    if len(given) != count:
        raise InputError(f"there are {count} texts but {len(given)} labels")
    if not all(0 <= label < num_labels for label in given):
        raise InputError(f"labels must lie in 0…{num_labels - 1}, got {sorted(set(given))}")
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
