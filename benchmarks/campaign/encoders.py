"""Encoders: random updates of tiny BERT models, and of MiniLM where it is installed."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from campaign.batches import draw_batch
from campaign.gradients import draw_obstacles, draw_protocol
from campaign.models import CLS, SEP, ModelRecipe, add_trap
from campaign.outcome import Part
from campaign.updates import UpdateRecipe, reproduce, run, simpler
from unmask.models.catalog import CATALOG, find_package_folder

RUNS_PER_MODEL = 10
MINILM = ModelRecipe(family="minilm-l6", width=384, vocab=30522)
MINILM_FRAME = (101, 102)
KEPT = (
    ("embeddings.word",),
    ("encoder.layer.0.",),
    ("attention.self",),
    ("embeddings.", "encoder.layer.0."),
    ("encoder.",),
)
WITHHELD = ("word_embeddings", "embeddings", "encoder.layer.0.", "attention.self", "output.dense")


def draw(seed: int) -> UpdateRecipe:
    """The recipe of a seed; neighbours share a model, every fiftieth is real."""
    rng = random.Random(f"encoders {seed}")
    model = draw_encoder(random.Random(f"encoder {seed // RUNS_PER_MODEL}"))
    if seed % 50 == 49 and minilm_is_installed():
        model = MINILM
    is_real = model == MINILM
    words = range(1000, 29000) if is_real else range(5, model.vocab)
    kind, texts = draw_batch(rng, words, model)
    settings: dict[str, Any] = {"padding": rng.choice(("right", "right", "left")), "seed": rng.randrange(10**6)}
    settings |= rng.choice(({"task": "classification"}, {"task": "classification"}, {"task": "masked_token"}))
    if settings["task"] == "classification":
        settings |= {"pooling": rng.choice((None, "first", "mean"))} | draw_protocol(rng, len(texts))
    if rng.random() < 0.08:
        settings["max_length"] = rng.randint(4, 8)
    settings |= draw_obstacles(rng, KEPT, WITHHELD)
    if not settings.get("optimizer"):
        settings["forget"] = tuple(name for name in settings["forget"] if name != "learning_rate")
    framed = [frame(rng, text, *(MINILM_FRAME if is_real else (CLS, SEP))) for text in texts[: 3 if is_real else 5]]
    return UpdateRecipe(model, tuple(framed), kind=kind, **settings)


def draw_encoder(rng: random.Random) -> ModelRecipe:
    """A small BERT, with a trap now and then."""
    vocab = rng.choice((60, 100, 200, 500))
    recipe = ModelRecipe(
        family="bert",
        width=rng.choice((32, 48, 64, 96)),
        blocks=rng.randint(1, 3),
        vocab=vocab,
        heads=rng.choice((2, 4)),
        head=rng.choices(("words", "none", "labels"), (4, 2, 1))[0],
        seed=rng.randrange(1000),
    )
    return add_trap(rng, recipe, range(5, vocab))


def frame(rng: random.Random, text: tuple[int, ...], first: int, last: int) -> tuple[Any, ...]:
    """A text as the tokenizer frames it; now and then as a pair, or without its frame."""
    choice = rng.random()
    if choice < 0.05:
        return text
    if choice < 0.12 and len(text) > 1:
        cut = rng.randint(1, len(text) - 1)
        return ((first, *text[:cut], last), (*text[cut:], last))
    return (first, *text, last)


@cache
def minilm_is_installed() -> bool:
    """Whether the real weights are here."""
    return find_package_folder(CATALOG["minilm-l6"]) is not None


PART = Part("encoders", draw, run, simpler, reproduce, chunk=RUNS_PER_MODEL)
