"""Replay without the loss: what arrives at the top of the model is sent down again through every layer below.

    Δ ← least squares at the highest layer of the update that adds to the stream (a down projection, or an attention's
        output projection): G = AᵀΔ, with a row of A known for each token
    Ĝ ← the gradient of Σ ⟨y, Δ⟩ in every parameter below, y the output of that layer with the stream beside it

Whatever the loss is, its pooling, its labels, its weights and its head, it reaches the layers below through Δ alone. So
if the texts are right, Ĝ agrees with every tensor of the update; if a text is missing or wrong, its rows are missing
or wrong in A and in all layers below. A text that is not in the batch gets Δ = 0: it is too many.

Notation: A (n, f) inputs of that layer, Δ (n, d) what arrives at its outputs.
Limits: at most f rows. It does not tell labels, nor where a text ends among rows that other texts share.
Cost: two forward passes and one backward pass. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Attended, Model
from unmask.models.linear import Role
from unmask.proof.agreement import Agreement, agree, tolerance_of
from unmask.proof.gradient_visits import only_trainable
from unmask.proof.replay import why_too_large

_CONDITION = 1e2  # least squares spreads the rounding of float32 by the condition of A; up to here it does not show
_MOST_LENIENT = 1e-2  # a wrong text differs by more, whatever the condition
_TEXTS_AT_ONCE = 32
_LEAST_ROOM = 8  # directions that rows leave free where one layer alone is compared


@dataclass(frozen=True)
class TextInput:
    """One text as the model takes it: tokens, where they stand, and their types where the family has them.

    `starts_anew`: its last token stands at the first position again, as that of the next text in a packed row.
    """

    tokens: tuple[int, ...]
    start: int = 0
    types: tuple[int, ...] | None = None
    starts_anew: bool = False


@dataclass(frozen=True)
class Arrivals:
    """What arrives at each row, in the order that they were asked for, and how well it explains the update below."""

    rows: Float[Tensor, "n d"]
    agreement: Agreement
    parameter: str
    compared: frozenset[str] = frozenset()  # the tensors that it explains

    @property
    def sizes(self) -> Float[Tensor, " n"]:
        """Norms of what arrives, as a share of the largest."""
        norms = self.rows.norm(dim=1)
        return norms / norms.max().clamp_min(1e-300)


@dataclass(frozen=True)
class Top:
    """The highest layer of an update that adds to the stream, and its gradient."""

    block: int
    role: Role
    gradient: Float[Tensor, "f d"]

    def is_last(self, model: Model) -> bool:
        """Whether nothing but the final norm and the head follows."""
        return self.block == model.num_blocks - 1 and self.role is Role.MLP_OUT


def highest_layer(evidence: GradientEvidence, model: Model) -> Top | None:
    """Down projections before output projections of a block, later blocks before earlier ones."""
    for block in reversed(range(model.num_blocks)):
        for role in (Role.MLP_OUT, Role.ATTENTION_OUT):
            gradient = evidence.linear(model, role, block)
            if gradient is not None and model.carries_all(role, block):
                return Top(block, role, gradient)
    return None


def replay_arrivals(
    evidence: GradientEvidence,
    model: Model,
    texts: Sequence[TextInput],
    rows: Int[Tensor, "n 2"],
    equal: Sequence[tuple[int, ...]] = (),
) -> Arrivals | None:
    """Solve for what arrives at rows (text, position), and send it down; None where the update does not allow it.

    Embedding rows of `equal` tokens are compared together.
    """
    if why_too_large(evidence):
        return None
    top = highest_layer(evidence, model)
    if top is None or not 0 < len(rows) <= top.gradient.shape[0]:
        return None
    layer = model.linear(top.role, top.block)
    assert layer is not None  # its gradient was read
    with torch.no_grad():
        hidden = torch.cat([_run(model, chunk, top)[0][here] for chunk, here, _ in _chunks(model, texts, rows)])
    order = torch.cat([places for _, _, places in _chunks(model, texts, rows)])
    a = hidden.double()
    q, r = torch.linalg.qr(a.T)
    diagonal = r.diagonal().abs()
    if float(diagonal.min()) <= 1e-9 * float(diagonal.max()):
        return None  # rows that depend on each other: what arrives at each of them is not determined
    arrived = torch.linalg.solve_triangular(r, q.T @ top.gradient.double(), upper=True)
    again = _send_down(evidence, model, texts, rows, top, arrived.to(hidden))
    if not set(again) - {layer.parameter} and len(rows) > a.shape[1] - _LEAST_ROOM:
        return None  # so many rows explain any gradient of this layer, and no other one is there to tell
    condition = float(torch.linalg.cond(r))
    tolerance = min(_MOST_LENIENT, tolerance_of(evidence) * max(1.0, condition / _CONDITION))
    placed = torch.empty_like(arrived)
    placed[order] = arrived
    return Arrivals(
        placed,
        agree(evidence, again, tolerance=tolerance, by_token=[model.token_embedding], equal=equal),
        layer.parameter,
        frozenset(again) & set(evidence.gradients),
    )


def _send_down(
    evidence: GradientEvidence,
    model: Model,
    texts: Sequence[TextInput],
    rows: Int[Tensor, "n 2"],
    top: Top,
    arrived: Float[Tensor, "n d"],
) -> dict[str, Tensor]:
    """Gradients of Σ ⟨y, Δ⟩ in the parameters that the update holds; those above the block have none."""
    again: dict[str, Tensor] = {}
    # An output layer that is tied to the embedding adds to its gradient from above.
    elsewhere = {model.token_embedding} if evidence.may_be_tied(model) else set()
    parameters = {n: p for n, p in model.named_parameters() if n in evidence.gradients and n not in elsewhere}
    with only_trainable(model, parameters), torch.enable_grad():
        start = 0
        for chunk, here, places in _chunks(model, texts, rows):
            _, outputs = _run(model, chunk, top)
            total = (outputs[here] * arrived[start : start + len(places)]).sum()
            start += len(places)
            gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
            for name, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    again[name] = again[name] + gradient if name in again else gradient
    return again


def down_inputs(model: Model, text: TextInput, block: int) -> Float[Tensor, "n f"]:
    """The input of a block's down projection at every token of a text."""
    return model.mlp_hidden(block, _attend(model, [text], block)[1])[0]


