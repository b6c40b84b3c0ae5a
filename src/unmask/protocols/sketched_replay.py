"""Replay in half the time: FedSGD on next tokens, without forming the gradients of linear layers.

    Ĝ·R of every linear layer and embedding (`gradient_sketches.py`), Ĝ of all other parameters

A text is run once, however often it occurs, without its last token, which predicts nothing, and beside texts of about
its length. That is right for causal models whose batches are padded on the right.

Limits: other clients, and models that use a weight without calling its module, are left to `replay.py`.
Cost: a forward pass, and a backward pass to the rows alone. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from unmask.evidence.gradients import GradientEvidence, Task, Update
from unmask.models.adapter import Model
from unmask.models.inputs import training_mode
from unmask.protocols.gradient_sketches import GradientSketches, Sketch, seed_of
from unmask.protocols.gradient_visits import only_trainable

_ROWS_AT_ONCE = 4096
_PADDING_ROWS, _PADDING = 24, 0.15  # rows, or a share of them, that cost less than another pass through the model


def replay_sketched(
    evidence: GradientEvidence, model: Model, texts: Mapping[tuple[int, ...], int]
) -> dict[str, Tensor | Sketch] | None:
    """What the client sends for texts with these counts; None where that cannot be told in this way."""
    is_plain = evidence.update is Update.GRADIENT and evidence.task in (None, Task.NEXT_TOKEN)
    if not is_plain or evidence.adapters or not model.causal or min(map(len, texts)) < 2:
        return None
    num_labels = sum((len(text) - 1) * count for text, count in texts.items())
    ordered = sorted(texts, key=len)
    wanted = {name: p for name, p in model.named_parameters() if name in evidence.gradients}
    totals: dict[str, Tensor] = {}
    with (
        only_trainable(model, wanted),
        GradientSketches(model, wanted, seed_of(evidence.gradients)) as sketched,
        training_mode(model.hf, False),
    ):
        formed = {name: parameter for name, parameter in wanted.items() if name not in sketched.owners}
        for chunk in _chunks_of_one_length(ordered):
            loss = _sum_of_losses(model, chunk, [texts[text] / num_labels for text in chunk])
            for name, gradient in sketched.send_back(loss, formed).items():
                totals[name] = totals[name] + gradient if name in totals else gradient
    again: dict[str, Tensor | Sketch] = {**totals, **sketched.sketches}
    is_whole = all(name in again or not bool(evidence.gradients[name].any()) for name in wanted)
    return again if is_whole else None  # a weight that is used without its module being called


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


def _sum_of_losses(model: Model, texts: Sequence[TokenIds], weights: Sequence[float]) -> Tensor:
    """Σ over texts of their weight times the cross-entropies of their tokens."""
    length = max(map(len, texts)) - 1
    tokens = torch.zeros(len(texts), length, dtype=torch.long)
    labels = torch.full((len(texts), length), -100)
    for row, text in enumerate(texts):
        tokens[row, : len(text) - 1] = torch.tensor(text[:-1])
        labels[row, : len(text) - 1] = torch.tensor(text[1:])
    mask = (labels >= 0).long()
    logits = model.hf(input_ids=tokens.to(model.device), attention_mask=mask.to(model.device)).logits
    is_label = mask.bool().to(model.device)
    each = functional.cross_entropy(logits[is_label].float(), labels.to(model.device)[is_label], reduction="none")
    return (each * torch.tensor(weights).to(each)[is_label.nonzero()[:, 0]]).sum()
