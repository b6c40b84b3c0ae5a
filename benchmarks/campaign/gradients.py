"""Decoders: random updates of tiny GPT-2, Llama, Mistral and Qwen2 models."""

from __future__ import annotations

import random
from typing import Any

from campaign.batches import draw_batch
from campaign.models import draw_decoder
from campaign.outcome import Part
from campaign.updates import UpdateRecipe, reproduce, run, simpler

RUNS_PER_MODEL = 16
# Tensors that are sent, for updates of which some are missing: parts of names of all families.
KEPT = (
    ("h.0.", "layers.0."),
    ("h.", "layers."),
    ("wte", "embed_tokens"),
    ("h.0.attn", "layers.0.self_attn"),
    ("mlp.",),
    ("wte", "embed_tokens", "h.0.", "layers.0."),
)
WITHHELD = ("wte+embed_tokens", "mlp.c_proj+mlp.down_proj", "h.0.+layers.0.", "attn", "lm_head+wte+embed_tokens")
DEFENCES = (
    *("noise:sigma=1e-9", "noise:sigma=1e-7", "noise:sigma=1e-5", "noise:sigma=1e-3,relative=true"),
    *("bf16", "int8", "int8:stochastic=true", "fp8", "topk:share=0.5", "topk:share=0.05", "random:share=0.9"),
    *("clip:norm=0.1", "clip:norm=1000"),
)


def draw(seed: int) -> UpdateRecipe:
    """The recipe of a seed; neighbours share a model."""
    model = draw_decoder(random.Random(f"decoder {seed // RUNS_PER_MODEL}"))
    rng = random.Random(f"gradients {seed}")
    kind, texts = draw_batch(rng, range(1, model.vocab - 1), model)
    next_token = model.head == "words" and rng.random() < 0.65
    if next_token and max(map(len, texts)) < 2:
        texts.append(tuple(rng.choices(range(1, model.vocab - 1), k=3)))
    settings: dict[str, Any] = {"padding": rng.choice(("right", "right", "left")), "seed": rng.randrange(10**6)}
    if next_token:
        settings |= draw_labels(rng, texts)
    else:
        settings |= {"task": "classification", "pooling": rng.choice((None, "last", "mean"))}
    if not settings.get("masked") and not settings.get("split"):
        settings |= draw_protocol(rng, len(texts))
    kind = "masked_labels" if settings.get("masked") else "micro_batches" if settings.get("split") else kind
    settings |= draw_obstacles(rng, KEPT, WITHHELD)
    if not settings.get("optimizer"):
        settings["forget"] = tuple(name for name in settings["forget"] if name != "learning_rate")
    return UpdateRecipe(model, tuple(texts), kind=kind, **settings)


def draw_labels(rng: random.Random, texts: list[tuple[int, ...]]) -> dict[str, Any]:
    """Masked labels or summed micro-batches, now and then."""
    choice = rng.random()
    if choice < 0.12:
        masked: list[tuple[int, int]] = []
        how = rng.choice(("one", "span", "tail", "prompt", "some"))
        for text, tokens in enumerate(texts):
            length = len(tokens)
            first, last = sorted((rng.randint(1, length), rng.randint(1, length)))
            spans: dict[str, Any] = {"span": range(first, last), "tail": range(first, length)}
            spans |= {"prompt": range(1, first), "some": [place for place in range(1, length) if rng.random() < 0.3]}
            spans["one"] = range(first, min(first + 1, length)) if text == 0 else range(0)
            masked += [(text, place) for place in spans[how]]
        num_labels = sum(max(0, len(tokens) - 1) for tokens in texts)
        return {"masked": tuple(masked)} if len(masked) < num_labels else {}
    if choice < 0.18 and len(texts) > 1 and all(len(text) > 1 for text in texts):
        cut = rng.randint(1, len(texts) - 1)
        return {"split": (cut, len(texts) - cut)}
    return {}


def draw_protocol(rng: random.Random, num_texts: int) -> dict[str, Any]:
    """FedSGD as a rule, else FedAvg or a sum of clients."""
    choice = rng.random()
    if choice < 0.65:
        return {}
    if choice < 0.75 and num_texts > 1:
        cut = rng.randint(1, num_texts - 1)
        return {"clients": True, "split": (cut, num_texts - cut)}
    optimizer = rng.choice(("sgd", "sgd", "adamw"))
    rates = {"sgd": (0.1, 0.01, 0.001), "adamw": (1e-3, 5e-5)}[optimizer]
    steps = rng.choice((1, 1, 2, 3, 4))
    settings = {"optimizer": optimizer, "steps": steps, "learning_rate": rng.choice(rates)}
    if steps > 1 and num_texts > 1 and rng.random() < 0.4:
        settings["batch_size"] = rng.randint(1, num_texts - 1)
    return settings


def draw_obstacles(rng: random.Random, kept: Any, withheld: Any) -> dict[str, Any]:
    """Defences, missing tensors, a client in another precision, side knowledge that is missing."""
    settings: dict[str, Any] = {}
    chances = {"num_texts": 0.08, "task": 0.05, "learning_rate": 0.2}
    settings["forget"] = tuple(name for name, chance in chances.items() if rng.random() < chance)
    if rng.random() < 0.25:
        settings["defences"] = (rng.choice(DEFENCES),)
    elif rng.random() < 0.1:
        settings["defences"] = (f"withhold:pattern={rng.choice(withheld)}",)
    elif rng.random() < 0.1:
        settings["keep"] = rng.choice(kept)
    if rng.random() < 0.05:
        settings["dtype"] = rng.choice(("bfloat16", "float64"))
    return settings


PART = Part("gradients", draw, run, simpler, reproduce, chunk=RUNS_PER_MODEL)
