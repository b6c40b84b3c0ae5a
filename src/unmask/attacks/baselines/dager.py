"""DAGER as published: the baseline that every other attack on gradients is measured against.

    spans       ← SVD of the query gradients of blocks 0 and 1, cut at b̃ = min(b, d − 20), b their rank
    token sets  ← tokens within τ₁ of block 0's span, position by position             (Algorithm 1)
    decoders    ← prefixes grown greedily, all rows within τ₂ of block 1's span         (Algorithm 2)
    encoders    ← products of the token sets up to an end token, within τ₂ of it        (Algorithm 3)
    best effort ← the nearest sequences that failed, where fewer passed than the batch holds

Notation: d the model's width; τ₁, τ₂ tolerances on relative distances (`dager_spans.py`).

Limits: b < d, and at least three blocks: the last block's queries have gradient only where the loss reads. A text
that is a prefix of another, a text of one token and how often a text occurs are not seen. The last token of a
next-token text is only a label and is not found. Where positions are learned, a token that stands at two positions
lets the tokens of one pass at the other, as sums stay in the span; end tokens do, so three lengths of encoder texts
already make it a matter of rounding which tokens are kept. In causal attention the query gradient of a first token is
exactly zero (softmax over one score); the official code escapes in two ways, both kept here. Where one stored
parameter serves queries, keys and values (GPT-2), it reads the whole of it. Elsewhere (Llama) it takes the start token
as known and leaves its row unchecked. Without a start token, such a model gives up only its bag of words.

Cost: vocab·d·b a position for the token sets; a forward pass through block 0 for every prefix × token, nothing cached.
Source: Petrov et al., DAGER, NeurIPS 2024, arXiv 2405.15586, and the authors' public code where the paper is silent.
Deviations: the SVD is seeded and runs where the evidence lies; decoders have a budget, `max_products`; encoder texts
are of token type 0; left padding is not searched where positions are learned; the official code's mode for noise
(decoders only) is left out. Guesses are told apart from what passed (`dager_guesses.py`); status and certificate are
ours (`dager_claim.py`). Its authors tune the rank tolerance for each batch size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.attacks.baselines.dager_claim import (
    AcceptedSequences,
    TokenSets,
    check_sequences,
    claim_sequences,
    tokens_only,
)
from unmask.attacks.baselines.dager_guesses import FailedSequences, Scored, Text, add_nearest, choose_guesses
from unmask.attacks.baselines.dager_spans import QuerySpans, SequenceCheck, query_layers, span_distance, take_spans
from unmask.attacks.claims import claim_nothing
from unmask.attacks.run import Progress, Run, silent
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.recovery import RecoveredTexts, Recovery, Status
from unmask.shapes import Basis, TokenBatch, Tokens

_TOKENS_AT_ONCE = 2**14  # of the vocabulary: a temporary of (2**14, d)


@dataclass(frozen=True)
class FrameTokens:
    """The token in front of every text, where there is one, and the tokens that end texts."""

    start: int | None
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Dager:
    """The attack with the paper's settings.

    `token_tolerance` τ₁; `sequence_tolerance` τ₂; `rank_margin`: the rank is cut at the width less this;
    `rank_tolerance`: smaller singular values count as zero (None: NumPy's default; the authors tune it by batch
    size); `max_products`: sequences checked at most, for each end token of encoders, in all for decoders;
    `distinct_fraction`: of texts that agree in this share of tokens the nearest is kept; `best_effort`: if the number
    of texts is known and fewer pass, the nearest that failed are returned too, never as certain; `batch_size`:
    sequences in one forward pass. `start_token`, `end_tokens` and `max_length` are side knowledge: None takes what the
    tokenizer puts in front of a text, its end and separator tokens (`Model.special_tokens` holds more, which end
    nothing), and as many positions as the model has.
    """

    token_tolerance: float = 1e-5
    sequence_tolerance: float = 1e-3
    rank_margin: int = 20
    rank_tolerance: float | None = None
    max_products: int = 10_000_000
    distinct_fraction: float = 0.7
    best_effort: bool = True
    batch_size: int = 1000
    start_token: int | None = None
    end_tokens: tuple[int, ...] | None = None
    max_length: int | None = None
    seed: int = 0

    @torch.no_grad()
    def __call__(
        self, evidence: GradientEvidence, model: Model, progress: Progress = silent
    ) -> Recovery[RecoveredTexts]:
        """Run the attack; the evidence and the model are left as they are."""
        run = Run(self.seed, progress)
        frame = self._frame(model)
        layers = query_layers(evidence, model)
        held = [layer for layer in layers if layer is not None]
        used = tuple(layer.parameter for layer in held)
        if layers[0] is None or layers[1] is None:
            return claim_nothing(run, Status.MISSING_EVIDENCE, _MISSING)
        if not model.causal and not frame.ends:
            return claim_nothing(run, Status.NOT_APPLICABLE, _NO_END)
        progress("taking spans", 0, 1)
        spans = take_spans(
            evidence, held, rank_margin=self.rank_margin, rank_tolerance=self.rank_tolerance, seed=self.seed
        )
        if spans.rank == 0:
            return claim_nothing(run, Status.NOTHING_FOUND, "the query gradients are zero", used)
        sets = self.token_sets(model, spans.first, frame, progress)
        if not sets.sets:
            return claim_nothing(run, *self._no_token(spans, model.width), used)
        start_is_silent = model.causal and frame.start is not None and layers[1].columns is None
        check = SequenceCheck(model, spans.second, num_unchecked=int(start_is_silent))
        search = self.grow_prefixes if model.causal else self.search_products
        accepted = search(sets, check, frame, evidence.num_texts, progress)
        if not accepted.sequences:
            return tokens_only(sets, check, accepted, self.token_tolerance, used, run)
        progress("judging texts", 0, 1)
        judgement = check_sequences(check, spans, accepted, self.sequence_tolerance)
        return claim_sequences(evidence, judgement, sets, used, run)

    def _frame(self, model: Model) -> FrameTokens:
        """Side knowledge: the settings, else what the tokenizer says."""
        known = (getattr(model.tokenizer, name, None) for name in ("eos_token_id", "sep_token_id"))
        ends = tuple(token for token in known if token is not None) if self.end_tokens is None else self.end_tokens
        if self.start_token is not None or model.tokenizer is None:
            return FrameTokens(self.start_token, ends)
        empty = model.encode("")
        return FrameTokens(empty[0] if empty and empty[0] not in ends else None, ends)

    def _no_token(self, spans: QuerySpans, width: int) -> tuple[Status, str]:
        """How it ends if no token passes: nothing there, or a span that was cut and then holds no token."""
        kept = spans.second.shape[1]
        if not spans.is_cut:
            return Status.NOTHING_FOUND, _NO_TOKEN.format(self.token_tolerance)
        if spans.rank >= width - 1:  # rows behind a norm without shift have mean zero: they fill d − 1 directions
            return Status.NOT_IDENTIFIABLE, _FULL.format(spans.rank, width, kept, self.token_tolerance)
        return Status.NOTHING_FOUND, _CUT.format(spans.rank, kept, width, self.token_tolerance)

    def token_sets(self, model: Model, basis: Basis, frame: FrameTokens, progress: Progress) -> TokenSets:
        """Algorithm 1: at every position the tokens within τ₁ of block 0's span, until no token passes.

        End tokens are noted and taken out; a decoder's start token stands in front only.
        """
        sets: list[Tokens] = []
        ends: list[tuple[int, int]] = []
        outside = torch.tensor([*frame.ends, frame.start] if model.causal and frame.start is not None else frame.ends)
        worst = 0.0
        longest = min(model.max_positions, self.max_length or model.max_positions)
        positions = range(longest if model.learned_positions else 1)
        for position in positions:
            progress("reading token sets", position, len(positions))
            tokens, distance = self._tokens_in_span(model, basis, position)
            if len(tokens) == 0:
                break
            worst = max(worst, distance)
            ends += [(position, end) for end in frame.ends if end in tokens]
            sets.append(tokens[~torch.isin(tokens, outside.long())])
        return TokenSets(sets, ends, not model.learned_positions, worst, model.vocab_size * (position + 1))

    def _tokens_in_span(self, model: Model, basis: Basis, position: int) -> tuple[Tokens, float]:
        """Tokens within τ₁ at a position, the nearest first, and the largest of their float64 distances."""
        near: list[Tensor] = []
        distances: list[Tensor] = []
        worst = 0.0
        for tokens in torch.arange(model.vocab_size, device=model.device).split(_TOKENS_AT_ONCE):
            rows = model.first_input(tokens, torch.full_like(tokens, position))
            distance = span_distance(rows, basis)
            passing = distance < self.token_tolerance
            near.append(tokens[passing].cpu())
            distances.append(distance[passing].cpu())
            if passing.any():
                worst = max(worst, float(span_distance(rows[passing].double(), basis.double()).max()))
        return torch.cat(near)[torch.cat(distances).argsort(stable=True)], worst

    def grow_prefixes(
        self, sets: TokenSets, check: SequenceCheck, frame: FrameTokens, num_texts: int | None, progress: Progress
    ) -> AcceptedSequences:
        """Algorithm 2: extend every prefix by every token of the next set; keep it if all its rows are within τ₂.

        A prefix that nothing extends is a text. As in the official code, first tokens are not checked by themselves,
        and a text has at least two tokens.
        """
        prefixes = sets.at(0)[:, None] if frame.start is None else torch.tensor([[frame.start]])
        failed = FailedSequences((num_texts or 0) * self.best_effort, self.distinct_fraction)
        texts: list[Text] = []
        num_checked = 0
        while len(prefixes):
            length = prefixes.shape[1]
            tokens = sets.at(length)[: None if length < check.model.max_positions else 0]
            if num_checked + len(prefixes) * len(tokens) > self.max_products:
                return AcceptedSequences(texts + _texts(prefixes), num_checked, is_cut=True)
            progress("growing prefixes", length, max(length, len(sets.sets)))
            extended, parents = self._extensions(prefixes, tokens, check, failed)
            texts += [text for i, text in enumerate(_texts(prefixes)) if i not in parents]
            num_checked += len(prefixes) * len(tokens)
            prefixes = extended
        num_missing = (num_texts or 0) - len(texts)
        if not failed.of_length or num_missing <= 0:
            return AcceptedSequences(texts, num_checked)
        num_checked += self._grow_guesses(sets, check, failed)
        guesses = choose_guesses(texts, failed.list_all(), num_missing, self.distinct_fraction)
        return AcceptedSequences(texts, num_checked, guesses=guesses)

    def _extensions(
        self, prefixes: TokenBatch, tokens: Tokens, check: SequenceCheck, failed: FailedSequences
    ) -> tuple[TokenBatch, set[int]]:
        """All prefix + token whose every row is within τ₂, and the numbers of the prefixes that were extended."""
        kept = [prefixes.new_zeros(0, prefixes.shape[1] + 1)]
        parents: set[int] = set()
        for before, sequences in self._pairs(prefixes, tokens):
            distances = check.distances(sequences).cpu()
            passing = (distances < self.sequence_tolerance).all(1)
            kept.append(sequences[passing])
            parents.update(before[passing].tolist())
            failed.offer(sequences[~passing], distances[~passing].mean(1))
        return torch.cat(kept), parents

    def _grow_guesses(self, sets: TokenSets, check: SequenceCheck, failed: FailedSequences) -> int:
        """Extend, length by length, the nearest sequences that failed; return how many were checked.

        They end where Algorithm 1's positions do, with rotary positions where the texts do.
        """
        longest = max(failed.of_length) if sets.everywhere else min(len(sets.sets), check.model.max_positions)
        num_checked = 0
        for length in range(2, longest):
            for _, sequences in self._pairs(failed.prefixes(length), sets.at(length)):
                failed.offer(sequences, check.distances(sequences).mean(1).cpu())
                num_checked += len(sequences)
        return num_checked

    def _pairs(self, prefixes: TokenBatch, tokens: Tokens) -> Iterator[tuple[Tokens, TokenBatch]]:
        """Every prefix with every token behind it, and the numbers of the prefixes, a forward pass at a time."""
        for pairs in torch.arange(len(prefixes) * len(tokens)).split(self.batch_size):
            before, last = pairs // max(1, len(tokens)), pairs % max(1, len(tokens))
            yield before, torch.cat([prefixes[before], tokens[last, None]], dim=1)

    def search_products(
        self, sets: TokenSets, check: SequenceCheck, frame: FrameTokens, num_texts: int | None, progress: Progress
    ) -> AcceptedSequences:
        """Algorithm 3: for every end token, the shortest text first, all products of the token sets before it.

        The paper's heuristics: if the number of texts is known, a position keeps that many of its nearest tokens;
        tokens of texts that were found leave the sets, unless they are a set's last. As in the official code, a
        product passes if the mean distance of its rows is within τ₂, and too many products are sampled at random.
        """
        remaining = [tokens[:num_texts].tolist() for tokens in sets.sets]
        generator = torch.Generator().manual_seed(self.seed)
        texts: list[Text] = []
        failed: list[Scored] = []
        num_checked, is_cut = 0, False
        for position, end in sets.ends:
            is_cut = is_cut or math.prod(map(len, remaining[:position])) >= self.max_products
            best: list[Scored] = []
            for heads in _products(remaining[:position], self.max_products, self.batch_size, generator):
                progress("checking products", num_checked, num_checked + len(heads))
                sequences = torch.cat([heads, torch.full((len(heads), 1), end)], dim=1)
                distances = check.distances(sequences).mean(1).cpu()
                if num_texts is None or not self.best_effort:
                    passing = distances < self.sequence_tolerance
                    sequences, distances = sequences[passing], distances[passing]
                best = add_nearest(best, sequences, distances, num_texts, self.distinct_fraction)
                num_checked += len(heads)
            found = [text for distance, text in best if distance < self.sequence_tolerance]
            failed += best[len(found) :]
            remaining = _without_used(remaining, found, frame.start)
            texts += found
        guesses = choose_guesses(texts, failed, (num_texts or 0) - len(texts), self.distinct_fraction)
        return AcceptedSequences(texts, num_checked, is_cut, guesses)


def _products(
    choices: Sequence[Sequence[int]], at_most: int, batch_size: int, generator: torch.Generator
) -> Iterator[TokenBatch]:
    """All sequences that take one token of each set, in order; a random sample if there are `at_most` or more."""
    total = math.prod(map(len, choices))
    if not choices or total == 0:
        return
    for numbers in torch.arange(min(total, at_most)).split(batch_size):
        columns = []
        for tokens in reversed(choices):
            if total >= at_most:
                digit = torch.randint(len(tokens), (len(numbers),), generator=generator)
            else:
                numbers, digit = numbers // len(tokens), numbers % len(tokens)
            columns.append(torch.tensor(tokens)[digit])
        yield torch.stack(columns[::-1], dim=1)


def _without_used(sets: list[list[int]], texts: list[Text], start: int | None) -> list[list[int]]:
    """Token sets less the tokens of texts that were found, where another token is left."""
    left = [list(tokens) for tokens in sets]
    for text in texts:
        for tokens, token in zip(left, text, strict=False):
            if token != start and len(tokens) > 1 and token in tokens:
                tokens.remove(token)
    return left


def _texts(sequences: TokenBatch) -> list[Text]:
    """Sequences of at least two tokens as tuples."""
    return [tuple(row) for row in sequences.tolist()] if sequences.shape[1] > 1 else []


_MISSING = "the update must hold the query gradients of blocks 0 and 1, which are all that this attack reads"
_NO_END = "lengths of an encoder's texts are read from their end token, which is not known; set `end_tokens`"
_FULL = (
    "the rank of the query gradients, {}, fills the width {}; cut at {}, as the paper does, their span holds no token "
    "within {:.0e}; the batch holds too many tokens, or noise was added"
)
_CUT = (
    "the rank of the query gradients, {}, was cut at {}, `rank_margin` below the width {}, as the paper does, and no "
    "token is within {:.0e} of what is left; a smaller margin keeps more"
)
_NO_TOKEN = "no token's vector is within {:.0e} of the span of block 0's query gradient"
