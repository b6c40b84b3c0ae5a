"""Exact texts from an encoder's hidden states: guess all tokens at once, recompute, repair until every state agrees.

    1. guess every position from its own state (encoder_templates.py); the tokenizer's frame at both ends
    2. run the guess g; the context's shift at i is H_i(g) − mean(g_i): rank h_i − shift again, a few times
    3. at the positions that are farthest off test candidates, each in a whole text, and keep what lowers
       Σ_i ‖H_i(g) − h_i‖²/‖h_i‖² most; the candidates tested there measure the shift for the next ones

In both directions every state depends on every token, so nothing is proven before all is: the certificate is that the
whole text, recomputed, gives the states seen at *every* position, while each token replaced by the likeliest other one
does not.

Notation: h_i the state seen at position i, H_i(g) that of a guess g, mean(v) = φ(v)·A + b the one expected of token v;
distance = ‖H_i(g) − h_i‖/‖h_i‖.
Limits: all positions must be seen, of one text with token types 0 (not a pair). Coarse storage is allowed for
(float16 that was cast to float32 is not recognised); noise that was added on purpose leaves a guess without a proof. A
text that is not found within the budget is handed out as a guess, with no token certain. Tokens with equal embeddings
are reported as a class (equal_tokens.py). Before the first block a state is a function of one token and its position:
tokens are proven, that they are of one text is not (placement.py, for texts that windows of attention do not span too).
Cost: one fit a layer (kept), then one text through l blocks where the first guess holds, 64 and more a repair.
Source: ours. For causal models see attack.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.outputs.prompts.claim import refuse_states
from unmask.attacks.outputs.prompts.encoder_claim import EncoderText, claim_encoder_prompts
from unmask.attacks.outputs.prompts.encoder_templates import EncoderTemplates, encoder_templates_for
from unmask.attacks.outputs.prompts.equal_tokens import Classes, equal_tokens
from unmask.attacks.outputs.prompts.nearest import ExpectedStates, is_beyond_chance, nearest_row
from unmask.attacks.outputs.prompts.ranking import Metric, direct_metric
from unmask.attacks.run import Progress, Run, silent
from unmask.evidence.outputs import HiddenEvidence, Site
from unmask.models.adapter import Model
from unmask.proof.binding import BEYOND, UNBOUND, are_bound, why_unbound
from unmask.proof.state_noise import StateNoise, computing_error, measure_rounding
from unmask.recovery import RecoveredTexts, Recovery
from unmask.shapes import Rows, Tokens

_ROWS = 8192  # tokens that are sent through the model at once
_GROWTH, _MOST = 4, 256  # candidates at a position that was tried in vain
_CROWDED_SHARE = 8  # one candidate in so many may be crowded


@dataclass(frozen=True)
class EncoderPromptAttack:
    """Settings: positions repaired at a time, candidates first tested at each, and texts run at most for one text."""

    positions: int = 4
    candidates: int = 16
    max_settling: int = 4
    max_texts: int = 4000

    def __call__(self, evidence: HiddenEvidence, model: Model, progress: Progress = silent) -> Recovery[RecoveredTexts]:
        """Read every text of the evidence."""
        run = Run(progress=progress)
        if model.causal or evidence.site not in (Site.STREAM, Site.FINAL_NORM):
            return refuse_states(run, evidence, model, "bidirectional")
        templates = encoder_templates_for(model, evidence.layer, evidence.site is Site.FINAL_NORM, progress)
        reader = EncoderReader(self, model, templates, direct_metric(templates.states), equal_tokens(model))
        error = computing_error(model, evidence.compute_dtype, evidence.layer) + _storing_error(evidence.states.dtype)
        texts = []
        for number, (states, mask) in enumerate(zip(evidence.states, evidence.mask, strict=True)):
            progress("reading texts", number, len(evidence.mask))
            rows = states[mask].to(device=model.device, dtype=model.dtype)
            if len(rows):
                position = int(mask.int().argmax())
                text = reader.read(rows, position, measure_rounding(rows, error))
                why = why_unbound(model, evidence.layer, len(rows))
                if text.proven and not why and not reader.are_bound(text, position):
                    why = UNBOUND
                texts.append(replace(text, why_unbound=why))
        return claim_encoder_prompts(texts, model, run)


@dataclass
class _Guess:
    """A whole text with its states."""

    tokens: Tokens
    states: Rows
    distances: Float[Tensor, " n"]

    @property
    def loss(self) -> float:
        return float(self.distances.double().square().sum())


@dataclass
class _Tried:
    """What was tested at a position in the present context: tokens, and how far their states are from expectation."""

    tokens: list[int] = field(default_factory=list)
    shifts: list[Tensor] = field(default_factory=list)
    rounds: int = 0


@dataclass(frozen=True)
class EncoderReader:
    """Everything that does not depend on the text."""

    settings: EncoderPromptAttack
    model: Model
    templates: EncoderTemplates
    metric: Metric
    equal: Classes

    @torch.no_grad()
    def read(self, states: Rows, position: int, noise: StateNoise) -> EncoderText:
        """Guess, settle, repair, and test the likeliest other tokens."""
        search = _Search(self, states, position, noise.tolerances)
        search.settle()
        tried = search.untried()
        while search.wrong.any() and search.num_texts < self.settings.max_texts:
            if search.repair(tried):
                tried = search.untried()
            elif all(len(tried[i].tokens) + 1 >= self.model.vocab_size for i in search.wrong.nonzero()):
                break
        equals = {} if search.wrong.any() else search.equals()
        rejected = None if search.wrong.any() else search.nearest_other()
        best = search.best
        stands_out = not search.wrong.any() or self._stands_out(states, best.states)
        return EncoderText(
            best.tokens, best.distances, noise.tolerances, rejected, search.num_texts, equals, stands_out
        )

    @cached_property
    def expected(self) -> ExpectedStates:
        """The state that is expected of each token."""
        every = torch.arange(self.model.vocab_size, device=self.model.device)
        return ExpectedStates(self.templates.states.means(every))

    def _stands_out(self, states: Rows, closest: Rows) -> bool:
        """Whether states point to the closest text, or to what is expected of any token, more than noise would."""
        if not all(self.expected.is_louder(row) for row in states):
            return True  # noise that hides tokens makes rows longer
        known = self.expected.means
        pairs = ((row, torch.cat([own[None], known])) for row, own in zip(states, closest, strict=True))
        return is_beyond_chance([nearest_row(rows, row, self.model.vocab_size)[2] for row, rows in pairs])

    def states_of(self, texts: Int[Tensor, "k n"], position: int) -> Float[Tensor, "k n d"]:
        """What is seen of whole texts from a position on."""
        places = (position + torch.arange(texts.shape[1], device=texts.device)).expand_as(texts)
        seen = self.model.hidden_states(texts, num_blocks=self.templates.layer, positions=places)[self.templates.layer]
        return self.model.final_norm(seen) if self.templates.normed else seen

    def are_bound(self, text: EncoderText, position: int) -> bool:
        """Whether a text's states tell that they are those of one text, in this order."""
        of_texts = partial(self.states_of, position=position)
        return are_bound(of_texts, text.tokens, BEYOND * text.tolerances, self.model.vocab_size)

    def scores(self, states: Rows) -> Float[Tensor, "n vocab"]:
        """How well each token explains each state."""
        return self.metric.scores(states @ self.metric.whiten.T)