def run_last_block(
    model: Model, texts: Sequence[TextInput], role: Role
) -> tuple[Float[Tensor, "t n f"], Attended, Float[Tensor, "t n d"]]:
    """At every token of texts: the input of a layer of the last block, the rows behind attention, what is added."""
    last = model.num_blocks - 1
    mixed, attended = _attend(model, texts, last)
    if role is Role.ATTENTION_OUT:
        return mixed, attended, attended.added
    hidden = model.mlp_hidden(last, attended)
    return hidden, attended, model.mlp_output(last, hidden)


def is_repetition(model: Model, tokens: Sequence[int]) -> bool:
    """Whether a prefix 't t … t' of a model without absolute positions has the very rows of 't', at every layer."""
    if len(tokens) < 2 or tokens[0] != tokens[-1]:  # asked for every prefix: most are told by two tokens
        return False
    return not model.learned_positions and len(set(tokens)) == 1


def prefix_rows(
    model: Model, texts: Sequence[tuple[int, tuple[int, ...]]]
) -> tuple[list[TextInput], list[tuple[int, tuple[int, ...]]], Int[Tensor, "n 2"]]:
    """Texts as inputs, and for each of their prefixes with a row of its own where it stands first."""
    places: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
    for index, (start, tokens) in enumerate(texts):
        for length in range(1, len(tokens) + 1):
            if not is_repetition(model, tokens[:length]):
                places.setdefault((start, tokens[:length]), (index, length - 1))
    inputs = [TextInput(tokens, start) for start, tokens in texts]
    return inputs, list(places), torch.tensor(list(places.values()), dtype=torch.long).reshape(-1, 2)


def _run(model: Model, texts: Sequence[TextInput], top: Top) -> tuple[Tensor, Tensor]:
    """The input of a layer at every token, and what its output adds up to with the stream beside it."""
    mixed, attended = _attend(model, texts, top.block)
    if top.role is Role.ATTENTION_OUT:
        return mixed, model.attention_sum(top.block, attended)
    hidden = model.mlp_hidden(top.block, attended)
    return hidden, model.mlp_sum(top.block, attended, hidden)


def _attend(model: Model, texts: Sequence[TextInput], block: int) -> tuple[Tensor, Attended]:
    """A block's mixed values and its rows behind attention, at every token."""
    length = max(len(text.tokens) for text in texts)
    tokens, types = torch.zeros(2, len(texts), length, dtype=torch.long, device=model.device)
    mask = torch.zeros(len(texts), length, dtype=torch.bool, device=model.device)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = torch.tensor(text.tokens)
        mask[row, : len(text.tokens)] = True
        if text.types is not None:
            types[row, : len(text.types)] = torch.tensor(text.types)
    starts = torch.tensor([text.start for text in texts], device=model.device)
    positions = (starts[:, None] + torch.arange(length, device=model.device)).clamp_max(model.max_positions - 1)
    for row, text in enumerate(texts):
        if text.starts_anew:
            positions[row, len(text.tokens) - 1] = text.start
    has_types = any(text.types is not None for text in texts)
    stream = model.hidden_states(
        tokens, mask, num_blocks=block, positions=positions, types=types if has_types else None
    )[-1]
    mixed = model.mixed_values(block, stream, positions, mask)
    return mixed, model.after_attention(block, stream, mixed)


def _chunks(
    model: Model, texts: Sequence[TextInput], rows: Int[Tensor, "n 2"]
) -> Iterator[tuple[Sequence[TextInput], tuple[Tensor, Tensor], Int[Tensor, " k"]]]:
    """Some of the texts, where their rows stand among them as (text, position), and which of the rows these are."""
    for begin in range(0, len(texts), _TEXTS_AT_ONCE):
        mine = (rows[:, 0] >= begin) & (rows[:, 0] < begin + _TEXTS_AT_ONCE)
        places = mine.nonzero()[:, 0]
        if len(places):
            here = rows[places].to(model.device)
            yield texts[begin : begin + _TEXTS_AT_ONCE], (here[:, 0] - begin, here[:, 1]), places.to(model.device)
