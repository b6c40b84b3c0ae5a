"""TAG reads a small client's words."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from tests.benchmarks.rivals import CASES, head_of, padded

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tag(monkeypatch: pytest.MonkeyPatch, one_thread: None):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("baselines.tag")


@pytest.fixture
def client_and_update(tag):
    matching = importlib.import_module("baselines.gradient_matching")
    make, texts = CASES["encoder"]
    model, text = make(), texts[:1]
    client = matching.Client.of_batch(model, head_of(model), text, [0])
    return client, matching.client_update(client, padded(text)), text[0]


def test_the_frame_is_kept_and_runs_repeat(tag, client_and_update):
    client, update, text = client_and_update
    (found,) = tag.Tag(num_steps=5)(client, update)
    assert len(found) == len(text)
    assert (found[0], found[-1]) == (text[0], text[-1])
    assert tag.Tag(num_steps=5)(client, update) == [found]


@pytest.mark.slow
def test_words_of_one_text(tag, client_and_update):
    client, update, text = client_and_update
    (found,) = tag.Tag(num_steps=100, starts=((0.1, 0.01), (0.03, 0.01)))(client, update)
    assert len(set(found[1:-1]) & set(text[1:-1])) >= 2  # of three words; guessing finds none