class _Search:
    """One text while it is searched: the closest guess so far, and the number of texts run."""

    def __init__(self, reader: EncoderReader, states: Rows, position: int, tolerances: Float[Tensor, " n"]) -> None:
        self.reader, self.states, self.position, self.tolerances = reader, states, position, tolerances
        self.num_texts = 0
        self.best = min(self.run(self._first_guesses()), key=lambda guess: guess.loss)

    @property
    def wrong(self) -> Tensor:
        """Positions whose state does not agree."""
        return self.best.distances > self.tolerances

    def run(self, texts: Int[Tensor, "k n"]) -> Iterator[_Guess]:
        """The states of whole texts and their distances from those seen."""
        self.num_texts += len(texts)
        for part in texts.split(max(1, _ROWS // texts.shape[1])):
            seen = self.reader.states_of(part, self.position)
            distances = (seen - self.states).norm(dim=2) / self.states.norm(dim=1).clamp_min(1e-30)
            yield from map(_Guess, part, seen, distances)

    def _first_guesses(self) -> Int[Tensor, "k n"]:
        """The likeliest tokens, of all and of those that are not crowded, with and without the frame."""
        scores, frame = self.reader.scores(self.states), self.reader.model.frame_tokens
        plain = scores.argmax(1)
        rare = scores.masked_fill(self.reader.templates.crowded, -torch.inf).argmax(1)
        guesses = torch.stack([plain, rare])
        if frame is not None and len(plain) > 1:
            framed = guesses.clone()
            framed[:, 0], framed[:, -1] = frame
            guesses = torch.cat([guesses, framed])
        return guesses.unique(dim=0)

    def settle(self) -> None:
        """Rank all positions again with the shifts that the guess itself has, while that helps or leads elsewhere."""
        guess = self.best
        for _ in range(self.reader.settings.max_settling):
            means = self.reader.templates.states.means(guess.tokens)
            likeliest = self.reader.scores(self.states - guess.states + means).argmax(1)
            tokens = torch.where(guess.distances > self.tolerances, likeliest, guess.tokens)
            if bool((tokens == guess.tokens).all()):
                return
            guess = next(self.run(tokens[None]))
            self.best = min(self.best, guess, key=lambda one: one.loss)

    def untried(self) -> list[_Tried]:
        """Nothing was tested in this context yet."""
        return [_Tried() for _ in self.states]

    def repair(self, tried: list[_Tried]) -> bool:
        """Test candidates at the worst positions; True if the text came closer."""
        changes: dict[int, _Guess] = {}
        texts, where = [], []
        for index in self._worst(tried):
            tokens = self._candidates(index, tried[index])
            changed = self.best.tokens.expand(len(tokens), -1).clone()
            changed[:, index] = tokens
            texts.append(changed)
            where += [index] * len(tokens)
            tried[index].rounds += 1
        for index, guess in zip(where, self.run(torch.cat(texts)), strict=True):
            means = self.reader.templates.states.means(guess.tokens[index : index + 1])[0]
            tried[index].tokens.append(int(guess.tokens[index]))
            tried[index].shifts.append(guess.states[index] - means)
            if guess.loss < min(self.best.loss, changes[index].loss if index in changes else float("inf")):
                changes[index] = guess
        return self._accept(changes)

    def _accept(self, changes: dict[int, _Guess]) -> bool:
        """Take the best of the changes: the first one, the first two together, and so on."""
        if not changes:
            return False
        order = sorted(changes, key=lambda index: changes[index].loss)
        together, texts = self.best.tokens.clone(), []
        for index in order:
            together[index] = changes[index].tokens[index]
            texts.append(together.clone())
        joint = list(self.run(torch.stack(texts[1:]))) if len(texts) > 1 else []
        self.best = min([changes[order[0]], *joint], key=lambda guess: guess.loss)
        return True

    def _worst(self, tried: list[_Tried]) -> list[int]:
        """Positions to repair: farthest off first, those tried in vain later."""
        rounds = torch.tensor([one.rounds for one in tried]).to(self.states)
        urgency = torch.where(self.wrong, self.best.distances / (1 + rounds), -1.0)
        return urgency.topk(min(self.reader.settings.positions, int(self.wrong.sum()))).indices.tolist()

    def _candidates(self, index: int, tried: _Tried) -> Int[Tensor, " k"]:
        """The likeliest tokens by the shift that all tested ones have in common, a few crowded ones among them."""
        table, crowded = self.reader.templates.states, self.reader.templates.crowded
        own = self.best.states[index] - table.means(self.best.tokens[index : index + 1])[0]
        shift = torch.stack([own, *tried.shifts]).mean(0)
        scores = self.reader.scores((self.states[index] - shift)[None])[0]
        scores[[*tried.tokens, int(self.best.tokens[index])]] = -torch.inf
        wanted = min(self.reader.settings.candidates * _GROWTH**tried.rounds, _MOST)
        few = max(1, wanted // _CROWDED_SHARE) if bool(crowded.any()) else 0
        chosen = [_likeliest(scores.masked_fill(crowded, -torch.inf), wanted - few)]
        chosen.append(_likeliest(scores.masked_fill(~crowded, -torch.inf), few))
        return torch.cat(chosen)

    def equals(self) -> dict[int, tuple[int, ...]]:
        """By position, the tokens that all give the states seen, where there are several; the closest one is kept."""
        found: dict[int, tuple[int, ...]] = {}
        for index, token in enumerate(self.best.tokens.tolist()):
            members = self.reader.equal.get(token, ())
            texts = self.best.tokens.expand(len(members), -1).clone()
            texts[:, index] = torch.tensor(members, dtype=texts.dtype)
            guesses = list(self.run(texts)) if members else []
            agreeing = [guess for guess in guesses if bool((guess.distances <= self.tolerances).all())]
            self.best = min([self.best, *agreeing], key=lambda guess: guess.loss)
            if len(agreeing) > 1:
                found[index] = tuple(sorted(int(guess.tokens[index]) for guess in agreeing))
        return found

    def nearest_other(self) -> float:
        """Each token replaced by the likeliest other one: the least that any such text is off at its worst position."""
        means = self.reader.templates.states.means(self.best.tokens)
        scores = self.reader.scores(self.states - self.best.states + means)
        for row, token in zip(scores, self.best.tokens.tolist(), strict=True):
            row[list(self.reader.equal.get(token, (token,)))] = -torch.inf
        texts = self.best.tokens.expand(len(scores), -1).clone()
        texts.diagonal().copy_(scores.argmax(1))
        return min(float(guess.distances.max()) for guess in self.run(texts))


def _storing_error(dtype: torch.dtype) -> float:
    """Of states that are handed out in half precision: a number is off by up to half a step."""
    return torch.finfo(dtype).eps / 2 if torch.finfo(dtype).bits == 16 else 0.0


def _likeliest(scores: Float[Tensor, " vocab"], count: int) -> Int[Tensor, " k"]:
    best = scores.topk(min(count, len(scores)))
    return best.indices[best.values > -torch.inf]
