"""`recover_text`: the default attack for the evidence and the model at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unmask.arguments import require_count
from unmask.attacks.gradients.decoder import DecoderAttack
from unmask.attacks.gradients.encoder import EncoderAttack
from unmask.attacks.outputs.encoder_prompt import EncoderPromptAttack
from unmask.attacks.outputs.first_attention import FirstAttentionAttack
from unmask.attacks.outputs.pooled import PooledAttack
from unmask.attacks.outputs.prompt import PromptAttack
from unmask.attacks.progress import Progress, silent
from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence
from unmask.evidence.outputs import HiddenEvidence, Site
from unmask.models.adapter import Model
from unmask.models.load import require_model
from unmask.recovery import RecoveredTexts, Recovery

TextAttack = Callable[[Any, Model, Progress], Recovery[RecoveredTexts]]


def recover_text(
    evidence: GradientEvidence | HiddenEvidence,
    model: Model,
    *,
    progress: Progress = silent,
    effort: int = 1,
    seed: int = 0,
) -> Recovery[RecoveredTexts]:
    """Recover the texts behind an update or behind hidden states, of decoders and encoders.

    The model must be the one that the client started from, or that the service runs; evidence of another one is
    refused. `effort`: how often the search for an encoder's texts is started anew while some are missing.
    """
    require_model(model)
    require_count("effort", effort)
    if isinstance(evidence, GradientEvidence):
        attack: TextAttack = DecoderAttack(seed=seed) if model.causal else EncoderAttack(effort=effort, seed=seed)
    elif isinstance(evidence, HiddenEvidence):
        attack = attack_on_states(evidence, model)
    else:
        raise InputError(
            f"texts can be recovered from gradients or hidden states, got {type(evidence).__name__}; "
            "for one attention layer use recover_inputs"
        )
    evidence.check(model)
    return attack(evidence.to(model.device), as_client_ran_it(model, evidence.compute_dtype), progress)


def attack_on_states(evidence: HiddenEvidence, model: Model) -> TextAttack:
    """The attack for the site where states were taken."""
    if evidence.site is Site.ATTENTION:
        return FirstAttentionAttack()
    if evidence.site is Site.MEAN:
        return PooledAttack()
    return PromptAttack() if model.causal else EncoderPromptAttack()


def as_client_ran_it(model: Model, compute_dtype: torch.dtype) -> Model:
    """The model with the weights that the client had, in a precision that distances can be measured in.

    A client in bfloat16 has rounded weights: they are rounded here too, then used in float32.
    """
    precise = torch.float64 if compute_dtype is torch.float64 else torch.float32
    if model.dtype is compute_dtype is precise:
        return model
    return model.to(dtype=compute_dtype).to(dtype=precise)
