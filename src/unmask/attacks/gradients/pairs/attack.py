"""Encoder–decoders: the texts of both sides, and which belong together.

    decoder's texts ← prefixes, grown at the output projection of its first self-attention, which no encoder reaches
    encoder's texts ← the search for an encoder's texts, at its own first block
    pairs           ← G = Σ w(s, t)·∂loss(s, t): least squares over all pairs of texts, then the client is run again

A text that is written ends with the tokenizer's end token, which is predicted and never read: it is assumed, and the
replay tells. Only a replay that agrees makes anything certain.
Notation: s a text that is read, t one that is written, w(s, t) how often the pair occurs over the number of tokens.
Limits: encoders without learned positions (T5) give their tokens alone, so that nothing can be run again, and the
decoder's texts stay guesses. A whole gradient, of one step.
Source: ours; prefixes as in DAGER (arXiv 2405.15586).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unmask.attacks.claims import claim_nothing
from unmask.attacks.gradients.bag_of_words.claim import read_tokens
from unmask.attacks.gradients.bag_of_words.token_filter import Candidates
from unmask.attacks.gradients.decoder.prefix_search import PrefixSearch
from unmask.attacks.gradients.encoder.attack import EncoderAttack
from unmask.attacks.gradients.sites import output_site
from unmask.attacks.outputs.prompts.equal_tokens import equal_tokens_ambiguity
from unmask.attacks.run import Progress, Run, silent
from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence, Update
from unmask.models.adapter import Model
from unmask.models.encoder_decoder import EncoderDecoder
from unmask.progress import track
from unmask.proof.agreement import Agreement, agree
from unmask.proof.alternatives import counts_by_means
from unmask.proof.replay import replay_pairs
from unmask.recovery import (
    Aim,
    Ambiguity,
    AmbiguityKind,
    Certificate,
    RecoveredText,
    RecoveredTexts,
    Recovery,
    Search,
    Status,
    searches_of,
)

_SMALLEST_WEIGHT = 0.3  # of the largest: pairs below are none
_ENTRIES = 2**18  # of gradients that pairs are told apart by
_MOST_PAIRS = 256
_COUNT_IS_OPEN = "pairs may occur more often: the size of the batch is not stated, or does not tell their counts"
SIDES = ("encoder", "decoder")

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Side:
    """What one side gave away: its bag of words, the texts that were found, and why there are no more."""

    candidates: Candidates | None = None
    texts: tuple[Tokens, ...] = ()
    why: str = ""

    @property
    def tokens(self) -> frozenset[int]:
        """Tokens that occur."""
        return frozenset() if self.candidates is None else self.candidates.tokens

    def open_tokens(self, model: EncoderDecoder, text: Tokens) -> tuple[Ambiguity, ...]:
        """Positions of a text at which other tokens would have done as well."""
        assert self.candidates is not None  # it has a text
        classes = {member: members for members in self.candidates.equal.values() for member in members}
        return tuple(
            equal_tokens_ambiguity(model.encoder, position, classes[token])
            for position, token in enumerate(text)
            if token in classes
        )


@dataclass(frozen=True)
class PairAttack:
    """Recover a batch of pairs from an update; settings as those of the attacks on either side."""

    frame: tuple[int, int] | None = None
    num_probes: int = 32
    min_gap_decades: float = 1.0
    num_equations: int = 192
    max_steps: int = 8
    memory_budget_bytes: int = 2**30
    seed: int = 0

    def __call__(
        self, evidence: GradientEvidence, model: EncoderDecoder, progress: Progress = silent
    ) -> Recovery[RecoveredTexts]:
        """Run the attack; the evidence and the model are left as they are."""
        run = Run(self.seed, progress)
        if not isinstance(model, EncoderDecoder):
            raise InputError("pairs are those of an encoder–decoder: load it with load_encoder_decoder")
        if evidence.update is not Update.GRADIENT or evidence.adapters:
            why = "pairs are read off the gradient of one step of the whole model"
            return claim_nothing(run, Status.NOT_APPLICABLE, why)
        written = self._read_decoder(run, one_side(evidence, model, model.decoder), model)
        read = self._read_encoder(run, one_side(evidence, model, model.encoder), model.encoder)
        pairs, agreement = [], None
        if read.texts and written.texts:
            progress("running the client again", 0, 1)
            pairs = find_pairs(evidence, model, read.texts, written.texts)
            agreement = agree(evidence, replay_pairs(model, pairs)) if pairs else None
        return _claim(run, evidence, model, read, written, pairs, agreement)

    @torch.no_grad()
    def _read_decoder(self, run: Run, evidence: GradientEvidence, model: EncoderDecoder) -> Side:
        """Texts that were written: what the decoder was given, less the start token, with the end token behind."""
        side = model.decoder
        known = read_tokens(run, evidence, side, self.num_probes, self.min_gap_decades)
        if isinstance(known, Recovery):
            return Side(None, (), known.reason)
        candidates, _ = known
        site = output_site(evidence, side)
        if side.problem or site is None or site.span.is_saturated:
            return Side(candidates, (), side.problem or "the span of its first output projection is full")
        forest = PrefixSearch(run, side, site, candidates, self.num_probes, self.memory_budget_bytes).search()
        given = [tokens for start, tokens in forest.leaves if start == 0 and tokens[0] == model.start_token]
        if not given or not forest.is_clear(self.min_gap_decades):
            return Side(candidates, (), "no prefix stands out")
        end = () if model.end_token is None else (model.end_token,)
        return Side(candidates, tuple(tokens[1:] + end for tokens in given))

    @torch.no_grad()
    def _read_encoder(self, run: Run, evidence: GradientEvidence, side: Model) -> Side:
        """Texts that were read."""
        known = read_tokens(run, evidence, side, self.num_probes, self.min_gap_decades)
        if isinstance(known, Recovery):
            return Side(None, (), known.reason)
        candidates, _ = known
        settings = EncoderAttack(frame=self.frame, num_equations=self.num_equations, max_steps=self.max_steps)
        search = settings.find_texts(run, evidence, side, candidates)
        if isinstance(search, str):
            return Side(candidates, (), search)
        texts = tuple(search.problem.places.tokens_of(text) for text in search.found)
        return Side(candidates, texts, "" if texts else "no text was found whose rows all fit")


def one_side(evidence: GradientEvidence, model: EncoderDecoder, side: Model) -> GradientEvidence:
    """The part of an update that belongs to one side, as an update of that side."""
    gradients = model.of_side(side, evidence.gradients)
    return replace(evidence, gradients=gradients, model_fingerprint=side.fingerprint())


def _tells_equal_tokens(evidence: GradientEvidence, model: EncoderDecoder) -> bool:
    """Whether the replay compared the rows of the token embedding, which equal tokens do not share."""
    shared = model.hf.get_input_embeddings().weight
    return any(name in evidence.gradients for name, parameter in model.named_parameters() if parameter is shared)


def find_pairs(
    evidence: GradientEvidence, model: EncoderDecoder, read: tuple[Tokens, ...], written: tuple[Tokens, ...]
) -> list[tuple[Tokens, Tokens]]:
    """Which text was written for which one that was read, each as often as it occurs; nothing where it is not clear."""
    options = [(s, t) for s in read for t in written]
    if len(options) > _MOST_PAIRS:
        return []
    seen = _sample(evidence.gradients)
    again = ({name: g for name, g in replay_pairs(model, [pair]).items() if name in evidence.gradients}
             for pair in track(options, "trying pairs"))  # fmt: skip
    columns = torch.stack([_sample(each) * len(pair[1]) for each, pair in zip(again, options, strict=True)], dim=1)
    scale = columns.norm(dim=0).clamp_min(1e-300)
    weights = torch.linalg.lstsq(columns.cpu() / scale.cpu(), seen.cpu()[:, None]).solution[:, 0] / scale.cpu()
    kept = [index for index, w in enumerate(weights.tolist()) if w > _SMALLEST_WEIGHT * float(weights.max())]
    unit = min((float(weights[index]) for index in kept), default=1.0)
    return [options[index] for index in kept for _ in range(round(float(weights[index]) / unit))]


def _sample(tensors: Mapping[str, Tensor]) -> Tensor:
    """The same entries of every update."""
    whole = torch.cat([tensors[name].detach().flatten().double() for name in sorted(tensors)])
    return whole[:: max(1, len(whole) // _ENTRIES)]


def _claim(
    run: Run,
    evidence: GradientEvidence,
    model: EncoderDecoder,
    read: Side,
    written: Side,
    pairs: list[tuple[Tokens, Tokens]],
    agreement: Agreement | None,
) -> Recovery[RecoveredTexts]:
    """Everything is certain if the client, run again, sends this update; else texts are guesses."""
    tokens = read.tokens | (written.tokens - {model.start_token})  # which every text begins with, and none holds
    cost, used = run.cost(candidates=len(tokens)), tuple(sorted(evidence.gradients))
    if agreement is not None and agreement.holds:
        counts = Counter(pairs)
        told = _told_counts(counts, evidence.num_texts or 0)
        open_count = () if told else (Ambiguity(AmbiguityKind.COUNT, _COUNT_IS_OPEN),)
        tells_equal, texts = _tells_equal_tokens(evidence, model), []
        for pair in counts:
            for side, text, found in zip(SIDES, pair, (read, written), strict=True):
                equal = () if tells_equal else found.open_tokens(model, text)
                made = _text(model, side, text, not equal)
                texts.append(replace(made, count=told.get(pair, 1), ambiguities=(*equal, *open_count)))
        certificate = Certificate(
            claim="the client, run again on these pairs, sends the same update: every tensor agrees",
            residual=agreement.misfit_as_is,
            tolerance=agreement.tolerance,
        )
        open_tokens = {token for text in texts for point in text.ambiguities for token in point.tokens}
        known = frozenset(token for text in texts for token in text.tokens) - open_tokens
        value = RecoveredTexts(tuple(texts), known)
        reason = f"all {len(counts)} different pairs: {certificate.claim}"
        status = Status.PARTIAL if open_count or open_tokens else Status.RECOVERED
        return Recovery(value, status, reason, certificate, cost, used, searches_of(Aim.TOKENS, Aim.TEXTS))
    searches = tuple(Search(Aim.TOKENS, stopped=side.candidates is None) for side in (read, written))
    if not tokens:
        why = f"encoder: {read.why}; decoder: {written.why}"
        return claim_nothing(run, Status.NOTHING_FOUND, why, used, searches)
    both = list(zip(SIDES, (read, written), strict=True))
    guesses = [_text(model, side, text, False) for side, found in both for text in found.texts]
    open_points = [f"{side}: {found.why}" for side, found in both if found.why]
    if agreement is not None or (read.texts and written.texts):
        open_points.append("no pairing of the texts found sends this update when the client is run again")
    reason = f"the tokens of both sides ({len(tokens)}) were recovered, texts are guesses: {'; '.join(open_points)}"
    gaps = [side.candidates.gap for side in (read, written) if side.candidates is not None]
    certificate = Certificate(
        claim="every token listed occurs: its vector lies in the span of one side's first gradients",
        residual=max(gap.accepted for gap in gaps),
        tolerance=max(gap.threshold for gap in gaps),
    )
    value = RecoveredTexts(tuple(guesses), tokens)
    return Recovery(value, Status.PARTIAL, reason, certificate, cost, used, searches)


def _told_counts(counts: Mapping[tuple[Tokens, Tokens], int], num_pairs: int) -> dict[tuple[Tokens, Tokens], int]:
    """How often each pair occurs, from how often in a mean over all labels; nothing where that is open."""
    if num_pairs == len(counts):
        return dict.fromkeys(counts, 1)
    factor, rest = divmod(num_pairs, sum(counts.values()))
    told = [factor * count for count in counts.values()]
    by_means = counts_by_means(list(counts.values()), [len(written) for _, written in counts], num_pairs)
    return {} if rest or not factor or by_means not in (None, told) else dict(zip(counts, told, strict=True))


def _text(model: EncoderDecoder, side: str, tokens: Tokens, certain: bool) -> RecoveredText:
    return RecoveredText(tokens, model.encoder.decode(tokens), certain, 0.0, side=side)
