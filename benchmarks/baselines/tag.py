"""TAG: embeddings whose gradient is near the client's, in squares and absolute values; our own implementation.

    x ← argmin Σ over tensors ‖G(x) − G‖² + α‖G(x) − G‖₁      by Adam;     tokens ← nearest embeddings by cosine

Notation: G the observed gradient; x (texts, length, d) embeddings; α the weight of the absolute values.

The attack is given its best: labels and lengths, the frame, a grid of (rate, α) whose starts run side by side, starts
of the embeddings' own size, and of all starts the one whose rounded tokens explain the gradient best.
Limits: the loss has many minima, and order is seen only through positions; batches beyond a few texts are not read.
Cost: `num_steps` double backward passes, with every gradient built.
Source: Deng et al., TAG, Findings of EMNLP 2021, arXiv 2103.06819; rates as in LAMP's comparison (arXiv 2202.08827).
Deviations: cross-entropy on known labels; starts, choice and rates as above; the update is scaled to norm
`update_norm`, as the head's size sets its scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from baselines.embedding_search import BERT_ENTRY, Descent, entry_size, nearest_tokens, random_starts, read_texts
from baselines.gradient_matching import Client, Update, absolute_distance, cosine_distance, drop_rounding, terms

Text = tuple[int, ...]


@dataclass(frozen=True)
class Tag:
    """The attack; `starts` are pairs (rate, α), one start each."""

    num_steps: int = 2500
    starts: tuple[tuple[float, float], ...] = ((0.1, 0.01), (0.03, 0.01), (0.01, 0.01))
    decay: float = 0.985
    update_norm: float = 10.0
    seed: int = 0

    def __call__(self, client: Client, update: Update) -> list[Text]:
        """Texts of the batch."""
        update = drop_rounding(update)
        generator = torch.Generator().manual_seed(self.seed)
        device = client.model.device
        rates, weights = (torch.tensor(each, device=device) for each in zip(*self.starts, strict=True))
        scale = self.update_norm / float(torch.stack([one.norm() for one in update.values()]).norm())
        start = random_starts(client, len(self.starts), generator)

        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return absolute_distance(terms(client, update, x, differentiable=True), weights, scale)

        descent = Descent(client, start, rates * entry_size(client) / BERT_ENTRY, self.decay, loss_of)
        for _ in range(self.num_steps):
            descent.step()
        tokens = nearest_tokens(client, descent.best)
        explained = cosine_distance(terms(client, update, client.embeddings[tokens])).detach()
        return read_texts(client, tokens[int(explained.argmin())])
