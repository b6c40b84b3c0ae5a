"""The benchmark of decoders gives DAGER its best setting."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from unmask.attacks.baselines.dager import Dager
from unmask.models import Model, adapt
from unmask.protocols import observe_gradients

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_rival_is_tuned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, one_thread: None) -> None:
    """Nine texts of nine words: rank 81 of 96, which the published cut at d − 20 spoils and another one does not."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = importlib.import_module("gradients.decoders")
    torch.manual_seed(0)
    sizes = {"n_embd": 96, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 500, "initializer_range": 0.1}
    model = adapt(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval())
    words = torch.randperm(490, generator=torch.Generator().manual_seed(0))[:81] + 10
    texts = words.reshape(9, 9).tolist()
    evidence = observe_gradients(model, texts, task="classification")
    assert not Dager()(evidence, model).value.texts
    row = benchmark.compare(model, texts, evidence, repeats=1)
    assert row["paper_exact"] == row["ours_exact"] == 9
    assert "9" in capsys.readouterr().out


def test_seconds_stand_beside_those_of_the_clients_own_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, one_thread: None, tiny_llama: Model
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = importlib.import_module("gradients.decoders_cuda")
    trained = [parameter.requires_grad for parameter in tiny_llama.hf.parameters()]
    row = benchmark.measure(tiny_llama, 2, repeats=1)
    assert (row["exact"], row["false"], row["status"]) == (2, 0, "RECOVERED")
    assert row["passes"] > 0
    assert [parameter.requires_grad for parameter in tiny_llama.hf.parameters()] == trained
    assert all(parameter.grad is None for parameter in tiny_llama.hf.parameters())
    assert "2/2" in capsys.readouterr().out
