"""What a search for an encoder's texts works on: the places that may be filled, and the layers that can tell."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.gradients.bag_of_words.token_filter import Candidates
from unmask.attacks.gradients.encoder.attention_shares import position_shares, type_shares
from unmask.attacks.gradients.encoder.position_candidates import Frame, PositionCandidates, Text
from unmask.attacks.gradients.sites import (
    SpanSite,
    above_noise,
    down_site,
    first_input_site,
    mlp_site,
    output_site,
    why_no_first_inputs,
)
from unmask.evidence.gradients import GradientEvidence, Update
from unmask.models.adapter import Model

_POSITIONS_AT_ONCE = 8
_LEAST_ROOM = 6  # directions that a span must leave free to tell rows apart
_OUTSIDE = 1e-3  # a distance that no row of the batch has
_DRIFT_FLOOR = 1e-5  # of the largest singular value: rows of float32 weights that have moved a little stay above
_INPUT_FLOOR = 2e-4  # the same of first inputs, which hardly move: a lower cut lets everything in
_MOST_NOISE = 0.2  # of the median token's row: what noise may move rows of other tokens by
_ABOVE_NOISE = 1.5  # times the median position's row: rows of noise differ by a tenth
_OUTSIDE_NOISE = 3.0  # the same in what noise leaves of a row of the batch
_OUTSIDE_DRIFT = 2e-2  # a distance that no row has after some local steps; others are beyond 0.1


@dataclass(frozen=True)
class Problem:
    """Places, and the layers of block 0 whose gradients leave room: `output`, `down` or `mlp`, one of them at least."""

    model: Model
    precise: Model  # its first block in float64
    places: PositionCandidates
    inputs: SpanSite
    output: SpanSite | None
    down: SpanSite | None
    drifts: bool = False  # the weights moved while the update was made, so that rows are only near their spans
    mlp: SpanSite | None = None  # asked where noise blurs the others
    is_blurred: bool = False  # there may be noise, though none shows in the spans

    @property
    def sites(self) -> list[SpanSite]:
        """The layers that test a text."""
        return [site for site in (self.output, self.down, self.mlp) if site is not None]

    @property
    def is_noisy(self) -> bool:
        """Whether spans are taken as far as they stand out of noise or of few digits, or a replay must allow for it."""
        return self.is_blurred or any(site.noise is not None for site in self.sites)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The tensors that the texts rest on."""
        return tuple(name for site in (self.inputs, *self.sites) for name in site.parameters)

    @property
    def rank(self) -> int:
        """The number of independent rows that the batch has."""
        return max(site.span.rank for site in self.sites)

    def distance(self, text: Text) -> float:
        """The largest distance of a text's rows to the spans, in float64, by the model's own forward pass.

        Under noise the mean of all rows, in what noise leaves of rows of the batch: about 1 if they are.
        """
        rows = self._rows(text)
        noisy = [site.noise.squares(row) for site, row in zip(self.sites, rows, strict=True) if site.noise is not None]
        if noisy:
            return float((sum(far.sum() for far, _ in noisy) / sum(left.sum() for _, left in noisy)) ** 0.5)
        return max(float(site.span.distance(row).max()) for site, row in zip(self.sites, rows, strict=True))

    def _rows(self, text: Text) -> list[Float[Tensor, "n f"]]:
        """The rows that enter each layer."""
        places = torch.tensor(text, device=self.precise.device)
        positions = self.places.position[places][None]
        states = self.precise.embed(self.places.token[places][None], positions, self.places.kind[places][None])
        mixed = self.precise.mixed_values(0, states, positions, torch.ones_like(positions, dtype=torch.bool))
        return [site.rows(self.precise, states, mixed).flatten(0, 1) for site in self.sites]


