"""Exact prompts from a decoder's cache: one block's keys and values, position by position.

    s_i = [k_i ; v_i] of block l;   for each position: guess tokens by [k_i·M_i⁻¹ ; v_i], test them by s_i

Keys and values of block l at position i are a function of tokens 0 … i, like the stream that they are made from, so the
reader of hidden states (prompts/attack.py) reads them: what is seen of the stream is another function of it
(models/readouts.py). A service keeps fewer numbers than the stream has (384 of SmolLM2's 576), or only some heads of
them, and stores them coarsely; where these do not tell tokens apart, those that are left are reported as open.

Block 0's keys and values depend on a token alone, or on it and its position, so any page of them is read, and its
tokens are proven. That they are of one text is the dump's word, and so are order and positions unless keys show them,
which is measured (prompts/placement.py): no text is certain, nor is one longer than attention with windows reaches.
Deeper blocks need all earlier tokens: a page without them is guessed by the table and nothing is claimed, unless a
known beginning holds them. If nothing agrees behind that one, it is doubted, and the page is guessed.

Notation: l the block, k keys after rotary, v values, M_i what position i does to keys.
Limits: causal models whose cache holds what the softmax reads (no compressed caches); weights known.
Cost: as for hidden states; the model reads each text once more, for its own predictions.
Source: ours; arXiv 2508.09442 reads caches by collision, and proposes KV-Cloak against it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.claims import claim_nothing
from unmask.attacks.outputs.prompts.claim import claim_prompts
from unmask.attacks.outputs.prompts.equal_tokens import equal_tokens
from unmask.attacks.outputs.prompts.one_factor import read_texts
from unmask.attacks.outputs.prompts.placement import place
from unmask.attacks.outputs.prompts.position_search import SearchSettings
from unmask.attacks.outputs.prompts.reader import PromptReader
from unmask.attacks.outputs.prompts.seen_text import Beginning, BeginningStatus, ReadText
from unmask.attacks.outputs.prompts.side_by_side import Reading, SharedProgress
from unmask.attacks.outputs.prompts.templates import templates_for
from unmask.attacks.run import Progress, Run, silent
from unmask.evidence.caches import CacheEvidence
from unmask.models.adapter import Model
from unmask.models.readouts import CacheReadout
from unmask.proof.state_noise import computing_error
from unmask.recovery import RecoveredTexts, Recovery, Status


@dataclass(frozen=True)
class CacheAttack:
    """Settings: candidates tested first, after each linearisation, and at most at a position (None: all tokens)."""

    first: int = 8
    refined: int = 16
    max_linearisations: int = 8
    max_candidates: int | None = None

    def __call__(self, evidence: CacheEvidence, model: Model, progress: Progress = silent) -> Recovery[RecoveredTexts]:
        """Read every text of the cache."""
        run, used = Run(progress=progress), tuple(evidence.parts)
        end = evidence.first_position + evidence.mask.shape[1]
        if not model.causal:
            why = "a cache is kept by causal models, and this one reads every position at once"
        else:
            why = model.problem_at(end)
        readout = CacheReadout(evidence.layer, evidence.heads, evidence.keys is not None, evidence.values is not None)
        positions = torch.arange(evidence.first_position, end)
        if why := why or readout.problem(model, positions):
            return claim_nothing(run, Status.NOT_APPLICABLE, why, used)
        reader = PromptReader(
            model=model,
            layer=evidence.layer,
            readout=readout,
            templates=templates_for(model, evidence.layer, readout, progress),
            settings=SearchSettings(self.first, self.refined, self.max_linearisations, self.max_candidates),
            computing_error=_computing_error(model, evidence, readout),
            equal=equal_tokens(model),
        )

        def readings(each: PromptReader) -> list[Reading[ReadText]]:
            shared = SharedProgress(progress, int(evidence.mask.sum()))
            rows = evidence.mask.any(1).nonzero()[:, 0].tolist()
            return [_reading(evidence, each, row, shared) for row in rows]

        return claim_prompts(read_texts(reader, readings), model, used, run)


def _reading(evidence: CacheEvidence, reader: PromptReader, row: int, shared: SharedProgress) -> Reading[ReadText]:
    """One text; behind tokens that are not known it is guessed."""
    mask = evidence.mask[row]
    rows = [part[row][mask].flatten(1) for part in evidence.parts.values()]
    states = torch.cat(rows, 1).to(device=reader.model.device, dtype=reader.model.dtype)
    position = evidence.first_position + int(mask.int().argmax())
    start = 0 if evidence.first_position else position
    beginning = Beginning(evidence.known_beginning, start)
    is_page = evidence.first_position > 0
    tell = shared.add_text()
    if not is_page or evidence.layer == 0:
        text = yield from reader.reading(states, position, tell, beginning)
        placed = place(text, reader.model, reader.readout, evidence.layer, position)
        return replace(placed, first_position=position, is_open=is_page)
    status = BeginningStatus.NONE
    if evidence.known_beginning:
        text = yield from reader.reading(states, position, tell, beginning)
        if text.before and text.stopped != 0:
            placed = place(text, reader.model, reader.readout, evidence.layer, position)
            return replace(placed, first_position=position)
        status = BeginningStatus.DOUBTED if text.beginning is BeginningStatus.UNSEEN else text.beginning
    return replace(reader.guess(states, position), first_position=position, beginning=status)


def _computing_error(model: Model, evidence: CacheEvidence, readout: CacheReadout) -> float:
    """How far keys and values are off where the service runs its model in another precision, heads by their norms."""

    def read(each: Model, streams: Float[Tensor, "batch length d"]) -> Float[Tensor, "batch length m"]:
        positions = torch.arange(streams.shape[1], device=streams.device).expand(streams.shape[:2])
        seen = readout(each, streams, positions).float()
        return (seen.flatten(0, 1) * readout.weights(each, seen.flatten(0, 1))).unflatten(0, seen.shape[:2])

    return computing_error(model, evidence.compute_dtype, evidence.layer, read)
