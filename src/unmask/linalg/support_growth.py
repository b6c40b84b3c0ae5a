"""Which atoms are behind Adam's steps: the support of `sparse_posterior.py`, grown until no atom is missing.

    turn   ← sites, posterior, scales anew; atoms of the highest rank are added, those that nothing needs are dropped
    swap   ← once it has settled, an atom in whose place a near one explains more gives way to that, once
    polish ← sites and scales anew while the support stays as it is, until the rounding is reached
    again  ← where much is explained, but not down to the rounding, once more with the strong atoms and fresh sites
    until  ← the strong atoms are the same for some turns; or most of what is added is dropped again, room runs out or
             the turns are over: then it has not settled, and what is chosen explains too little

Notation: scores are those of a normal variable for an atom that does not occur.
Limits: a greedy search over a model that is not convex. Whether it ended well is told by `is_settled`, the share that
is not explained and the misfit. Cost: up to 40 turns, each as in `sparse_posterior.py`.
Source: measured for this project.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.linalg.sparse_posterior import SparsePosterior

_ADDED, _KEPT = 5.0, 3.5  # scores
_NEAR_BEST = 0.7  # of the best score: atoms below it wait, since the best may explain them
STRONG = 12.0  # score of an atom that counts as found
_QUIET = 4  # turns without a new strong atom
_MOST_TURNS = 40
_MANY, _WASTED = 9, 1  # atoms added, most of which are dropped at once; how often that may be
_FULL = 0.95  # of the width
_NODES, _FIRST_NODES, _NUM_FIRST = (24, 16), (32, 24), 4
_DAMPING = 0.8
_POLISHED = 8  # turns in which the support stays
_HOPEFUL = 0.1  # not explained: with more, a second search would end no better
# Roundings that right atoms leave: 1.3 to 2, and 4 to 27 with fewer profiles than gradients. Wrong ones leave 9 or more
# in the one case, thousands in the other (measured).
_EXACT, _APPROXIMATE = 3.0, 30.0


@dataclass(frozen=True)
class GrownSupport:
    """Atoms chosen, the score of each given all others, and its log-evidence less that of a near one in its place."""

    chosen: tuple[int, ...]
    scores: Float[Tensor, " n"]
    margins: Float[Tensor, " n"]
    unexplained: float
    misfit: float
    is_settled: bool
    is_sharp: bool


def grow_support(posterior: SparsePosterior) -> GrownSupport:
    """Grow the posterior's support until it explains the steps, or does not."""
    is_settled = _grow(posterior)
    if posterior.largest_unexplained() < _HOPEFUL and not (is_settled and is_sharp(posterior)):
        sound = (posterior.own_scores() > STRONG) & (posterior.compare_rivals()[0] > 0)
        posterior.begin_again(sound.nonzero()[:, 0].tolist())
        _polish(posterior)
        is_settled = _grow(posterior)
    return GrownSupport(
        tuple(posterior.chosen),
        posterior.own_scores(),
        posterior.compare_rivals()[0],
        posterior.largest_unexplained(),
        posterior.misfit(),
        is_settled,
        is_sharp(posterior),
    )


def is_sharp(posterior: SparsePosterior) -> bool:
    """Whether little more than rounding is left; with fewer profiles than gradients, what they leave out as well."""
    return posterior.misfit() < (_EXACT if posterior.steps.is_exact else _APPROXIMATE)


def _grow(posterior: SparsePosterior) -> bool:
    """Turns until one is the last; whether the support has settled."""
    growth = _Growth(posterior)
    for turn in range(_MOST_TURNS):
        if growth.take_turn(turn):
            break
    if posterior.largest_unexplained() < _HOPEFUL:
        _polish(posterior)
    return growth.num_quiet >= _QUIET


def _polish(posterior: SparsePosterior) -> None:
    """Sites and scales of the atoms as they are, until little is left of the steps."""
    for _ in range(_POLISHED):
        if is_sharp(posterior):
            break
        posterior.update_sites(_NODES, _DAMPING)
        posterior.solve()
        posterior.learn()
        posterior.solve()


@dataclass
class _Growth:
    """What the turns before have shown."""

    posterior: SparsePosterior
    num_quiet: int = 0
    _most: int = 0
    _num_wasted: int = 0
    _has_swapped: bool = False
    _strong: frozenset[int] = frozenset()
    _added: list[int] = field(default_factory=list)
    _dropped: Counter[int] = field(default_factory=Counter)

    def take_turn(self, turn: int) -> bool:
        """One turn; whether it was the last."""
        posterior = self.posterior
        if turn:
            posterior.update_sites(_FIRST_NODES if turn < _NUM_FIRST else _NODES, _DAMPING)
            posterior.solve()
        new = self._find_new()
        scores = posterior.own_scores()
        posterior.learn()
        kept = (scores >= _KEPT).nonzero()[:, 0].tolist()
        self._note(scores, kept)
        is_full = len(posterior.chosen) + len(new) > _FULL * posterior.measured.shape[1]
        is_over = self.num_quiet >= _QUIET or self._num_wasted > _WASTED or is_full
        if self.num_quiet >= _QUIET and not self._has_swapped and self._swap():
            is_over, self.num_quiet = False, 0
        self._added = [] if is_over else new
        posterior.replace_atoms(kept, self._added)
        return is_over or (not posterior.chosen and turn >= _NUM_FIRST - 1)

    def _find_new(self) -> list[int]:
        """Atoms that stand out, none that was dropped twice."""
        scores = self.posterior.rank()
        scores[[atom for atom, times in self._dropped.items() if times > 1]] = -torch.inf
        best = scores.topk(min(len(scores), max(4, len(self.posterior.chosen) // 6)))
        least = max(_ADDED, _NEAR_BEST * float(best.values[0]))
        return [int(atom) for atom, score in zip(best.indices, best.values, strict=True) if score > least]

    def _note(self, scores: Float[Tensor, " n"], kept: list[int]) -> None:
        """Count what is dropped, and turns that bring nothing new."""
        chosen = self.posterior.chosen
        staying = {chosen[place] for place in kept}
        self._dropped.update(atom for atom in chosen if atom not in staying)
        strong = frozenset(atom for atom, score in zip(chosen, scores.tolist(), strict=True) if score > STRONG)
        self.num_quiet = self.num_quiet + 1 if strong == self._strong and len(kept) <= self._most else 0
        self._strong, self._most = strong, max(self._most, len(kept))
        num_staying = sum(atom in staying for atom in self._added)
        self._num_wasted += len(self._added) > _MANY and 2 * num_staying < len(self._added)

    def _swap(self) -> bool:
        """Put the better one in the place of every atom that has one; whether there was any."""
        if self.posterior.chosen:
            margins, better = self.posterior.compare_rivals()
            for place in (margins < 0).nonzero()[:, 0].tolist():
                if int(better[place]) not in self.posterior.chosen:
                    self.posterior.chosen[place], self._has_swapped = int(better[place]), True
        return self._has_swapped
