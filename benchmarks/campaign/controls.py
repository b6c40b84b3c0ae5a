"""Negative controls: evidence whose signal was destroyed. Nothing of it may be called certain or recovered."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import unmask
from campaign import encoders, federations, gradients, states, updates
from campaign.outcome import FALSE_TEXT, FALSELY_RECOVERED, Fault, Outcome, Part, ShortRepr, attack_again
from campaign.states import StatesRecipe
from campaign.updates import UpdateRecipe
from unmask.models import Model
from unmask.recovery import RecoveredTexts, Recovery, Status

HOW = ("noise", "noise", "other weights", "other weights", "shuffled", "columns", "columns", "zeros", "weights")


@dataclass(frozen=True, repr=False)
class ControlRecipe(ShortRepr):
    """What is observed, and how its signal is destroyed."""

    evidence: UpdateRecipe | StatesRecipe
    how: str = "noise"
    seed: int = 0


def draw(seed: int) -> ControlRecipe:
    """The recipe of a seed: an update of a decoder, an encoder or a federation's client, or hidden states."""
    rng = random.Random(f"controls {seed}")
    how = rng.choice(HOW)
    source = rng.choices(("decoder", "encoder", "federation", "states"), (4, 2, 4, 1))[0]
    if source == "states":
        return ControlRecipe(states.draw(seed), how if how in ("noise", "shuffled", "columns") else "noise", seed)
    if source == "federation":
        return ControlRecipe(federations.draw(seed), how, seed)
    update = gradients.draw(seed) if source == "decoder" else encoders.draw(seed)
    while update.model == encoders.MINILM or not update.model.head:
        update = gradients.draw(seed)
    return ControlRecipe(replace(update, defences=()), how, seed)


def run(recipe: ControlRecipe) -> Outcome:
    """Observe, destroy, attack, judge."""
    try:
        model, evidence = observe(recipe)
    except unmask.UnmaskError as error:
        return Outcome("not_made", recipe.how, refusal=str(error))
    try:
        recovery = unmask.recover_text(evidence, model)
    except unmask.UnmaskError as error:
        return Outcome("refused", recipe.how, refusal=str(error))
    return judge(recipe, model, recovery)


def observe(recipe: ControlRecipe) -> tuple[Model, Any]:
    """The model and evidence of which only the shapes, and the sizes of tensors, are left."""
    generator = torch.Generator().manual_seed(recipe.seed)
    if isinstance(recipe.evidence, StatesRecipe):
        model, states_seen = states.observe(recipe.evidence)
        return model, replace(states_seen, states=_destroy(states_seen.states, recipe.how, generator))
    clean = replace(recipe.evidence, defences=())
    model, evidence = updates.observe(clean)
    if recipe.how == "other weights":
        others = replace(clean, model=replace(clean.model, seed=clean.model.seed + 1))
        _, seen = updates.observe(others)
        destroyed = replace(seen, model_fingerprint=evidence.model_fingerprint)
    elif recipe.how == "weights":
        weights = dict(model.named_parameters()) | dict(evidence.adapters)
        destroyed = replace(evidence, gradients={name: weights[name].detach() for name in evidence.gradients})
    else:
        destroyed = replace(evidence, gradients=_destroy_all(evidence.gradients, recipe.how, generator))
    return model, updates.defend(destroyed, recipe.evidence, generator)


def judge(recipe: ControlRecipe, model: Model, recovery: Recovery[RecoveredTexts]) -> Outcome:
    """Any claim about texts is a fault, and so is a certified token that does not occur.

    Columns of weights that are stored as (in, out) may be shuffled without a loss: there a fault is what is false.
    """
    judged = (states if isinstance(recipe.evidence, StatesRecipe) else updates).judge(recipe.evidence, model, recovery)
    if recipe.how == "columns":
        return Outcome(recovery.status.name, recipe.how, judged.faults)
    faults = [fault for fault in judged.faults if fault.kind not in (FALSELY_RECOVERED, FALSE_TEXT)]
    if recovery.status is Status.RECOVERED:
        faults.append(Fault(FALSELY_RECOVERED, f"RECOVERED from {recipe.how}: {recovery.value.expand()}"))
    if recovery.value.certain:
        faults.append(Fault(FALSE_TEXT, f"certain of {recipe.how}: {[text.tokens for text in recovery.value.certain]}"))
    return Outcome(recovery.status.name, recipe.how, tuple(faults))


def simpler(recipe: ControlRecipe) -> Iterator[ControlRecipe]:
    """Simpler evidence, destroyed in the same way."""
    part = states if isinstance(recipe.evidence, StatesRecipe) else updates
    yield from (replace(recipe, evidence=evidence) for evidence in part.simpler(recipe.evidence))


def reproduce(recipe: ControlRecipe) -> str:
    """A few lines of Python that show the failure."""
    return attack_again(
        recipe,
        "judge(recipe, model, recovery).faults",
        "from campaign.controls import ControlRecipe, StatesRecipe, UpdateRecipe, judge, observe",
        "from campaign.models import ModelRecipe",
    )


def _destroy_all(tensors: Mapping[str, Tensor], how: str, generator: torch.Generator) -> dict[str, Tensor]:
    return {name: _destroy(tensor, how, generator) for name, tensor in tensors.items()}


def _destroy(tensor: Tensor, how: str, generator: torch.Generator) -> Tensor:
    """Noise of the same norm, the same entries or the same columns in another order, or zeros."""
    if how == "zeros":
        return torch.zeros_like(tensor)
    if how == "shuffled":
        order = torch.randperm(tensor.numel(), generator=generator)
        return tensor.flatten()[order].view(tensor.shape)
    if how == "columns":  # rank, norms and spectrum stay as they are
        return tensor[..., torch.randperm(tensor.shape[-1], generator=generator)]
    noise = torch.randn(tensor.shape, generator=generator)
    return (noise / noise.norm().clamp_min(1e-30) * tensor.float().norm()).to(tensor.dtype)


PART = Part("controls", draw, run, simpler, reproduce)
