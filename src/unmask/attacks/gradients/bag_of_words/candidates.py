"""The bag of words by the strongest evidence that an update holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from unmask.attacks.gradients.bag_of_words.delta_tokens import find_delta_tokens
from unmask.attacks.gradients.bag_of_words.embedding_rows import (
    find_doubtful_tokens,
    positions_from_rows,
    tokens_from_rows,
)
from unmask.attacks.gradients.bag_of_words.lora_tokens import find_lora_tokens
from unmask.attacks.gradients.bag_of_words.noisy_tokens import NoisyTokens, find_noisy_tokens, is_adaptive
from unmask.attacks.gradients.bag_of_words.tied_rows import find_tied_tokens
from unmask.attacks.gradients.bag_of_words.token_filter import Candidates, filter_tokens, merge_equal
from unmask.attacks.gradients.sites import first_input_site
from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.coarse import Coarseness, storage_of
from unmask.linalg.gap import FLOAT32_FLOOR, Gap
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.recovery import Status

_ROUNDINGS = 4.0
_COARSE_GAP_DECADES, _COARSE_FAR = 0.15, 0.2


@dataclass(frozen=True)
class BagOfWords:
    """Candidates with the tensors they rest on; or, if there are none, the status and reason why.

    `expected_false` is how many of them are false on average, where a statistical test chose them: then none is
    certain, and no text may be called so. None where the choice is exact. `details` are numbers for the certificate.
    """

    candidates: Candidates | None
    used: tuple[str, ...]
    status: Status = Status.PARTIAL
    reason: str = ""
    expected_false: float | None = None
    details: Mapping[str, float] = field(default_factory=dict)


@torch.no_grad()
def find_candidates(
    evidence: GradientEvidence,
    model: Model,
    num_probes: int,
    min_gap_decades: float,
    generator: torch.Generator,
) -> BagOfWords:
    """Tokens from embedding rows if they tell, else from the span of block 0's queries, keys and values.

    Where neither is exact, because of noise, coarse numbers or an adaptive optimiser, by statistical tests.
    """
    exact = find_exact_tokens(evidence, model, num_probes, min_gap_decades, generator)
    if exact.candidates is not None:
        return exact
    return find_noisy_bag(evidence, model, exact, generator)


@torch.no_grad()
def find_exact_tokens(
    evidence: GradientEvidence, model: Model, num_probes: int, min_gap_decades: float, generator: torch.Generator
) -> BagOfWords:
    """The tokens that rows or spans tell without any noise; else why they do not."""
    rows = tokens_from_rows(evidence, model)
    if rows is not None:
        positions = positions_from_rows(evidence, model)
        everywhere = [-1] if positions is None and not model.learned_positions else _list(positions, model)
        unseen = find_doubtful_tokens(evidence, model)
        unseen |= frozenset() if model.gradient_free_token is None else frozenset([model.gradient_free_token])
        tokens = torch.cat([rows, torch.tensor(sorted(unseen - set(rows.tolist())), dtype=torch.long).to(rows)])
        candidates = Candidates(dict.fromkeys(everywhere, tokens), Gap(0.0, 1.0), model.vocab_size, unseen)
        candidates = merge_equal(candidates, model, told_apart=True)
        read = [model.token_embedding] if positions is None else [model.token_embedding, model.position_embedding]
        return BagOfWords(candidates, tuple(name for name in read if name is not None))
    site = first_input_site(evidence, model)
    if site is None and evidence.adapters:
        return _find_in_adapters(evidence, model, min_gap_decades)
    if site is None:
        return BagOfWords(None, (), Status.MISSING_EVIDENCE, _missing(evidence, model))
    if site.span.rank == 0:
        return BagOfWords(None, site.parameters, Status.NOTHING_FOUND, "the gradients of block 0 are zero")
    if site.span.is_saturated:
        reason = _full(site.span.width, site.span.gap_decades) + _hint_at_rows(evidence, model)
        return BagOfWords(None, site.parameters, Status.NOT_IDENTIFIABLE, reason)
    if _has_lost_entries(evidence, site.parameters):
        reason = "most entries of block 0's gradients were not sent, or lie on a few levels: no span is exact"
        return BagOfWords(None, site.parameters, Status.NOT_IDENTIFIABLE, reason)
    floor, needed, farthest = _precision(evidence, min_gap_decades)
    span = site.span if model.num_token_types < 2 else site.span.join(model.token_type_directions)
    candidates = filter_tokens(model, span, num_probes=num_probes, generator=generator, floor=floor)
    return _judge(merge_equal(candidates, model, told_apart=False), site.parameters, needed, farthest)


@torch.no_grad()
def find_noisy_bag(
    evidence: GradientEvidence,
    model: Model,
    exact: BagOfWords,
    generator: torch.Generator,
) -> BagOfWords:
    """Tokens by all tests that bear noise and optimisers; if there are none, why not."""
    found = find_noisy_tokens(evidence, model, generator)
    tied = find_tied_tokens(evidence, model)
    steps = find_delta_tokens(evidence, model)
    used = tuple(found.noise)
    details = {
        f"{kind} of {name}": value for kind in ("noise", "signal") for name, value in getattr(found, kind).items()
    }
    tokens = torch.unique(torch.cat([found.tokens, tied.tokens, steps.tokens]))
    if len(tokens):
        everywhere = range(model.max_positions) if model.learned_positions else [-1]
        expected_false = found.expected_false + tied.expected_false + steps.expected_false
        num_tested = found.num_tested + model.vocab_size * sum(bool(len(other.tokens)) for other in (tied, steps))
        candidates = Candidates(
            dict.fromkeys(everywhere, tokens.to(model.device)), Gap(expected_false, 1.0), num_tested
        )
        used += (model.token_embedding,) if len(tied.tokens) else ()
        used += steps.used if len(steps.tokens) else ()
        details |= {**tied.details, **steps.details}
        return BagOfWords(candidates, tuple(dict.fromkeys(used)), expected_false=expected_false, details=details)
    if steps.used:
        return BagOfWords(None, steps.used, Status.NOT_APPLICABLE, steps.reason, details=steps.details)
    if not used:
        return _why_not(evidence, model, exact)
    status = Status.NOT_APPLICABLE if found.rank == 0 else exact.status
    return BagOfWords(None, used, status, _noise_floor(evidence, found, exact.reason), details=details)


def _why_not(evidence: GradientEvidence, model: Model, exact: BagOfWords) -> BagOfWords:
    """The exact test's answer; where an adaptive optimiser has made the update, that nothing else can be read."""
    gradient = evidence.linear(model, Role.VALUE, 0)
    if gradient is None or not is_adaptive(evidence, gradient):
        return exact
    reason = (
        "an adaptive optimiser (Adam) made this weight delta: it divides every entry by its own size, so that its "
        "columns are no combinations of the inputs, and no embedding rows tell which tokens occur"
    )
    return BagOfWords(None, exact.used, Status.NOT_APPLICABLE, reason)


