"""DAGER as published: the baseline that every other attack on gradients is measured against.

    span of block 0, span of block 1  ← SVD of the query gradients, cut at the rank                       (§5.1)
    token sets                        ← tokens within τ₁ of block 0's span, position by position          (Algorithm 1)
    decoders: texts                   ← prefixes grown greedily, every row within τ₂ of block 1's span    (Algorithm 2)
    encoders: texts                   ← products of the token sets, up to each end token, within τ₂       (Algorithm 3)

Notation: G (d, m) a gradient; b its rank; U (d, b) a basis of its column space; the distance of a row x is relative,
‖x/‖x‖ − UUᵀx/‖x‖‖, and computed in the model's precision, as the official code does.

Limits: b < d, and at least three blocks, or block 1's queries get gradient at one position only. A text that is a prefix
of another, a text of one token and the number of times that a text occurs are not seen. The last token of a next-token
text is only a label and is not found. In causal attention the query gradient at position 0 is exactly zero (softmax over
one score). The official code escapes in two ways, both kept here: where queries, keys and values share one stored
parameter (GPT-2's c_attn) it reads the whole of it, not the query's columns; elsewhere (Llama) it takes the start token
as known and leaves its row unchecked. Without a start token, the first tokens of such a model are lost, and all texts.

Source: Petrov et al., DAGER, NeurIPS 2024, arXiv 2405.15586, Theorems 5.1 and 5.2, and the authors' public code.
Deviations from that code: its best-effort guesses (sequences that fail τ₂) are left out, as nothing certifies them, which
makes it faster; the SVD runs where the evidence lies, from a seed; decoders stop after `max_products` checks, where it
has no limit; encoders are searched with token type 0 alone; texts are padded on the right where positions are learned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.gradients.verdict import no_result
from unmask.attacks.progress import Progress, silent
from unmask.evidence.gradients import GradientEvidence, Task
from unmask.models.adapter import LinearLayer, Model, Role
from unmask.recovery import Certificate, Cost, RecoveredText, RecoveredTexts, Recovery, Status
from unmask.shapes import Basis, TokenBatch, Tokens

_RANK_BLOCKS = 10  # the official code takes the largest rank of the first ten blocks for all of them
_POWER_ITERATIONS = 10  # of its randomised SVD
_TOKENS_AT_ONCE = 2**14  # a chunk of the vocabulary: (2**14, d) floats
# Float32 leaves about 1e-6 of a gradient outside the span of all its rows; a missing text leaves its share of the loss.
_UNEXPLAINED = 1e-4

Sequences = list[tuple[int, ...]]


@dataclass(frozen=True)
class Spans:
    """Bases of blocks 0 and 1, block 1's gradient, and the rank b before the cut at d − margin."""

    first: Basis
    second: Basis
    second_gradient: Float[Tensor, "d m"]
    rank: int


@dataclass(frozen=True)
class TokenSets:
    """Tokens that may stand at each position, the nearest first; one set for all where positions are rotary."""

    sets: list[Tokens]
    ends: list[tuple[int, int]]  # (position, end token): where texts may end, the shortest first
    everywhere: bool
    worst: float
    num_tested: int

    def at(self, position: int) -> Tokens:
        """The set of a position; empty beyond the longest text."""
        index = 0 if self.everywhere else position
        return self.sets[index] if index < len(self.sets) else torch.zeros(0, dtype=torch.long)

    @property
    def tokens(self) -> frozenset[int]:
        """All tokens, whatever their position."""
        return frozenset(int(t) for tokens in self.sets for t in tokens) | {end for _, end in self.ends}


@dataclass(frozen=True)
class Layer2:
    """The check of whole sequences: rows that enter block 1, computed afresh for each sequence."""

    model: Model
    basis: Basis
    num_unchecked: int  # leading rows whose query gradient is zero

    def rows(self, sequences: TokenBatch) -> Float[Tensor, "batch length d"]:
        """Attention inputs of block 1 by a full forward pass through block 0."""
        states = self.model.hidden_states(sequences.to(self.model.device), num_blocks=1)[-1]
        return self.model.attention_input(1, states)

    def distances(self, sequences: TokenBatch) -> Float[Tensor, "batch checked"]:
        """Distances of all rows that are checked."""
        return span_distance(self.rows(sequences)[:, self.num_unchecked :], self.basis)


@dataclass(frozen=True)
class Found:
    """Accepted sequences, how many were checked, and whether the budget cut the search."""

    sequences: Sequences
    num_checked: int
    is_cut: bool = False


