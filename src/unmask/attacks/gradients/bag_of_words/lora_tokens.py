"""The bag of words from low-rank adapters: y = W·x + s·B·(A·x) in block 0's queries, keys and values.

    ∂L/∂A = s·Bᵀ·∂L/∂Yᵀ·X       each of its r rows is a combination of the batch's inputs
    ∂L/∂B = s·∂L/∂Yᵀ·(X·Aᵀ)     its row space is that of X·Aᵀ, in r dimensions

*By ∂A.* The rows of ∂A are few, but each is a combination of the same few vectors out of a vocabulary: sparse recovery
with several right-hand sides (`pursuit.py`), with vectors of tokens and, where they are learned, of positions. Tokens
may be many more than r. The vocabulary's second moments whiten the vectors first, so that they are nearly orthogonal.

    certain  what the tokens leave of ∂A is rounding, and no other token could stand in the place of one of them

*By ∂B*, where ∂A is zero because B is, as in the first step of the first round: 'does A·x lie in the row space?' That
tells tokens only while the batch has fewer than r distinct inputs.

Limits: tokens + positions up to 0.85·d. Updates of one step, in float32 or better: rounding or noise above 3e-5 of ∂A
leaves a residual, and nothing is claimed. A token of which only a label is made (the last one of a text) is in neither.
Source: measured for this project; ∂B is DAGER's span test (arXiv 2405.15586) behind the adapter's projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from unmask.attacks.gradients.bag_of_words.token_filter import Candidates
from unmask.evidence.gradients import GradientEvidence, Update
from unmask.linalg.gap import Gap, widest_gap
from unmask.linalg.pursuit import find_rivals, find_support, inverse_root, orthonormal
from unmask.linalg.subspace import Span, column_span
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.recovery import Status

_FLOOR = 1e-6  # what float32 leaves of a zero once a vector went through A
_FAR = 0.1
_BY_CHANCE = 1e-3  # wrong tokens that may pass the test of ∂B on average
_RIDGE = 1e-7  # of the largest second moment: directions of the vocabulary below it are rounding
_COLUMNS = 1e-4  # of the largest: columns below it hold more rounding than gradient
_EXPLAINED = 2e-5  # of ∂A: less is float32's rounding, and nothing more is taken
TOLERANCE = 3e-5  # of ∂A: what right tokens leave at most; a wrong token was seen to leave 3e-4
_NEEDED = 1e-4  # of ∂A: a token of which less depends is not needed
_MOST = 0.85  # of the dimensions


@dataclass(frozen=True)
class LoraTokens:
    """Candidates with the tensors they rest on; or, if there are none, the status and reason why."""

    candidates: Candidates | None
    used: tuple[str, ...]
    reason: str = ""
    status: Status = Status.NOT_IDENTIFIABLE


@dataclass(frozen=True)
class _Factors:
    """An adapted projection of block 0: A (r, d), and the span of the rows of X·Aᵀ in r dimensions."""

    name: str
    down: Float[Tensor, "r d"]
    span: Span


@torch.no_grad()
def find_lora_tokens(evidence: GradientEvidence, model: Model) -> LoraTokens:
    """Tokens by ∂A if it holds anything, else by ∂B."""
    # A difference of factors has their rounding in it, but where B was zero there is none to speak of.
    inputs = gradients_of_inputs(evidence, model, 0) if evidence.update is Update.GRADIENT else {}
    seen = [] if evidence.optimizer == "adamw" else list(_outputs(evidence, model))
    if not inputs and not seen:
        return _say_what_is_missing(evidence, model)
    reason = ""
    if inputs:
        found, reason = _find_by_inputs(inputs, model)
        if found is not None:
            return LoraTokens(found, tuple(inputs))
    open_ones = [one for one in _without_blind_ones(model, seen) if one.span.rank < one.span.width]
    if open_ones:
        found = _passing(model, open_ones)
        used = tuple(one.name for one in open_ones)
        free = sum(one.span.width - one.span.rank for one in open_ones)
        by_chance = found.num_tested * max(found.gap.accepted, _FLOOR) ** free
        if by_chance > _BY_CHANCE:
            return LoraTokens(
                None, used, f"only {free} directions of the adapters tell tokens apart, and some pass by chance"
            )
        return LoraTokens(found, used)
    rank = max((one.span.width for one in seen), default=0)
    reason = reason or (
        f"{_why_no_inputs(evidence, model)}. Adapters of this rank then show {rank} directions at most and all are in "
        "use: the batch has at least as many distinct inputs, and every token passes"
    )
    return LoraTokens(None, (*inputs, *(one.name for one in seen)), reason)


def _say_what_is_missing(evidence: GradientEvidence, model: Model) -> LoraTokens:
    """Why neither factor of block 0's adapters is read: they are not there, or AdamW made their changes."""
    names = [name for factor in "AB" for name in input_factors(model, factor)]
    held = tuple(name for name in names if _moved(evidence, name))
    if not held:
        verb = "holds a gradient" if evidence.update is Update.GRADIENT else "changed"
        reason = f"no adapter of block 0's queries, keys or values {verb}"
        return LoraTokens(None, (), reason, Status.MISSING_EVIDENCE)
    if evidence.optimizer != "adamw":
        reason = "block 0's adapters moved, but the weights that the server sent are not all known; pass adapters=…"
        return LoraTokens(None, held, reason, Status.MISSING_EVIDENCE)
    steps = "one AdamW step" if evidence.num_steps == 1 else "AdamW"
    why = _why_no_inputs(evidence, model)
    reason = (
        f"{steps} made this change of block 0's adapters: it divides every entry by its own size, so that little more "
        f"than signs is left of a gradient{f'; {why}' if why else ''}"
    )
    return LoraTokens(None, held, reason, Status.NOT_APPLICABLE)


