"""Fitted effects are kept on disk, so that a model is fitted once, on sentences that are the same for all."""

from __future__ import annotations

from importlib.resources import files

import torch
from torch import Tensor

from unmask.attacks.kept_fits import fit_once
from unmask.attacks.outputs.vectors.embedder import Embedder
from unmask.attacks.outputs.vectors.insertion_effects import FitSettings, InsertionEffects, fit_insertion_effects
from unmask.attacks.run import Progress
from unmask.models.adapter import Model
from unmask.models.pooling import special_frame

_VERSION = 1  # raise it when the fit changes
_LENGTHS = range(3, 49)  # tokens of sentences that are used
_RANDOM = (500, 16)  # sentences of random tokens, and the longest
_CONTEXTS = {"cpu": 8_000, "cuda": 30_000}


def load_effects(embedder: Embedder, progress: Progress) -> InsertionEffects:
    """The effects of a model and a recipe; fitted if they are not on the disk yet."""
    device = embedder.model.device
    settings = FitSettings(contexts=_CONTEXTS.get(device.type, 8_000))
    name = f"{embedder.model.fingerprint()} {embedder.recipe} {settings} {_VERSION} {_sentences()}"

    def fit() -> dict[str, Tensor]:
        sentences = read_sentences(embedder.model)
        return vars(fit_insertion_effects(embedder, sentences, settings, progress=progress))

    return InsertionEffects(**fit_once("effects", name, fit, device))


def read_sentences(model: Model) -> list[tuple[int, ...]]:
    """Ordinary sentences (SmolLM2 wrote them) in a model's tokens, without the special ones.

    A model without a tokenizer gets tokens at random.
    """
    if model.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(0, model.vocab_size, _RANDOM, generator=generator).tolist()
        return [tuple(row[: 3 + number % (_RANDOM[1] - 2)]) for number, row in enumerate(rows)]
    opening, closing = special_frame(model)
    framed = (model.encode(line) for line in _sentences().splitlines() if line)
    tokens = (tuple(line[len(opening) : len(line) - len(closing)]) for line in framed)
    return [line for line in tokens if len(line) in _LENGTHS]


def _sentences() -> str:
    return files("unmask.attacks.outputs.vectors").joinpath("sentences.txt").read_text(encoding="utf-8")
