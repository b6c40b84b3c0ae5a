"""Replay in half the time: FedSGD on next tokens, without forming the gradients of linear layers.

    Ĝ·R of every linear layer and embedding (`gradient_sketches.py`), Ĝ of all other parameters

A text is run once, however often it occurs, without its last token, which predicts nothing, and beside texts of about
its length. That is right for causal models whose batches are padded on the right. Labels enter behind the forward pass:
whoever reads them off its rows need not run it again.

Limits: other clients, and models that use a weight without calling its module, are left to `replay.py`.
Cost: a forward pass, and a backward pass to the rows alone. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from unmask.evidence.gradients import GradientEvidence, Task, Update
from unmask.models.adapter import Model
from unmask.models.inputs import training_mode
from unmask.models.record import hook_before
from unmask.progress import track
from unmask.proof.gradient_sketches import GradientSketches, Sketch, seed_of
from unmask.proof.gradient_visits import only_trainable

_ROWS_AT_ONCE = 4096
_PADDING_ROWS, _PADDING = 24, 0.15  # rows, or a share of them, that cost less than another pass through the model


@dataclass(frozen=True)
class ForwardPass:
    """Texts run side by side, padded on the right: their logits, and the stream that enters the last block."""

    texts: list[tuple[int, ...]]
    logits: Float[Tensor, "n l vocab"]
    last_stream: Float[Tensor, "n l d"]


class SketchedClient:
    """A client that has run its forward passes and waits for the labels; they are sent back once."""

    def __init__(self, evidence: GradientEvidence, model: Model) -> None:
        self.model = model
        self.update = evidence.gradients
        self.wanted = {name: p for name, p in model.named_parameters() if name in evidence.gradients}
        self.sketched = GradientSketches(model, self.wanted, seed_of(evidence.gradients))
        self.passes: list[ForwardPass] = []
        self.likely: dict[tuple[tuple[int, ...], int], float] = {}  # of a prefix and its label, how likely that was
        self.totals: dict[str, Tensor] = {}

    def run(self, texts: Sequence[tuple[int, ...]]) -> None:
        """A forward pass over texts without their last tokens, whose graph is kept."""
        tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, text in enumerate(texts):
            tokens[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
        model, seen = self.model, []
        last = model.layout.blocks[-1]

        def keep(_: nn.Module, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
            seen.append((given[last.rows] if isinstance(last.rows, int) else options[last.rows]).detach())

        inputs = {"input_ids": tokens.to(model.device), "attention_mask": mask.to(model.device)}
        with (
            torch.enable_grad(),
            only_trainable(model, self.wanted),
            self.sketched,
            training_mode(model.hf, False),
            hook_before(model.block_module(model.num_blocks - 1), keep),
        ):
            self.passes.append(ForwardPass(list(texts), model.hf(**inputs).logits, seen[-1]))

    def send_back(self, labels: Mapping[tuple[int, ...], Mapping[int, float]]) -> None:
        """Weights of the labels behind each prefix, each sent back from the first text that begins with it."""
        weights, picked = dict(labels), []
        for forward in self.passes:
            places = [
                (row, length - 1, label, weight, text[:length])
                for row, text in enumerate(forward.texts)
                for length in _upto(text)
                for label, weight in weights.pop(text[:length], {}).items()
            ]
            if places:
                rows, positions, named, sizes, prefixes = zip(*places, strict=True)
                logits = forward.logits[list(rows), list(positions)].float()
                each = functional.cross_entropy(logits, torch.tensor(named).to(logits.device), reduction="none")
                picked.append((each * torch.tensor(sizes).to(each)).sum())
                self.likely |= zip(zip(prefixes, named, strict=True), (-each.detach()).exp().tolist(), strict=True)
        self.passes.clear()
        if picked:
            formed = {name: p for name, p in self.wanted.items() if name not in self.sketched.owners}
            with only_trainable(self.model, self.wanted):
                for name, gradient in self.sketched.send_back(torch.stack(picked).sum(), formed).items():
                    self.totals[name] = self.totals[name] + gradient if name in self.totals else gradient

    def update_again(self) -> dict[str, Tensor | Sketch] | None:
        """What the client sends; None where a weight is used without its module being called."""
        again: dict[str, Tensor | Sketch] = {**self.totals, **self.sketched.sketches}
        is_whole = all(name in again or not bool(self.update[name].any()) for name in self.wanted)
        return again if is_whole else None


def can_sketch(evidence: GradientEvidence, model: Model) -> bool:
    """Whether the client is one whose gradients are compared by sketches."""
    is_plain = evidence.update is Update.GRADIENT and evidence.task in (None, Task.NEXT_TOKEN)
    return is_plain and not evidence.adapters and model.causal


def run_client(evidence: GradientEvidence, model: Model, texts: Sequence[tuple[int, ...]]) -> SketchedClient | None:
    """Forward passes over texts whose last labels are not known yet; None where their graphs would be too large."""
    chunks = list(_chunks_of_one_length(sorted(set(texts), key=len)))
    if not can_sketch(evidence, model) or sum(len(chunk) * len(chunk[-1]) for chunk in chunks) > _ROWS_AT_ONCE:
        return None
    client = SketchedClient(evidence, model)
    for chunk in track(chunks, "running the client"):
        client.run(chunk)
    return client


def replay_sketched(
    evidence: GradientEvidence,
    model: Model,
    texts: Mapping[tuple[int, ...], int],
    client: SketchedClient | None = None,
    likely: dict[tuple[tuple[int, ...], int], float] | None = None,
) -> dict[str, Tensor | Sketch] | None:
    """What the client sends for texts with these counts; None where that cannot be told in this way.

    `client`: one that has run over texts that begin with all of these, but for their last tokens. `likely` is told how
    likely each label was behind its prefix.
    """
    if not can_sketch(evidence, model) or min(map(len, texts)) < 2:
        return None
    num_labels = sum((len(text) - 1) * count for text, count in texts.items())
    labels: dict[tuple[int, ...], dict[int, float]] = {}
    for text, count in texts.items():
        for length in range(1, len(text)):
            behind = labels.setdefault(text[:length], {})
            behind[text[length]] = behind.get(text[length], 0.0) + count / num_labels
    inputs = sorted({text[:-1] for text in texts}, key=len)
    run = {text[:length] for part in (client.passes if client else ()) for text in part.texts for length in _upto(text)}
    if client is not None and run.issuperset(inputs):
        client.send_back(labels)
        if likely is not None:
            likely |= client.likely
        return client.update_again()
    client = SketchedClient(evidence, model)
    for chunk in track(list(_chunks_of_one_length(inputs)), "running the client"):
        client.run(chunk)
        begun = {text[:length] for text in chunk for length in _upto(text)}
        client.send_back({prefix: labels.pop(prefix) for prefix in begun & labels.keys()})
    if likely is not None:
        likely |= client.likely
    return client.update_again()


def _upto(text: tuple[int, ...]) -> range:
    """Lengths of a text's prefixes."""
    return range(1, len(text) + 1)


def _chunks_of_one_length(ordered: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Texts in the order of their lengths, cut where padding or memory would be too much."""
    chunk: list[tuple[int, ...]] = []
    for text in ordered:
        padding = sum(len(text) - len(other) for other in chunk)
        num_rows = (len(chunk) + 1) * len(text)
        if chunk and (padding > max(_PADDING_ROWS, _PADDING * num_rows) or num_rows > _ROWS_AT_ONCE):
            yield chunk
            chunk = []
        chunk.append(text)
    yield chunk
