"""Do the labels of a text explain what arrives at its rows in the last block?

    v_u(y) = ∂ℓ(y behind u)/∂s_u,   s_u what the last layer's output is added up to at prefix u

Behind that layer no token is mixed with another one, so one backward pass gives v_u for all rows of a text. Of rows
that are all known, least squares tells what arrives (`arrivals.py`): δ_u = Σ_y w_y·v_u(y), w_y > 0, over the labels y
that the texts have behind u. While texts are missing, only the space of all δ is known, the row space of G = AᵀΔ:

    known rows     min over w of ‖δ_u − Σ w_y·v_u(y)‖ / ‖δ_u‖
    missing rows   min over w of ‖N·Σ w_y·v_u(y)‖ / ‖Σ w_y·v_u(y)‖,   N the projection outside of that space

Limits: next-token training; a gradient of one step. A label that the model is sure of sends nothing.
Cost: one pass of the text, and one backward pass through the head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from scipy.optimize import nnls
from torch import Tensor
from torch.nn import functional

from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.subspace import column_span
from unmask.models.adapter import Attended, Model
from unmask.models.linear import Role
from unmask.proof.arrivals import TextInput, is_repetition, run_last_block

_CLEAR = 3.0  # times as much is left without a label that is needed
SURE = 2e-3  # a label of at least this much less than probability 1 leaves a trace

Prefix = tuple[int, tuple[int, ...]]  # where it starts, and its tokens


@dataclass(frozen=True)
class LabelFlow:
    """Of every row of a text what its label sends there, what the layer's input is, and how likely the label was."""

    hidden: Float[Tensor, "n f"]
    sent: Float[Tensor, "n d"]
    probabilities: Float[Tensor, " n"]  # of the labels

    def is_silent(self, length: int) -> bool:
        """Whether the model is so sure of the label behind so many tokens that nothing of it arrives."""
        return float(self.probabilities[length - 1]) > 1 - SURE


def label_layer(evidence: GradientEvidence, model: Model) -> Role | None:
    """The last layer whose gradient the update holds, behind which no token is mixed with another one."""
    last = model.num_blocks - 1
    held = (role for role in (Role.MLP_OUT, Role.ATTENTION_OUT) if evidence.linear(model, role, last) is not None)
    return next(held, None)


def flow_of(model: Model, role: Role, text: Sequence[int], start: int = 0) -> LabelFlow:
    """The labels of one text: each token behind the first one."""
    (flow,) = flows_of(model, role, [text], start)
    return flow


def flows_of(model: Model, role: Role, texts: Sequence[Sequence[int]], start: int = 0) -> list[LabelFlow]:
    """The same of texts of one length, in one pass."""
    head = model.token_head
    assert head is not None  # the client predicts tokens
    inputs = [TextInput(tuple(text[:-1]), start) for text in texts]
    labels = torch.tensor([list(text[1:]) for text in texts], device=model.device)
    with torch.no_grad():
        hidden, attended, added = run_last_block(model, inputs, role)
    with torch.enable_grad():
        sums = added.detach().requires_grad_(True)
        last = model.num_blocks - 1
        if role is Role.ATTENTION_OUT:
            stream = model.after_mlp(last, Attended(attended.stream, sums))
        else:
            stream = model.leave_block(last, attended, sums)
        logits = head.logits(stream)
        each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        (sent,) = torch.autograd.grad(each.sum(), sums)
    probabilities = (-each.detach()).exp().unflatten(0, labels.shape)
    return [LabelFlow(*parts) for parts in zip(hidden, sent.detach(), probabilities, strict=True)]


def is_named(
    labels: Mapping[int, Float[Tensor, " d"]], label: int, limit: float, share: Callable[[Float[Tensor, "k d"]], float]
) -> bool:
    """Whether labels behind a prefix explain what arrives there, and do not without this one."""
    others = [sent for other, sent in labels.items() if other != label]
    if share(torch.stack(list(labels.values()))) > limit:
        return False
    return not others or share(torch.stack(others)) > _CLEAR * limit


def share_unexplained(arrived: Float[Tensor, " d"], sent: Float[Tensor, "k d"]) -> float:
    """What labels leave of what arrives at a prefix, as a share; none of them may have less than no part in it."""
    columns, whole = sent.double().T.cpu(), arrived.double().cpu()
    weights, left = nnls(columns.numpy(), whole.numpy())
    return float(left) / max(float(whole.norm()), 1e-300) if weights.any() else 1.0


def share_outside(space: Float[Tensor, "d r"], sent: Float[Tensor, "k d"]) -> float:
    """How far the nearest positive combination of labels is from a space."""
    columns = sent.double().T
    columns = columns / columns.norm(dim=0).clamp_min(1e-300)
    outside = columns - space @ (space.T @ columns)
    if columns.shape[1] == 1:
        return float(outside.norm())
    _, sizes, ways = torch.linalg.svd(outside, full_matrices=False)
    nearest = ways[-1]
    is_positive = bool((nearest > 0).all() or (nearest < 0).all())
    return float(sizes[-1] / (columns @ nearest).norm().clamp_min(1e-300)) if is_positive else 1.0


def space_of_arrivals(evidence: GradientEvidence, model: Model, role: Role) -> Float[Tensor, "d r"] | None:
    """A basis of what all arriving gradients span at a layer; None where that is everything, and tells nothing."""
    gradient = evidence.linear(model, role, model.num_blocks - 1)
    span = None if gradient is None else column_span(gradient.T)
    return None if span is None or span.is_saturated or span.rank == 0 else span.basis.double()


def sent_behind(model: Model, flows: Mapping[Prefix, LabelFlow]) -> dict[Prefix, dict[int, Float[Tensor, " d"]]]:
    """What every label sends that texts have behind a prefix of theirs with a row of its own."""
    sent: dict[Prefix, dict[int, Tensor]] = {}
    for (start, tokens), flow in flows.items():
        for length in range(1, len(tokens)):
            prefix = row_of(model, start, tokens[:length])
            sent.setdefault(prefix, {})[tokens[length]] = flow.sent[length - 1]
    return sent


def row_of(model: Model, start: int, tokens: tuple[int, ...]) -> Prefix:
    """The prefix whose row it is: 't t … t' has that of 't' where positions are relative."""
    return (start, tokens[:1]) if is_repetition(model, tokens) else (start, tokens)
