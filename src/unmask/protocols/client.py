"""What a client that trains holds: its own copy of the model, the head of its task, its texts and their losses.

How texts become losses (task, labels, pooling, head) is the same for every protocol, so it is said here, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from unmask.arguments import require_count, require_member
from unmask.errors import InputError
from unmask.evidence.gradients import Task
from unmask.models.adapter import Model
from unmask.models.encoder_decoder import EncoderDecoder
from unmask.models.load import require_model
from unmask.protocols.batch import Batch, Pair, Texts, TokenIds, is_whole, make_batch, require_memory

Pooling = Literal["last", "first", "mean"]
_HEAD_SCALE = 0.02  # the standard deviation that transformers initialises heads with


class DataOptions(TypedDict, total=False):
    """How texts become losses; the options of `observe_gradients`, with the same meaning and the same defaults."""

    task: Task | str | None
    labels: Sequence[int] | None
    num_labels: int
    head: Tensor | None
    pooling: Pooling | None
    padding_side: Literal["left", "right"]
    max_length: int | None


@dataclass(frozen=True)
class Losses:
    """Cross-entropies of a batch, summed over the targets of each text, and how many targets each text has."""

    totals: Float[Tensor, " texts"]
    counts: Int[Tensor, " texts"]

    def mean(self) -> Tensor:
        """The mean over all targets: the loss that transformers trains on."""
        return self.totals.sum() / self.counts.sum().clamp_min(1)

    def of_each_text(self) -> Float[Tensor, " texts"]:
        """The mean over each text's own targets, so that no text's loss depends on the others."""
        return self.totals / self.counts.clamp_min(1)


class Client(nn.Module):
    """A copy of the model that may be trained, with the texts to do it on; the caller's model is left alone.

    A fresh classification head is a linear layer beside the copy: it is trained along, but it is no part of the model
    and is never shared. Labels and head are drawn from the seed as `observe_gradients` draws them.
    """

    def __init__(
        self,
        model: Model,
        texts: Texts,
        *,
        task: Task | str | None = None,
        labels: Sequence[int] | None = None,
        num_labels: int = 2,
        head: Tensor | None = None,
        pooling: Pooling | None = None,
        padding_side: Literal["left", "right"] = "right",
        max_length: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        require_model(model)
        self.task = choose_task(model, task)
        if self.task is Task.MASKED_TOKEN:
            raise InputError("clients that train do not support task='masked_token' yet; observe_gradients does")
        self.pooling = choose_pooling(model, pooling)
        everyone = make_batch(model, texts, padding_side=padding_side, max_length=max_length)
        self.sequences = _sequences(everyone)
        self.padding_side = padding_side
        self.model = model.to()
        self.hf = self.model.hf
        if self.task is Task.NEXT_TOKEN:
            require_next_token(model, everyone)
            return
        generator = torch.Generator().manual_seed(seed)
        self.labels, fresh = labels_and_head(model, labels, len(texts), num_labels, generator, head)
        if fresh is not None:
            self.fresh_head = fresh

    def side_knowledge(self) -> dict[str, Any]:
        """What the server knows of the task before the client trains, because it sent the model: evidence fields."""
        head = getattr(self, "fresh_head", None)
        return task_knowledge(self.task, self.pooling, None if head is None else head.weight.detach().clone())

    @property
    def rows(self) -> range:
        """Every text of the client."""
        return range(len(self.sequences))

    def batch(self, rows: Sequence[int]) -> Batch:
        """Some of the texts, padded to the longest of them as a data loader does it."""
        batch = make_batch(self.model, [self.sequences[row] for row in rows], padding_side=self.padding_side)
        require_memory(self.model, *batch.tokens.shape, backward=True)
        return batch

    def forward(self, batch: Batch, rows: Sequence[int]) -> Losses:
        """Losses of a batch; `rows` says which of the client's texts it holds.

        Position and token type ids are given for each text: those that transformers makes itself have a batch of one,
        at which Opacus fails.
        """
        inputs: dict[str, Any] = {**batch.inputs}
        inputs["position_ids"] = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        if hasattr(self.model.config, "type_vocab_size"):
            inputs.setdefault("token_type_ids", torch.zeros_like(batch.tokens))
        if self.task is Task.NEXT_TOKEN:
            logits = precise(self.hf(**inputs).logits[:, :-1])
            targets, scored = batch.tokens[:, 1:], batch.mask[:, 1:]
            # Classes on the last axis: over another one torch's CPU sum of 49,152 of them in float32 is so inexact
            # that single gradients of SmolLM2 are off by half a per cent.
            losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            return Losses((losses.view(targets.shape) * scored).sum(1), scored.sum(1))
        logits = class_logits(self.model, inputs, batch, self.pooling, getattr(self, "fresh_head", None))
        losses = functional.cross_entropy(logits, self.labels[list(rows)], reduction="none")
        return Losses(losses, torch.ones_like(losses, dtype=torch.long))

    def shared_parameters(self, patterns: Sequence[str] | None) -> dict[str, nn.Parameter]:
        """Trainable parameters of the model by canonical name, those that contain one of the patterns."""
        return trainable(self.model, patterns)


@contextmanager
def fix_seed(seed: int) -> Iterator[None]:
    """Gradients on, and torch's global generator (dropout, initial weights) at a seed; afterwards as it was."""
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _sequences(batch: Batch) -> list[TokenIds | Pair]:
    """The texts of a batch without its padding, pairs as pairs."""
    types = torch.zeros_like(batch.tokens) if batch.types is None else batch.types
    rows = [(row[mask], kinds[mask]) for row, kinds, mask in zip(batch.tokens, types, batch.mask, strict=True)]
    return [
        (tokens[kinds == 0].tolist(), tokens[kinds == 1].tolist()) if bool(kinds.any()) else tokens.tolist()
        for tokens, kinds in rows
    ]


