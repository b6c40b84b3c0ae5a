"""What a client that trains holds: its own copy of the model, the head of its task, its texts and their losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from unmask.errors import InputError
from unmask.evidence.gradients import Task
from unmask.models.adapter import Model
from unmask.protocols.batch import Batch, Pair, Texts, TokenIds, make_batch
from unmask.protocols.fedsgd import _HEAD_SCALE, Pooling, _labels, _pool, _task


class DataOptions(TypedDict, total=False):
    """How texts become losses; the options of `observe_gradients`, with the same meaning and the same defaults."""

    task: Task | str
    labels: Sequence[int] | None
    num_labels: int
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
        task: Task | str = Task.NEXT_TOKEN,
        labels: Sequence[int] | None = None,
        num_labels: int = 2,
        pooling: Pooling | None = None,
        padding_side: Literal["left", "right"] = "right",
        max_length: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.task = _task(task)
        if self.task is Task.MASKED_TOKEN:
            raise InputError("clients that train do not support task='masked_token' yet; observe_gradients does")
        self.pooling = _pooling(model, pooling)
        everyone = make_batch(model, texts, padding_side=padding_side, max_length=max_length)
        self.sequences = _sequences(everyone)
        self.padding_side = padding_side
        self.model = model.to()
        self.hf = self.model.hf
        if self.task is Task.NEXT_TOKEN:
            _require_next_token(model, everyone)
            return
        generator = torch.Generator().manual_seed(seed)
        num_labels = num_labels if self.own_head is None else int(model.config.num_labels)
        self.labels = _labels(labels, len(texts), num_labels, generator).to(model.device)
        if self.own_head is None:
            self.fresh_head = nn.Linear(model.width, num_labels, bias=False, device=model.device, dtype=model.dtype)
            noise = torch.randn(model.width, num_labels, generator=generator)
            self.fresh_head.weight.data = noise.T.to(self.fresh_head.weight) * _HEAD_SCALE

    @property
    def own_head(self) -> nn.Module | None:
        """The classification head that the model has itself."""
        return getattr(self.hf, "score", None) or getattr(self.hf, "classifier", None)

    @property
    def rows(self) -> range:
        """Every text of the client."""
        return range(len(self.sequences))

    def batch(self, rows: Sequence[int]) -> Batch:
        """Some of the texts, padded to the longest of them as a data loader does it."""
        return make_batch(self.model, [self.sequences[row] for row in rows], padding_side=self.padding_side)

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
            logits = _precise(self.hf(**inputs).logits[:, :-1])
            targets, scored = batch.tokens[:, 1:], batch.mask[:, 1:]
            # Classes on the last axis: over another one torch's CPU sum of 49,152 of them in float32 is so inexact
            # that single gradients of SmolLM2 are off by half a per cent.
            losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            return Losses((losses.view(targets.shape) * scored).sum(1), scored.sum(1))
        logits = _precise(self._class_logits(inputs, batch))
        losses = functional.cross_entropy(logits, self.labels[list(rows)], reduction="none")
        return Losses(losses, torch.ones_like(losses, dtype=torch.long))

    def _class_logits(self, inputs: dict[str, Any], batch: Batch) -> Float[Tensor, "texts labels"]:
        if self.own_head is not None and not self.model.causal:
            return self.hf(**inputs).logits
        head = self.fresh_head if self.own_head is None else self.own_head
        return head(_pool(self.model.body(**inputs).last_hidden_state, batch, self.pooling))

    def shared(self, patterns: Sequence[str] | None) -> dict[str, nn.Parameter]:
        """Trainable parameters of the model by canonical name, those that contain one of the patterns."""
        if isinstance(patterns, str):
            raise InputError("parameters must be a list of name parts, got one string; put it into a list")
        found = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and (patterns is None or any(pattern in name for pattern in patterns))
        }
        if not found:
            raise InputError(f"no trainable parameter has a name that contains one of {list(patterns or [])}")
        return found


@contextmanager
def seeded(seed: int) -> Iterator[None]:
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


def _precise(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _pooling(model: Model, pooling: Pooling | None) -> Pooling:
    pooling = pooling or ("last" if model.causal else "first")
    if pooling not in get_args(Pooling):
        raise InputError(f"pooling must be one of {', '.join(get_args(Pooling))}, got {pooling!r}")
    if pooling == "first" and model.causal:
        raise InputError("the first state of a causal model knows only the first token; use pooling 'last' or 'mean'")
    return pooling


def _require_next_token(model: Model, batch: Batch) -> None:
    if model.unembedding is None or not model.causal:
        raise InputError(
            f"next-token training needs a causal model with a language head, and this {model.family} model is none; "
            "use task='classification', or load another model"
        )
    if batch.tokens.shape[1] < 2:
        raise InputError("next-token training needs a text of at least two tokens: one to read and one to predict")