def set_up(
    evidence: GradientEvidence,
    model: Model,
    candidates: Candidates,
    frame_tokens: tuple[int, int] | None,
    *,
    noisy: bool = False,
) -> Problem | str:
    """The problem, or why it cannot be set up; a `noisy` one takes spans as far as they stand out of noise."""
    frame_tokens = frame_tokens or model.frame_tokens
    if model.causal or frame_tokens is None:
        return "texts of an encoder need a tokenizer with [CLS] and [SEP], or the start and end tokens of a text"
    if why := why_no_places(model):
        return why
    if not set(frame_tokens) <= candidates.searched:
        return f"the start and end tokens {frame_tokens} were not found"
    drifts = evidence.update is Update.DELTA
    if drifts and evidence.optimizer == "adamw":
        return "an adaptive optimiser (Adam) made this weight delta, so that its columns are no combinations of inputs"
    floor = _DRIFT_FLOOR if drifts else None
    inputs = first_input_site(evidence, model, _INPUT_FLOOR if drifts else None)
    if inputs is None:
        return "where tokens stand needs the gradient of block 0's queries, keys or values, and the update has none"
    output, down, mlp = output_site(evidence, model, floor), down_site(evidence, model, floor), None
    if noisy:
        inputs = above_noise(evidence, model, inputs)
        output, down, mlp = (
            None if site is None else above_noise(evidence, model, site)
            for site in (output, down, mlp_site(evidence, model))
        )
    if not any(map(_has_room, (output, down, mlp))):
        return _why_no_room(output, down)
    precise = model.to(dtype=torch.float64, num_blocks=1)
    possible = candidates.searched | (candidates.unseen - {model.gradient_free_token})
    tokens = torch.tensor(sorted(possible), device=model.device)
    frame = Frame(*frame_tokens, end_type=_end_type(precise, inputs, frame_tokens[1], candidates))
    outside = _OUTSIDE_NOISE if noisy else _OUTSIDE_DRIFT if drifts else _OUTSIDE
    num_positions = _num_moved_positions(evidence, model) if noisy else None
    num_positions = num_positions or _num_positions(precise, inputs, tokens, candidates, outside)
    if num_positions < 2:
        return "no token of the bag lies in the span of block 0's gradients"
    if late := model.problem_at(num_positions):
        return late
    shares = position_shares(evidence, precise, tokens, num_positions, _MOST_NOISE if noisy else 0.0)
    by_type = type_shares(evidence, precise, tokens, num_positions) if frame.end_type else None
    places = PositionCandidates.of(precise, tokens, shares, frame, by_type)
    output, down, mlp = (site if _has_room(site) else None for site in (output, down, mlp))
    return Problem(model, precise, places, inputs, output, down, drifts, mlp)


def is_full(evidence: GradientEvidence, model: Model) -> bool:
    """Whether a gradient fills every span that could check a text, as noise does."""
    sites = [site for site in (output_site(evidence, model), down_site(evidence, model)) if site is not None]
    return bool(sites) and not any(map(_has_room, sites))


def why_no_places(model: Model) -> str:
    """Why an update of this model cannot tell where tokens stand, whatever it holds; empty if it can."""
    if why := model.problem or why_no_first_inputs(model):
        return why
    if model.position_embedding is None:
        return "where tokens stand is read off learned positions, and this encoder has none (rotary ones, or relative)"
    if model.first_input_sum(torch.zeros(1, dtype=torch.long, device=model.device)) is None:
        return "where tokens stand is read off positions behind one norm, and more happens to this encoder's embeddings"
    return ""


def _has_room(site: SpanSite | None) -> bool:
    """Whether rows outside of a span can be told; the LayerNorm behind takes one direction from every gradient."""
    if site is None or site.span.rank == 0 or site.span.rank >= site.span.max_rank - 1:
        return False
    return site.span.width - site.span.rank >= _LEAST_ROOM


def _why_no_room(output: SpanSite | None, down: SpanSite | None) -> str:
    sites = [site for site in (output, down) if site is not None]
    if not sites:
        return (
            "the order of the tokens needs the gradient of block 0's output projection or down projection, and the "
            "update holds neither"
        )
    ranks = ", ".join(f"{site.name}: rank {site.span.rank} of at most {site.span.max_rank}" for site in sites)
    why = "too many tokens for its width, or rounding and noise fill it"
    return f"every span that could check a text is full ({ranks}): {why}"


def _end_type(model: Model, inputs: SpanSite, last: int, candidates: Candidates) -> int:
    """1 if the batch holds pairs of texts: only then the last token of type 1 lies in the span, where a pair ends."""
    longest = max(candidates.by_position) + 1
    if model.num_token_types < 2 or longest <= 2:
        return 0
    positions = torch.arange(2, longest, device=model.device)
    ends = model.first_input(torch.full_like(positions, last), positions, torch.ones_like(positions))
    return int(float(inputs.span.distance(ends).min()) < _OUTSIDE)


def _num_moved_positions(evidence: GradientEvidence, model: Model) -> int | None:
    """The length of the longest text, by positions whose row moved more than noise moves those beyond; None if none."""
    rows = evidence.gradients.get(model.position_embedding or "")
    sizes = torch.zeros(1) if rows is None else rows.double().norm(dim=1)
    moved = sizes > _ABOVE_NOISE * sizes.median()  # zero where positions beyond the texts got nothing
    return int(moved.nonzero().max()) + 1 if bool(moved.any()) else None


def _num_positions(
    model: Model, inputs: SpanSite, tokens: Int[Tensor, " t"], candidates: Candidates, outside: float
) -> int:
    """The length of the longest text: positions from 0 on at which some token of the bag lies in the span."""
    limit = max(candidates.by_position) + 1
    span = inputs.span.join(model.token_type_directions)  # a position may hold tokens of type 1 only
    for positions in torch.arange(limit, device=tokens.device).split(_POSITIONS_AT_ONCE):
        rows = model.first_input(tokens.repeat(len(positions)), positions.repeat_interleave(len(tokens)))
        if inputs.noise is None:
            distances = span.distance(rows)
        else:
            far, left = inputs.noise.squares(rows)
            distances = (far / left).sqrt()
        is_empty = distances.view(len(positions), -1).amin(1) > outside
        if bool(is_empty.any()):
            return int(positions[is_empty][0])
    return limit
