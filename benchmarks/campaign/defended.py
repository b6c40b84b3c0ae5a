"""States and caches behind random chains of defences: nothing certain is false, and no gate is held over a leak.

The judge of gates is a reader that knows nothing of noise, digits or factors: position by position it takes the token
of the whole vocabulary whose row, made by the observing service itself, has the largest cosine with the one seen. Where
it reads a text that the attack did not list, the attack must not say that it looked for texts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import unmask
from campaign.batches import draw_batch
from campaign.claims import false_claims, num_found
from campaign.models import ModelRecipe, add_sink, build, draw_decoder, simpler_models
from campaign.outcome import HELD_GATE, Fault, Outcome, Part, ShortRepr, attack_again
from unmask.defences.table import parse_defence
from unmask.evidence.caches import CacheEvidence
from unmask.evidence.outputs import HiddenEvidence
from unmask.models import Model
from unmask.recovery import Aim, RecoveredTexts, Recovery

RUNS_PER_MODEL = 16
LONGEST, MOST_TEXTS = 12, 3  # the judge runs the vocabulary at every position

_TELLING = 16.0  # nats: shorter texts are read from noise by chance

Evidence = HiddenEvidence | CacheEvidence


@dataclass(frozen=True, repr=False)
class DefendedRecipe(ShortRepr):
    """Which texts, what is seen of them, and the defences in their order."""

    model: ModelRecipe
    texts: tuple[tuple[int, ...], ...]
    site: str = "stream"
    layer: int = 1
    defences: tuple[str, ...] = ()
    seed: int = 0


def draw(seed: int) -> DefendedRecipe:
    """The recipe of a seed; neighbours share a model."""
    shared, rng = random.Random(f"defended model {seed // RUNS_PER_MODEL}"), random.Random(f"defended {seed}")
    model = add_sink(shared, draw_decoder(shared))
    _, texts = draw_batch(rng, range(1, model.vocab - 1), model)
    cut = tuple(dict.fromkeys(tuple(text[:LONGEST]) for text in texts))[:MOST_TEXTS]  # each row is a text by itself
    site = rng.choice(("stream", "final_norm", "cache", "cache"))
    layer = rng.randint(0, model.blocks - (site == "cache"))
    defences = tuple(_draw_defence(rng, site) for _ in range(rng.randint(1, 3)))
    return DefendedRecipe(model, cut, site, model.blocks if site == "final_norm" else layer, defences, seed)


def _draw_defence(rng: random.Random, site: str) -> str:
    size, share = 10 ** rng.uniform(-7, 3), round(1 - 10 ** rng.uniform(-2.5, -0.3), 4)
    noise = f"{rng.choice(('noise', 'laplace'))}:sigma={size:.1e},relative={rng.choice(('true', 'false'))}"
    kinds = [noise, f"clip:norm={10 ** rng.uniform(-3, 2):.1e}", f"topk:share={share}", f"random:share={share}"]
    kinds += ["int8", "int8:stochastic=true", "fp8", "fp16", "bf16"]
    return rng.choice([*kinds, "cloak"] if site == "cache" else kinds)


def observe(recipe: DefendedRecipe) -> tuple[Model, Evidence]:
    """The model, and what is seen behind the defences."""
    model = build(recipe.model)
    return model, defend(recipe, _see(recipe, model, recipe.texts))


def defend(recipe: DefendedRecipe, evidence: Evidence) -> Evidence:
    """The evidence behind the defences of a recipe."""
    generator = torch.Generator().manual_seed(recipe.seed)
    for text in recipe.defences:
        evidence = parse_defence(text)(evidence, generator)
    return evidence


def _see(recipe: DefendedRecipe, model: Model, texts: tuple[tuple[int, ...], ...]) -> Evidence:
    layer = min(recipe.layer, model.num_blocks - (recipe.site == "cache"))
    if recipe.site == "cache":
        return unmask.observe_cache(model, list(texts), layer=layer)
    return unmask.observe_hidden(model, list(texts), site=recipe.site, layer=layer)


def run(recipe: DefendedRecipe) -> Outcome:
    """Observe, defend, attack, judge."""
    try:
        model, evidence = observe(recipe)
        recovery = unmask.recover_text(evidence, model)
    except unmask.UnmaskError as error:
        return Outcome("refused", recipe.site, refusal=str(error))
    return judge(recipe, model, evidence, recovery)


def judge(recipe: DefendedRecipe, model: Model, evidence: Evidence, recovery: Recovery[RecoveredTexts]) -> Outcome:
    """What is claimed against the texts, and what is said to have been looked for against the judge's reading."""
    batch = list(recipe.texts)
    faults = false_claims(recovery, batch, (), recipe.model.equal)
    telling = [row for row, text in enumerate(batch) if len(text) * math.log(recipe.model.vocab) > _TELLING]
    missing = [row for row in telling if not any(text.covers(batch[row]) for text in recovery.value.texts)]
    if Aim.TEXTS in recovery.looked_for:
        for row in missing:
            if read_nearest(recipe, model, evidence, row) == batch[row]:
                faults.append(Fault(HELD_GATE, f"{batch[row]} is not listed, and cosines alone read it"))
    return Outcome(recovery.status.name, recipe.site, tuple(faults), len(batch), num_found(recovery, batch))


def read_nearest(recipe: DefendedRecipe, model: Model, evidence: Evidence, row: int) -> tuple[int, ...]:
    """One text by the largest cosines; it ends where one is not the secret's, as the judge may."""
    rows, known = _rows(evidence)[row][evidence.mask[row]], ()
    for place, truth in enumerate(recipe.texts[row]):
        every = _see(recipe, model, tuple((*known, token) for token in range(model.vocab_size)))
        known += (int(torch.cosine_similarity(_rows(every)[:, place], rows[place][None]).argmax()),)
        if known[-1] != truth:
            break
    return known


def _rows(evidence: Evidence) -> Tensor:
    """What is seen of each position, as one row."""
    if isinstance(evidence, HiddenEvidence):
        return evidence.states.double()
    return torch.cat([part.flatten(2) for part in evidence.parts.values()], 2).double()


def simpler(recipe: DefendedRecipe) -> Iterator[DefendedRecipe]:
    """Fewer and shorter texts, fewer defences, a smaller model."""
    texts, defences = recipe.texts, recipe.defences
    yield from (replace(recipe, texts=texts[:at] + texts[at + 1 :]) for at in range(len(texts)) if len(texts) > 1)
    yield from (replace(recipe, defences=defences[:at] + defences[at + 1 :]) for at in range(len(defences)))
    if recipe.layer and recipe.site != "final_norm":
        yield replace(recipe, layer=recipe.layer - 1)
    yield from (replace(recipe, model=model) for model in simpler_models(recipe.model))
    for at, text in enumerate(texts):
        if len(text) > 1:
            yield replace(recipe, texts=(*texts[:at], text[:-1], *texts[at + 1 :]))


def reproduce(recipe: DefendedRecipe) -> str:
    """A few lines of Python that show the failure."""
    return attack_again(
        recipe,
        "judge(recipe, model, evidence, recovery).faults",
        "from campaign.defended import DefendedRecipe, ModelRecipe, judge, observe",
    )


PART = Part("defended", draw, run, simpler, reproduce, chunk=RUNS_PER_MODEL)
