"""Gradients with weight decay inside, as an L2 penalty leaves it: no certain token, text or count may be false."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

import unmask
from campaign import gradients, updates
from campaign.outcome import Outcome, Part, ShortRepr, attack_again
from campaign.updates import UpdateRecipe
from unmask.evidence.gradients import GradientEvidence
from unmask.models import Model

RUNS_PER_MODEL = gradients.RUNS_PER_MODEL


@dataclass(frozen=True, repr=False)
class DecayedRecipe(ShortRepr):
    """An update, how much of each weight is added to it, and whether the padding token's row is zero, as a fresh one.

    `matrices`: biases and gains are not decayed, as many libraries have it.
    """

    update: UpdateRecipe
    decay: float
    padded: bool = False
    matrices: bool = False


def draw(seed: int) -> DecayedRecipe:
    """The recipe of a seed: an update of the part 'gradients' that is no delta."""
    update, rng = gradients.draw(seed), random.Random(f"decayed {seed}")
    update = replace(update, optimizer=None, learning_rate=None, steps=1, batch_size=None)
    decay = 10 ** rng.uniform(-9, 0) * rng.choice((1, 1, -1))
    return DecayedRecipe(update, float(f"{decay:.1e}"), rng.random() < 0.5, rng.random() < 0.5)


def observe(recipe: DecayedRecipe) -> tuple[Model, GradientEvidence]:
    """The model, and the update with its decay behind its defences."""
    plain = replace(recipe.update, defences=())
    model, evidence = updates.observe(plain)
    if recipe.padded:
        model = model.to()
        with torch.no_grad():
            model.parameter(model.token_embedding)[recipe.update.model.pad] = 0.0
        model, evidence = updates.observe(plain, model)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    sent = {
        name: tensor if recipe.matrices and tensor.ndim < 2 else tensor + recipe.decay * weights[name].to(tensor)
        for name, tensor in evidence.gradients.items()
    }
    generator = torch.Generator().manual_seed(recipe.update.seed)
    return model, updates.defend(replace(evidence, gradients=sent), recipe.update, generator)


def run(recipe: DecayedRecipe) -> Outcome:
    """Observe, attack, judge."""
    try:
        model, evidence = observe(recipe)
        return updates.judge(recipe.update, model, unmask.recover_text(evidence, model))
    except unmask.UnmaskError as error:
        return Outcome("refused", recipe.update.kind, refusal=str(error))


def simpler(recipe: DecayedRecipe) -> Iterator[DecayedRecipe]:
    """A simpler update with the same decay."""
    yield from (replace(recipe, **{name: False}) for name in ("padded", "matrices") if getattr(recipe, name))
    yield from (replace(recipe, update=update) for update in updates.simpler(recipe.update))


def reproduce(recipe: DecayedRecipe) -> str:
    """A few lines of Python that show the failure."""
    return attack_again(
        recipe,
        "updates.judge(recipe.update, model, recovery).faults",
        "from campaign.decayed import DecayedRecipe, UpdateRecipe, observe, updates",
        "from campaign.models import ModelRecipe",
    )


PART = Part("decayed", draw, run, simpler, reproduce, chunk=RUNS_PER_MODEL)
