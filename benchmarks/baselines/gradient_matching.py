"""Gradients of a classification client as functions of token embeddings, for many guesses at once.

    L_r = mean over texts of the cross-entropy of guess r;  for each linear layer  G_r = X_rᵀ·D_r,  D_r = ∂L_r/∂Y_r
    ⟨G_r, G⟩ = Σ (X_r G) ⊙ D_r,     ‖G_r‖² = Σ (X_r X_rᵀ) ⊙ (D_r D_rᵀ)

so one forward and one backward pass over all guesses give every distance to the observed gradient G, and no G_r needs
to be built. With `differentiable` the distances can be differentiated with respect to the embeddings.

Notation: r a guess; X_r (texts·length, d_in) and Y_r the layer's inputs and outputs. Gradients that are compared:
weights and biases of linear layers and layer norms, learned positions, the head. Token embeddings are not, as in the
attacks' own code: there they are the unknown.

Limits: a module that is called twice in a pass counts once. Observed gradients of nearly zero norm (biases of keys)
hold rounding only: `drop_rounding` leaves them out.
Cost: a forward pass and a backward pass, N·d_in·d_out and N²·(d_in + d_out) a layer, N tokens of a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.pytorch_utils import Conv1D

from unmask.models import Model

NEGLIGIBLE = 1e-6  # of the largest norm: what rounding leaves of a gradient that is zero
LAYERS = (nn.Linear, Conv1D, nn.LayerNorm)


@dataclass(frozen=True)
class Client:
    """A classification client, and what a rival is told of its batch.

    `known` (texts, length): tokens of the frame and the padding, −1 where a token is looked for.
    """

    model: Model
    head: Tensor
    labels: Tensor
    lengths: tuple[int, ...]
    known: Tensor

    @classmethod
    def of_batch(cls, model: Model, head: Tensor, texts: Sequence[Sequence[int]], labels: Sequence[int]) -> Client:
        """Lengths, labels and the frame of a batch are told, its words are not."""
        lengths = tuple(map(len, texts))
        known = torch.zeros(len(texts), max(lengths), dtype=torch.long)
        frame = set(getattr(model.tokenizer, "all_special_ids", ())) if model.frame_tokens else set()
        for row, text in enumerate(texts):
            known[row, : len(text)] = torch.tensor([token if token in frame else -1 for token in text])
        return cls(model, head.to(model.device), torch.tensor(labels, device=model.device), lengths, known)

    @property
    def embeddings(self) -> Tensor:
        """The token embedding (vocabulary, d)."""
        return self.model.parameter(self.model.token_embedding).detach()

    @cached_property
    def unknown(self) -> Tensor:
        """Which places (texts, length) are looked for."""
        return (self.known < 0).to(self.model.device)

    @cached_property
    def mask(self) -> Tensor:
        """Which places hold a token."""
        places = torch.arange(self.known.shape[1])
        return (places < torch.tensor(self.lengths)[:, None]).to(self.model.device)

    def losses(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over guesses of the mean losses of their texts, and the states that the head reads."""
        guesses = x.shape[0]
        mask = self.mask.repeat(guesses, 1)
        states = self.model.body(inputs_embeds=x.flatten(0, 1), attention_mask=mask.long()).last_hidden_state
        rows = torch.arange(len(states), device=x.device)
        pooled = states[rows, mask.sum(1) - 1] if self.model.causal else states[:, 0]
        logits = pooled @ self.head.T
        return functional.cross_entropy(logits, self.labels.repeat(guesses), reduction="sum") / len(self.labels), pooled


@dataclass(frozen=True)
class Outer:
    """G_r = X_rᵀ·D_r of a weight, and the gradient that was observed (d_in, d_out)."""

    inputs: Tensor
    arrivals: Tensor
    seen: Tensor

    def inner(self) -> Tensor:
        """⟨G_r, G⟩ for each guess."""
        return ((self.inputs @ self.seen) * self.arrivals).sum((1, 2))

    def squares(self) -> Tensor:
        """‖G_r‖² for each guess."""
        return ((self.inputs @ self.inputs.mT) * (self.arrivals @ self.arrivals.mT)).sum((1, 2))

    def dense(self) -> Tensor:
        """G_r itself."""
        return self.inputs.mT @ self.arrivals


@dataclass(frozen=True)
class Plain:
    """A gradient that is small enough to be written out, (guesses, …), and the one that was observed."""

    value: Tensor
    seen: Tensor

    def inner(self) -> Tensor:
        """⟨G_r, G⟩ for each guess."""
        return (self.value * self.seen).flatten(1).sum(1)

    def squares(self) -> Tensor:
        """‖G_r‖² for each guess."""
        return self.value.square().flatten(1).sum(1)

    def dense(self) -> Tensor:
        """G_r itself."""
        return self.value


Term = Outer | Plain
Update = dict[str, Tensor]


def client_update(client: Client, tokens: Tensor) -> Update:
    """The gradients that the client sends for its batch (texts, length), by name; torch's own, nothing factored."""
    body, head = client.model.body, client.head.clone().requires_grad_()
    named = {f"{name}.{kind}": one for name, layer in _layers(body).items() for kind, one in layer.named_parameters()}
    if client.model.position_embedding is not None:
        named["positions"] = client.model.parameter(client.model.position_embedding)
    told = Client(client.model, head, client.labels, client.lengths, client.known)
    with torch.enable_grad():
        loss, _ = told.losses(client.embeddings[tokens.to(client.model.device)][None])
        found = torch.autograd.grad(loss, [*named.values(), head], allow_unused=True)
    update = {name: one.detach() for name, one in zip([*named, "head"], found, strict=True) if one is not None}
    if "positions" in update:
        update["positions"] = update["positions"][: tokens.shape[1]]
    return update


