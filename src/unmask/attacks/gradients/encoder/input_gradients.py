"""Each text's own part of the embeddings' gradients, and how much of what was sent some texts explain together.

    G = Σ_i w_i·φ(text_i) + noise,   φ(text): rows of tokens and positions, to which a text sends ∂(z_0 − z_1)/∂input

z are the head's outputs, so w_i is −(1 − p_0)/n or p_0/n, whatever the text's label; least squares finds all w_i. One
wrong token changes what arrives at all tokens of its text: a right batch leaves noise, others many times that.

Notation: δ (i, d) what arrives at the inputs of a text; R the part of G that is left; n texts.
Limits: a gradient, or the sum of a few steps' gradients, of a classifier with a known linear head of two outputs, and
both embeddings' rows.
Cost: a forward and a backward pass without gradients of weights for each text, in batches of one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.gradients.encoder.problem import Problem
from unmask.evidence.gradients import GradientEvidence, Task, Update
from unmask.models.adapter import Model

_AT_ONCE = 16  # texts of a pass
_NUM_OTHERS = 1024  # rows of other tokens that are looked at
_ABOVE_NOISE = 1.1  # of what noise leaves: a right batch is below, unless what noise leaves is not told
_ROUNDING = 3e-6  # of the squared norm: what bfloat16 leaves
_MOST_KEPT = 4096  # texts whose gradients are kept

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """What texts leave of the rows, their weights, and what makes the next fit cheap."""

    left: float  # of the squared norm
    weights: Float[Tensor, " n"]
    parts: Float[Tensor, "n m"]
    gram: Float[Tensor, "n n"]
    mixed: Float[Tensor, " n"]


@dataclass(frozen=True)
class InputGradients:
    """Rows of the bag's tokens and of all positions that texts reach, and texts' parts of them."""

    model: Model
    head: Float[Tensor, "2 d"]
    pooling: str
    tokens: Int[Tensor, " t"]
    rows: Float[Tensor, "r d"]
    floor: float = 0.0  # what noise leaves of the squared norm, as far as rows that nothing reaches tell
    _known: dict[Tokens, Float[Tensor, "i d"]] = field(default_factory=dict)

    @classmethod
    def of(cls, evidence: GradientEvidence, problem: Problem) -> InputGradients | None:
        """The rows of an update; None if it tells nothing of this kind."""
        model, places = problem.model, problem.places
        words, positions = (evidence.gradients.get(name or "") for name in _embeddings(model))
        is_adaptive = evidence.update is Update.DELTA and evidence.optimizer == "adamw"
        is_single = evidence.task is Task.CLASSIFICATION and not is_adaptive and places.num_types == 1
        if not is_single or evidence.head is None or len(evidence.head) != 2 or words is None or positions is None:
            return None
        rows = torch.cat([words[places.tokens.to(words.device)], positions[: places.num_positions]])
        if not bool(words.any()) or not bool(positions.any()):
            return None
        head = evidence.head.to(model.device, model.dtype)
        others = torch.ones(len(words), dtype=torch.bool, device=words.device)
        others[places.tokens.to(words.device)] = False
        noise = words[others][:_NUM_OTHERS].double().square().mean() * rows.numel() / rows.double().square().sum()
        floor = _ABOVE_NOISE * float(noise) + _ROUNDING
        rows = rows.to(model.device, model.dtype)
        return cls(model, head, evidence.pooling or "first", places.tokens, rows, floor)

    @property
    def num_tokens(self) -> int:
        """Rows of tokens; those of positions follow."""
        return len(self.tokens)

    def indices(self, text: Tokens) -> Int[Tensor, " i"]:
        """The rows of a text's tokens."""
        return torch.searchsorted(self.tokens, torch.tensor(text, device=self.tokens.device))

    def arriving(self, text: Tokens) -> Float[Tensor, "i d"]:
        """δ of a text."""
        self.prepare([text])
        return self._known[text]

    def prepare(self, texts: Sequence[Tokens]) -> None:
        """Run texts whose gradients are not known yet, those of one length together."""
        if len(self._known) > _MOST_KEPT:
            self._known.clear()
        missing = [text for text in dict.fromkeys(texts) if text not in self._known]
        for length in {len(text) for text in missing}:
            same = [text for text in missing if len(text) == length]
            for start in range(0, len(same), _AT_ONCE):
                part = same[start : start + _AT_ONCE]
                self._known.update(zip(part, self._run(part), strict=True))

    def part_of(self, text: Tokens) -> Float[Tensor, " m"]:
        """φ of a text."""
        found, arriving = torch.zeros_like(self.rows), self.arriving(text)
        found.index_add_(0, self.indices(text), arriving)
        found[self.num_tokens : self.num_tokens + len(text)] += arriving
        return found.flatten()

    def fit(self, texts: Sequence[Tokens]) -> Fit:
        """Least squares over the texts' weights."""
        self.prepare(texts)
        parts = torch.stack([self.part_of(text) for text in texts])
        return self._solve(parts, (parts @ parts.T).double(), (parts @ self.rows.flatten()).double())

    def refit(self, fit: Fit, changes: Sequence[tuple[int, Tokens]]) -> Fit:
        """The same after some texts have changed."""
        parts, gram, mixed = fit.parts.clone(), fit.gram.clone(), fit.mixed.clone()
        for index, text in changes:
            parts[index] = self.part_of(text)
        for index, _ in changes:
            gram[index] = gram[:, index] = (parts @ parts[index]).double()
            mixed[index] = (parts[index] @ self.rows.flatten()).double()
        return self._solve(parts, gram, mixed)

    def rest(self, fit: Fit) -> Float[Tensor, "r d"]:
        """R: what the texts leave of the rows."""
        return self.rows - (fit.weights.to(fit.parts) @ fit.parts).view_as(self.rows)

    def rest_without(self, fit: Fit, index: int) -> Float[Tensor, "r d"]:
        """What all texts but one leave of them."""
        others = [other for other in range(len(fit.parts)) if other != index]
        return self.rest(self._solve(fit.parts[others], fit.gram[others][:, others], fit.mixed[others]))

    def _solve(self, parts: Tensor, gram: Tensor, mixed: Tensor) -> Fit:
        weights = torch.linalg.pinv(gram, hermitian=True) @ mixed
        total = float(self.rows.double().square().sum())
        left = total - 2 * float(weights @ mixed) + float(weights @ gram @ weights)
        return Fit(max(left, 0.0) / max(total, 1e-300), weights, parts, gram, mixed)

    def _run(self, texts: Sequence[Tokens]) -> Float[Tensor, "n i d"]:
        """What arrives at the token embeddings' outputs."""
        kept: list[Tensor] = []

        def keep(module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
            kept.append(output.detach().requires_grad_())
            return kept[-1]

        hook = _embedding_module(self.model).register_forward_hook(keep)
        try:
            with torch.enable_grad():
                batch = torch.tensor(texts, device=self.model.device)
                states = self.model.body(input_ids=batch).last_hidden_state
                pooled = states.mean(1) if self.pooling == "mean" else states[:, -1 if self.pooling == "last" else 0]
                outputs = pooled @ self.head.T
                return torch.autograd.grad((outputs[:, 0] - outputs[:, 1]).sum(), kept[0])[0]
        finally:
            hook.remove()


def _embeddings(model: Model) -> tuple[str | None, str | None]:
    return model.token_embedding, model.position_embedding


def _embedding_module(model: Model) -> torch.nn.Module:
    """The module that looks tokens up."""
    weight = dict(model.named_parameters())[model.token_embedding or ""]
    modules = (module for module in model.body.modules() if isinstance(module, torch.nn.Embedding))
    return next(module for module in modules if module.weight is weight)
