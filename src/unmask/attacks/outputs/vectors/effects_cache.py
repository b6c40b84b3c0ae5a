"""Effects of tokens are kept on disk, so that a model is fitted once, on sentences that are the same for all.

The regression of the catalogue's encoder comes with the package, for its usual recipe (`regressions/`, named by the
weights' fingerprint), and so do the effects of its tokens. They are the fit's own, in float16 and in 8 bits; they say
where to look, and proofs need none of them. `save_regression` makes them.
"""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from unmask.attacks.kept_fits import fit_once
from unmask.attacks.outputs.vectors.embedder import Embedder
from unmask.attacks.outputs.vectors.insertion_effects import (
    FitSettings,
    InsertionEffects,
    Regression,
    fit_insertion_effects,
    fit_regression,
    token_features,
)
from unmask.attacks.run import Progress
from unmask.models.adapter import Model

_VERSION = 2  # raise it when the fit changes
_LENGTHS = range(3, 49)  # tokens of sentences that are used
_RANDOM = (500, 16)  # sentences of random tokens, and the longest
_CONTEXTS = {"cpu": 8_000, "cuda": 30_000}
_REGRESSIONS = files("unmask.attacks.outputs.vectors").joinpath("regressions")


def load_effects(embedder: Embedder, progress: Progress) -> InsertionEffects:
    """The effects of a model and a recipe; fitted if they are not on the disk yet."""
    device = embedder.model.device
    settings = FitSettings(contexts=_CONTEXTS.get(device.type, 8_000))
    name = f"{embedder.model.fingerprint()} {embedder.recipe} {settings} {_VERSION} {_sentences()}"

    def fit() -> dict[str, Tensor]:
        sentences, known = read_sentences(embedder.model), packaged_regression(embedder)
        return vars(fit_insertion_effects(embedder, sentences, settings, progress=progress, regression=known))

    return InsertionEffects(**fit_once("effects", name, fit, device))


def save_regression(embedder: Embedder, folder: Path) -> Path:
    """Fit a model, and write what `load_effects` takes from the package."""
    sentences = read_sentences(embedder.model)
    settings = FitSettings(contexts=_CONTEXTS[embedder.model.device.type])
    features = token_features(embedder)
    fitted = fit_regression(embedder, features, sentences, settings)
    path = folder / _file_name(embedder)
    kept = {name: value.half().cpu().contiguous() for name, value in vars(fitted).items() if value is not None}
    rows = features @ fitted.features
    scales = rows.abs().amax(1, keepdim=True) / 127
    kept |= {"rows": (rows / scales).round().to(torch.int8).cpu(), "scales": scales.half().cpu()}
    save_file(kept, path, metadata={"recipe": str(embedder.recipe), "settings": str(settings)})
    return path


def packaged_regression(embedder: Embedder) -> Regression | None:
    """What comes with the package for a model and a recipe, if anything; a GPU fits more contexts within seconds."""
    if embedder.model.device.type != "cpu":
        return None
    with as_file(_REGRESSIONS.joinpath(_file_name(embedder))) as path:
        if not path.exists():
            return None
        with safe_open(path, "pt", device=str(embedder.model.device)) as file:
            if (file.metadata() or {}).get("recipe") != str(embedder.recipe):
                return None
            kept = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        rows = kept.pop("rows") * kept.pop("scales")
        return Regression(**kept, rows=rows)


def _file_name(embedder: Embedder) -> str:
    return f"{embedder.model.fingerprint()[:32]}.safetensors"


def read_sentences(model: Model) -> list[tuple[int, ...]]:
    """Ordinary sentences (SmolLM2 wrote them) in a model's tokens, without the special ones.

    A model without a tokenizer gets tokens at random.
    """
    if model.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(0, model.vocab_size, _RANDOM, generator=generator).tolist()
        return [tuple(row[: 3 + number % (_RANDOM[1] - 2)]) for number, row in enumerate(rows)]
    opening, closing = model.special_frame
    framed = (model.encode(line) for line in _sentences().splitlines() if line)
    tokens = (tuple(line[len(opening) : len(line) - len(closing)]) for line in framed)
    return [line for line in tokens if len(line) in _LENGTHS]


def _sentences() -> str:
    return files("unmask.attacks.outputs.vectors").joinpath("sentences.txt").read_text(encoding="utf-8")