def _why_no_inputs(evidence: GradientEvidence, model: Model) -> str:
    """Why the factors A of block 0's adapters tell nothing; empty where they moved."""
    downs, ups = input_factors(model, "A"), input_factors(model, "B")
    known = [evidence.adapters[name] for name in ups if name in evidence.adapters]
    is_first_step = evidence.update is Update.GRADIENT or evidence.num_steps in (None, 1)
    if is_first_step and known and not any(bool(weights.any()) for weights in known):
        return (
            "A has no gradient yet, because the factors B are zero, as in a first round (audit a later round as well: "
            "it shows more)"
        )
    if not any(name in evidence.gradients for name in downs):
        return "the update does not hold the factors A, which may be frozen"
    if not any(_moved(evidence, name) for name in downs):
        return "the factors A did not move" if evidence.update is Update.DELTA else "the gradients of A are zero"
    return "" if known else "the factors B that the server sent are not known"


def _moved(evidence: GradientEvidence, name: str) -> bool:
    change = evidence.gradients.get(name)
    return change is not None and bool(change.any())


def gradients_of_inputs(evidence: GradientEvidence, model: Model, block: int) -> dict[str, Float[Tensor, "d r"]]:
    """∂Aᵀ of the adapters at a block's queries, keys and values, whose columns are combinations of its inputs."""
    return {
        name: gradient.T
        for name in input_factors(model, "A", block)
        if (gradient := evidence.gradients.get(name)) is not None and bool(gradient.any())
    }


def input_factors(model: Model, factor: str, block: int = 0) -> list[str]:
    """Names of the adapters' factors at a block's queries, keys and values; a fused projection once."""
    layers = (model.linear(role, block) for role in (Role.QUERY, Role.KEY, Role.VALUE))
    modules = dict.fromkeys(layer.parameter.removesuffix(".weight") for layer in layers if layer is not None)
    return [f"{module}.lora_{factor}.weight" for module in modules]


