"""Batches of token ids that are hard for an attack, by kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from campaign.models import ModelRecipe

Text = tuple[int, ...]
Draw = Callable[[random.Random, Sequence[int], ModelRecipe], list[Text]]
LONGEST = 12


def draw_batch(rng: random.Random, words: Sequence[int], model: ModelRecipe) -> tuple[str, list[Text]]:
    """The kind of a batch and its texts; batches that use the model's trap come first where it has one."""
    own = [kind for kind, is_trap in _trapped(model).items() if is_trap]
    kind = rng.choice(own) if own and rng.random() < 0.7 else rng.choice(list(_KINDS))
    texts = (_KINDS | _TRAPS)[kind](rng, words, model)
    if rng.random() < 0.15:
        kind, texts = "mixed", texts + _KINDS[rng.choice(list(_KINDS))](rng, words, model)
    rng.shuffle(texts)
    return kind, [text[:LONGEST] for text in texts[:8]]


def _trapped(model: ModelRecipe) -> dict[str, bool]:
    return {"equal": bool(model.equal), "near": bool(model.near), "predictable": bool(model.fitted)}


def _text(rng: random.Random, words: Sequence[int], shortest: int = 2, longest: int = 8) -> Text:
    return tuple(rng.choices(words, k=rng.randint(shortest, longest)))


def _plain(rng: random.Random, words: Sequence[int], model: ModelRecipe) -> list[Text]:
    return [_text(rng, words) for _ in range(rng.randint(1, 6))]


def _prefixes(rng: random.Random, words: Sequence[int], model: ModelRecipe) -> list[Text]:
    """Texts that begin alike: one ends where others go on."""
    longest = _text(rng, words, 4, 9)
    cuts = [longest[: rng.randint(1, len(longest))] for _ in range(rng.randint(1, 3))]
    forks = [longest[: rng.randint(1, 3)] + _text(rng, words, 1, 3) for _ in range(rng.randint(0, 2))]
    return [longest, *cuts, *forks]


def _repeats(rng: random.Random, words: Sequence[int], model: ModelRecipe) -> list[Text]:
    """Texts of two or three words, over and over."""
    few = rng.sample(words, rng.randint(1, 3))
    return [_text(rng, few, 2, 9) for _ in range(rng.randint(1, 4))]


def _duplicates(rng: random.Random, words: Sequence[int], model: ModelRecipe) -> list[Text]:
    texts = _plain(rng, words, model)[:3]
    return [text for text in texts for _ in range(rng.randint(1, 3))]


def _runs(rng: random.Random, words: Sequence[int], model: ModelRecipe) -> list[Text]:
    """Runs of a leading token, of several lengths, before tails that may be the same."""
    tails = [_text(rng, words, 0, 3) for _ in range(rng.randint(1, 2))]
    firsts = rng.sample(words, rng.randint(1, 2))
    runs = [(rng.choice(firsts),) * rng.randint(1, 6) + rng.choice(tails) for _ in range(rng.randint(1, 4))]
    return [*runs, *(_plain(rng, words, model)[:1] if rng.random() < 0.5 else [])]


def _short(rng: random.Random, words: Sequence[int], model: ModelRecipe) -> list[Text]:
    """Texts of one token among others."""
    few = rng.sample(words, 3)
    ones = [(rng.choice(few),) for _ in range(rng.randint(1, 3))]
    return [*ones, *(_text(rng, few if rng.random() < 0.5 else words, 1, 4) for _ in range(rng.randint(0, 3)))]


def _anagrams(rng: random.Random, words: Sequence[int], model: ModelRecipe) -> list[Text]:
    """The same words in other orders."""
    text = _text(rng, words, 3, 6)
    return [tuple(rng.sample(text, len(text))) for _ in range(rng.randint(2, 4))]


def _special(rng: random.Random, words: Sequence[int], model: ModelRecipe) -> list[Text]:
    """Texts with the padding token and the end token inside, in front and behind."""
    special = (model.pad, 1, 2)
    return [
        tuple(rng.choice(special) if rng.random() < 0.35 else word for word in text)
        for text in _plain(rng, words, model)
    ]


def _many(rng: random.Random, words: Sequence[int], model: ModelRecipe) -> list[Text]:
    """About as many tokens as the model is wide, or more."""
    return [_text(rng, words, 6, LONGEST) for _ in range(rng.randint(3, 8))]


def _equal(rng: random.Random, words: Sequence[int], model: ModelRecipe) -> list[Text]:
    """Texts with tokens that no forward pass tells apart."""
    tokens = [token for group in model.equal for token in group]
    return _sprinkle(rng, tokens, _plain(rng, words, model))


def _near(rng: random.Random, words: Sequence[int], model: ModelRecipe) -> list[Text]:
    return _sprinkle(rng, [token for pair in model.near for token in pair[:2]], _plain(rng, words, model))


def _sprinkle(rng: random.Random, tokens: Sequence[int], texts: list[Text]) -> list[Text]:
    return [tuple(rng.choice(tokens) if rng.random() < 0.3 else word for word in text) for text in texts]


def _predictable(rng: random.Random, words: Sequence[int], model: ModelRecipe) -> list[Text]:
    """Texts that the model knows, some cut where it is sure of what follows, among others."""
    known = [text if rng.random() < 0.6 else text[: rng.randint(1, len(text))] for text in model.fitted]
    return [*known, *_plain(rng, words, model)[: rng.randint(0, 2)]]


_KINDS: dict[str, Draw] = {
    "plain": _plain,
    "prefixes": _prefixes,
    "repeats": _repeats,
    "duplicates": _duplicates,
    "runs": _runs,
    "short": _short,
    "anagrams": _anagrams,
    "special": _special,
    "many": _many,
}
_TRAPS: dict[str, Draw] = {"equal": _equal, "near": _near, "predictable": _predictable}
