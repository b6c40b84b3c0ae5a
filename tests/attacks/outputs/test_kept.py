"""What is kept of a model is made once, for each model, and goes with it."""

from __future__ import annotations

import gc

from unmask.attacks.outputs import kept
from unmask.attacks.outputs.kept import once


def test_it_is_made_once_for_each_model_and_key(tiny_gpt2, tiny_llama):
    made: list[str] = []
    for model, name in ((tiny_gpt2, "a"), (tiny_gpt2, "a"), (tiny_gpt2, "b"), (tiny_llama, "a")):
        assert once(model, ("test", name), lambda name=name: made.append(name) or name) == name
    assert made == ["a", "b", "a"]


def test_it_goes_with_the_model(tiny_gpt2):
    model = tiny_gpt2.to()
    once(model, "test", lambda: 1)
    before = len(kept._KEPT)
    del model
    gc.collect()
    assert len(kept._KEPT) == before - 1