def choose_pooling(model: Model, pooling: Pooling | None) -> Pooling:
    """Which state stands for a text: as given, else the last one of decoders and the first, [CLS], of encoders."""
    pooling = pooling or ("last" if model.causal else "first")
    if pooling not in get_args(Pooling):
        raise InputError(f"pooling must be one of {', '.join(get_args(Pooling))}, got {pooling!r}")
    if pooling == "first" and model.causal:
        raise InputError("the first state of a causal model knows only the first token; use pooling 'last' or 'mean'")
    return pooling


def usual_task(model: Model) -> Task:
    """What a client most likely trains the model for."""
    return Task.NEXT_TOKEN if model.causal and model.unembedding is not None else Task.CLASSIFICATION


def choose_task(model: Model, task: Task | str | None) -> Task:
    """The task that was named, or the usual one."""
    return usual_task(model) if task is None else require_member(Task, "task", task)


def require_next_token(model: Model, batch: Batch) -> None:
    """Refuse next-token training where nothing predicts, or nothing is to be predicted."""
    if model.unembedding is None or not model.causal:
        raise InputError(
            f"next-token training needs a causal model with a language head, and this {model.family} model is not one; "
            "use task='classification', or load another model"
        )
    if batch.tokens.shape[1] < 2:
        raise InputError("next-token training needs a text of at least two tokens: one to read and one to predict")


def trainable(model: Model | EncoderDecoder, patterns: Sequence[str] | None) -> dict[str, nn.Parameter]:
    """Trainable parameters by canonical name, those that contain one of the patterns."""
    if isinstance(patterns, str):
        raise InputError("parameters must be a list of name parts, got one string; put it into a list")
    found = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (patterns is None or any(pattern in name for pattern in patterns))
    }
    if not found:
        raise InputError(f"no trainable parameter has a name that contains one of {list(patterns or [])}")
    return found


def task_knowledge(task: Task, pooling: Pooling, head: Tensor | None) -> dict[str, Any]:
    """What the server knows of a task, because it sent the model: fields of the evidence."""
    if task is Task.NEXT_TOKEN:
        return {"all_tokens_predicted": True}
    return {"pooling": pooling, "head": head} if task is Task.CLASSIFICATION else {}


def labels_and_head(
    model: Model,
    given: Sequence[int] | None,
    num_texts: int,
    num_labels: int,
    generator: torch.Generator,
    weights: Float[Tensor, "labels d"] | None = None,
) -> tuple[Int[Tensor, " texts"], nn.Linear | None]:
    """Labels, drawn where none are given; then a linear head, if the model has none: of `weights`, or drawn as well.

    Those that are drawn have the size of transformers' own.
    """
    own = model.classifier
    if weights is not None and not (isinstance(weights, Tensor) and weights.ndim == 2):
        raise InputError(f"the head must be a matrix of torch (labels, width), got {type(weights).__name__}")
    if weights is not None and weights.shape[1] != model.width:
        raise InputError(f"the head has width {weights.shape[1]}, the model has {model.width}; pass (labels, width)")
    num_labels = num_labels if weights is None else len(weights)
    num_labels = num_labels if own is None else int(model.config.num_labels)
    require_count("num_labels", num_labels, least=0)
    if num_labels < 2:
        raise InputError(f"classification needs at least two labels, got {num_labels}: the loss of one is constant")
    labels = _labels(given, num_texts, num_labels, generator).to(model.device)
    if own is not None:
        return labels, None
    sizes = {"in_features": model.width, "out_features": num_labels, "bias": False}
    # Its own first weights would be drawn from torch's global generator, which is the caller's.
    head = nn.utils.skip_init(nn.Linear, **sizes, device=model.device, dtype=model.dtype)
    if weights is None:
        weights = torch.randn(model.width, num_labels, generator=generator).T.to(head.weight) * _HEAD_SCALE
    head.weight.data = weights.to(head.weight, copy=True)
    return labels, head


def class_logits(
    model: Model, inputs: dict[str, Any], batch: Batch, pooling: Pooling, fresh_head: nn.Module | None
) -> Float[Tensor, "texts labels"]:
    """What the model's own head says of each text, else the fresh one, in float32 at least."""
    head = model.classifier or fresh_head
    if head is not fresh_head and (not model.causal or (pooling == "last" and model.unread_end is not None)):
        return precise(model.hf(**inputs).logits)
    assert head is not None  # `labels_and_head` makes one where the model has none
    return precise(head(_pool(model.body(**inputs).last_hidden_state, batch, pooling)))


def precise(logits: Tensor) -> Tensor:
    """Logits as a loss takes them: half precision becomes float32."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _pool(states: Float[Tensor, "texts n d"], batch: Batch, pooling: Pooling) -> Float[Tensor, "texts d"]:
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
    if not all(map(is_whole, given)):
        raise InputError(f"labels must be whole numbers, got {list(given)!r}")
    if len(given) != count:
        raise InputError(f"there are {count} texts but {len(given)} labels")
    if not all(0 <= label < num_labels for label in given):
        raise InputError(f"labels must lie in 0…{num_labels - 1}, got {sorted(set(given))}")
    return torch.tensor(list(given))