def drop_rounding(update: Update) -> Update:
    """The update without gradients that are zero but for rounding; done once, before the search."""
    norms = {name: float(seen.norm()) for name, seen in update.items()}
    return {name: seen for name, seen in update.items() if norms[name] > NEGLIGIBLE * max(norms.values())}


def terms(client: Client, update: Update, x: Tensor, *, differentiable: bool = False) -> dict[str, Term]:
    """Every gradient of the guesses x (guesses, texts, length, d) beside the observed one, by name."""
    guesses = len(x)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), _recorded(client.model.body) as record:
        x = x if x.requires_grad else x.detach().requires_grad_()
        loss, pooled = client.losses(x)
        outputs = [output for _, output in record.values()]
        given = [x, pooled, *outputs]
        found = torch.autograd.grad(loss, given, create_graph=differentiable, allow_unused=True)
        made: dict[str, Term] = {}
        if "positions" in update:
            made["positions"] = Plain(found[0].sum(1), update["positions"])
        if "head" in update:
            made["head"] = _head_term(client, pooled, update["head"], guesses)
        for (name, (layer, inputs)), arrivals in zip(_inputs(client, record).items(), found[2:], strict=True):
            if arrivals is not None:
                made |= _layer_terms(name, layer, inputs, arrivals, update, guesses)
    return made


def cosine_distance(parts: Mapping[str, Term]) -> Tensor:
    """1 − cos between guessed and observed gradients, the mean over tensors, for each guess."""
    cosines = [
        part.inner() / (part.squares().clamp_min(torch.finfo(part.seen.dtype).tiny).sqrt() * part.seen.norm())
        for part in parts.values()
    ]
    return 1 - torch.stack(cosines).mean(0)


def absolute_distance(parts: Mapping[str, Term], l1_weights: Tensor, scale: float = 1.0) -> Tensor:
    """Σ ‖G_r − G‖² + α_r·‖G_r − G‖₁ over all tensors, for each guess, all gradients times `scale`; G_r is built."""
    total = torch.zeros_like(l1_weights)
    for part in parts.values():
        if isinstance(part, Outer):
            total = total + _Absolute.apply(part.inputs, part.arrivals, part.seen, l1_weights, scale)
        else:
            away = scale * (part.value - part.seen).flatten(1)
            total = total + away.square().sum(1) + l1_weights * away.abs().sum(1)
    return total


class _Absolute(torch.autograd.Function):
    """The distance of one weight with its slope 2(G_r − G) + α·sign(G_r − G): G_r is passed over few times."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, arrivals: Tensor, seen: Tensor, weights: Tensor, scale: float) -> Tensor:
        away = (inputs.mT @ arrivals).sub_(seen).mul_(scale)
        flat = away.flatten(1)
        value = flat.square().sum(1) + weights * flat.norm(p=1, dim=1)
        slope = away.sign().mul_(weights[:, None, None]).add_(away, alpha=2).mul_(scale)
        ctx.save_for_backward(inputs, arrivals, slope)
        return value

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # type: ignore[override]
        inputs, arrivals, slope = ctx.saved_tensors
        weight = given[:, None, None]
        return weight * (arrivals @ slope.mT), weight * (inputs @ slope), None, None, None


def _head_term(client: Client, pooled: Tensor, seen: Tensor, guesses: int) -> Term:
    """The head's gradient in closed form: (softmax − one-hot)ᵀ·states."""
    probabilities = (pooled @ client.head.T).softmax(-1)
    wanted = functional.one_hot(client.labels, len(client.head)).repeat(guesses, 1)
    arrivals = (probabilities - wanted) / len(client.labels)
    return Outer(arrivals.unflatten(0, (guesses, -1)), pooled.unflatten(0, (guesses, -1)), seen)


def _layer_terms(
    name: str, layer: nn.Module, inputs: Tensor, arrivals: Tensor, update: Update, guesses: int
) -> dict[str, Term]:
    rows = arrivals.reshape(guesses, -1, arrivals.shape[-1])
    inputs = inputs.reshape(guesses, -1, inputs.shape[-1])
    found: dict[str, Term] = {}
    weight, bias = update.get(f"{name}.weight"), update.get(f"{name}.bias")
    if bias is not None:
        found[f"{name}.bias"] = Plain(rows.sum(1), bias)
    if weight is None:
        return found
    if isinstance(layer, nn.LayerNorm):
        normed = functional.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
        found[f"{name}.weight"] = Plain((normed * rows).sum(1), weight)
    else:
        found[f"{name}.weight"] = Outer(inputs, rows, weight if isinstance(layer, Conv1D) else weight.T)
    return found


def _layers(body: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in body.named_modules() if isinstance(module, LAYERS)}


def _inputs(client: Client, record: dict[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[nn.Module, Tensor]]:
    layers = _layers(client.model.body)
    return {name: (layers[name], inputs) for name, (inputs, _) in record.items()}


@contextmanager
def _recorded(body: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Inputs and outputs of all layers that are called meanwhile."""
    record: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            record[name] = given[0], output

        return hook

    handles = [layer.register_forward_hook(keep(name)) for name, layer in _layers(body).items()]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()