def _noise_floor(evidence: GradientEvidence, found: NoisyTokens, reason: str) -> str:
    """The reason of the exact test, and the numbers of the statistical one."""
    sizes = ", ".join(f"'{name}' {sigma:.1e} on {found.signal[name]:.1e}" for name, sigma in found.noise.items())
    steps = "" if evidence.learning_rate is None else f", at a learning rate of {evidence.learning_rate:g}"
    return (
        f"{reason}. No token stands out of rounding and noise either: {found.rank} directions of block 0's gradients "
        f"are above them (noise on signal, root mean square of an entry: {sizes}{steps})"
    )


def _find_in_adapters(evidence: GradientEvidence, model: Model, min_gap_decades: float) -> BagOfWords:
    """The same behind low-rank adapters. What they do not show may be there: they show few directions, and blurred."""
    found = find_lora_tokens(evidence, model)
    if found.candidates is None:
        return BagOfWords(None, found.used, found.status, found.reason)
    judged = _judge(merge_equal(found.candidates, model, told_apart=False), found.used, min_gap_decades)
    return judged if judged.candidates else replace(judged, status=Status.NOT_IDENTIFIABLE)


def _judge(candidates: Candidates, used: tuple[str, ...], min_gap_decades: float, farthest: float = 1.0) -> BagOfWords:
    """Candidates that are near enough and whose distances stand apart from all others; else none."""
    if not candidates.searched:
        reason = (
            "no token of the vocabulary lies in the span of block 0's gradients: they are of other weights, or of a "
            "client that trained with dropout"
        )
        return BagOfWords(None, used, Status.NOT_APPLICABLE, reason)
    if candidates.gap.accepted > farthest:
        reason = f"the nearest tokens lie {candidates.gap.accepted:.2f} from the span, further than rounding takes them"
        return BagOfWords(None, used, Status.NOT_APPLICABLE, reason)
    if candidates.gap.decades < min_gap_decades:
        return BagOfWords(
            None,
            used,
            Status.NOT_APPLICABLE,
            f"no token's vector stands out: the span test's distances {candidates.gap.describe()}, and "
            f"{min_gap_decades:.1f} decades are asked for; the update may be noisy, of a client with dropout, or of "
            "other weights",
        )
    return BagOfWords(candidates, used)


def _has_lost_entries(evidence: GradientEvidence, names: tuple[str, ...]) -> bool:
    """Whether gradients of a client with few digits were pruned or put on a grid as well: then any gap is chance."""
    if torch.finfo(evidence.compute_dtype).eps <= 1e-4:
        return False  # a float32 client's span is full then, and says so
    kinds = {storage_of(evidence.gradients[name]).kind for name in names}
    return bool(kinds & {Coarseness.EVEN, Coarseness.LARGEST, Coarseness.THINNED})


def _precision(evidence: GradientEvidence, min_gap_decades: float) -> tuple[float, float, float]:
    """The distance that the client's rounding leaves of a zero, how wide a gap must then be, and the largest distance.

    In bfloat16 a true vector is some roundings (2⁻⁸) away from the span, a wrong one about 0.2: no room for more.
    """
    eps = torch.finfo(evidence.compute_dtype).eps
    if eps > 1e-4:
        return _ROUNDINGS * eps, _COARSE_GAP_DECADES, _COARSE_FAR
    return FLOAT32_FLOOR, min_gap_decades, 1.0


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


def _hint_at_rows(evidence: GradientEvidence, model: Model) -> str:
    """What to state where rows of the embedding would tell, if it did not predict tokens as well."""
    rows = evidence.gradients.get(model.token_embedding)
    if evidence.task is not None or rows is None or bool((rows != 0).any(1).all()):
        return ""
    return (
        "; some rows of the embedding did not move, and tell which tokens occur unless it predicts tokens as well; "
        "state task='classification' if it does not"
    )
