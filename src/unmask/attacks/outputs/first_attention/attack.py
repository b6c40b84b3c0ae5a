"""Tokens from the output of block 0's attention module alone: no residual stream, no MLP, no optimisation.

    A = (B − b)·W_O⁻¹,   row i of head h:  Aᵢₕ = Σ_{j≤i} fₕᵢⱼ·v(tⱼ, j)      (fₕᵢⱼ > 0, all heads of a group share v)

**Span test.** Let t₀ … tᵢ₋₁ be known, and N the projection onto the complement of their values in one key/value group.
Then N·Aᵢₕ = fₕᵢᵢ·N·v(tᵢ, i) for every head h of the group: the new token's value is, modulo known values, parallel to
what is seen. So tᵢ is among the tokens t whose N·v(t, i) is parallel to N·Aᵢ in *every* group; for i + 1 < e a wrong
token is not, except on a set of measure zero. One matmul over the vocabulary ranks all tokens.

**Forward check.** The first tokens of that ranking, and those seen before (where positions are not in the values, a
repetition has N·v = 0 and leaves no direction), are sent through the attention module behind the known prefix. Equality
of outputs implies the span condition, so whoever could explain the row is ranked first; the relative error of the
recomputed row is the token's certificate, and the next best error tells how clear the choice is. A token is
certain only if rounding alone explains its error.

**Rows that hide their token.** Where every head reads one earlier token and nothing else, A tells neither v(tᵢ, i) nor
the query of tᵢ: other tokens may read the same. Fewer than two heads that mix, and the whole vocabulary is checked.

**Coarse evidence.** W_O⁻¹ multiplies the evidence's rounding by up to κ(W_O), so the ranking is blurred in bfloat16: a
longer list is checked then, and the whole vocabulary where that does not settle it, or where there is no ranking at all
(i + 1 ≥ e, or W_O not invertible).

Notation: B (n, d) the module's output; W_O (o, d), b its projection; e the width of a head; v(t, p) value of token t at
position p.
Limits: this is for causal models, encoders are read in encoder.py. In coarse evidence `rejected` is the
best of the tokens that were checked, not of all.
Cost a token: vocab·g·e·(i + 1) multiplications for the ranking; vocab·d·(2o + 2g·e) where every token is tried.
Source: ours; the idea of a span test is DAGER's, arXiv 2405.15586, with values in the place of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.claims import claim_nothing
from unmask.attacks.outputs.block_step import BlockStep
from unmask.attacks.outputs.first_attention.encoder import read_encoder
from unmask.attacks.outputs.first_attention.module import FAR, AttentionReading, Choice, zero_error
from unmask.attacks.outputs.prompts.equal_tokens import Classes, equal_tokens, equal_tokens_ambiguity
from unmask.attacks.run import Progress, Run, silent
from unmask.evidence.outputs import HiddenEvidence, Site
from unmask.linalg.gap import Gap
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.models.output_projection import OutputProjection
from unmask.recovery import Aim, Certificate, RecoveredText, RecoveredTexts, Recovery, Status, searches_of
from unmask.shapes import Rows

_USED = ("states",)
_SHORTLISTS = (16, 1024)  # tokens of the ranking that are sent through the module, the longer one if need be
_KNOWN = 1e-4  # of a value's squared norm: less than this outside the known values is nothing (float32)
_ALONE = 1e-2  # of a value's norm: a head that is nearer to it reads that token alone
_EQUAL = "tokens with equal embeddings have equal rows, which nothing tells apart"
_CHUNK = 8192  # tokens at once where all are tried


@dataclass(frozen=True)
class FirstAttentionAttack:
    """Texts from the output of block 0's attention module, all positions of each text.

    `min_gap_decades`: how much worse than the token the next best one must explain its row.
    `try_every_token`: fall back on the whole vocabulary where the ranking does not settle a position.
    """

    min_gap_decades: float = 1.0
    try_every_token: bool = True

    def __call__(self, evidence: HiddenEvidence, model: Model, progress: Progress = silent) -> Recovery[RecoveredTexts]:
        """Run the attack; the evidence and the model are left as they are."""
        run = Run(progress=progress)
        if evidence.site is not Site.ATTENTION or evidence.layer != 0:
            why = (
                f"this attack reads the attention module of block 0, but the states were taken at "
                f"'{evidence.site.value}' of layer {evidence.layer}"
            )
            return claim_nothing(run, Status.NOT_APPLICABLE, why, _USED)
        if why := why_no_values(model):
            return claim_nothing(run, Status.NOT_APPLICABLE, why, _USED)
        precise = model.to(dtype=torch.float64, num_blocks=1)
        read = self.read if model.causal else self._read_encoder
        # Rows of a service in half precision may come in a longer type.
        dtype = evidence.compute_dtype if evidence.compute_dtype.itemsize == 2 else evidence.states.dtype
        rows, masks = evidence.states.to(model.device, dtype), evidence.mask.to(model.device)
        readings = [
            read(precise, states[mask], mask.nonzero()[:, 0].tolist(), progress)
            for states, mask in zip(rows, masks, strict=True)
            if mask.any()
        ]
        return self._recovery(readings, model, run, dtype)

    @torch.no_grad()
    def read(
        self, model: Model, outputs: Rows, positions: Sequence[int] | None = None, progress: Progress = silent
    ) -> AttentionReading:
        """Tokens of one text from the module's output rows; `model` in float64, rows in the precision they came in."""
        places = list(range(len(outputs))) if positions is None else list(positions)
        projection, rows = OutputProjection.of(model, 0), outputs.double()
        mixed = projection.invert(rows) if projection.condition < float("inf") else None
        equal = equal_tokens(model, "inputs")
        step, choices, num_certain = BlockStep.first(model, 0, places[0]), list[Choice](), 0
        for index, table in enumerate(value_tables(model, places)):
            progress("reading tokens", index, len(places))
            step = BlockStep(model, 0, places[index], step.prefix)
            seen = torch.tensor([choice.token for choice in choices], dtype=torch.long, device=rows.device)
            ranked = None if mixed is None else table.ranking(mixed[index], step.prefix.values)
            choice = self._choose(step, projection, rows[index], ranked, seen, outputs.dtype, equal)
            if choice is None or choice.error > FAR:
                break
            choices.append(choice)
            clear = choice.is_clear(self.min_gap_decades, outputs.dtype)
            num_certain = index + 1 if clear and num_certain == index else num_certain
            attended = step.attend(_embed(model, torch.tensor([choice.token]), places[index]))
            step = step.following(attended.keys, attended.values)
        return AttentionReading(tuple(choices), num_certain, len(places))

    def _read_encoder(
        self, model: Model, outputs: Rows, positions: Sequence[int], progress: Progress
    ) -> AttentionReading:
        """The same of an encoder, all positions at once."""
        progress("reading tokens", 0, len(positions))
        return read_encoder(model, outputs, positions, self.min_gap_decades)

    def _choose(
        self,
        step: BlockStep,
        projection: OutputProjection,
        row: Float[Tensor, " d"],
        ranked: Int[Tensor, " k"] | None,
        seen: Int[Tensor, " j"],
        precision: torch.dtype,
        equal: Classes,
    ) -> Choice | None:
        """The best of a shortlist if it settles the matter, or of all tokens; None where there was nothing to try."""
        choice = None
        for size in _SHORTLISTS if ranked is not None else ():
            assert ranked is not None
            choice = _best(step, projection, row, torch.cat([ranked[:size], seen]).unique(), equal)
            if choice.is_clear(self.min_gap_decades, precision):
                if _shows_token(step, choice.token):
                    return choice
                break
        if self.try_every_token:
            return _best(step, projection, row, torch.arange(step.model.vocab_size, device=row.device), equal)
        return None if choice is None else replace(choice, rejected=choice.error)  # a better one may be left out

    def _recovery(
        self, readings: list[AttentionReading], model: Model, run: Run, dtype: torch.dtype
    ) -> Recovery[RecoveredTexts]:
        """Status, reason and certificate of a batch."""
        texts = [_text(reading, model) for reading in readings if reading.choices]
        proven = [choice for reading in readings for choice in reading.choices[: reading.num_certain]]
        certain = [choice for choice in proven if not choice.equals]
        classes = tuple(dict.fromkeys(choice.equals for choice in proven if choice.equals))
        num_tokens = sum(reading.length for reading in readings)
        num_tested = sum(choice.num_tested for reading in readings for choice in reading.choices)
        if proven and not certain:
            why = f"no token is alone: {_EQUAL}"
            nothing = claim_nothing(run, Status.NOT_IDENTIFIABLE, why, _USED)
            return replace(nothing, value=RecoveredTexts(tuple(texts), token_classes=classes))
        if not certain:
            why = "no token explains the first row of any text clearly better than all others do"
            if not model.causal:
                why += f"; an encoder's text must be shorter than its heads are wide ({model.head_width})"
            return claim_nothing(run, Status.NOTHING_FOUND, why, _USED)
        residual, rejected = max(choice.error for choice in certain), min(choice.rejected for choice in certain)
        certificate = Certificate(
            claim="each token's recomputed row of the module's output is the one seen, and no other token's is",
            residual=residual,
            tolerance=Gap(residual, rejected, zero_error(dtype)).threshold,
            rejected=rejected,
            details={
                "certain_tokens": float(len(certain)),
                "condition_of_output_projection": OutputProjection.of(model, 0).condition,
            },
        )
        whole = len(certain) == num_tokens
        reason = f"{len(certain)} of {num_tokens} tokens are certain, the leading ones of each text"
        if len(proven) > len(certain):
            reason += f"; {len(proven) - len(certain)} more are proven up to others like them: {_EQUAL}"
        texts.sort(key=lambda text: (not text.certain, text.residual))
        value = RecoveredTexts(tuple(texts), frozenset(choice.token for choice in certain), classes)
        cost = run.cost(candidates=num_tested, forward_passes=len(readings))
        status = Status.RECOVERED if whole else Status.PARTIAL
        searches = searches_of(Aim.TOKENS, Aim.TEXTS, stopped=len(proven) < num_tokens)
        return Recovery(value, status, reason, certificate, cost, _USED, searches)


