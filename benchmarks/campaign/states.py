"""Hidden states from start to end: made as a recipe says, attacked, and judged."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import unmask
from campaign.batches import draw_batch
from campaign.claims import false_claims, num_found
from campaign.encoders import draw_encoder
from campaign.models import CLS, SEP, ModelRecipe, add_sink, build, draw_decoder, simpler_models
from campaign.outcome import Outcome, Part, ShortRepr, attack_again
from unmask.evidence.outputs import HiddenEvidence
from unmask.models import Model

RUNS_PER_MODEL = 16


@dataclass(frozen=True, repr=False)
class StatesRecipe(ShortRepr):
    """Which texts, and where in the model their states are read."""

    model: ModelRecipe
    texts: tuple[tuple[int, ...], ...]
    kind: str = "plain"
    site: str = "stream"
    layer: int | None = None
    padding: str = "right"

    @property
    def batch(self) -> list[tuple[int, ...]]:
        """The secret."""
        return list(self.texts)


def draw(seed: int) -> StatesRecipe:
    """The recipe of a seed; neighbours share a model."""
    shared, rng = random.Random(f"states model {seed // RUNS_PER_MODEL}"), random.Random(f"states {seed}")
    causal = shared.random() < 0.7
    model = add_sink(shared, draw_decoder(shared)) if causal else draw_encoder(shared)
    kind, texts = draw_batch(rng, range(1, model.vocab - 1) if causal else range(5, model.vocab), model)
    if not causal:
        texts = [text if rng.random() < 0.1 else (CLS, *text, SEP) for text in texts]
    site = rng.choices(("stream", "final_norm", "attention", "mean"), (5, 2, 1, 1))[0]
    layer = rng.randint(0, model.blocks) if site in ("stream", "mean") else None
    return StatesRecipe(model, tuple(texts), kind, site, layer, rng.choice(("right", "left")))


def observe(recipe: StatesRecipe) -> tuple[Model, HiddenEvidence]:
    """The model and what its service hands out."""
    model = build(recipe.model)
    layer = None if recipe.layer is None else min(recipe.layer, recipe.model.blocks)
    return model, unmask.observe_hidden(
        model, list(recipe.texts), site=recipe.site, layer=layer, padding_side=recipe.padding
    )


def run(recipe: StatesRecipe) -> Outcome:
    """Observe, attack, judge."""
    model, evidence = observe(recipe)
    try:
        return judge(recipe, model, unmask.recover_text(evidence, model))
    except unmask.UnmaskError as error:
        return Outcome("refused", recipe.kind, refusal=str(error))


def judge(recipe: StatesRecipe, model: Model, recovery: Any) -> Outcome:
    """The claims of a recovery against the texts."""
    faults = false_claims(recovery, recipe.batch, (), recipe.model.equal)
    found = num_found(recovery, recipe.batch)
    plain = recipe.site in ("stream", "final_norm")
    return Outcome(recovery.status.name, recipe.kind, tuple(faults), len(recipe.texts), found, plain)


def simpler(recipe: StatesRecipe) -> Iterator[StatesRecipe]:
    """Fewer and shorter texts, a smaller model."""
    texts = recipe.texts
    yield from (replace(recipe, texts=texts[:at] + texts[at + 1 :]) for at in range(len(texts)) if len(texts) > 1)
    if recipe.padding != "right":
        yield replace(recipe, padding="right")
    if recipe.layer:
        yield replace(recipe, layer=recipe.layer - 1)
    yield from (replace(recipe, model=model) for model in simpler_models(recipe.model))
    for at, text in enumerate(texts):
        shorter = (text[:place] + text[place + 1 :] for place in reversed(range(len(text))))
        yield from (replace(recipe, texts=(*texts[:at], short, *texts[at + 1 :])) for short in shorter if short)


def reproduce(recipe: StatesRecipe) -> str:
    """A few lines of Python that show the failure."""
    return attack_again(
        recipe,
        "judge(recipe, model, recovery).faults",
        "from campaign.states import ModelRecipe, StatesRecipe, judge, observe",
    )


PART = Part("states", draw, run, simpler, reproduce, chunk=RUNS_PER_MODEL)
