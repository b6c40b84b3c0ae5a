"""Exact prompts from a decoder's hidden states: position by position, each token proven by its own recomputed state.

    for each position:  guess a few tokens ahead, keep those whose states agree;  search the first that does not

The state of layer l at position i is a function of tokens 0 … i alone, and no two tokens were ever seen to give the
same one (the nearest wrong token is some hundredths of the norm away). So a token whose recomputed state agrees to the
last digits *is* the token, whatever the guess was made from; the art is to guess well (ranking.py), so that few
candidates are tested.

The model helps twice: what it would have said next is a prior, and it comes for free at every layer, as the states that
were seen need only be sent through the blocks that they have not passed.

Notation: l the layer seen, d the width, V the vocabulary; distance = ‖h(v) − h‖/‖h‖.
Limits: all positions of a text must be seen. Noise beyond a fifth of a state's norm leaves guesses. Tokens with equal
embeddings have equal states: a class of them is reported, and the text is not certain (equal_tokens.py). Before the
first block a state is a function of one token alone: tokens are proven, that they are one text in this order is not.
The same holds for texts longer than attention with windows reaches (placement.py).
Cost: some 20 seconds to fit a layer of SmolLM2 (templates.py; kept in the process), then a few candidates a token, some
tens at the last layer. Texts of a batch are read side by side and share their passes (side_by_side.py).
Source: arXiv 2510.15511 (SipIt) for the sequential proof; ranking, tables, the linear map and the prior are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from unmask.attacks.claims import claim_nothing
from unmask.attacks.outputs.prompts.claim import claim_prompts, refuse_states
from unmask.attacks.outputs.prompts.equal_tokens import equal_tokens
from unmask.attacks.outputs.prompts.one_factor import read_texts
from unmask.attacks.outputs.prompts.placement import place
from unmask.attacks.outputs.prompts.position_search import SearchSettings
from unmask.attacks.outputs.prompts.reader import PromptReader
from unmask.attacks.outputs.prompts.seen_text import Beginning, ReadText
from unmask.attacks.outputs.prompts.side_by_side import Reading, SharedProgress
from unmask.attacks.outputs.prompts.templates import templates_for
from unmask.attacks.run import Progress, Run, silent
from unmask.evidence.outputs import HiddenEvidence, Site
from unmask.models.adapter import Model
from unmask.models.readouts import FINAL_NORM, STREAM
from unmask.proof.state_noise import computing_error
from unmask.recovery import RecoveredTexts, Recovery, Status


@dataclass(frozen=True)
class PromptAttack:
    """Settings: candidates tested first, after each linearisation, and at most at a position (None: all tokens)."""

    first: int = 8
    refined: int = 16
    max_linearisations: int = 8
    max_candidates: int | None = None

    def __call__(self, evidence: HiddenEvidence, model: Model, progress: Progress = silent) -> Recovery[RecoveredTexts]:
        """Read every text of the evidence."""
        run = Run(progress=progress)
        if not model.causal or evidence.site not in (Site.STREAM, Site.FINAL_NORM):
            return refuse_states(run, evidence, model, "causal")
        if why := model.problem_at(evidence.states.shape[1]):
            return claim_nothing(run, Status.NOT_APPLICABLE, why, ("states",))
        readout = FINAL_NORM if evidence.site is Site.FINAL_NORM else STREAM
        if readout == FINAL_NORM and model.final_width != model.width:
            why = f"this model's last hidden states are projected to {model.final_width} of {model.width} entries"
            return claim_nothing(run, Status.NOT_APPLICABLE, why, ("states",))
        templates = templates_for(model, evidence.layer, readout, progress)
        reader = PromptReader(
            model=model,
            layer=evidence.layer,
            readout=readout,
            templates=templates,
            settings=SearchSettings(self.first, self.refined, self.max_linearisations, self.max_candidates),
            computing_error=computing_error(model, evidence.compute_dtype, evidence.layer),
            equal=equal_tokens(model),
        )

        def readings(each: PromptReader) -> list[Reading[ReadText]]:
            shared = SharedProgress(progress, int(evidence.mask.sum()))
            pairs = zip(evidence.states, evidence.mask, strict=True)
            return [_reading(states, mask, each, evidence, shared) for states, mask in pairs if mask.any()]

        return claim_prompts(read_texts(reader, readings), model, ("states",), run)


def _reading(
    states: Float[Tensor, "length d"],
    mask: Tensor,
    reader: PromptReader,
    evidence: HiddenEvidence,
    shared: SharedProgress,
) -> Reading[ReadText]:
    """One text."""
    position = int(mask.int().argmax())
    tell = shared.add_text()
    beginning = Beginning(evidence.known_beginning, position)
    text = yield from reader.reading(_real(states, mask, reader.model), position, tell, beginning)
    return place(text, reader.model, reader.readout, evidence.layer, position)


def _real(states: Float[Tensor, "length d"], mask: Tensor, model: Model) -> Float[Tensor, "n d"]:
    """States of a text's own tokens, in the precision that they are compared in."""
    return states[mask].to(device=model.device, dtype=model.dtype)
