"""The same search where noise or few digits blur the spans: texts are accepted that are as near as noise leaves them.

Probes of one layer cannot tell which text is better; so costs are distances to all spans, and single tokens are
exchanged by all layers together (`noisy_swaps.py`). Three things make up for what noise hides:

    few places  a descent is over places that have a part of their token's largest share: a third of the likely ones
                hold nearly all of a batch, and each false one that is left out tells as much as many equations
    many rows   of a text, once it is partly right: what noise blurs in one row, others tell
    all places  come back when single tokens are exchanged, and when nearly right texts are corrected

A text that is accepted is no more than likely. Of two that are alike, the nearer one is kept.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from unmask.attacks.gradients.encoder.drafts import are_alike, list_drafts
from unmask.attacks.gradients.encoder.input_gradients import InputGradients
from unmask.attacks.gradients.encoder.noisy_swaps import NoisySwaps
from unmask.attacks.gradients.encoder.position_candidates import PositionCandidates, Text
from unmask.attacks.gradients.encoder.relaxation import Relaxation
from unmask.attacks.gradients.encoder.replay_edits import ReplayEdits
from unmask.attacks.gradients.encoder.search import EncoderSearch
from unmask.attacks.run import Run
from unmask.evidence.gradients import GradientEvidence

_NO_TEXT = 0.05  # of the median weight: a text of less is none


class NoisySearch(EncoderSearch):
    """Texts near the spans of a noisy problem."""

    def _draw_probes(self) -> None:
        super()._draw_probes()
        self.moved: set[Text] = set()  # texts that moves were tried on
        self.exchange = None  # the output projection's probes are blurred
        self.swaps = NoisySwaps(self.problem, self.problem.places.is_possible.nonzero()[:, 0])
        self.narrow = self._relaxation(_select_clear(self.problem.places, self.settings.noisy_share))

    @property
    def accepted_below(self) -> float:
        """The distance of a text that may be in the batch."""
        return self.settings.noisy_distance

    def _from_anchors(self, anchors: list[int], relaxation: Relaxation) -> None:
        """A text near the anchors and what goes with them, after moves; while refused, again from its best rows."""
        self.num_anchors += 1
        self.run.progress("recovering texts", self.num_rows, self.problem.rank)
        text, _, weights = self._descend(anchors, relaxation, self.removed)
        if text in self.found:
            return
        together = self._companions(anchors, weights, relaxation)
        deep, before = replace(relaxation, max_rows=self.settings.max_noisy_rows), float("inf")
        for _ in range(self.settings.max_noisy_attempts):
            text, _, _ = self._descend(together, deep, self.removed)
            if text in self.moved:
                return
            self.moved.add(text)
            text, cost = self.swaps.improve(text, self.settings.max_noisy_sweeps)
            if self._accepts(text, cost) or cost > self.settings.noisy_progress * before:
                return
            costs = self.swaps.row_costs(torch.tensor([text], device=self.removed.device))[0]
            best = [text[int(row)] for row in costs[1:-1].argsort()[: len(text) // 3] + 1]
            together = [place for place in best if relaxation.has(place) and not bool(self.removed[place])]
            before = cost

    def _accepts(self, text: Text, cost: float) -> bool:
        """Accept a text that is near, and let go of one that it is alike and nearer than."""
        if not super()._accepts(text, cost):
            return False
        alike = [other for other in self.found if other != text and are_alike(text, other, self.settings.alike)]
        for other in alike:
            worse = max(text, other, key=lambda each: self.found[each])
            self.refused[worse] = cost if worse == text else float("inf"), self.found.pop(worse)
            if worse == text:
                break
        return True

    @property
    def is_hopeless(self) -> bool:
        """Whether anchors lead to no new text while there are as many drafts as texts: these may be corrected."""
        if self.num_in_vain >= self.settings.noisy_patience and len(list_drafts(self)) == self.num_texts:
            return True
        return super().is_hopeless

    @property
    def is_done(self) -> bool:
        """Whether there are as many texts as the batch holds: noise hides directions, and the rank says too little."""
        return super().is_done if self.num_texts is None else len(self.found) == self.num_texts


def _select_clear(places: PositionCandidates, least: float) -> Bool[Tensor, " j"]:
    """Places that have a part of the largest share of their token, and all ends."""
    shares = places.share.view(places.num_positions, places.num_types, -1)
    is_clear = shares > least * shares.amax((0, 1))
    return places.is_possible & (is_clear.flatten() | places.is_frame)


def correct_texts(run: Run, evidence: GradientEvidence, search: EncoderSearch) -> None:
    """Replace what was found, and what stands in for missing texts, by texts that explain the embeddings' gradients."""
    gradients, places = InputGradients.of(evidence, search.problem), search.problem.places
    if gradients is None:
        return
    drafts = [text for text in list_drafts(search) if len(text) > 2]  # more than a frame
    if not drafts or len(drafts) > (search.num_texts or len(drafts)):
        return
    possible = (places.is_possible & ~places.is_frame).view(places.num_positions, -1)
    before = [places.tokens_of(text) for text in drafts]
    if gradients.fit(before).left > gradients.floor:
        shortest = (before[0][0], before[0][1], before[0][-1])  # a text that is to be read anew
        before += [shortest] * ((search.num_texts or 0) - len(before))
    after, _ = ReplayEdits(gradients, possible).improve(run, before)
    if after == before and len(drafts) == len(search.found):
        return
    weights = gradients.fit(after).weights.abs()
    is_there = (weights > _NO_TEXT * weights.median()).tolist()  # of texts that occur twice, one has no weight
    after = [text for place, text in enumerate(after) if place < len(drafts) or is_there[place]]
    index = {int(token): place for place, token in enumerate(places.tokens.tolist())}
    found = [tuple(p * len(index) + index[token] for p, token in enumerate(tokens)) for tokens in after]
    search.found = {text: search.problem.distance(text) for text in found}
