"""Bags of tokens from pooled states: one mean over a text's tokens, and its order gone.

    layer 0, no learned positions:   m = Σ_v (k_v/n)·E[v],   k_v ≥ 1 whole,  Σ k_v = n

The few v are found by orthogonal matching pursuit on whitened rows: take the rows that fit the residual best, solve all
coefficients, again. Up to d/2 rows may be taken; once all the right ones are among them the others' coefficients are
zero. The certificate is the equation itself, with whole counts and at rounding: then any other bag of at most d/2
distinct tokens that fits would make d rows of E linearly dependent, and no token of the bag may be exchanged for the
nearest other one. A mean does not tell 'a b' from 'a b a b', so the counts are the least that fit.

With positions that are added (GPT-2) the mean of the first n of them is subtracted, for one n after the other. Where
the embeddings end in a norm (BERT), and at deeper layers, states are only *expected* to be φ(v)·A + b (templates.py,
encoder_templates.py): the same pursuit gives a guess, in order of confidence, and nothing is claimed.

Notation: m the mean seen, E the embedding rows, k_v how often v occurs, n the length, d the width.
Limits: order is never determined: a text is never RECOVERED. More than d/2 distinct tokens, or noise: nothing.
Cost: V·d a step, at most d/2 steps; with added positions that for each n.
Source: Pati, Rezaiifar, Krishnaprasad (1993) for the pursuit; Donoho, Elad, PNAS 100 (2003), for uniqueness by spark.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.claims import claim_nothing
from unmask.attacks.outputs.prompts.encoder_templates import encoder_templates_for
from unmask.attacks.outputs.prompts.templates import TokenStates, templates_for
from unmask.attacks.run import Progress, Run, silent
from unmask.evidence.outputs import HiddenEvidence, Site
from unmask.models.adapter import Model
from unmask.models.model_cache import compute_once
from unmask.proof.state_noise import computing_error, measure_rounding
from unmask.recovery import Aim, Certificate, RecoveredText, RecoveredTexts, Recovery, Search, Status

_RIDGE = 1e-3  # in units of the median variance
_NEARLY_WHOLE = 0.2  # a count may be so far off before it is rounded and tested
_CLEAR = 3.0  # another token must be off by more than this many tolerances
_SHARE = 8  # rows taken at once: one, and one more for so many that were taken
_CLAIM = (
    "The mean of the embeddings of the recovered tokens, with whole counts, equals the observed state. The smallest "
    "rejected error is that of a bag with one token replaced by the nearest other one. The order is unknown."
)


@dataclass(frozen=True)
class Bag:
    """Tokens and how often each occurs; distances are relative to the mean seen."""

    counts: dict[int, int]
    residual: float
    tolerance: float
    rejected: float | None

    @property
    def certain(self) -> bool:
        """Whether the bag gives the mean seen, and its neighbours do not."""
        return self.residual <= self.tolerance and self.rejected is not None and self.rejected > _CLEAR * self.tolerance

    @property
    def tokens(self) -> tuple[int, ...]:
        """The bag laid out, the most frequent first."""
        return tuple(token for token, count in self.counts.items() for _ in range(count))


@dataclass(frozen=True)
class PooledAttack:
    """Settings: the longest text, the same where positions were added, and the size of a guess at deeper layers."""

    max_length: int = 512
    max_length_with_positions: int = 32
    max_guess: int = 48

    @torch.no_grad()
    def __call__(self, evidence: HiddenEvidence, model: Model, progress: Progress = silent) -> Recovery[RecoveredTexts]:
        """A bag for every text."""
        run = Run(progress=progress)
        if evidence.site is not Site.MEAN:
            why = f"states taken at '{evidence.site.value}' are not means over a text ('{Site.MEAN.value}')"
            return claim_nothing(run, Status.NOT_APPLICABLE, why, ("states",))
        means = evidence.states[evidence.mask].to(device=model.device, dtype=model.dtype)
        error = computing_error(model, evidence.compute_dtype, evidence.layer)
        tolerances = measure_rounding(means, error).tolerances.tolist()
        exact = evidence.layer == 0 and _is_sum(model)
        rows = CandidateRows.load_cached(model, evidence.layer, exact, progress)
        bags = []
        for number, (mean, tolerance) in enumerate(zip(means.double(), tolerances, strict=True)):
            progress("reading pooled states", number, len(means))
            bag = self._exact(mean, rows, model, tolerance) if exact else None
            bags.append(bag or rows.guess(mean, self.max_guess, min(self.max_length, model.max_positions)))
        return _recovery(bags, model, evidence, run)

    def _exact(self, mean: Float[Tensor, " d"], rows: CandidateRows, model: Model, tolerance: float) -> Bag | None:
        """The bag that gives the mean, or None."""
        if not model.learned_positions:
            return rows.bag(mean, None, self.max_length, tolerance)
        first = torch.zeros(1, dtype=torch.long, device=model.device)
        shift = torch.zeros_like(mean)
        for length in range(1, min(self.max_length_with_positions, model.max_positions) + 1):
            added = model.embed(first, first + length - 1) - model.embed(first, first)
            shift = shift + (added[0].double() - shift) / length
            bag = rows.bag(mean - shift, length, length, tolerance)
            if bag is not None and bag.certain:
                return bag
        return None


@dataclass(frozen=True)
class CandidateRows:
    """What a token adds to a mean, and the coordinates in which these rows are least alike."""

    table: Float[Tensor, "vocab d"]
    centre: Float[Tensor, " d"]  # subtracted from rows and means: coefficients sum to 1
    whiten: Float[Tensor, "d d"]  # float64
    units: Float[Tensor, "vocab d"]  # centred, whitened, of length 1

    @classmethod
    def load_cached(cls, model: Model, layer: int, exact: bool, progress: Progress) -> CandidateRows:
        """The rows of a layer, made once and kept while the model lives."""
        make = cls.of_embeddings if exact else lambda model: cls.of_expected_states(model, layer, progress)
        return compute_once(model, ("pooled rows", layer), lambda: make(model))

    @classmethod
    def of_embeddings(cls, model: Model) -> CandidateRows:
        """Embeddings at position 0; nothing is subtracted, so that no length need be known."""
        everyone = torch.arange(model.vocab_size, device=model.device)
        table = model.embed(everyone, torch.zeros_like(everyone))
        return cls._whiten(table, torch.zeros_like(table[0]).double(), torch.cov(table.double().T))

    @classmethod
    def of_expected_states(cls, model: Model, layer: int, progress: Progress) -> CandidateRows:
        """Expected states of a layer; the direction in which a text's first token differs has no say."""
        sink = None
        if model.causal:
            templates = templates_for(model, layer, progress=progress)
            states, first = templates.in_context.seen, templates.alone.seen
            sink = (_all_means(first).mean(0) - _all_means(states).mean(0)).double()
        else:
            states = encoder_templates_for(model, layer, progress=progress).states
        table = _all_means(states)
        return cls._whiten(table, table.double().mean(0), states.spread.double(), sink)

    @classmethod
    def _whiten(cls, table: Tensor, centre: Tensor, covariance: Tensor, ignored: Tensor | None = None) -> CandidateRows:
        variances, directions = torch.linalg.eigh(covariance)
        floor = _RIDGE * variances.median().clamp_min(1e-30)
        whiten = directions / (variances.clamp_min(0) + floor).sqrt()
        if ignored is not None:
            unit = torch.nn.functional.normalize(ignored @ whiten, dim=0)
            whiten = whiten - (whiten @ unit)[:, None] * unit
        units = torch.nn.functional.normalize((table - centre.to(table)) @ whiten.to(table), dim=1)
        return cls(table, centre, whiten, units)

    def bag(self, mean: Float[Tensor, " d"], length: int | None, max_length: int, tolerance: float) -> Bag | None:
        """Matching pursuit until the mean is reached, then whole counts; None if it is not reached."""
        limit = len(mean) // 2 if length is None else min(len(mean) // 2, 2 * length + 8)
        chosen: list[int] = []
        seen, residual = mean @ self.whiten, mean @ self.whiten
        while len(chosen) < limit:
            chosen += self._best(residual, chosen, min(1 + len(chosen) // _SHARE, limit - len(chosen)))
            coefficients, residual = self._solve(seen, chosen)
            if float((mean - coefficients @ self.table[chosen].double()).norm()) <= tolerance * float(mean.norm()):
                kept = [token for token, c in zip(chosen, coefficients.tolist(), strict=True) if c > 0.5 / max_length]
                return self._whole(mean, kept, length, max_length, tolerance) if kept else None
        return None

    def _best(self, residual: Float[Tensor, " d"], chosen: list[int], count: int) -> list[int]:
        fits = self.units @ residual.to(self.units)
        fits[chosen] = -torch.inf
        return [int(token) for token in fits.topk(min(count, len(fits))).indices]

    def _solve(self, seen: Float[Tensor, " d"], chosen: list[int]) -> tuple[Tensor, Tensor]:
        """Least squares over the chosen rows: coefficients, and what is left, whitened."""
        atoms = (self.table[chosen].double() - self.centre) @ self.whiten
        coefficients = torch.linalg.lstsq(atoms.T, seen[:, None]).solution[:, 0]
        return coefficients, seen - coefficients @ atoms

    def _whole(
        self, mean: Float[Tensor, " d"], kept: list[int], length: int | None, max_length: int, tolerance: float
    ) -> Bag | None:
        """The least length for which all counts are whole and the mean is met."""
        coefficients, _ = self._solve(mean @ self.whiten, kept)
        rows = self.table[kept].double()
        for n in range(len(kept), max_length + 1) if length is None else [length]:
            counts = (n * coefficients).round()
            whole = float((n * coefficients - counts).abs().max()) < _NEARLY_WHOLE
            if not whole or float(counts.min()) < 1 or int(counts.sum()) != n:
                continue
            residual = float((mean - counts @ rows / n).norm() / mean.norm())
            if residual <= tolerance:
                order = counts.argsort(descending=True, stable=True).tolist()
                found = {kept[place]: int(counts[place]) for place in order}
                return Bag(found, residual, tolerance, self._nearest_other(mean, kept, counts / n))
        return None

    def _nearest_other(self, mean: Float[Tensor, " d"], kept: list[int], shares: Float[Tensor, " k"]) -> float:
        """How far the mean moves at least when one token is exchanged for the one whose row is nearest."""
        apart = torch.cdist(self.table[kept].double(), self.table.double())
        apart.scatter_(1, torch.tensor(kept, device=apart.device)[:, None], torch.inf)
        return float((shares * apart.min(1).values).min() / mean.norm())

    def guess(self, mean: Float[Tensor, " d"], max_guess: int, max_length: int) -> Bag:
        """Tokens whose expected states explain a mean, the largest share first; it ends where shares are small.

        It is empty where that would take a longer text.
        """
        seen = (mean - self.centre) @ self.whiten
        chosen: list[int] = []
        residual = seen
        while len(chosen) < max_guess:
            longer = chosen + self._best(residual, chosen, 1)
            coefficients, residual = self._solve(seen, longer)
            if float(coefficients[-1]) < float(coefficients.median()) / 2 or float(coefficients[-1]) <= 0:
                break
            chosen = longer
        nothing = Bag({}, float("inf"), 0.0, None)
        if not chosen:
            return nothing
        coefficients, residual = self._solve(seen, chosen)
        counts = (coefficients / coefficients.median()).round().clamp_min(1)
        if not float(counts.sum()) <= max_length:
            return nothing
        order = coefficients.argsort(descending=True).tolist()
        found = {chosen[place]: int(counts[place]) for place in order}
        return Bag(found, float(residual.norm() / seen.norm()), 0.0, None)


def _all_means(states: TokenStates) -> Float[Tensor, "vocab d"]:
    return states.means(torch.arange(len(states.features), device=states.features.device))


def _is_sum(model: Model) -> bool:
    """Whether embeddings are rows of tokens plus rows of positions, with nothing behind the sum."""
    if not model.learned_positions:
        return True
    tokens, positions = torch.tensor([[0, 0], [1, 1]]), torch.tensor([[0, 1], [0, 1]])
    rows = model.embed(tokens.to(model.device), positions.to(model.device)).double()
    added = rows[:, 1] - rows[:, 0]
    return bool((added[0] - added[1]).norm() <= 1e-5 * rows.norm())


def _recovery(bags: list[Bag], model: Model, evidence: HiddenEvidence, run: Run) -> Recovery[RecoveredTexts]:
    """Texts are bags laid out, never certain; only certain bags support the set of tokens."""
    certain = [bag for bag in bags if bag.certain]
    texts = [
        RecoveredText(bag.tokens, model.decode(bag.tokens), False, bag.residual)
        for bag in sorted(bags, key=lambda bag: not bag.certain)
        if bag.counts
    ]
    parts = [f"{len(certain)} of {len(bags)} bags of tokens are certain, up to order and a common factor of all counts"]
    if guessed := sum(bool(bag.counts) and not bag.certain for bag in bags):
        parts.append(f"{guessed} are guesses in order of confidence, none of whose tokens is certain")
    if empty := sum(not bag.counts for bag in bags):
        parts.append(f"{empty} are empty, as no text of a length that this attack looks for explains the state")
    certificate = Certificate.none("no bag of tokens gives the state that was seen")
    if certain:
        worst = max(certain, key=lambda bag: bag.residual / bag.tolerance)
        rejected = min(bag.rejected for bag in certain if bag.rejected is not None)
        certificate = Certificate(_CLAIM, worst.residual, worst.tolerance, rejected)
    return Recovery(
        value=RecoveredTexts(tuple(texts), frozenset(token for bag in certain for token in bag.counts)),
        status=Status.PARTIAL if certain else Status.NOTHING_FOUND,
        reason="; ".join(parts) + ".",
        certificate=certificate,
        cost=run.cost(candidates=len(bags) * model.vocab_size),
        used=("states",),
        searches=tuple(Search(Aim.TOKENS, unconfirmed=not bag.certain) for bag in bags),
    )
