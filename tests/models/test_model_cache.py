"""What is kept of a model is made once for the same weights, whoever holds them, and only of the last few models."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.recover import as_client_ran_it
from unmask.models import Model
from unmask.models import model_cache as kept
from unmask.models.model_cache import compute_once


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_KEPT", type(kept._KEPT)())


def is_made(model: Model, key: str = "test") -> bool:
    """Whether the value had to be made."""
    made = []
    compute_once(model, key, lambda: made.append(1))
    return bool(made)


def test_it_is_made_once_for_each_model_and_key(tiny_gpt2, tiny_llama):
    made: list[str] = []
    for model, name in ((tiny_gpt2, "a"), (tiny_gpt2, "a"), (tiny_gpt2, "b"), (tiny_llama, "a")):
        assert compute_once(model, ("test", name), lambda name=name: made.append(name) or name) == name
    assert made == ["a", "b", "a"]


def test_copies_with_the_same_weights_share_it(tiny_gpt2):
    """A client in bfloat16 gets a copy of the model at every call; each was fitted anew, 20 seconds for SmolLM2."""
    assert is_made(tiny_gpt2)
    assert not is_made(tiny_gpt2.to())
    assert is_made(as_client_ran_it(tiny_gpt2, torch.bfloat16))
    assert not is_made(as_client_ran_it(tiny_gpt2, torch.bfloat16))


def test_other_digits_are_another_model(tiny_gpt2):
    """Fingerprints of evidence are rounded to bfloat16; here every digit counts."""
    assert is_made(tiny_gpt2)
    assert is_made(tiny_gpt2.to(dtype=torch.float64))
    changed = tiny_gpt2.to()
    for parameter in changed.hf.parameters():
        parameter.data *= 1 + 1e-6
    assert is_made(changed)


def test_one_other_row_of_the_embedding_is_another_model(tiny_llama):
    """A sample of the weights need not see it; which tokens are equal hangs on it."""
    assert is_made(tiny_llama)
    for token in (7, 311):
        changed = tiny_llama.to()
        changed.parameter(changed.token_embedding).data[token] = changed.parameter(changed.token_embedding).data[5]
        assert is_made(changed)


def test_only_the_last_models_are_kept(tiny_gpt2, tiny_llama):
    assert is_made(tiny_llama)
    for step in range(kept._MOST_MODELS):
        changed = tiny_gpt2.to()
        changed.hf.transformer.ln_f.weight.data += step
        assert is_made(changed)
    assert len(kept._KEPT) == kept._MOST_MODELS
    assert is_made(tiny_llama)
