"""Invented sentences, as many as are asked for: nobody's data."""

from __future__ import annotations

import random

from unmask.audit.cases.data import INVENTED_TEXTS as TEXTS

_PEOPLE = ("Anna Weber", "our lawyer", "the new nurse", "Tom Okafor", "my sister", "the night guard", "Ms Lindqvist")
_DEEDS = ("has not paid", "will inherit", "quietly sold", "borrowed", "insured", "lost", "returned", "still hides")
_THINGS = ("the summer house", "a grey van", "twelve paintings", "her shares", "the old boat", "two laptops", "a ring")
_PLACES = ("in Tromsø", "near the lake", "on Mill Street", "at the clinic", "behind the school", "in room 214")
_TIMES = ("last autumn", "on Tuesday", "before the audit", "in June", "without a contract", "three years ago")


def invented(count: int, seed: int = 0) -> list[str]:
    """The texts of the demo first, then sentences of a small grammar, no two alike."""
    generator = random.Random(seed)
    texts = dict.fromkeys(TEXTS[:count])
    while len(texts) < count:
        parts = (generator.choice(words) for words in (_PEOPLE, _DEEDS, _THINGS, _PLACES, _TIMES))
        texts[f"{' '.join(parts)}.".capitalize()] = None
    return list(texts)
