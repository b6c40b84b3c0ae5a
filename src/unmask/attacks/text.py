"""`recover_text`: the default attack for the evidence and the model at hand."""

from __future__ import annotations

import torch

from unmask.attacks.gradients.decoder import DecoderAttack
from unmask.attacks.gradients.encoder import EncoderAttack
from unmask.attacks.progress import Progress, silent
from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.recovery import RecoveredTexts, Recovery


def recover_text(
    evidence: GradientEvidence,
    model: Model,
    *,
    progress: Progress = silent,
    confirm: bool = False,
    seed: int = 0,
) -> Recovery[RecoveredTexts]:
    """Recover the texts behind an update, of decoders and encoders.

    The model must be the one that the client started from; evidence of another one is refused. With `confirm`, every
    prefix of a decoder's texts is tested again in block 1.
    """
    if not isinstance(evidence, GradientEvidence):
        raise InputError(
            f"texts can be recovered from gradient evidence, got {type(evidence).__name__}; "
            "recovery from hidden states is not built yet"
        )
    evidence.check(model)
    attack = DecoderAttack(confirm=confirm, seed=seed) if model.causal else EncoderAttack(seed=seed)
    return attack(evidence.to(model.device), as_client_ran_it(model, evidence.compute_dtype), progress)


def as_client_ran_it(model: Model, compute_dtype: torch.dtype) -> Model:
    """The model with the weights that the client had, in a precision that distances can be measured in.

    A client in bfloat16 has rounded weights: they are rounded here too, then used in float32.
    """
    precise = torch.float64 if compute_dtype is torch.float64 else torch.float32
    if model.dtype is compute_dtype is precise:
        return model
    return model.to(dtype=compute_dtype).to(dtype=precise)
