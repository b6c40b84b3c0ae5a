"""Are rows that were seen (hidden states, keys and values) those of this text? It is run once, and so are its edits.

    agreement     every row computed again is the one seen, as far as its digits go
    alternatives  the text with another token at one place: those whose embeddings lie nearest, and some at random; one
                  whose rows all agree is open, one that nearly does leaves the text undecided
    binding       rows behind another beginning, or in another order, would differ (`binding.py`)

Nothing is searched, so only as many other texts are tested as is said. Where rows are rounded by more than 2 % of their
length, or hold noise, what else agrees takes a search of the vocabulary: then texts are undecided.

Notation: as in `state_noise.py`. Limits: states of a stream or behind the final norm, caches from their first position.
Cost: a pass of the text for each edit, 30,000 rows in all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.evidence.caches import CacheEvidence
from unmask.evidence.outputs import HiddenEvidence, Site
from unmask.models.adapter import Model
from unmask.models.readouts import FINAL_NORM, STREAM, CacheReadout, Readout
from unmask.proof.alternatives import EQUAL, equal_token
from unmask.proof.binding import BEYOND, UNBOUND, are_bound, why_unbound
from unmask.proof.state_noise import computing_error, lengths_of, measure_rounding
from unmask.proof.verdicts import Decision, Ground, ProposedText, TextVerdict, Tokens, Verdict
from unmask.recovery import Ambiguity

_COARSEST = 0.02  # tolerance, beyond which one token must be told from others by likelihood
_CLEAR = 3.0  # tolerances that another text must be off, in one row at least
_FAR = 10.0  # the same of a text that is not the one seen
_WRONG = 0.05  # of a row's length: rows of other tokens are further off
_NEAREST, _RANDOM = 4, 2  # other tokens that are tried at a place
_MOST_ROWS = 30_000
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class SeenRows:
    """The rows of one text, as they are compared, where they stand, and how far they may be off."""

    model: Model
    readout: Readout
    layer: int
    states: Float[Tensor, "n m"]
    weights: Float[Tensor, "n m"]
    tolerances: Float[Tensor, " n"]
    position: int

    def rows_of(self, texts: Int[Tensor, "k n"]) -> Float[Tensor, "k n m"]:
        """What would be seen of texts, as it is compared."""
        places = (self.position + torch.arange(texts.shape[1], device=texts.device)).expand_as(texts)
        streams = self.model.hidden_states(texts, num_blocks=self.layer, positions=places)[self.layer]
        return self.readout(self.model, streams, places) * self.weights

    def excess(self, texts: Int[Tensor, "k n"]) -> Float[Tensor, " k"]:
        """The distance of the farthest row of each text, in tolerances."""
        at_once = max(1, _ROWS_AT_ONCE // texts.shape[1])
        off = [
            (self.rows_of(part) - self.states).norm(dim=2) / lengths_of(self.states) for part in texts.split(at_once)
        ]
        return (torch.cat(off) / self.tolerances).amax(1)


@torch.no_grad()
def judge_states(evidence: HiddenEvidence | CacheEvidence, model: Model, texts: list[Tokens]) -> Verdict:
    """Decide on texts, one for each text of the evidence that has rows, in their order."""
    seen = _rows_of_evidence(evidence, model)
    if isinstance(seen, str) or len(seen) != len(texts):
        why = seen if isinstance(seen, str) else f"the evidence holds {len(seen)} texts, and {len(texts)} were given"
        undecided = tuple(TextVerdict(ProposedText(text), Decision.UNDECIDED, float("inf"), why=why) for text in texts)
        return Verdict(Ground.NONE, undecided, problems=(why,))
    judged = tuple(_judge(rows, text) for rows, text in zip(seen, texts, strict=True))
    coarsest = max(float(rows.tolerances.max()) for rows in seen)
    judged = tuple(
        replace(verdict, decision=Decision.REFUTED) if _is_refuted(verdict, rows, coarsest) else verdict
        for rows, verdict in zip(seen, judged, strict=True)
    )
    agree = [text for text in judged if text.decision in (Decision.CERTAIN, Decision.ONE_OF_THESE)]
    return Verdict(Ground.STATES if agree else Ground.NONE, judged, tolerance=1.0)


def _rows_of_evidence(evidence: HiddenEvidence | CacheEvidence, model: Model) -> list[SeenRows] | str:
    """The rows of every text; or why these cannot be computed again here."""
    readout: Readout = STREAM
    if isinstance(evidence, CacheEvidence):
        if evidence.first_position:
            return "a page of a cache that does not start at its first position is not verified"
        readout = CacheReadout(evidence.layer, evidence.heads, evidence.keys is not None, evidence.values is not None)
        if why := readout.problem(model, torch.arange(evidence.mask.shape[1])):
            return why
        parts = list(evidence.parts.values())
    elif evidence.site in (Site.STREAM, Site.FINAL_NORM):
        readout, parts = FINAL_NORM if evidence.site is Site.FINAL_NORM else STREAM, [evidence.states]
    else:
        return f"states at the site '{evidence.site.value}' are not verified"
    if why := model.problem_at(evidence.mask.shape[1]):
        return why
    error = computing_error(model, evidence.compute_dtype, evidence.layer)
    found = []
    for row, mask in enumerate(evidence.mask):
        if not bool(mask.any()):
            continue
        own = torch.cat([part[row][mask].flatten(1) for part in parts], 1).to(device=model.device, dtype=model.dtype)
        weights, widths = readout.weights(model, own), readout.split(model, own.shape[1])
        noise = measure_rounding(own, error, weights, widths)
        position = int(mask.int().argmax())
        found.append(SeenRows(model, readout, evidence.layer, own * weights, weights, noise.tolerances, position))
    return found


def _judge(seen: SeenRows, text: Tokens) -> TextVerdict:
    proposed = ProposedText(text, start=seen.position)

    def say(decision: Decision, why: str, misfit: float = float("inf")) -> TextVerdict:
        return TextVerdict(proposed, decision, misfit, why=why)

    if len(text) != len(seen.states):
        rows = len(seen.states)
        return say(Decision.REFUTED, f"it has {len(text)} tokens, and {rows} rows were seen")
    tokens = torch.tensor(text, device=seen.model.device)
    misfit = float(seen.excess(tokens[None])[0])
    if misfit > 1:
        return say(
            Decision.UNDECIDED, f"a row of it is {misfit:.3g} times as far from the one seen as it may be", misfit
        )
    if float(seen.tolerances.max()) > _COARSEST:
        return say(Decision.UNDECIDED, "rows are so coarse that what else agrees takes a search", misfit)
    points, is_clear = _alternatives(seen, tokens)
    if not is_clear:
        return say(Decision.UNDECIDED, "another token at a place of it agrees nearly as well", misfit)
    why = why_unbound(seen.model, seen.layer, len(text))
    if not why and not are_bound(seen.rows_of, tokens, BEYOND * seen.tolerances, seen.model.vocab_size):
        why = UNBOUND
    if why:
        return say(Decision.UNDECIDED, why, misfit)
    decided = TextVerdict(proposed, Decision.CERTAIN, misfit)
    return replace(decided, decision=Decision.ONE_OF_THESE, points=tuple(points)) if points else decided


def _is_refuted(verdict: TextVerdict, seen: SeenRows, coarsest: float) -> bool:
    """Whether rows of a text agree and others are far off: noise, or another model, would leave none that agrees.

    `coarsest` is the largest tolerance of any row: coarse storage may not show in all of them.
    """
    if verdict.decision is not Decision.UNDECIDED or len(verdict.text.tokens) != len(seen.states):
        return False
    tokens = torch.tensor([verdict.text.tokens], device=seen.model.device)
    off = (seen.rows_of(tokens)[0] - seen.states).norm(dim=1) / lengths_of(seen.states)
    agrees = bool((off <= seen.tolerances).any())
    return agrees and coarsest <= _COARSEST and float(off.max()) > max(_FAR * coarsest, _WRONG)


def _alternatives(seen: SeenRows, tokens: Int[Tensor, " n"]) -> tuple[list[Ambiguity], bool]:
    """Places at which other tokens agree, and whether all others that were tried clearly do not."""
    model, number = seen.model, _MOST_ROWS // len(tokens)
    rows = model.parameter(model.token_embedding).detach()[: model.vocab_size].float()
    places = torch.linspace(0, len(tokens) - 1, min(len(tokens), max(1, number // (_NEAREST + _RANDOM)))).round().long()
    generator = torch.Generator().manual_seed(0)
    points, is_clear = [], True
    for place in places.unique().tolist():
        token = int(tokens[place])
        apart = (rows - rows[token]).norm(dim=1) / rows[token].norm().clamp_min(1e-30)
        apart[token] = torch.inf
        near = apart.topk(_NEAREST, largest=False).indices
        equal = (apart <= EQUAL).nonzero()[:, 0]
        drawn = torch.randint(0, model.vocab_size, (_RANDOM,), generator=generator).to(tokens.device)
        others = torch.cat([near, equal, drawn]).unique()
        others = others[others != token]
        edited = tokens.repeat(len(others), 1)
        edited[:, place] = others
        off = seen.excess(edited)
        if agreeing := others[off <= _CLEAR].tolist():
            is_clear &= bool((off[off <= _CLEAR] <= 1).all())
            points.append(equal_token(model, place, sorted({token, *agreeing})))
    return points, is_clear
