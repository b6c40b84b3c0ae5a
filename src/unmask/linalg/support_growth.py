"""Which atoms are behind Adam's steps: the support of `sparse_posterior.py`, grown until no atom is missing.

    turn   ← sites, posterior, scales anew; atoms that rank above every decoy are added, weak ones dropped
    polish ← sites and scales anew while the support stays as it is, until the rounding is reached
    again  ← where much is explained, but not down to the rounding: once more with the strong atoms and fresh sites,
             since a wrong atom settles sites at wrong signs, which then ask for more wrong atoms
    until  ← the rounding is reached, or a search ends with (nearly) the strong atoms of the one before

Notation: scores are those of a normal variable for an atom that does not occur; decoys are the atoms of the dictionary
from `num_real` on.
Limits: a greedy search over a model that is not convex. Whether it ended well is told by `is_settled`, the share that
is not explained and the misfit. Cost: up to 5 searches of up to 50 turns, each as in `sparse_posterior.py`.
Source: measured for this project.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.linalg.sparse_posterior import SparsePosterior
from unmask.progress import tell

_ADDED, _KEPT = 5.0, 3.5  # scores
_NEAR_BEST = 0.7  # of the best score: atoms below it wait, since the best may explain them
STRONG = 12.0  # score of an atom that counts as found
_QUIET = 4  # turns without another strong atom, in which what is not explained does not halve either
_MOST_SEARCHES, _MOST_TURNS = 5, 50
_ALIKE = 0.95  # of the strong atoms of two searches
_FULL = 0.95  # of the width
_NODES, _FIRST_NODES, _NUM_FIRST = (24, 16), (32, 24), 4
_DAMPING = 0.8
_POLISHED, _STILL = 8, 0.95  # turns in which the support stays, while each leaves less than this of the misfit
_HOPEFUL = 0.3  # not explained: with more, another search would end no better
# Roundings at which a search ends at once. Right atoms leave 1 to 20 of them; with fewer profiles than gradients 15 to
# 190 in a first round and up to 9000 in a later one. Destroyed steps leave thousands in all cases (measured).
_EXACT, _APPROXIMATE = 3.0, 30.0

_STEP = "explaining several steps of AdamW by tokens"


@dataclass(frozen=True)
class GrownSupport:
    """Atoms chosen, the score of each given all others, and its log-evidence less that of a near one in its place.

    `is_settled`: the last search ended by itself, and left only rounding or (nearly) repeated the one before.
    """

    chosen: tuple[int, ...]
    scores: Float[Tensor, " n"]
    margins: Float[Tensor, " n"]
    unexplained: float
    misfit: float
    is_settled: bool
    is_sharp: bool


def grow_support(posterior: SparsePosterior, num_real: int) -> GrownSupport:
    """Grow the posterior's support until it explains the steps, or does not."""
    before: frozenset[int] = frozenset()
    for search in range(_MOST_SEARCHES):
        has_ended = _grow(posterior, num_real, search)
        scores, (margins, _) = posterior.own_scores(), posterior.compare_rivals()
        sound = ((scores > STRONG) & (margins > 0)).nonzero()[:, 0].tolist()
        strong = frozenset(posterior.chosen[place] for place in sound)
        is_settled = has_ended and (is_sharp(posterior) or len(strong & before) >= _ALIKE * len(strong | before) > 0)
        if is_settled or not strong or posterior.largest_unexplained() > _HOPEFUL or search == _MOST_SEARCHES - 1:
            break
        before = strong
        posterior.begin_again(sound)
        _polish(posterior)
    return GrownSupport(
        tuple(posterior.chosen),
        scores,
        margins,
        posterior.largest_unexplained(),
        posterior.misfit(),
        is_settled,
        is_sharp(posterior),
    )


def is_sharp(posterior: SparsePosterior) -> bool:
    """Whether little more than rounding is left; with fewer profiles than gradients, what they leave out as well."""
    return posterior.misfit() < (_EXACT if posterior.steps.is_exact else _APPROXIMATE)


def _grow(posterior: SparsePosterior, num_real: int, search: int) -> bool:
    """Turns until one is the last; whether nothing more was found in the end."""
    growth = _Growth(posterior, num_real)
    for turn in range(_MOST_TURNS):
        tell(_STEP, search * _MOST_TURNS + turn, _MOST_SEARCHES * _MOST_TURNS)
        if growth.take_turn(turn):
            break
    if posterior.largest_unexplained() < _HOPEFUL:
        _polish(posterior)
    return growth.num_quiet >= _QUIET


def _polish(posterior: SparsePosterior) -> None:
    """Sites and scales of the atoms as they are, until little is left of the steps or no less is."""
    before = torch.inf
    for _ in range(_POLISHED):
        misfit = posterior.misfit()
        if is_sharp(posterior) or misfit > _STILL * before:
            break
        before = misfit
        posterior.update_sites(_NODES, _DAMPING)
        posterior.solve()
        posterior.learn()
        posterior.solve()


@dataclass
class _Growth:
    """What the turns before have shown."""

    posterior: SparsePosterior
    num_real: int
    num_quiet: int = 0
    _most_strong: int = 0
    _least_unexplained: float = 1.0
    _dropped: Counter[int] = field(default_factory=Counter)

    def take_turn(self, turn: int) -> bool:
        """Sites, posterior, scales and support anew; whether it was the last turn."""
        posterior = self.posterior
        if turn:
            posterior.update_sites(_FIRST_NODES if turn < _NUM_FIRST else _NODES, _DAMPING)
            posterior.solve()
        new, scores = self._find_new(), posterior.own_scores()
        posterior.learn()
        kept = (scores >= _KEPT).nonzero()[:, 0].tolist()
        self._note(scores, kept)
        is_full = len(posterior.weights) + len(new) > _FULL * posterior.measured.shape[1]
        is_over = turn == _MOST_TURNS - 1 or self.num_quiet >= _QUIET or is_full
        posterior.replace_atoms(kept, [] if is_over else new)
        return is_over or (not posterior.chosen and turn >= _NUM_FIRST - 1)

    def _find_new(self) -> list[int]:
        """Atoms that rank above every decoy, none that was dropped twice."""
        scores = self.posterior.rank()
        scores[[atom for atom, times in self._dropped.items() if times > 1]] = -torch.inf
        best = scores[: self.num_real].topk(min(self.num_real, max(4, len(self.posterior.weights) // 6)))
        decoy = float(scores[self.num_real :].max()) if len(scores) > self.num_real else -torch.inf
        least = max(_ADDED, _NEAR_BEST * float(best.values[0]), decoy)
        return [atom for atom, score in zip(best.indices.tolist(), best.values.tolist(), strict=True) if score > least]

    def _note(self, scores: Float[Tensor, " n"], kept: list[int]) -> None:
        """Count what is dropped, and turns that bring nothing new."""
        chosen, unexplained = self.posterior.chosen, self.posterior.largest_unexplained()
        staying = {chosen[place] for place in kept}
        self._dropped.update(atom for atom in chosen if atom not in staying)
        num_strong = int((scores > STRONG).sum())
        if num_strong > self._most_strong or unexplained < 0.5 * self._least_unexplained:
            self.num_quiet, self._least_unexplained = 0, unexplained
            self._most_strong = max(self._most_strong, num_strong)
        else:
            self.num_quiet += 1
