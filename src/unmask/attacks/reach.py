"""What the attacks can do with a model, by the parts that were found of it; where less, why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unmask.attacks.gradients.encoder.problem import why_no_places
from unmask.attacks.gradients.sites import why_no_first_inputs
from unmask.attacks.outputs.first_attention.attack import why_no_values
from unmask.errors import UnmaskError
from unmask.models.adapter import Model
from unmask.models.heads import layer_heads
from unmask.models.linear import Role
from unmask.models.load import require_model

WHOLE_TEXTS, PREFIXES, TOKENS = "texts", "texts but for their last tokens", "tokens"
WEIGHTS, NO_ATTACK = "weights", "no attack"


@dataclass(frozen=True)
class Reach:
    """What evidence of one kind gives away; `why` says why not more, and is empty where it is all."""

    evidence: str
    gives: str
    why: str = ""


def find_reach(model: Model) -> tuple[Reach, ...]:
    """One line for each kind of evidence; of an encoder–decoder, ask each side."""
    require_model(model)
    rules: dict[str, Callable[[Model], tuple[str, str]]] = {
        "gradients": _from_decoder_gradients if model.causal else _from_encoder_gradients,
        "hidden states": _from_states,
        "attention outputs of block 0": _from_attention,
        "logits": _from_logits,
        "answers of an attention layer": _from_answers,
    }
    return tuple(Reach(evidence, *rule(model)) for evidence, rule in rules.items())


def _from_decoder_gradients(model: Model) -> tuple[str, str]:
    if why := model.problem or why_no_first_inputs(model):
        return TOKENS, why
    if all(model.linear(role, model.num_blocks - 1) is None for role in (Role.MLP_OUT, Role.ATTENTION_OUT)):
        return PREFIXES, "the last block has neither a down projection nor an output projection that is a linear layer"
    if model.unembedding is not None and model.token_head is None:
        return PREFIXES, "how the output layer is fed was not found, so labels cannot be read"
    return WHOLE_TEXTS, ""


def _from_encoder_gradients(model: Model) -> tuple[str, str]:
    why = why_no_places(model)
    return (TOKENS, why) if why else (WHOLE_TEXTS, "")


def _from_states(model: Model) -> tuple[str, str]:
    if model.causal and model.problem:
        return NO_ATTACK, model.problem
    if model.final_width != model.width:
        return WHOLE_TEXTS, "but not from the last ones, which are projected to another width"
    return WHOLE_TEXTS, ""


def _from_attention(model: Model) -> tuple[str, str]:
    why = why_no_values(model)
    return (NO_ATTACK, why) if why else (WHOLE_TEXTS, "")


def _from_logits(model: Model) -> tuple[str, str]:
    if model.unembedding is None:
        return NO_ATTACK, "the model has no head that predicts tokens"
    return "hidden size and output layer", ""


def _from_answers(model: Model) -> tuple[str, str]:
    try:
        layer_heads(model, 0)
    except UnmaskError as error:
        return NO_ATTACK, str(error)
    return WEIGHTS, ""
