"""Whether a text is the one behind a vector: its vector once more, in float64, and those of its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unmask.attacks.outputs.vectors.agreement import StoredVector
from unmask.attacks.outputs.vectors.claim import CLEAR, ReadVector
from unmask.attacks.outputs.vectors.edits import TextBatch, concatenate
from unmask.attacks.outputs.vectors.embedder import Embedder
from unmask.attacks.outputs.vectors.neighbours import TokenLikeness, near_texts
from unmask.models.model_cache import compute_once
from unmask.models.pooling import max_length_of

_NEIGHBOURS = {False: 6, True: 24}  # tokens at every place, by whether digits are few


@dataclass(frozen=True)
class Prover:
    """A model with its recipe, and which of its tokens are alike."""

    embedder: Embedder
    likeness: TokenLikeness

    def __call__(self, stored: StoredVector, text: tuple[int, ...], close: TextBatch | None = None) -> ReadVector:
        """What a vector says of the text that was found for it; `close` are texts that came nearly as close."""
        model = self.embedder.model
        if not text and not any(self.embedder.frame):
            return ReadVector((), 1.0, 1.0, stored.tolerance, None, (), False)
        precise = compute_once(model, "in float64", lambda: model.to(dtype=torch.float64))
        exact = Embedder(precise, self.embedder.recipe).exact(TextBatch.of([text], model.device))
        excess = float(stored.excess(exact)[0])
        distance = float((exact[0] - stored.vector).norm()) / (float(stored.vector.norm()) or 1.0)
        rejected: float | None = None
        others: tuple[tuple[int, ...], ...] = ()
        if excess <= stored.tolerance:
            rejected, others = self._compare_neighbours(stored, text, close)
        return ReadVector(
            tokens=text,
            distance=distance,
            excess=excess,
            tolerance=stored.tolerance,
            rejected=rejected,
            others=others,
            tells_apart=stored.tells_apart(len(text), model.vocab_size),
            may_go_on=len(text) + sum(map(len, self.embedder.frame)) >= max_length_of(model),
        )

    def _compare_neighbours(
        self, stored: StoredVector, text: tuple[int, ...], close: TextBatch | None
    ) -> tuple[float, tuple[tuple[int, ...], ...]]:
        """The least excess of a neighbour, and those that agree."""
        is_coarse = bool(stored.half_steps.any()) or stored.centroids is not None
        near = near_texts(text, self.likeness, _NEIGHBOURS[is_coarse])
        near = near if close is None else concatenate([near, close])
        excess = stored.excess(self.embedder.exact(near))
        own = torch.tensor([other == text for other in near.as_tuples()], device=excess.device)
        excess = excess.masked_fill(own, torch.inf)
        agree = (excess <= CLEAR * stored.tolerance).nonzero()[:, 0]
        texts = near[agree.to(near.tokens.device)].as_tuples() if len(agree) else []
        return float(excess.min()), tuple(dict.fromkeys(texts))
