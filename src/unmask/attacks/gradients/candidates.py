"""The bag of words by the strongest evidence that an update holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unmask.attacks.gradients.embedding_rows import positions_from_rows, tokens_from_rows
from unmask.attacks.gradients.sites import first_input_site
from unmask.attacks.gradients.token_filter import Candidates, filter_tokens
from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.gap import FLOAT32_FLOOR, Gap
from unmask.models.adapter import Model
from unmask.recovery import Status

_ROUNDINGS = 4.0
_COARSE_GAP_DECADES = 0.15


@dataclass(frozen=True)
class BagOfWords:
    """Candidates with the tensors they rest on; or, if there are none, the status and reason why."""

    candidates: Candidates | None
    used: tuple[str, ...]
    status: Status = Status.PARTIAL
    reason: str = ""


@torch.no_grad()
def find_candidates(
    evidence: GradientEvidence,
    model: Model,
    *,
    num_probes: int,
    min_gap_decades: float,
    generator: torch.Generator,
) -> BagOfWords:
    """Tokens from embedding rows if they tell, else from the span of block 0's queries, keys and values."""
    rows = tokens_from_rows(evidence, model)
    if rows is not None:
        positions = positions_from_rows(evidence, model)
        everywhere = [-1] if positions is None and not model.learned_positions else _list(positions, model)
        unseen = frozenset() if model.gradient_free_token is None else frozenset([model.gradient_free_token])
        tokens = torch.cat([rows, torch.tensor(sorted(unseen - set(rows.tolist())), dtype=torch.long).to(rows)])
        candidates = Candidates(dict.fromkeys(everywhere, tokens), Gap(0.0, 1.0), model.vocab_size, unseen)
        read = [model.token_embedding] if positions is None else [model.token_embedding, model.position_embedding]
        return BagOfWords(candidates, tuple(name for name in read if name is not None))
    site = first_input_site(evidence, model)
    if site is None:
        return BagOfWords(None, (), Status.MISSING_EVIDENCE, _missing(evidence, model))
    if site.span.rank == 0:
        return BagOfWords(None, site.parameters, Status.NOTHING_FOUND, "the gradients of block 0 are zero")
    if site.span.is_saturated:
        return BagOfWords(None, site.parameters, Status.NOT_IDENTIFIABLE, _full(site.span.width, site.span.gap_decades))
    floor, needed = _precision(evidence, min_gap_decades)
    span = site.span if model.num_token_types < 2 else site.span.joined(model.token_type_directions)
    candidates = filter_tokens(model, span, num_probes=num_probes, generator=generator, floor=floor)
    if not candidates.tokens:
        reason = "no token of the vocabulary lies in the span of block 0's gradients: are they of these weights?"
        return BagOfWords(None, site.parameters, Status.NOTHING_FOUND, reason)
    if candidates.gap.decades < needed:
        return BagOfWords(
            None,
            site.parameters,
            Status.NOTHING_FOUND,
            f"no token's vector stands out: the span test's distances have a gap of only {candidates.gap.decades:.1f} "
            f"decades where {needed:.1f} are asked for; the update may be noisy or of other weights",
        )
    return BagOfWords(candidates, site.parameters)


def _precision(evidence: GradientEvidence, min_gap_decades: float) -> tuple[float, float]:
    """The distance that the client's rounding leaves of a zero, and how wide a gap must then be.

    In bfloat16 a true vector is some roundings (2⁻⁸) away from the span, a wrong one about 0.2: no room for more.
    """
    eps = torch.finfo(evidence.compute_dtype).eps
    return (_ROUNDINGS * eps, _COARSE_GAP_DECADES) if eps > 1e-4 else (FLOAT32_FLOOR, min_gap_decades)


def _list(positions: torch.Tensor | None, model: Model) -> list[int]:
    return list(range(model.max_positions)) if positions is None else positions.tolist()


def _missing(evidence: GradientEvidence, model: Model) -> str:
    return (
        f"the update holds {len(evidence.gradients)} tensors, but neither block 0's query, key or value gradients nor "
        f"embedding rows ('{model.token_embedding}') that tell which tokens occur"
    )


def _full(width: int, gap_decades: float) -> str:
    return (
        f"the rank of block 0's gradients equals the width {width} (largest fall of the spectrum: {gap_decades:.1f} "
        "decades), so every token passes the span test: the batch holds too many different tokens, or noise was added"
    )
