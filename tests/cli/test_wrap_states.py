"""`unmask wrap hidden` and `wrap cache`: states, keys and values on disk give the texts back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.answers import Answer, Call
from tests.audit.made import WORDS, save_llama

import unmask
from unmask import cli

TEXTS = list(WORDS[:2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and what transformers returned of two texts, as people write it to disk."""
    folder = save_llama(tmp_path_factory.mktemp("llama"))
    model = unmask.load_model(str(folder))
    tokens = model.tokenizer(TEXTS, return_tensors="pt", padding=True)
    mask = tokens.attention_mask
    with torch.no_grad():
        output = model.hf(tokens.input_ids, attention_mask=mask, output_hidden_states=True, use_cache=True)
    states = output.hidden_states
    layers = [(layer.keys, layer.values) for layer in output.past_key_values.layers]
    parts = {"keys": layers[1][0].contiguous(), "values": layers[1][1].contiguous()}
    np.save(folder / "one.npy", states[1].numpy())
    np.save(folder / "transposed.npy", states[1].transpose(1, 2).numpy())
    np.save(folder / "whole.npy", (100 * states[1]).long().numpy())
    np.save(folder / "mask.npy", mask.numpy())
    np.save(folder / "logits.npy", output.logits.numpy())
    np.save(folder / "words.npy", np.array(TEXTS))
    (folder / "named.npy").write_text("no array")
    np.savez(folder / "masked.npz", states=states[1].numpy(), attention_mask=mask.numpy())
    np.save(folder / "all.npy", torch.stack(states).numpy())
    save_file({f"layers.{i}": part.clone() for i, part in enumerate(states)}, folder / "all.safetensors")
    torch.save(states[1], folder / "one.pt")
    save_file({**parts, "attention_mask": mask}, folder / "cache.safetensors")
    np.savez(folder / "cache.npz", **{name: part.numpy() for name, part in parts.items()})
    named = {f"past_key_values.{i}.{name}": pair[j] for i, pair in enumerate(layers) for j, name in NAMES}
    np.savez(folder / "onnx.npz", **{name: part.numpy() for name, part in named.items()})
    np.save(folder / "pair.npy", torch.stack(layers[1]).numpy())
    np.savez(folder / "gradients.npz", **{name: weight.numpy() for name, weight in model.hf.state_dict().items()})
    unmask.observe_hidden(model, TEXTS, layer=1).save(folder / "evidence.safetensors")
    np.savez(folder / "rows.npz", **{name: part.transpose(1, 2).numpy() for name, part in parts.items()})
    np.savez(folder / "one_text.npz", **{name: part[0].numpy() for name, part in parts.items()})
    np.savez(folder / "no_texts.npz", **{name: part[:0].numpy() for name, part in parts.items()})
    return folder


NAMES = ((0, "key"), (1, "value"))


