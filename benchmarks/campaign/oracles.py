"""A zoo of oracles against `recover_weights`: what is RECOVERED must answer as the oracle does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

import unmask
from campaign.outcome import FALSE_LAYER, Fault, Outcome, Part, ShortRepr
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
    try:
        recovery = attack(recipe)
    except unmask.UnmaskError as error:
        return Outcome("refused", recipe.function, refusal=str(error))
    return Outcome(recovery.status.name, recipe.function, tuple(false_layer(recipe, recovery)))


def false_layer(recipe: OracleRecipe, recovery: Recovery[HeadWeights]) -> list[Fault]:
    """A RECOVERED layer that answers fresh random sequences otherwise than the function."""
    if recovery.status is not Status.RECOVERED:
        return []
    function = make_function(recipe)
    function = getattr(function, "behind", function)
    generator = torch.Generator().manual_seed(recipe.seed + 10**6)
    allowed = max(LOOSEST, 10 * recovery.certificate.tolerance)
    wrong = total = 0
    for size in (0.5, 1.0, 2.0):
        for length in (2, 4, 7):
            shape = (NUM_FRESH, length, recipe.width)
            X = size * torch.randn(shape, generator=generator, dtype=torch.float64)
            if recipe.max_norm is not None:
                X = X * (recipe.max_norm / X.norm(dim=2, keepdim=True)).clamp(max=1)
            answers = function(X).double()
            size_of_answers = answers.square().mean().sqrt().clamp_min(1e-300)
            off = (answers - recovery.value(X)).abs() / size_of_answers
            off = off.flatten(1).amax(1) if off.ndim > 1 else off
            wrong, total = wrong + int((off > allowed).sum()), total + len(off)
    if wrong <= MOST_WRONG * total:
        return []
    return [Fault(FALSE_LAYER, f"RECOVERED {len(recovery.value)} heads; {wrong} of {total} fresh answers differ")]


def simpler(recipe: OracleRecipe) -> Iterator[OracleRecipe]:
    """A smaller width, nothing special."""
    for change in ({"max_norm": None}, {"budget": 20_000}, {"width": 1}, {"width": recipe.width - 1 or 1}):
        if (other := replace(recipe, **change)) != recipe:  # type: ignore[arg-type]
            yield other


def reproduce(recipe: OracleRecipe) -> str:
    """A few lines of Python that show the failure."""
    return "\n".join(
        (
            "import sys; sys.path.insert(0, 'benchmarks')",
            "from campaign.oracles import OracleRecipe, attack, false_layer",
            f"recipe = {recipe!r}",
            "recovery = attack(recipe)",
            "print(recovery, *false_layer(recipe, recovery), sep='\\n')",
        )
    )


PART = Part("oracles", draw, run, simpler, reproduce, chunk=4, limit_seconds=300.0)
