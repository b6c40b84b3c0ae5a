"""Beyond b = d: complete the span of a gradient that is too narrow, by rows that verify each other.

    rows     ← prefixes grown by a soft score (`soft_growth.py`)
    verified ← rows that take part in an exact linear dependency with G and the other rows
    span     ← span(G, verified rows): all rows of the batch, once more than b − d of them are verified
    texts    ← the exact search of `prefix_search.py`, in that span

Why a dependency is a proof: G and k rows of the batch lie in the b dimensions that A fills, so as soon as d + k > b
they are dependent, and every row of the batch takes part. A false row points out of these dimensions and takes part in
none. So a row is certified by the others, not by itself.

Notation: as in `soft_growth.py`; R the rows with span(G) projected out.
Limits: the soft score must find more than b − d true prefixes; b < f. Source: ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unmask.attacks.gradients.bag_of_words.token_filter import Candidates
from unmask.attacks.gradients.decoder.prefix_rows import Growth
from unmask.attacks.gradients.decoder.soft_growth import SoftGrowth
from unmask.attacks.gradients.sites import SpanSite, down_site
from unmask.attacks.run import Run
from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.subspace import Span, column_span, rank_by_gap
from unmask.models.adapter import Model
from unmask.models.linear import Role

_ROUNDS = 8
_MIN_DEPENDENCIES, _DEPENDENT = 32, 0.05  # so many, and such a share of rows, that each has a fair weight in them
_TAKES_PART = 0.02  # of the mean weight in the dependencies; a false row has none
_BETTER_THAN_CHANCE = 0.78  # of the share that a false row keeps outside span(G)
_CLEAR_FALL = 1.5  # decades between singular values of independent and of dependent rows


@dataclass(frozen=True)
class Dependencies:
    """How many independent exact relations hold among rows modulo span(G), and each row's weight in them."""

    number: int
    weights: Float[Tensor, " n"]

    @property
    def verified(self) -> Bool[Tensor, " n"]:
        """Rows that take part."""
        return self.weights > _TAKES_PART * self.number / len(self.weights)


def wide_site(evidence: GradientEvidence, model: Model) -> SpanSite | None:
    """The down projection of block 0, whose span is too small for the batch but in a wide enough space."""
    gradient = evidence.linear(model, Role.MLP_OUT, 0)
    if gradient is None or gradient.shape[0] <= gradient.shape[1]:
        return None
    return down_site(evidence, model)


@dataclass(frozen=True)
class CompletedSpan:
    """The site with the span of all rows; or, if too few rows could be verified, the likeliest prefixes, best first."""

    site: SpanSite | None
    hypotheses: tuple[tuple[tuple[int, ...], float], ...] = ()


@torch.no_grad()
def complete(
    run: Run, site: SpanSite, model: Model, candidates: Candidates, num_texts: int, memory_budget_bytes: int
) -> CompletedSpan:
    """Grow, verify and complete; what could not be verified is kept as hypotheses."""
    growth = Growth.at_site(site, model, memory_budget_bytes)
    soft = SoftGrowth(growth, site.span.basis, candidates, num_texts, run.generator)
    room = site.span.width - site.span.rank - _MIN_DEPENDENCIES
    known: dict[tuple[int, ...], Tensor] = {}
    for _ in range(_ROUNDS):
        taken: dict[tuple[int, ...], Tensor] = {}
        for taken in soft.levels(known):
            run.progress("growing hypotheses beyond the width", len(taken), room)
            if len(taken) >= room:
                break  # more rows than dimensions: everything would depend on everything
            rows = torch.stack(list(taken.values()))
            found = dependencies(rows, site.span)
            if found.number >= max(_MIN_DEPENDENCIES, _DEPENDENT * len(rows)):
                span = _complete_span(site.span, rows[found.verified])
                name = f"{site.name}, completed by verified prefixes"
                return CompletedSpan(SpanSite(name, span, site.rows, site.parameters, site.layers))
        if not taken:
            return CompletedSpan(None)
        before, known = known, _plausible(taken, site.span)
        if len(known) <= len(before):
            break  # nothing new
    return CompletedSpan(None, _rank_leaves(taken, site.span))


def dependencies(rows: Float[Tensor, "n f"], span: Span) -> Dependencies:
    """Exact linear relations among rows once span(G) is projected out: the null space of R Rᵀ."""
    residuals = _outside(rows, span)
    eigenvalues, vectors = torch.linalg.eigh(residuals @ residuals.T)
    values = eigenvalues.clamp_min(0).sqrt().flip(0)
    rank, _ = rank_by_gap(values, _CLEAR_FALL)
    null = vectors.flip(1)[:, rank:]
    return Dependencies(null.shape[1], null.square().sum(1))


def _outside(rows: Float[Tensor, "n f"], span: Span) -> Float[Tensor, "n f"]:
    """R: rows of norm 1 with span(G) projected out, in float64."""
    x = rows.to(span.basis)
    x = x / x.norm(dim=1, keepdim=True)
    for _ in range(2):
        x = x - (x @ span.basis) @ span.basis.T
    return x


def _complete_span(span: Span, rows: Float[Tensor, "n f"]) -> Span:
    """span(G, rows): an orthonormal basis, with dependent directions left out by the gap of the spectrum."""
    extra = column_span(_outside(rows, span).T, min_gap_decades=_CLEAR_FALL)
    basis = torch.cat([span.basis, extra.basis], dim=1)
    return Span(basis, span.singular_values, span.width, extra.gap_decades, extra.noise_floor)


def _rank_leaves(taken: dict[tuple[int, ...], Tensor], span: Span) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Prefixes that nothing extends, by their distance to the span of G and the other rows."""
    distances = _leave_one_out(_outside(torch.stack(list(taken.values())), span)).clamp_min(0).sqrt().tolist()
    inner = {prefix[:-1] for prefix in taken}
    leaves = [(prefix, d) for prefix, d in zip(taken, distances, strict=True) if prefix not in inner]
    return tuple(sorted(leaves, key=lambda leaf: leaf[1]))


def _plausible(taken: dict[tuple[int, ...], Tensor], span: Span) -> dict[tuple[int, ...], Tensor]:
    """Rows that the others and G explain better than chance, with all their prefixes: a start for the next round."""
    rows = torch.stack(list(taken.values())).to(span.basis)
    alone = _leave_one_out(rows / rows.norm(dim=1, keepdim=True))
    beside = _leave_one_out(_outside(rows, span))
    by_chance = (span.width - span.rank - len(rows)) / (span.width - len(rows))
    explained = beside < _BETTER_THAN_CHANCE * max(by_chance, 1e-3) * alone
    good = {prefix for prefix, holds in zip(taken, explained.tolist(), strict=True) if holds}
    return {
        prefix: row
        for prefix, row in taken.items()
        if all(prefix[:length] in good for length in range(1, len(prefix) + 1))
    }


def _leave_one_out(x: Float[Tensor, "n f"]) -> Float[Tensor, " n"]:
    """Squared distance of each row to the span of the others: 1 / (X Xᵀ)⁻¹ᵢᵢ."""
    gram = x @ x.T
    gram.diagonal().add_(1e-10)  # keeps dependent rows invertible: their distance is then about this
    return 1 / torch.linalg.inv(gram).diagonal()