@dataclass(frozen=True)
class ValueTable:
    """Value vectors of the whole vocabulary at one position, group by group; float32 is enough to rank."""

    values: Float[Tensor, "g vocab e"]
    squares: Float[Tensor, "g vocab"]

    @classmethod
    def of(cls, values: Float[Tensor, "vocab g e"]) -> ValueTable:
        """In the layout and precision of the ranking."""
        table = values.float().transpose(0, 1).contiguous()
        return cls(table, table.square().sum(-1))

    def ranking(self, mixed: Float[Tensor, " o"], known: Float[Tensor, "j g e"]) -> Int[Tensor, " k"] | None:
        """Tokens by how nearly parallel their values are to what is seen, modulo known ones; None where all would be.

        In each group: U an orthonormal basis of the known values, N = I − UUᵀ, u the main direction of the heads' rows
        N·A and s their size. Score: Σ s²(‖N·v‖² − (uᵀv)²) over Σ s²‖N·v‖², sums over groups: noise δ turns u by δ/s.
        """
        num_groups, num_tokens, width = self.values.shape
        if len(known) + 1 >= width:
            return None
        heads = mixed.unflatten(0, (num_groups, -1, width))
        basis = torch.linalg.qr(known.permute(1, 2, 0))[0]  # (g, e, j)
        outside = heads - (heads @ basis) @ basis.mT
        _, sizes, directions = torch.linalg.svd(outside, full_matrices=False)
        frame = torch.cat([basis, directions[:, :1].mT], dim=2).to(self.values)
        parts = (self.values @ frame).square()  # (g, vocab, j + 1)
        free = self.squares - parts[..., :-1].sum(-1)
        missed = (free - parts[..., -1]).clamp_min(0)
        known_already = free.sum(0) < _KNOWN * self.squares.sum(0)  # nothing left of them but rounding
        weights = (sizes[:, 0] / sizes[:, 0].max().clamp_min(1e-300)).square().to(self.values)
        scores = ((weights @ missed) / (weights @ free)).masked_fill(known_already, torch.inf)
        return scores.topk(min(_SHORTLISTS[-1], num_tokens), largest=False).indices


