"""Python blocks of pages that show a fragment: each runs with what its page says is there already."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.attacks.queries.many_heads.test_known_subspaces import known
from tests.attacks.queries.random_heads import random_head
from tests.attacks.queries.test_samples import samples_of
from tests.audit.made import save_llama
from tests.docs.pages import code_of
from tests.test_attention_service import started

import unmask
from unmask.recovery import Status


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def execute(page: str, number: int = 0, change: tuple[str, str] = ("", ""), **names: Any) -> dict[str, Any]:
    """Run a block of a page, with a word of it changed; the names that it leaves."""
    exec(compile(code_of(page)[number].replace(*change), f"{page}, block {number + 1}", "exec"), names)
    return names


def test_an_update_that_was_captured_elsewhere():
    folder = Path("path/to/round-17")
    folder.mkdir(parents=True)
    save_llama(folder)
    model = unmask.load_model(folder)
    model.hf.zero_grad()
    tokens = torch.tensor([[5, 6, 7, 8]] * 3 + [[9, 10, 11, 12]] * 5)
    model.hf(input_ids=tokens, labels=tokens).loss.backward()
    save_file({name: weight.grad for name, weight in model.hf.named_parameters()}, "captured.safetensors")
    execute("docs/evidence-format.md")
    recovery = unmask.recover_text(unmask.load_evidence("update.safetensors"), model)
    counts = {text.tokens: text.count for text in recovery.value.texts}
    assert counts == {(5, 6, 7, 8): 3, (9, 10, 11, 12): 5}


def test_a_federation_is_audited(minilm):
    pytest.importorskip("flwr", reason="the server app needs Flower: pip install 'unmask[flower]'")
    from unmask.integrations.flower import WatchedGrid

    class Strategy:
        def start(self, **arguments: Any) -> dict[str, Any]:
            return arguments

    names = execute("docs/flower.md", grid=None, arrays=None, num_rounds=3, strategy=Strategy())
    assert isinstance(names["result"]["grid"], WatchedGrid)


def test_a_client_audits_itself(minilm):
    flwr = pytest.importorskip("flwr.clientapp", reason="the client app needs Flower: pip install 'unmask[flower]'")
    assert isinstance(execute("docs/flower.md", 1)["app"], flwr.ClientApp)


def test_an_audit_from_python(capsys):
    Path("plan.toml").write_text('[[queries]]\nsecrets = ["random:heads=1,width=4"]\ngates = ["no weights"]\n')
    names = execute("docs/plans.md")
    assert names["verdict"].exit_code == 1
    assert "leaks" in capsys.readouterr().out
    assert Path("runs/audit/report.html").is_file()


def test_weights_from_queries(commands):
    head = random_head(16)
    heads, bases = known(4, 4, 16)
    samples = samples_of(random_head(6), 160)
    with ExitStack() as stack:
        url = stack.enter_context(started(commands, "--heads", "1", "--width", "16")).url
        names = execute(
            "docs/queries.md",
            change=("width=64", "width=16"),
            unmask=unmask,
            f=head,
            url=url,
            oracle=unmask.FunctionOracle(heads),
            bases=bases,
            sequences=samples.sequences,
            answers=samples.answers,
        )
    assert names["recovery"].status is Status.RECOVERED
    assert unmask.score_heads(names["recovery"].value, head).worst_W_error < 1e-9
    assert Path("answers.sqlite").is_file()


def test_weights_are_converted_file_by_file():
    source = Path("llama-2-7b")
    source.mkdir()
    save_file({"weight": torch.ones(2, 3, dtype=torch.bfloat16)}, source / "model-1.safetensors")
    save_file({"bias": torch.ones(4, dtype=torch.float16)}, source / "model-2.safetensors")
    execute("docs/scale.md")
    found = {name: tensor for file in Path("llama-2-7b-float32").iterdir() for name, tensor in load_file(file).items()}
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(("weight", "bias"), torch.float32)


def test_texts_are_verified(smollm2, monkeypatch, capsys):
    monkeypatch.setattr(unmask, "load_model", lambda name: smollm2, raising=False)
    execute("docs/verify.md")
    assert capsys.readouterr().out.splitlines()[0].startswith("CERTAIN The vault code is 4711.")
