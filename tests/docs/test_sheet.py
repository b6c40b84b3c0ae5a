"""The sheet 'I have X, type Y': every command runs on small files of its kind; services are tested elsewhere."""

from __future__ import annotations

import copy
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.audit.made import WORDS, save_bert, save_llama
from tests.docs.pages import code_of

import unmask
from unmask import cli

PAGE = "docs/i-have.md"
COMMANDS = [line for block in code_of(PAGE, "bash") for line in block.splitlines() if line.startswith("unmask ")]
DONE, CROSSED, INCONCLUSIVE = 0, 1, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the sheet's reader has."""
    folder = tmp_path_factory.mktemp("sheet")
    (folder / "texts.txt").write_text("\n".join(WORDS[:2]), encoding="utf-8")
    model, encoder = unmask.load_model(save_llama(folder / "model")), unmask.load_model(save_bert(folder / "encoder"))
    np.save(folder / "embeddings.npy", unmask.observe_vectors(encoder, list(WORDS[:2])).vectors.numpy())
    tokens = model.tokenizer(WORDS[0], return_tensors="pt").input_ids
    with torch.no_grad():
        output = model.hf(tokens, output_hidden_states=True, use_cache=True)
    first = output.past_key_values.layers[0]
    np.save(folder / "logits.npy", output.logits[:, -1].numpy())
    np.save(folder / "states.npy", output.hidden_states[1].numpy())
    np.save(folder / "mask.npy", np.ones(tokens.shape, dtype=np.int64))
    np.savez(folder / "keys-values.npz", keys=first.keys.numpy(), values=first.values.numpy())
    _train(copy.deepcopy(model.hf), tokens, folder)
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    adapted = peft.get_peft_model(copy.deepcopy(model.hf), peft.LoraConfig(r=4, init_lora_weights=False))
    adapted.save_pretrained(folder / "adapter-before")
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    factors = {name: weight for name, weight in adapted.named_parameters() if weight.grad is not None}
    save_file({name: weight.grad for name, weight in factors.items()}, folder / "factors.safetensors")
    torch.optim.SGD(factors.values(), lr=0.01).step()
    adapted.save_pretrained(folder / "adapter-after")
    return folder


def _train(client: torch.nn.Module, tokens: torch.Tensor, folder: Path) -> None:
    """One step: its gradients, also as a pickle, and the weights around it."""
    before = {name: weight.detach().clone() for name, weight in client.named_parameters()}
    client(input_ids=tokens, labels=tokens).loss.backward()
    torch.save({name: weight.grad for name, weight in client.named_parameters()}, folder / "grads.pt")
    torch.optim.SGD(client.parameters(), lr=0.01).step()
    after = {name: weight.detach().clone() for name, weight in client.named_parameters()}
    save_file(before, folder / "before.safetensors")
    save_file(after, folder / "after.safetensors")
    save_file({name: after[name] - before[name] for name in before}, folder / "delta.safetensors")


def test_every_command_does_what_it_says(folder, monkeypatch, capsys, one_thread):
    monkeypatch.chdir(folder)
    for block in code_of(PAGE):
        exec(compile(block, PAGE, "exec"), {})
    assert "RECOVERED" in capsys.readouterr().out
    plan = Path("plan.toml")
    local = [command for command in COMMANDS if "--server" not in command and "--oracle" not in command]
    assert len(local) > 15
    for command in local:
        if "compare" in command:
            shutil.copytree("runs/audit", "runs/main")
        if command.startswith("unmask audit"):  # one case of each group is enough
            plan.write_text(plan.read_text(encoding="utf-8").replace('["none", "noise:sigma=1e-2"]', '["none"]'))
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        with pytest.raises(SystemExit) as left:
            cli.main()
        expected = (DONE, CROSSED) if "audit" in command else (DONE, INCONCLUSIVE) if "recover" in command else (DONE,)
        assert left.value.code in expected, (command, capsys.readouterr().err)
        if "-o" in (words := sys.argv):
            assert Path(words[words.index("-o") + 1]).is_file(), command


def test_it_is_two_pages():
    assert len((Path(__file__).parents[2] / PAGE).read_text(encoding="utf-8").splitlines()) <= 130
