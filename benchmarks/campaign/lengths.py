"""Services that are another function at other lengths: what is RECOVERED is true at the lengths that it speaks of."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import unmask
from campaign.oracles import MOST_WRONG, are_wrong, draw_sequences, run_attack
from campaign.outcome import FALSE_LAYER, Fault, Outcome, Part, ShortRepr, python
from campaign.zoo import Function
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Recovery, Status

_NUM_FRESH = 16  # sequences of each length
_ALL_UP_TO = 16  # lengths of which every one is asked
_LONGEST = 200  # beyond what certificates speak of


@dataclass(frozen=True, repr=False)
class LengthsRecipe(ShortRepr):
    """Heads, what their service does to sequences of some lengths, what it shows, and how it may be asked."""

    kind: str
    length: int = 8
    heads: int = 1
    shows: str = "numbers"
    width: int = 3
    max_norm: float | None = None
    noise: float = 0.0
    seed: int = 0


def _top(heads: HeadWeights, X: Tensor, count: int) -> Tensor:
    """Each head reads the tokens of its largest scores alone."""
    answers = torch.zeros(())
    for W, v in zip(heads.W, heads.v, strict=True):
        scores = torch.einsum("bnd,bd->bn", X, X[:, -1] @ W.T)
        least = scores.topk(min(count, X.shape[1]), dim=1).values[:, -1:]
        shares = scores.masked_fill(scores < least, -torch.inf).softmax(1)
        answers = answers + torch.einsum("bn,bnd->bd", shares, X) @ v
    return answers


def _sharper(heads: HeadWeights, factor: float) -> HeadWeights:
    return HeadWeights(W=factor * heads.W, v=heads.v)


# By the heads, other heads, the sequences (n tokens) and the recipe's length.
KINDS: Mapping[str, Callable[[HeadWeights, HeadWeights, Tensor, int], Tensor]] = {
    "equal": lambda own, other, X, length: own(X),  # the control: the same at all lengths
    "odd": lambda own, other, X, length: _sharper(own, 1 + X.shape[1] % 2)(X),
    "multiples": lambda own, other, X, length: _sharper(own, 1 if X.shape[1] % length else 2)(X),
    "from": lambda own, other, X, length: (own if X.shape[1] < length else other)(X),
    "single": lambda own, other, X, length: (other if X.shape[1] == length else own)(X),
    "window": lambda own, other, X, length: own(X[:, -length:]),
    "beginning": lambda own, other, X, length: own(torch.cat([X[:, :-1][:, :length], X[:, -1:]], 1)),
    "chunks": lambda own, other, X, length: own(X[:, (X.shape[1] - 1) // length * length :]),
    "top": lambda own, other, X, length: _top(own, X, length),
    "scaled": lambda own, other, X, length: _sharper(own, max(1.0, X.shape[1] / length) ** 0.5)(X),
    "sums": lambda own, other, X, length: own(X) * max(1.0, X.shape[1] / length),
}


def draw(seed: int) -> LengthsRecipe:
    """The recipe of a seed: every kind in turn."""
    rng, kinds = random.Random(f"lengths {seed}"), list(KINDS)
    return LengthsRecipe(
        kind=kinds[seed % len(kinds)],
        length=rng.choice((2, 3, 5, 7, 8, 9, 13, rng.randint(2, _LONGEST), rng.randint(17, _LONGEST))),
        heads=rng.choice((1, 1, 2, 3)),
        shows=rng.choice(("numbers", "numbers", "numbers", "vectors", "signs", "network")),
        width=rng.choice((2, 3, 4)),
        max_norm=rng.choice((None, None, None, 10.0)),
        noise=rng.choice((0.0, 0.0, 0.0, 1e-6, 1e-3, 1e-2)),
        seed=seed,
    )


def make_service(recipe: LengthsRecipe, noisy: bool = True) -> Function:
    """The service, its weights drawn from the seed; without its noise it is what a recovery is compared with."""
    generator = torch.Generator().manual_seed(recipe.seed)
    chance = torch.Generator().manual_seed(recipe.seed + 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    width, many = recipe.width, recipe.shows in ("numbers", "vectors")
    count, outputs = min(recipe.heads, width) if many else 1, () if recipe.shows in ("numbers", "signs") else (width,)
    own, other = (HeadWeights(W=normal(count, width, width), v=normal(count, width, *outputs)) for _ in range(2))
    hidden, output = normal(width, width), normal(width)
    after: Mapping[str, Callable[[Tensor], Tensor]] = {
        "signs": torch.sign if noisy else lambda answers: answers,
        "network": lambda answers: (answers @ hidden).relu() @ output,
    }

    def answer(X: Tensor) -> Tensor:
        shown = after.get(recipe.shows, lambda answers: answers)(KINDS[recipe.kind](own, other, X, recipe.length))
        return shown + noisy * recipe.noise * torch.randn(shown.shape, generator=chance, dtype=shown.dtype)

    return answer


def attack(recipe: LengthsRecipe) -> Recovery[Any]:
    """The whole attack on the service."""
    oracle = unmask.FunctionOracle(make_service(recipe), recipe.kind)
    return unmask.recover_weights(oracle, width=recipe.width, max_norm=recipe.max_norm, seed=recipe.seed)


def run(recipe: LengthsRecipe) -> Outcome:
    """Attack, then compare at every length that the certificate speaks of."""
    return run_attack(recipe, recipe.kind, attack, false_lengths)


def false_lengths(recipe: LengthsRecipe, recovery: Recovery[Any]) -> list[Fault]:
    """A RECOVERED layer that is another one where its certificate holds."""
    if recovery.status is not Status.RECOVERED:
        return []
    longest = int(recovery.certificate.details.get("longest_checked", _ALL_UP_TO))
    wrong = [length for length in range(1, longest + 1) if _is_wrong(recipe, recovery, length)]
    if not [length for length in wrong if length <= _ALL_UP_TO] and len(wrong) <= MOST_WRONG * longest:
        return []
    says = f"RECOVERED up to {longest} tokens, and {len(wrong)} lengths are answered otherwise: {wrong[:8]}"
    return [Fault(FALSE_LAYER, says)]


def _is_wrong(recipe: LengthsRecipe, recovery: Recovery[Any], length: int) -> bool:
    """Whether most fresh sequences of a length are answered otherwise; signs tell answers up to their size."""
    generator = torch.Generator().manual_seed(recipe.seed + length)
    X = draw_sequences(recipe, (_NUM_FRESH, length), generator)
    answers, learned = make_service(recipe, noisy=False)(X), recovery.value(X)
    if recipe.shows == "signs":
        answers, learned = (each / each.norm().clamp_min(1e-300) for each in (answers, learned))
    return 2 * int(are_wrong(answers, learned, recovery.certificate.tolerance).sum()) > _NUM_FRESH


def simpler(recipe: LengthsRecipe) -> Iterator[LengthsRecipe]:
    """Fewer heads, a smaller width, nothing special."""
    changes = {"noise": 0.0}, {"max_norm": None}, {"shows": "numbers"}, {"heads": 1}, {"width": 2}, {"length": 8}
    for change in changes:
        if (other := replace(recipe, **change)) != recipe:
            yield other


def reproduce(recipe: LengthsRecipe) -> str:
    """A few lines of Python that show the failure."""
    return python(
        "from campaign.lengths import LengthsRecipe, attack, false_lengths",
        f"recipe = {recipe!r}",
        "recovery = attack(recipe)",
        "print(recovery, *false_lengths(recipe, recovery), sep='\\n')",
    )


PART = Part("lengths", draw, run, simpler, reproduce, chunk=4, limit_seconds=300.0)
