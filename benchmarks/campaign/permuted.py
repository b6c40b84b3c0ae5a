"""States and caches whose rows are in another order, or of two texts: no text that nobody wrote may be certain."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

import unmask
from campaign import defended
from campaign.claims import false_claims
from campaign.defended import DefendedRecipe, Evidence
from campaign.outcome import FALSE_TEXT, FALSE_TOKEN, Fault, Outcome, Part, ShortRepr, attack_again
from unmask.models import Model
from unmask.recovery import RecoveredTexts, Recovery

RUNS_PER_MODEL = defended.RUNS_PER_MODEL


@dataclass(frozen=True, repr=False)
class PermutedRecipe(ShortRepr):
    """What is seen of some texts, and how rows move: in each text, or, if spliced, ends are of the next one."""

    evidence: DefendedRecipe
    spliced: bool = False


def draw(seed: int) -> PermutedRecipe:
    """The recipe of a seed: what the part 'defended' sees, some behind its defences; half of it before the first block.

    Of some models the attention is weak, so that rows hardly depend on the tokens before them.
    """
    rng = random.Random(f"permuted {seed}")
    shared = random.Random(f"permuted model {seed // RUNS_PER_MODEL}")
    seen = defended.draw(seed)
    weak = replace(seen.model, attention=10 ** shared.uniform(-7, 0)) if shared.random() < 0.5 else seen.model
    seen = replace(seen, model=weak, defences=seen.defences if rng.random() < 0.4 else ())
    texts = (*seen.texts, tuple(rng.choices(range(1, seen.model.vocab - 1), k=6)))
    layer = 0 if rng.random() < 0.5 and seen.site != "final_norm" else seen.layer
    return PermutedRecipe(replace(seen, texts=texts, layer=layer), rng.random() < 0.4)


def observe(recipe: PermutedRecipe) -> tuple[Model, Evidence]:
    """The model, and rows that no text has in this order, moved before anything is done to them."""
    model, evidence = defended.observe(replace(recipe.evidence, defences=()))
    tensors = evidence.named_tensors()
    moved = evidence.with_tensors({name: tensors[_source(recipe, name)] for name in tensors})
    return model, defended.defend(recipe.evidence, moved)


def _source(recipe: PermutedRecipe, name: str) -> str:
    """Whose row takes the place of a text's position."""
    text, position, *rest = name.split("/")
    return "/".join((*_place(recipe, int(text), int(position)), *rest))


def _place(recipe: PermutedRecipe, text: int, position: int) -> tuple[str, str]:
    texts = recipe.evidence.texts
    if recipe.spliced:
        other = (text + 1) % len(texts)
        return _named(other if position >= 2 and position < len(texts[other]) else text, position)
    order = torch.randperm(len(texts[text]), generator=torch.Generator().manual_seed(recipe.evidence.seed + text))
    return _named(text, int(order[position]))


def _named(text: int, position: int) -> tuple[str, str]:
    return f"{text:06d}", f"{position:06d}"


def run(recipe: PermutedRecipe) -> Outcome:
    """Observe, attack, judge."""
    try:
        model, evidence = observe(recipe)
        return judge(recipe, unmask.recover_text(evidence, model))
    except unmask.UnmaskError as error:
        return Outcome("refused", recipe.evidence.site, refusal=str(error))


def judge(recipe: PermutedRecipe, recovery: Recovery[RecoveredTexts]) -> Outcome:
    """Certain are tokens of the batch, and beginnings of its texts at most, as rows may have stayed where they were."""
    batch = list(recipe.evidence.texts)
    claimed = false_claims(recovery, batch, (), recipe.evidence.model.equal)
    faults = [fault for fault in claimed if fault.kind == FALSE_TOKEN]
    for text in recovery.value.certain:
        if not any(other[: len(text.tokens)] == text.tokens for other in batch):
            faults.append(Fault(FALSE_TEXT, f"certain {text.tokens} is in none of {batch}"))
    return Outcome(recovery.status.name, recipe.evidence.site, tuple(faults))


def simpler(recipe: PermutedRecipe) -> Iterator[PermutedRecipe]:
    """Simpler evidence, moved in the same way."""
    yield from (replace(recipe, evidence=evidence) for evidence in defended.simpler(recipe.evidence))


def reproduce(recipe: PermutedRecipe) -> str:
    """A few lines of Python that show the failure."""
    return attack_again(
        recipe,
        "judge(recipe, recovery).faults",
        "from campaign.models import ModelRecipe",
        "from campaign.permuted import DefendedRecipe, PermutedRecipe, judge, observe",
    )


PART = Part("permuted", draw, run, simpler, reproduce, chunk=RUNS_PER_MODEL)