@dataclass(frozen=True)
class Dager:
    """The attack with the paper's settings.

    `token_tolerance` τ₁, `sequence_tolerance` τ₂; `rank_tolerance`: singular values below it count as zero (None: the
    default of NumPy's matrix_rank; the authors set it by hand for each batch size); `max_products`: sequences checked
    at most, for each length of an encoder's texts, in all for a decoder; `distinct_fraction`: of encoder texts
    that agree in this share of tokens only the nearest is kept; `batch_size`: sequences in one forward pass.
    `start_token` and `end_tokens` are side knowledge; None takes what the tokenizer puts in front of every text, and
    its end and separator tokens. (`Model.special_tokens` also holds padding and start tokens, which end nothing.)
    """

    token_tolerance: float = 1e-5
    sequence_tolerance: float = 1e-3
    rank_margin: int = 20
    rank_tolerance: float | None = None
    max_products: int = 10_000_000
    distinct_fraction: float = 0.7
    batch_size: int = 1000
    start_token: int | None = None
    end_tokens: tuple[int, ...] | None = None
    seed: int = 0

    @torch.no_grad()
    def __call__(
        self, evidence: GradientEvidence, model: Model, progress: Progress = silent
    ) -> Recovery[RecoveredTexts]:
        """Run the attack; the evidence and the model are left as they are."""
        started = time.perf_counter()
        start, ends = self._frame(model)
        layers = _query_layers(evidence, model)
        if layers[0] is None or layers[1] is None:
            return no_result(Status.MISSING_EVIDENCE, _MISSING, (), started)
        used = tuple(layer.parameter for layer in layers if layer is not None)
        if not model.causal and not ends:
            return no_result(Status.NOT_APPLICABLE, _NO_END, used, started)
        progress("taking spans", 0, 1)
        spans = self.spans(evidence, layers)
        if spans.rank >= model.width:
            return no_result(Status.NOT_IDENTIFIABLE, _FULL.format(model.width), used, started)
        if spans.rank == 0:
            return no_result(Status.NOTHING_FOUND, "the query gradients are zero", used, started)
        sets = self.token_sets(model, spans.first, start, ends, progress)
        if not sets.sets:
            return no_result(Status.NOTHING_FOUND, _NO_TOKEN.format(self.token_tolerance), used, started)
        start_is_silent = model.causal and start is not None and layers[1].columns is None
        layer2 = Layer2(model, spans.second, int(start_is_silent))
        if model.causal:
            found = self.grow_prefixes(sets, layer2, start, progress)
        else:
            found = self.search_products(sets, layer2, start, evidence.num_texts, progress)
        return self._verdict(evidence, spans, sets, layer2, found, used, started)

    def _frame(self, model: Model) -> tuple[int | None, tuple[int, ...]]:
        """The token in front of every text, if there is one, and the tokens that end texts."""
        tokenizer = model.tokenizer
        names = ("eos_token_id", "sep_token_id")
        known = () if tokenizer is None else (getattr(tokenizer, name, None) for name in names)
        ends = self.end_tokens if self.end_tokens is not None else tuple(t for t in known if t is not None)
        if self.start_token is not None or tokenizer is None:
            return self.start_token, ends
        empty = model.encode("")
        return (empty[0] if empty and empty[0] not in ends else None), ends

    def spans(self, evidence: GradientEvidence, layers: Sequence[LinearLayer | None]) -> Spans:
        """Column spaces of the first two blocks' query gradients, at the largest rank of the first blocks.

        Theorem 5.1: G = Xᵀ·∂L/∂Y; if ∂L/∂Y has rank b, the columns of G span the rows of X.
        """
        gradients = [_gradient(evidence, layer) for layer in layers if layer is not None]
        rank = max(_rank(gradient, self.rank_tolerance) for gradient in gradients)
        cut = max(1, min(rank, gradients[0].shape[0] - self.rank_margin))
        first, second = (_basis(gradient, cut, self.seed) for gradient in gradients[:2])
        return Spans(first, second, gradients[1], rank)

    def token_sets(
        self, model: Model, basis: Basis, start: int | None, ends: tuple[int, ...], progress: Progress
    ) -> TokenSets:
        """Algorithm 1: at every position all tokens within τ₁ of block 0's span, until no token passes.

        End tokens are noted and taken out; a decoder's start token stands only in front.
        """
        sets: list[Tokens] = []
        found_ends: list[tuple[int, int]] = []
        worst = 0.0
        positions = range(model.max_positions if model.learned_positions else 1)
        for position in positions:
            progress("reading token sets", position, len(positions))
            tokens, distance = self._tokens_in_span(model, basis, position)
            if len(tokens) == 0:
                break
            worst = max(worst, distance)
            found_ends += [(position, end) for end in ends if bool((tokens == end).any())]
            outside = [*ends, start] if model.causal and start is not None else list(ends)
            sets.append(tokens[~torch.isin(tokens, torch.tensor(outside, dtype=torch.long))])
        tested = model.vocab_size * (position + 1)
        return TokenSets(sets, found_ends, not model.learned_positions, worst, tested)

    def _tokens_in_span(self, model: Model, basis: Basis, position: int) -> tuple[Tokens, float]:
        """Tokens within τ₁ at a position, the nearest first, and the largest of their float64 distances."""
        near, distances, worst = [], [], 0.0
        for tokens in torch.arange(model.vocab_size, device=model.device).split(_TOKENS_AT_ONCE):
            rows = model.first_input(tokens, torch.full_like(tokens, position))
            distance = span_distance(rows, basis)
            passing = distance < self.token_tolerance
            near.append(tokens[passing].cpu())
            distances.append(distance[passing].cpu())
            if passing.any():
                worst = max(worst, float(span_distance(rows[passing].double(), basis.double()).max()))
        return torch.cat(near)[torch.cat(distances).argsort(stable=True)], worst

    def grow_prefixes(self, sets: TokenSets, layer2: Layer2, start: int | None, progress: Progress) -> Found:
        """Algorithm 2: extend every prefix by every token of the next set; keep it if all rows are within τ₂.

        A prefix that nothing extends is a text. As in the official code, first tokens are not checked by themselves,
        and a text has at least two tokens.
        """
        prefixes = sets.at(0)[:, None] if start is None else torch.tensor([[start]])
        texts: Sequences = []
        checked = 0
        while len(prefixes):
            length = prefixes.shape[1]
            tokens = sets.at(length) if length < layer2.model.max_positions else sets.at(0)[:0]
            if checked + len(prefixes) * len(tokens) > self.max_products:
                return Found(texts + (_tuples(prefixes) if length > 1 else []), checked, is_cut=True)
            extended, parents = self._extensions(prefixes, tokens, layer2)
            checked += len(prefixes) * len(tokens)
            progress("growing prefixes", length, len(sets.sets))
            if length > 1:
                texts += [text for i, text in enumerate(_tuples(prefixes)) if i not in parents]
            prefixes = extended
        return Found(texts, checked)

    def _extensions(self, prefixes: TokenBatch, tokens: Tokens, layer2: Layer2) -> tuple[TokenBatch, set[int]]:
        """All prefix + token whose every row is within τ₂, and which prefixes were extended."""
        kept = [prefixes.new_zeros(0, prefixes.shape[1] + 1)]
        parents: set[int] = set()
        for pairs in torch.arange(len(prefixes) * len(tokens)).split(self.batch_size):
            before, last = pairs // len(tokens), pairs % len(tokens)
            sequences = torch.cat([prefixes[before], tokens[last, None]], dim=1)
            passing = (layer2.distances(sequences) < self.sequence_tolerance).all(1).cpu()
            kept.append(sequences[passing])
            parents.update(before[passing].tolist())
        return torch.cat(kept), parents

    def search_products(
        self, sets: TokenSets, layer2: Layer2, start: int | None, num_texts: int | None, progress: Progress
    ) -> Found:
        """Algorithm 3: for every end token, the shortest first, all products of the token sets before it.

        Heuristics of the paper: with the number of texts known, a position keeps that many nearest tokens; tokens of
        texts that were found leave the sets, unless they are the last one. A product is accepted if the mean
        distance of its rows is within τ₂ (the paper says every row, the official code takes the mean). Too many
        products to check are sampled at random.
        """
        remaining = [tokens[:num_texts].tolist() for tokens in sets.sets]
        generator = torch.Generator().manual_seed(self.seed)
        texts: Sequences = []
        checked, is_cut = 0, False
        for count, (position, end) in enumerate(sets.ends):
            progress("checking products", count, len(sets.ends))
            choices = remaining[:position]
            is_cut = is_cut or math.prod(map(len, choices)) >= self.max_products
            best: list[tuple[float, tuple[int, ...]]] = []
            for heads in _products(choices, self.max_products, self.batch_size, generator) if choices else ():
                sequences = torch.cat([heads, torch.full((len(heads), 1), end)], dim=1)
                distances = layer2.distances(sequences).mean(1).cpu()
                passing = distances < self.sequence_tolerance
                best += zip(distances[passing].tolist(), _tuples(sequences[passing]), strict=True)
                best = self._distinct(best)[:num_texts]
                checked += len(heads)
            texts += [text for _, text in best]
            remaining = _without_used(remaining, [text for _, text in best], start)
        return Found(texts, checked, is_cut)

    def _distinct(self, scored: list[tuple[float, tuple[int, ...]]]) -> list[tuple[float, tuple[int, ...]]]:
        """The nearest of each group of sequences that agree in most of their tokens."""
        kept: list[tuple[float, tuple[int, ...]]] = []
        for distance, text in sorted(scored):
            enough = self.distinct_fraction * len(text)
            if all(sum(a == b for a, b in zip(text, other, strict=True)) < enough for _, other in kept):
                kept.append((distance, text))
        return kept