def why_no_values(model: Model) -> str:
    """Why the values behind a module's output cannot be had from this model; empty if they can."""
    if model.problem:
        return model.problem
    weight = model.weight(Role.VALUE, 0)
    if weight is None or weight.shape[1] != model.num_key_value_heads * model.value_width:
        return "the values of block 0 are made of its inputs by more than one linear layer"
    if model.linear(Role.ATTENTION_OUT, 0) is None:
        return "block 0 has no output projection that is given the mixed values as they are"
    if not model.causal and not model.learned_positions:
        return "an encoder's tokens are told apart by learned positions, and this one has none"
    return ""


def value_tables(model: Model, positions: Sequence[int]) -> Iterator[ValueTable]:
    """Values of every token, position by position; made once where positions are not in them."""
    weight = model.weight(Role.VALUE, 0)
    assert weight is not None  # every family has values
    shape = model.num_key_value_heads, model.value_width
    nothing = torch.zeros(1, model.width, dtype=model.dtype, device=model.device)
    constant = model.queries_keys_values(0, nothing, torch.zeros(1, dtype=torch.long, device=model.device))[2][0]
    own = positions if model.learned_positions else positions[:1]
    for projected in model.project_first_inputs(weight, own):
        table = ValueTable.of(projected.unflatten(1, shape) + constant)
        yield from [table] * (1 if model.learned_positions else len(positions))


