"""MiniLM with the effects of its tokens, by the regression that comes with the package."""

from __future__ import annotations

import os

import pytest
from filelock import FileLock
from safetensors.torch import load_file, save_file

from unmask.attacks.outputs.vectors.effects_cache import packaged_regression, read_sentences
from unmask.attacks.outputs.vectors.embedder import Embedder
from unmask.attacks.outputs.vectors.insertion_effects import InsertionEffects, fit_insertion_effects
from unmask.models import Model
from unmask.models.pooling import recipe_of


@pytest.fixture(scope="session")
def embedder(minilm: Model) -> Embedder:
    return Embedder(minilm, recipe_of(minilm))


@pytest.fixture(scope="session")
def effects(embedder: Embedder, tmp_path_factory: pytest.TempPathFactory) -> InsertionEffects:
    """Computed once a run, by whichever of its processes comes first."""
    own = tmp_path_factory.getbasetemp()
    path = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "effects.safetensors"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            known = packaged_regression(embedder)
            assert known is not None
            made = fit_insertion_effects(embedder, read_sentences(embedder.model), regression=known)
            save_file({name: tensor.contiguous() for name, tensor in vars(made).items()}, path)
        return InsertionEffects(**load_file(path))