def _find_by_inputs(inputs: Mapping[str, Float[Tensor, "d r"]], model: Model) -> tuple[Candidates | None, str]:
    """Tokens and positions that explain ∂A down to rounding; none where none do, and why."""
    everyone = torch.arange(model.vocab_size, device=model.device)
    words, places, shift = model.first_input_parts(everyone, model.max_positions)
    always = orthonormal(torch.cat([shift[None], model.token_type_directions]).T, 1e-6)
    measured = torch.cat([gradient.double() for gradient in inputs.values()], dim=1)
    measured = measured - always @ (always.T @ measured)
    whiten = inverse_root((words.T @ words).double() / len(words), always, _RIDGE)
    atoms = normalize(torch.cat([words, places]).double() @ whiten, dim=1).to(words)
    basis = orthonormal(whiten.T @ measured, _COLUMNS)
    most = int(_MOST * (model.width - always.shape[1]))
    found = find_support(atoms, basis, _EXPLAINED, most, _NEEDED)
    if not found.chosen or found.residual > TOLERANCE:
        return None, (
            f"no {most} tokens explain the gradients of block 0's adapters (they leave {found.residual:.0e} of them, "
            f"and {TOLERANCE:.0e} is rounding): the batch holds more, or the client trained with dropout, in few "
            "digits or for several steps, or noise was added"
        )
    rivals = find_rivals(atoms, found).tolist()
    chosen = [(atom, rival) for atom, rival in zip(found.chosen, rivals, strict=True) if atom < model.vocab_size]
    clear = [rival for _, rival in chosen if rival >= _NEEDED]
    tokens = torch.tensor(sorted(atom for atom, _ in chosen), device=model.device)
    length = 1 + max((atom - model.vocab_size for atom in found.chosen if atom >= model.vocab_size), default=-1)
    everywhere = range(length) if model.learned_positions else [-1]
    gap = Gap(found.residual, min(clear, default=found.residual))
    unclear = frozenset(atom for atom, rival in chosen if rival < _NEEDED)
    return Candidates(dict.fromkeys(everywhere, tokens), gap, len(atoms), unclear), ""


def _outputs(evidence: GradientEvidence, model: Model) -> Iterator[_Factors]:
    for down, up in zip(input_factors(model, "A"), input_factors(model, "B"), strict=True):
        gradient, weights = evidence.gradients.get(up), evidence.adapters.get(down)
        if gradient is not None and weights is not None and bool(gradient.any()):
            yield _Factors(up, weights, column_span(gradient.T))


def _without_blind_ones(model: Model, seen: list[_Factors]) -> list[_Factors]:
    """In a causal model the query gradient of a first token is zero; values see every token."""
    layer = model.linear(Role.VALUE, 0)
    sees_all = [one for one in seen if layer and one.name.startswith(layer.parameter.removesuffix(".weight"))]
    return sees_all if model.causal and sees_all else seen


def _passing(model: Model, seen: list[_Factors]) -> Candidates:
    """All tokens whose A·x lies in every projection's span, position by position until none passes."""
    positions = range(model.max_positions if model.learned_positions else 1)
    matrix = torch.cat([one.down.T for one in seen], dim=1).to(model.device, model.dtype)
    sizes = [one.span.width for one in seen]
    distances: dict[int, Tensor] = {}
    gap: Gap | None = None
    for position, projected in zip(positions, model.project_first_inputs(matrix, positions), strict=True):
        parts = zip(seen, projected.split(sizes, dim=1), strict=True)
        worst = torch.stack([one.span.distance(part) for one, part in parts]).amax(0)
        gap = widest_gap(worst, _FAR, _FLOOR) if gap is None else gap.narrow(worst)
        if not bool((worst <= gap.threshold).any()):
            break
        distances[position] = worst
    assert gap is not None  # a model has at least one position
    passing = {p: (worst <= gap.threshold).nonzero()[:, 0] for p, worst in distances.items()}
    by_position = passing if model.learned_positions else {-1: passing.get(0, torch.zeros(0, dtype=torch.long))}
    return Candidates(by_position, gap, model.vocab_size * (position + 1))
