"""The search for an encoder's texts: anchor after anchor, until the texts explain the gradient's rank."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unmask.attacks.gradients.encoder.attending_rows import probe_layer
from unmask.attacks.gradients.encoder.position_candidates import PositionCandidates, Text
from unmask.attacks.gradients.encoder.problem import Problem
from unmask.attacks.gradients.encoder.relaxation import Relaxation, whiten_probes
from unmask.attacks.gradients.encoder.search_settings import SearchSettings
from unmask.attacks.gradients.encoder.token_swaps import TokenSwaps
from unmask.attacks.run import Run
from unmask.linalg.gap import FLOAT32_FLOOR


class EncoderSearch:
    """Texts found with their distances, texts refused with cost and distance, and places that are spoken for."""

    def __init__(
        self,
        run: Run,
        problem: Problem,
        *,
        num_texts: int | None,
        num_equations: int,
        max_steps: int,
        max_anchors: int | None,
        settings: SearchSettings = SearchSettings(),  # noqa: B008 (frozen)
    ) -> None:
        places = problem.places
        self.problem = problem
        self.num_equations, self.max_steps, self.max_anchors = num_equations, max_steps, max_anchors
        self.run, self.settings = run, settings
        self.found: dict[Text, float] = {}
        self.refused: dict[Text, tuple[float, float]] = {}
        self.num_anchors = self.num_steps = 0
        self.explained = torch.zeros(places.num_candidates, dtype=torch.bool, device=places.share.device)
        self.removed = self.explained.clone()
        self.num_texts = num_texts
        self.prior = 1 / (num_texts or _fullest_position(places))
        self._draw_probes()
        self.random_distance, self.random_cost = self._wrong_by_chance()

    @property
    def accepted_below(self) -> float:
        """The distance of a text that may be in the batch."""
        floor = self.settings.drift_distance if self.problem.drifts else 10 * FLOAT32_FLOOR
        return (floor * self.random_distance) ** 0.5

    def _wrong_by_chance(self) -> tuple[float, float]:
        """The distance and the cost of a random text, as a median; those that are right by chance left out."""
        texts = [self._random_text() for _ in range(self.settings.num_random_texts)]
        distances = [self.problem.distance(text) for text in texts]
        wrong = [
            index
            for index, distance in enumerate(distances)
            if distance >= self.settings.right_distance * max(*distances, self.settings.wrong_distance)
        ]
        if not wrong:
            return self.settings.wrong_distance, 1.0
        return _median([distances[n] for n in wrong]), _median([self._cost(texts[n]) for n in wrong])

    def _draw_probes(self) -> None:
        """Relaxations with fresh random probes: over likely places, and over all once they are needed."""
        self.narrow = self._relaxation(_select_likely(self.problem.places, self.settings.spread_share))
        self.exchange = _make_swaps(self.problem, self.narrow)
        self.__dict__.pop("wide", None)
        self.num_passes = self.num_in_vain = 0

    def search(self, effort: int = 1) -> None:
        """Search; where texts are missing, up to `effort` times with fresh probes."""
        self._search()
        for _ in range(effort - 1):
            if self.is_done or self.is_out_of_budget:
                return
            self._draw_probes()
            self._search()

    def _search(self) -> None:
        """Clear anchors over likely places, less those that found texts have used; over all likely ones; over all."""
        self._pass(self.narrow, self.settings.clear_anchor)
        self.removed[:] = False
        if not self.is_done:
            self._pass(self.narrow, self.settings.least_anchor)
        if not self.is_done:
            self._pass(self.wide, self.settings.least_anchor)

    def _pass(self, relaxation: Relaxation, least_share: float) -> None:
        """Anchor by anchor; if the last text resists, from all clear places that are left: they are its own."""
        self.num_passes += 1
        num_failures = self.num_in_vain = 0
        for anchor in self._anchors(least_share):
            if self.is_done or self.is_out_of_budget or self.is_hopeless:
                return
            if self.num_passes == 3 or not bool(self.explained[anchor]):
                num_found = len(self.found)
                self._from_anchors([anchor], relaxation)
                self.num_in_vain = self.num_in_vain + 1 if len(self.found) == num_found else 0
                num_failures += self.is_last and not self.is_done
                if num_failures == self.settings.patience:
                    self._from_anchors(self._find_unexplained(), relaxation)

    def _find_unexplained(self) -> list[int]:
        """Clear places that no text explains, as far as they fit into one text."""
        kept: list[int] = []
        for place in self._anchors(self.settings.clear_anchor):
            if not bool(self.explained[place]) and all(self.problem.places.fit(place, other) for other in kept):
                kept.append(place)
        return kept

    def _from_anchors(self, anchors: list[int], relaxation: Relaxation) -> None:
        """A text near the anchors; then with what goes with them; if nearly right, from its best rows."""
        self.num_anchors += 1
        self.run.progress("recovering texts", self.num_rows, self.problem.rank)
        text, cost, weights = self._descend(anchors, relaxation, self.removed)
        text, cost = self._swap_tokens(text, cost)
        if self.num_passes == 1 and cost > self.settings.hopeless_cost * self.random_cost:
            return  # another anchor of the same text is likely to lead to it; if not, this one comes again
        for _ in range(self.settings.max_regroupings):
            together = self._companions(anchors, weights, relaxation)
            if text in self.found or cost < self.settings.zero_cost * self.random_cost or len(together) <= len(anchors):
                break
            anchors = together
            other, other_cost, weights = self._descend(anchors, relaxation, self.removed)
            other, other_cost = self._swap_tokens(other, other_cost)
            text, cost = (other, other_cost) if other_cost < cost else (text, cost)
        for choose in (lambda: self.narrow, lambda: self.wide):
            is_near = self.settings.zero_cost * self.random_cost <= cost <= self.settings.near_cost * self.random_cost
            if text in self.found or self.exchange is None or not is_near:
                return
            rows = self.exchange.row_costs(text)[1:-1].argsort() + 1
            kept = [text[int(row)] for row in rows[: 2 * len(rows) // 3]]
            again = choose()
            anchors = [place for place in kept if again.has(place)]
            text, cost, _ = self._descend(anchors, again, torch.zeros_like(self.removed))
            text, cost = self._swap_tokens(text, cost)

    def _descend(
        self, anchors: list[int], relaxation: Relaxation, removed: Bool[Tensor, " j"]
    ) -> tuple[Text, float, Float[Tensor, " j"]]:
        """Follow the relaxation and test each text on the way; the best one, its cost, and the last weights."""
        best: tuple[float, Text] | None = None
        weights = self.problem.places.share
        least = self.settings.least_share if self.num_passes == 1 and not self.problem.is_noisy else 1.0
        steps = relaxation.descend(anchors, removed, self.prior, self.max_steps, least)
        for text, weights in steps:  # noqa: B007
            self.num_steps += 1
            cost = self._cost(text)
            best = (cost, text) if best is None else min(best, (cost, text))
            if cost < self.settings.promising_cost * self.random_cost and self._accepts(text, cost):
                break
        assert best is not None  # a descent takes a step at least
        return best[1], best[0], weights

    def _companions(self, anchors: list[int], weights: Float[Tensor, " j"], relaxation: Relaxation) -> list[int]:
        """The anchors and the heaviest clear places that fit them: they tend to stand in the same text."""
        clear = [
            place
            for place in self._anchors(self.settings.clear_anchor)
            if relaxation.has(place) and weights[place] > self.settings.heavy_weight
        ]
        together = list(anchors)
        for place in sorted(clear, key=lambda place: float(weights[place]), reverse=True):
            if len(together) < self.settings.max_anchors and all(
                self.problem.places.fit(place, other) for other in together
            ):
                together.append(place)
        return together

    def _swap_tokens(self, text: Text, cost: float) -> tuple[Text, float]:
        """A text that is partly right, after exchanges of single tokens."""
        could_be_better = (
            self.settings.zero_cost * self.random_cost <= cost < self.settings.hopeless_cost * self.random_cost
        )
        if text not in self.found and self.exchange is not None and could_be_better:
            enough = self.settings.zero_cost * self.random_cost
            text, cost = self.exchange.improve(text, self.settings.max_sweeps, enough)
            self._accepts(text, cost)
        return text, cost

    def _accepts(self, text: Text, cost: float) -> bool:
        """Accept a text if all its rows lie in the spans."""
        if text in self.found or text in self.refused:
            return text in self.found
        distance = self.problem.distance(text)
        if distance > self.accepted_below:
            self.refused[text] = cost, distance
            return False
        self.found[text] = distance
        places = torch.tensor(text, device=self.removed.device)
        self.explained[places] = True
        if self.num_passes == 1:
            self.removed[places] = (
                self.problem.places.share[places] > self.settings.unique_share
            ) & ~self.problem.places.is_frame[places]
        other = None if self.exchange is None else self.exchange.runner_up(text)
        if other is not None:
            self._accepts(other, float("inf"))  # the nearest text that differs: refused, or another one of the batch
        return True

    @property
    def num_rows(self) -> int:
        """The number of rows that the texts found explain."""
        return sum(map(len, self.found))

    @property
    def is_cut(self) -> bool:
        """Whether the budget ended the search."""
        return self.is_out_of_budget and not self.is_done

    @property
    def is_complete(self) -> bool:
        """Whether they explain every direction of the gradient."""
        return self.num_rows == self.problem.rank

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to find."""
        return self.num_rows >= self.problem.rank or len(self.found) == self.num_texts

    @property
    def is_last(self) -> bool:
        """Whether one text is missing, as far as one can tell."""
        if self.num_texts is not None:
            return len(self.found) == self.num_texts - 1
        return 0 < self.problem.rank - self.num_rows <= self.problem.places.num_positions

    @property
    def is_hopeless(self) -> bool:
        """Whether many anchors led to no new text: the evidence is not what it seems (noise, other weights)."""
        return self.num_in_vain >= (self.settings.most_in_vain if self.found else self.settings.most_in_vain_at_first)

    @property
    def is_out_of_budget(self) -> bool:
        """Whether all anchors that the budget allows were tried."""
        return self.max_anchors is not None and self.num_anchors >= self.max_anchors

    @property
    def nearest_refused(self) -> float:
        """The smallest distance of a text that was refused."""
        return min((distance for _, distance in self.refused.values()), default=self.random_distance)

    def _cost(self, text: Text) -> float:
        """What a text leaves of the probes: cheap if the output projection tells, else its distance squared."""
        return self.problem.distance(text) ** 2 if self.exchange is None else self.exchange.cost(text)

    @cached_property
    def wide(self) -> Relaxation:
        """Every token of the batch at every position."""
        return self._relaxation(self.problem.places.is_possible)

    def _relaxation(self, chosen: Bool[Tensor, " j"]) -> Relaxation:
        places = self.problem.places
        indices = chosen.nonzero()[:, 0]
        num_equations = min(self.num_equations, max(self.settings.fewest_equations, len(indices) // 4))
        sizes = (self.settings.num_output_probes, 2 * num_equations, 2 * num_equations)
        probed = [
            probe_layer(self.problem.model, site, size, self.run.generator, is_hidden=site is self.problem.down)
            for site, size in zip((self.problem.output, self.problem.down, self.problem.mlp), sizes, strict=True)
            if site is not None
        ]
        clearest = places.share.masked_fill(places.is_frame | ~chosen, -1.0).argsort(descending=True)
        rows = [places.start, *clearest[: self.settings.num_whitening_rows - 1].tolist()]
        return whiten_probes(Relaxation(self.problem.model, places, indices, probed), rows, self.prior, num_equations)

    def _anchors(self, least_share: float) -> Iterator[int]:
        """Places with a clear share, the clearest first; then ends, one for each length."""
        places = self.problem.places
        share = places.share.masked_fill(places.is_frame | ~places.is_possible, 0.0)
        order = share.argsort(descending=True)
        yield from order[share[order] > least_share].tolist()
        if least_share < self.settings.clear_anchor:
            yield from (places.is_end & places.is_possible & (places.share > 0)).nonzero()[:, 0].tolist()

    def _random_text(self) -> Text:
        """Random tokens of the batch at every position before a random end; of a pair, around a random middle."""
        places = self.problem.places
        is_pair = places.frame.end_type == 1
        end = self._any(places.is_end & (places.position > places.frame.end_type))
        closing = places.closes & ~places.is_end & (places.position < places.position[end])
        middle = self._any(closing) if is_pair else end
        split, length = int(places.position[middle]), int(places.position[end])
        inner = [places.is_possible & ~places.is_frame & (places.kind == kind) for kind in range(places.num_types)]
        text = [self._any(inner[0] & (places.position == p)) for p in range(1, split)]
        if is_pair:
            text += [middle, *(self._any(inner[1] & (places.position == p)) for p in range(split + 1, length))]
        return (places.start, *text, end)

    def _any(self, mask: Bool[Tensor, " j"]) -> int:
        indices = mask.nonzero()[:, 0]
        if len(indices) == 0:
            return self.problem.places.start  # no text can be made here; a random one is only there to be refused
        return int(indices[int(torch.randint(len(indices), (1,), generator=self.run.generator))])


def _select_likely(places: PositionCandidates, spread_share: float) -> Bool[Tensor, " j"]:
    """Places of shares above zero, all ends, and every place of a token that is spread out."""
    by_token = places.share.view(places.num_positions, places.num_types, -1).amax((0, 1))
    spread = (by_token < spread_share).repeat(places.num_positions * places.num_types)
    return places.is_possible & ((places.share > 0) | spread | places.is_frame)


def _make_swaps(problem: Problem, relaxation: Relaxation) -> TokenSwaps | None:
    """Moves by the output projection's probes, if its gradient leaves room for any."""
    probes = [layer.probes for layer in relaxation.probed if layer.site is problem.output]
    return TokenSwaps.of(problem.places, probes[0]) if probes else None


def _fullest_position(places: PositionCandidates) -> float:
    """At least how many texts there are: the shares that meet at one position."""
    shares = places.share.view(places.num_positions, -1).sum(1)
    return max(1.0, float(shares.max()))


def _median(numbers: list[float]) -> float:
    return sorted(numbers)[len(numbers) // 2]
