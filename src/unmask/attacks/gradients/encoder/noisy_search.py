"""The same search where noise or few digits blur the spans: texts are accepted that are as near as noise leaves them.

Probes of one layer cannot tell which text is better; so costs are distances to all spans, and single tokens are
exchanged by all layers together (`noisy_swaps.py`). A text that is accepted is no more than likely.
"""

from __future__ import annotations

import torch

from unmask.attacks.gradients.encoder.noisy_swaps import NoisySwaps
from unmask.attacks.gradients.encoder.relaxation import Relaxation
from unmask.attacks.gradients.encoder.search import EncoderSearch


class NoisySearch(EncoderSearch):
    """Texts near the spans of a noisy problem."""

    def _draw_probes(self) -> None:
        super()._draw_probes()
        self.exchange = None  # the output projection's probes are blurred
        self.swaps = NoisySwaps(self.problem, self.narrow.chosen)

    @property
    def accepted_below(self) -> float:
        """The distance of a text that may be in the batch."""
        return self.settings.noisy_distance

    def _from_anchors(self, anchors: list[int], relaxation: Relaxation) -> None:
        """A text near the anchors and what goes with them, after moves; while refused, again from its best rows."""
        self.num_anchors += 1
        self.run.progress("recovering texts", self.num_rows, self.problem.rank)
        _, _, weights = self._descend(anchors, relaxation, self.removed)
        together = self._companions(anchors, weights, relaxation)
        for attempt in range(1, self.settings.max_noisy_attempts + 1):
            text, _, _ = self._descend(together, relaxation, self.removed)
            text, cost = self.swaps.improve(text, self.settings.max_noisy_sweeps)
            if self._accepts(text, cost) or attempt == self.settings.max_noisy_attempts:
                return
            costs = self.swaps.row_costs(torch.tensor([text], device=self.removed.device))[0]
            best = [text[int(row)] for row in costs[1:-1].argsort()[: len(text) // 3] + 1]
            together = [place for place in best if relaxation.has(place) and not bool(self.removed[place])]

    @property
    def is_done(self) -> bool:
        """Whether there are as many texts as the batch holds: noise hides directions, and the rank says too little."""
        return super().is_done if self.num_texts is None else len(self.found) == self.num_texts