def _best(
    step: BlockStep, projection: OutputProjection, row: Float[Tensor, " d"], tokens: Int[Tensor, " t"], equal: Classes
) -> Choice:
    """The token whose recomputed row is nearest to what was seen; tokens with the same input do not compete."""
    errors = torch.cat(
        [
            (projection(step.attend(_embed(step.model, chunk, step.position)).mixed) - row).norm(dim=1)
            for chunk in tokens.split(_CHUNK)
        ]
    ) / row.norm().clamp_min(1e-300)
    token, error = int(tokens[errors.argmin()]), float(errors.min())
    others = errors[~torch.isin(tokens, torch.tensor(equal.get(token, (token,)), device=tokens.device))]
    rejected = float(others.min()) if len(others) else float("inf")
    return Choice(token, error, rejected, len(tokens), equal.get(token, ()))


def _shows_token(step: BlockStep, token: int) -> bool:
    """Whether a row depends on its own token: at least two heads, or the only one, read more than an earlier token."""
    known = step.prefix.values[:, :, None]  # (j, g, 1, e)
    if not len(known):
        return True
    mixed = step.attend(_embed(step.model, torch.tensor([token]), step.position)).mixed[0]
    heads = mixed.unflatten(0, (known.shape[1], -1, known.shape[3]))
    mixes = ((heads - known).norm(dim=3) > _ALONE * known.norm(dim=3)).all(0)
    return int(mixes.sum()) >= min(2, mixes.numel())


def _embed(model: Model, tokens: Int[Tensor, " n"], position: int) -> Rows:
    return model.embed(tokens.to(model.device), torch.full_like(tokens, position, device=model.device))


def _text(reading: AttentionReading, model: Model) -> RecoveredText:
    tokens = tuple(choice.token for choice in reading.choices)
    residual = max(choice.error for choice in reading.choices)
    proven = reading.num_certain == reading.length
    ambiguities = tuple(
        equal_tokens_ambiguity(model, position, choice.equals)
        for position, choice in enumerate(reading.choices)
        if choice.equals and proven
    )
    certain = proven and not ambiguities
    return RecoveredText(tokens, model.decode(tokens), certain, residual, ambiguities=ambiguities)
