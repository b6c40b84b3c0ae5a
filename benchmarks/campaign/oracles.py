"""A zoo of oracles against `recover_weights`: what is RECOVERED must answer as the oracle does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import unmask
from campaign.outcome import FALSE_LAYER, Fault, Outcome, Part, ShortRepr, python
from campaign.zoo import ZOO, Function
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Recovery, Status

NUM_FRESH = 64  # fresh sequences for each size and length
# Of an answer. A layer that is right to the attack's own tolerance is right; beyond ten times that it is another one.
LOOSEST = 1e-3
MOST_WRONG = 0.05  # share of the fresh sequences: an oracle may misbehave where nobody has asked


@dataclass(frozen=True, repr=False)
class OracleRecipe(ShortRepr):
    """A function of the zoo, and how it may be asked."""

    function: str
    width: int = 2
    max_norm: float | None = None
    budget: int | None = 20_000
    seed: int = 0


def draw(seed: int) -> OracleRecipe:
    """The recipe of a seed: every function in turn."""
    rng = random.Random(f"oracles {seed}")
    names = list(ZOO)
    return OracleRecipe(
        function=names[seed % len(names)],
        width=rng.choice((1, 2, 3, 4)),
        max_norm=rng.choice((None, None, None, 10.0)),
        budget=rng.choice((20_000, 20_000, 300)),
        seed=seed,
    )


def make_function(recipe: OracleRecipe) -> Function:
    """The function, its weights drawn from the seed."""
    return ZOO[recipe.function](recipe.width, torch.Generator().manual_seed(recipe.seed))


def attack(recipe: OracleRecipe) -> Recovery[HeadWeights]:
    """The whole attack on the function as an oracle."""
    oracle = unmask.FunctionOracle(make_function(recipe), recipe.function)
    return unmask.recover_weights(
        oracle, width=recipe.width, budget=recipe.budget, max_norm=recipe.max_norm, seed=recipe.seed
    )


def run(recipe: OracleRecipe) -> Outcome:
    """Attack, then compare what was learned with the function."""
    return run_attack(recipe, recipe.function, attack, false_layer)


def run_attack(
    recipe: Any, group: str, attack: Callable[[Any], Recovery[Any]], faults: Callable[[Any, Recovery[Any]], list[Fault]]
) -> Outcome:
    """How an attack on a service ended, and what of it is false."""
    try:
        recovery = attack(recipe)
    except unmask.UnmaskError as error:
        return Outcome("refused", group, refusal=str(error))
    return Outcome(recovery.status.name, group, tuple(faults(recipe, recovery)))


def false_layer(recipe: OracleRecipe, recovery: Recovery[HeadWeights]) -> list[Fault]:
    """A RECOVERED layer that answers fresh random sequences otherwise than the function."""
    if recovery.status is not Status.RECOVERED:
        return []
    function = make_function(recipe)
    function = getattr(function, "behind", function)
    generator = torch.Generator().manual_seed(recipe.seed + 10**6)
    wrong = total = 0
    for size in (0.5, 1.0, 2.0):
        for length in (2, 4, 7):
            X = draw_sequences(recipe, (NUM_FRESH, length), generator, size)
            off = are_wrong(function(X).double(), recovery.value(X), recovery.certificate.tolerance)
            wrong, total = wrong + int(off.sum()), total + len(off)
    if wrong <= MOST_WRONG * total:
        return []
    return [Fault(FALSE_LAYER, f"RECOVERED {len(recovery.value)} heads; {wrong} of {total} fresh answers differ")]


def draw_sequences(recipe: Any, shape: tuple[int, int], generator: torch.Generator, size: float = 1.0) -> Tensor:
    """Random sequences of the recipe's width, within its norm."""
    X = size * torch.randn(*shape, recipe.width, generator=generator, dtype=torch.float64)
    return X if recipe.max_norm is None else X * (recipe.max_norm / X.norm(dim=2, keepdim=True)).clamp(max=1)


def are_wrong(answers: Tensor, learned: Tensor, tolerance: float) -> Tensor:
    """Of each sequence whether what was learned answers it otherwise."""
    size = answers.square().mean().sqrt().clamp_min(1e-300)
    off = ((answers - learned).abs() / size).reshape(len(answers), -1).amax(1)
    return off > max(LOOSEST, 10 * tolerance)


def simpler(recipe: OracleRecipe) -> Iterator[OracleRecipe]:
    """A smaller width, nothing special."""
    for change in ({"max_norm": None}, {"budget": 20_000}, {"width": 1}, {"width": recipe.width - 1 or 1}):
        if (other := replace(recipe, **change)) != recipe:  # type: ignore[arg-type]
            yield other


def reproduce(recipe: OracleRecipe) -> str:
    """A few lines of Python that show the failure."""
    return python(
        "from campaign.oracles import OracleRecipe, attack, false_layer",
        f"recipe = {recipe!r}",
        "recovery = attack(recipe)",
        "print(recovery, *false_layer(recipe, recovery), sep='\\n')",
    )


PART = Part("oracles", draw, run, simpler, reproduce, chunk=4, limit_seconds=300.0)
