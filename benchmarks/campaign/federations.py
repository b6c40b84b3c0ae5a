"""Clients of LLM federations: adapters after gradients or local steps, whole models under few digits and noise."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from campaign import encoders, gradients
from campaign.outcome import Part
from campaign.updates import UpdateRecipe, reproduce, run, simpler

RUNS_PER_MODEL = 10
BLURS = (
    *("bf16", "bf16", "fp16", "fp8", "int8", "int8:stochastic=true", "topk:share=0.3"),
    *("noise:sigma=1e-8", "noise:sigma=1e-6", "noise:sigma=1e-5", "noise:sigma=1e-4", "noise:sigma=1e-2,relative=true"),
)


def draw(seed: int) -> UpdateRecipe:
    """The recipe of a seed; neighbours share a model."""
    rng = random.Random(f"federations {seed}")
    update = encoders.draw(seed) if seed // RUNS_PER_MODEL % 4 == 3 else gradients.draw(seed)
    is_plain = update.model != encoders.MINILM and not update.split and not update.masked and update.dtype == "float32"
    if not is_plain:
        return draw(seed + 1_000_003)
    kept: dict[str, Any] = {"task": update.task, "pooling": update.pooling, "padding": "right", "seed": update.seed}
    forget = tuple(name for name in update.forget if name != "task")
    plain = UpdateRecipe(update.model, update.texts, update.kind, forget=forget, **kept)
    return draw_lora(rng, plain) if rng.random() < 0.6 else draw_blurred(rng, plain)


def draw_lora(rng: random.Random, plain: UpdateRecipe) -> UpdateRecipe:
    """Adapters: their gradients, or their change after local steps; of a first round or a later one."""
    settings: dict[str, Any] = {"rank": rng.choice((2, 4, 8, 16))}
    earlier: tuple[Any, ...] = ()
    if rng.random() < 0.7:
        settings["steps"] = rng.choice((1, 2))
        words = range(5, plain.model.vocab)
        earlier = tuple(tuple(rng.choices(words, k=5)) for _ in range(2))
    if rng.random() < 0.5:
        settings["local_steps"] = rng.choice((1, 1, 2, 3, 5))
        settings["optimizer"] = rng.choice(("adamw", "adamw", "sgd"))
        settings["local_learning_rate"] = rng.choice((1e-1, 1e-2, 1e-3, 5e-5))
    text = ",".join(f"{name}={value}" for name, value in settings.items())
    blur = (rng.choice(BLURS),) if rng.random() < 0.3 else ()
    forget = tuple(name for name in plain.forget if name != "learning_rate" or "local_steps" in settings)
    return replace(plain, protocol=f"lora:{text}", earlier=earlier, defences=blur, forget=forget)


def draw_blurred(rng: random.Random, plain: UpdateRecipe) -> UpdateRecipe:
    """The whole model: few digits, noise or local steps."""
    if rng.random() < 0.7:
        forget = tuple(name for name in plain.forget if name != "learning_rate")
        return replace(plain, defences=(rng.choice(BLURS),), forget=forget)
    steps, rate = rng.choice((1, 2, 4, 10)), rng.choice((0.1, 0.01, 0.001))
    return replace(plain, optimizer="sgd", steps=steps, learning_rate=rate)


PART = Part("federations", draw, run, simpler, reproduce, chunk=RUNS_PER_MODEL)
