"""`unmask wrap update`: gradients, weights and adapters from disk give the texts back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.answers import Answer, Call
from tests.audit.made import WORDS, save_llama

import unmask
from unmask import cli

TEXT = WORDS[1]
KNOWN = ("--task", "next-token", "--num-texts", 1, "--clients", 1, "--all-tokens-predicted")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gradients(folder: Path) -> dict[str, torch.Tensor]:
    """As `p.grad` under the names of named_parameters()."""
    model = unmask.load_model(str(folder))
    tokens = torch.tensor([model.encode(TEXT)])
    model.hf.zero_grad()
    model.hf(input_ids=tokens, labels=tokens).loss.backward()
    return {name: p.grad.contiguous() for name, p in model.hf.named_parameters() if p.grad is not None}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None) -> Iterator[Call]:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["unmask", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        return Answer(left.value.code, *capsys.readouterr())

    return run


def texts_of(path: Path, folder: Path) -> list[str]:
    recovery = unmask.recover_text(unmask.load_evidence(path), unmask.load_model(str(folder)))
    return [text.text for text in recovery.value.texts if text.certain]


def test_a_file_of_gradients(call, folder, gradients, tmp_path):
    save_file(gradients, tmp_path / "grads.safetensors")
    out = tmp_path / "update.safetensors"
    answer = call("wrap", "update", tmp_path / "grads.safetensors", "-m", folder, "-o", out, *KNOWN, "--json")
    assert answer.code == 0, answer.err
    assert answer.document["holds"] == f"{len(gradients)} tensors (gradients)"
    evidence = unmask.load_evidence(out)
    assert (evidence.num_texts, evidence.num_clients, evidence.all_tokens_predicted) == (1, 1, True)
    assert texts_of(out, folder) == [TEXT]


@pytest.mark.parametrize("way", ["delta", "weights", "before"])
def test_weights_after_training(call, folder, gradients, tmp_path, way):
    before = load_file(folder / "model.safetensors")
    step = {name: -0.1 * gradient for name, gradient in gradients.items()}
    after = {name: weight + step.get(name, 0.0) for name, weight in before.items()}
    save_file(step if way == "delta" else after, tmp_path / "after.safetensors")
    options = {"delta": ["--delta"], "weights": ["--weights"], "before": ["--before", folder]}[way]
    out = tmp_path / "update.safetensors"
    known = ("--learning-rate", 0.1, "--num-steps", 1, "--optimizer", "sgd", *KNOWN)
    answer = call("wrap", "update", tmp_path / "after.safetensors", "-m", folder, "-o", out, *options, *known)
    assert answer.code == 0, answer.err
    assert "(weight differences)" in answer.told
    evidence = unmask.load_evidence(out)
    assert (evidence.update.value, evidence.learning_rate, evidence.optimizer) == ("delta", 0.1, "sgd")
    assert texts_of(out, folder) == [TEXT]


@pytest.mark.parametrize("options", [(), ("--delta",)], ids=["gradients", "delta"])
def test_weights_instead_of_differences_are_explained(call, folder, tmp_path, options):
    arguments = ("wrap", "update", folder / "model.safetensors", "-m", folder, "-o", tmp_path / "u", *options)
    answer = call(*arguments)
    assert answer.code == 2
    assert "these are the model's weights, not gradients" in answer.message
    assert "--before" in answer.message
    assert "update=" not in answer.message


def test_what_is_not_stated_and_would_make_more_certain_is_named(call, folder, gradients, tmp_path):
    save_file(gradients, tmp_path / "grads.safetensors")
    command = ("wrap", "update", tmp_path / "grads.safetensors", "-m", folder, "-o", tmp_path / "u.safetensors")
    hint = "next: state what you know, so that more can be proven: "
    assert f"{hint}--task --num-texts --clients --all-tokens-predicted next: unmask recover" in call(*command).told
    assert f"{hint}--learning-rate --num-steps --optimizer next:" in call(*command, "--delta", *KNOWN).told
    assert hint not in call(*command, "--num-texts", 1, "--all-tokens-predicted").told
    assert texts_of(tmp_path / "u.safetensors", folder) == [TEXT]  # that was enough
    classes = call(*command, "--task", "classification", "--num-texts", 1, "--json").document
    assert classes["not_stated"] == ["--clients", "--pooling"]
    assert hint not in call(*command, *KNOWN).told


def test_what_adam_left_is_not_taken_for_gradients_in_silence(call, folder, gradients, tmp_path):
    weights = {name: torch.nn.Parameter(w) for name, w in load_file(folder / "model.safetensors").items()}
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=0.001)
    for name, gradient in gradients.items():
        weights[name].grad = gradient.clone()
    for _ in range(2):
        optimizer.step()
    save_file({name: weights[name].detach() - before[name] for name in gradients}, tmp_path / "delta.safetensors")
    save_file(gradients, tmp_path / "grads.safetensors")
    end = ("-m", folder, "-o", tmp_path / "u.safetensors")
    answer = call("wrap", "update", tmp_path / "delta.safetensors", *end)
    assert answer.code == 0
    assert "if these are new − old, give --delta and --optimizer adamw" in answer.message
    for told in (("delta.safetensors", "--delta"), ("grads.safetensors",)):
        assert "give --delta" not in call("wrap", "update", tmp_path / told[0], *end, *told[1:]).message


def test_a_peft_adapter_before_and_after_and_its_gradients(call, folder, tmp_path):
    peft = pytest.importorskip("peft", reason="comes with the extra 'lora'")
    base = unmask.load_model(str(folder)).hf
    tuned = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    tuned.save_pretrained(tmp_path / "before")
    factors = {name: parameter for name, parameter in tuned.named_parameters() if "lora_" in name}
    for parameter in factors.values():
        parameter.grad = torch.ones_like(parameter)
    grads = {name: parameter.grad.clone() for name, parameter in factors.items()}
    save_file(grads, tmp_path / "grads.safetensors")
    torch.optim.SGD(factors.values(), lr=0.5).step()
    tuned.save_pretrained(tmp_path / "after")
    out = tmp_path / "u.safetensors"
    answer = call("wrap", "update", tmp_path / "after", "--before", tmp_path / "before", "-m", folder, "-o", out)
    assert answer.code == 0, answer.err
    evidence = unmask.load_evidence(out)
    assert (evidence.update.value, evidence.adapter_scale, len(evidence.adapters)) == ("delta", 2.0, len(factors))
    assert all(torch.allclose(tensor, torch.tensor(-0.5), atol=1e-6) for tensor in evidence.gradients.values())
    options = ("--adapter", tmp_path / "before", "-m", folder, "-o", out)
    assert call("wrap", "update", tmp_path / "grads.safetensors", *options).code == 0
    evidence = unmask.load_evidence(out)
    assert (evidence.update.value, evidence.adapter_scale, len(evidence.adapters)) == ("gradient", 2.0, len(factors))
    alone = call("wrap", "update", tmp_path / "after", "-m", folder, "-o", out)
    assert alone.code == 2
    assert "give the adapter that the client started from with --before" in alone.message
    mixed = call("wrap", "update", tmp_path / "after", "--before", folder, "-m", folder, "-o", out)
    assert "give two adapters, or two files of weights" in mixed.message


def test_a_pickle_gets_the_lines_that_convert_it(call, folder, tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "update.pt")
    answer = call("wrap", "update", tmp_path / "update.pt", "-m", folder, "-o", tmp_path / "u.safetensors")
    assert answer.code == 2
    assert "torch.load('update.pt', weights_only=True)" in answer.message


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--delta", "--weights"), "with --delta, FILE already holds differences"),
        (("--adapter", "a", "--weights"), "--adapter is for gradients"),
        (("--adapter", "nowhere"), "must be a folder that PEFT's save_pretrained wrote"),
    ],
)
def test_options_that_contradict_each_other(call, tmp_path, options, part):
    answer = call("wrap", "update", tmp_path / "x", "-m", "minilm-l6", "-o", tmp_path / "u", *options)
    assert answer.code == (2 if "nowhere" in options else 4)
    assert part in answer.message


def test_a_head_of_its_own_and_the_state_that_it_reads(call, folder, gradients, tmp_path):
    files = [tmp_path / f"{name}.safetensors" for name in ("grads", "head", "two", "update")]
    save_file(gradients, files[0])
    width = unmask.load_model(str(folder)).width
    save_file({"score.weight": torch.ones(2, width), "score.bias": torch.ones(2)}, files[1])
    save_file({"a": torch.ones(2, width), "b": torch.ones(2, width)}, files[2])
    command = ("wrap", "update", files[0], "-m", folder, "-o", files[3], "--task", "classification")
    answer = call(*command, "--head", files[1], "--pooling", "mean")
    assert answer.code == 0, answer.err
    evidence = unmask.load_evidence(files[3])
    assert (evidence.pooling, tuple(evidence.head.shape)) == ("mean", (2, width))
    answer = call(*command, "--head", files[2])
    assert answer.code == 2
    assert "must hold one matrix (labels, width), got ['a', 'b']" in answer.message


def test_reasons_name_options_and_not_arguments_of_python(call, folder, gradients, tmp_path):
    save_file(gradients, tmp_path / "grads.safetensors")
    out = tmp_path / "update.safetensors"
    assert call("wrap", "update", tmp_path / "grads.safetensors", "-m", folder, "-o", out).code == 0
    answer = call("recover", "text", out, "-m", folder, "--json")
    assert "`unmask wrap update --all-tokens-predicted`" in answer.document["reason"]
    assert "all_tokens_predicted" not in answer.document["reason"]


def test_a_capture_is_never_overwritten_and_evidence_is_no_capture(call, folder, gradients, tmp_path):
    """It may be the only copy; and evidence needs no wrapping."""
    grads, out = tmp_path / "grads.safetensors", tmp_path / "update.safetensors"
    save_file(gradients, grads)
    before = grads.read_bytes()
    refused = call("wrap", "update", grads, "-m", folder, "-o", grads, *KNOWN)
    assert (refused.code, grads.read_bytes() == before) == (4, True)
    assert "is the file that is read; name another one" in refused.message
    assert call("wrap", "update", grads, "-m", folder, "-o", out, *KNOWN).code == 0
    again = call("wrap", "update", out, "-m", folder, "-o", tmp_path / "twice.safetensors")
    assert again.code == 2
    assert "is evidence already; `unmask recover` reads it as it is" in again.message