@pytest.fixture
def call(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """`unmask wrap KIND FILE -o e.safetensors` of the folder's model, in the folder."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(folder)

    def run(line: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["unmask", *line.split(), "-m", "."])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        return Answer(left.value.code, *capsys.readouterr())

    return run


@pytest.mark.parametrize(
    ("line", "holds"),
    [
        ("hidden masked.npz -l 1", "states of 2 texts (13 tokens) after 1 block (stream)"),
        ("hidden one.npy -l 1 --mask mask.npy", "states of 2 texts (13 tokens) after 1 block (stream)"),
        ("hidden all.npy -l 3 --mask mask.npy", "states of 2 texts (13 tokens) after 3 blocks (final_norm)"),
        ("hidden all.safetensors -l 2 --mask mask.npy", "states of 2 texts (13 tokens) after 2 blocks (stream)"),
        ("cache cache.safetensors -l 1", "keys and values of block 1 for 2 texts (7 positions, 2 heads)"),
        ("cache onnx.npz -l 1 --mask mask.npy", "keys and values of block 1 for 2 texts (7 positions, 2 heads)"),
        ("cache pair.npy -l 1 --mask mask.npy", "keys and values of block 1 for 2 texts (7 positions, 2 heads)"),
    ],
)
def test_files_of_every_form_are_evidence(call, line, holds):
    answer = call(f"wrap {line} -o e.safetensors --json")
    assert answer.code == 0, answer.err
    assert answer.document["holds"] == holds
    evidence = unmask.load_evidence("e.safetensors")
    assert evidence.mask.tolist() == np.load("mask.npy").astype(bool).tolist()
    if line.startswith("hidden"):
        assert torch.equal(evidence.states, torch.from_numpy(np.load("all.npy"))[evidence.layer])
    else:
        pair = torch.from_numpy(np.load("pair.npy")).transpose(2, 3)
        assert torch.equal(torch.stack([evidence.keys, evidence.values]), pair)


@pytest.mark.parametrize("line", ["hidden all.npy -l 3 --mask mask.npy", "cache cache.safetensors -l 1"])
def test_they_give_the_texts_back(call, folder, line):
    assert call(f"wrap {line} -o e.safetensors").code == 0
    recovery = unmask.recover_text(unmask.load_evidence("e.safetensors"), unmask.load_model(str(folder)))
    assert [text.text for text in recovery.value.texts if text.certain] == TEXTS
    assert "padding" not in recovery.reason


def test_a_layer_that_is_not_stated_is_asked_for_before_the_model_is_loaded(call):
    answer = call("wrap hidden one.npy -o refused.safetensors -m no-such-model")
    assert (answer.code, "--layer must be stated: how many blocks" in answer.message) == (4, True)


def test_padding_without_a_mask_is_named(call, folder):
    wanted = "next: state what you know, so that more can be proven: --mask next:"
    for line in ("cache cache.npz -l 1", "hidden one.npy -l 1"):
        assert wanted in call(f"wrap {line} -o e.safetensors").told
        assert wanted not in call(f"wrap {line} --mask mask.npy -o masked.safetensors").told
    reason = call("recover text e.safetensors --json").document["reason"]
    assert "1 of 2 texts begin or end in '[PAD]', the padding token, and no place is marked" in reason


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hidden one.npy -l 7", "--layer must be 0…3 for states of this llama model, got 7"),
        ("hidden one.npy -l 1 --site final-norm", "--layer must be 3 after the final norm"),
        ("hidden one.npy -l 1 --site mean", "means are one row a text, (texts, width), got (2, 7, 64)"),
        ("hidden one.npy -l 1 --mask whole.npy", "and a mask (2, 7, 64)"),
        ("hidden one.npy -l 1 --mask onnx.npz", "--mask onnx.npz must hold one array, or one called 'attention_mask'"),
        ("hidden transposed.npy -l 1", "transpose them to (batch, length, width)"),
        ("hidden whole.npy -l 1", "holds int64, expected floating-point numbers"),
        ("hidden logits.npy -l 1", "wrap them with `unmask wrap logits`"),
        ("hidden words.npy -l 1", "must hold one array of states of layer 1, got nothing that is a number"),
        ("hidden named.npy -l 1", "is not a whole file of NumPy, whatever its name says"),
        ("hidden all.safetensors", "and 1 more; choose one with --collection NAME"),
        ("hidden all.safetensors -c x", "must hold an array 'x'"),
        ("hidden one.pt -l 1", "held = torch.load('one.pt', weights_only=True)"),
        ("hidden . -l 1", "is a folder; give the file in it"),
        ("hidden none.npy -l 1", "there is no file none.npy"),
        ("hidden config.json -l 1", "give .safetensors, .npy or .npz"),
        ("cache one.npy -l 1", "must hold an array 'keys' of layer 1, one 'values', or both, got 'one' (2, 7, 64)"),
        ("cache onnx.npz -l 7", "of layer 7"),
        ("cache cache.npz -l 7", "block 7 is one that this model lacks: it has 0…2"),
        ("cache rows.npz -l 1", "keys of 7 heads (up to number 6)"),
        ("cache one_text.npz -l 1", "got (2, 7, 16); one text is a batch of one"),
        ("cache no_texts.npz -l 1", "with at least one of each, got keys (0, 2, 7, 16)"),
        ("cache cache.npz -l 1 --head 5", "--head must name the 2 heads that the tensors hold, got [5]"),
        ("cache cache.npz -l 1 --mask onnx.npz", "--mask onnx.npz must hold one array"),
        ("update one.npy", "which is no update; wrap states with `unmask wrap hidden one.npy --layer N`"),
        ("update cache.npz", "which is no update; wrap keys and values with `unmask wrap cache cache.npz --layer N`"),
        ("update config.json", "give .safetensors, .npy or .npz"),
        ("store one.npy", "states of tokens are for `unmask wrap hidden`"),
        ("store one.pt", "held = torch.load('one.pt', weights_only=True)"),
        ("logits logits.npy", "take each prompt's last position, logits[:, -1]"),
        ("store evidence.safetensors", "evidence.safetensors is evidence already"),
    ],
)
def test_what_a_careless_user_hands_over_ends_in_one_sentence(call, line, words):
    answer = call(f"wrap {line} -o refused.safetensors")
    assert answer.code == 2
    assert words in answer.message
    assert "Traceback" not in answer.err
    assert not Path("refused.safetensors").exists()


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("one.npy", "`unmask wrap hidden one.npy --layer N`"),
        ("masked.npz", "`unmask wrap hidden masked.npz --layer N`"),
        ("all.safetensors", "`unmask wrap hidden all.safetensors --layer N`"),
        ("cache.safetensors", "`unmask wrap cache cache.safetensors --layer N`"),
        ("onnx.npz", "`unmask wrap cache onnx.npz --layer N`"),
        ("model.safetensors", "`unmask wrap update model.safetensors`"),
        ("gradients.npz", "`unmask wrap update gradients.npz`"),
        ("one.pt", "`wrap hidden` for states"),
        ("words.npy", "it holds no floating-point numbers"),
    ],
)
def test_recover_names_the_command_that_fits_the_file(call, file, command):
    """'wrap update', or 'copy it again', was said of everything."""
    answer = call(f"recover text {file}")
    assert answer.code == 2
    assert command in answer.message


def test_a_matrix_may_be_vectors_one_text_s_states_or_logits(call, folder):
    np.save(folder / "rows.npy", np.ones((2, 64), dtype=np.float32))
    message = call("recover text rows.npy").message
    for command in ("wrap store rows.npy`", "wrap hidden rows.npy --layer N`", "wrap logits rows.npy`"):
        assert command in message


@pytest.mark.parametrize("held", ["tensor", "layers", "tied"])
def test_the_lines_that_convert_a_pickle_run(call, folder, held):
    """A tied model's tensors share memory, which safetensors refuses."""
    shared = torch.ones(2, 3)
    torch.save({"tensor": shared, "layers": (shared, shared), "tied": {"a": shared, "b": shared}}[held], "x.pt")
    message = call("wrap update x.pt -o refused.safetensors").message
    lines = message.partition("where you trust it: ")[2].partition(". Then")[0]
    exec(compile(lines, "message", "exec"), {})
    assert Path("x.safetensors").is_file()
