"""The check of a model for people and for machines: the same facts, and names that are shown as they are."""

from __future__ import annotations

import json

import pytest
from tests.models.families import build
from tests.tiny_models import word_tokenizer

from unmask.attacks.reach import find_reach
from unmask.models import Model, adapt
from unmask.terminal.models import check_document, check_models, print_model_check


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture(scope="module")
def limited() -> Model:
    return adapt(build("Qwen3Next"))


def shown(capsys: pytest.CaptureFixture[str], name: str, model: Model) -> str:
    print_model_check(name, model, json=False)
    return capsys.readouterr().out


def test_facts_of_a_model(tiny_llama):
    found = check_document("mine", tiny_llama)
    facts = {"family": "llama", "direction": "causal", "blocks": 3, "width": 64, "vocabulary": 500}
    heads = {"heads": 4, "key_value_heads": 2, "positions": "not learned", "problem": ""}
    assert {"name": "mine", **facts, **heads}.items() <= found.items()
    assert [line["gives"] for line in found["reach"]] == [line.gives for line in find_reach(tiny_llama)]
    (group,) = found["roles"]
    assert group["blocks"] == "0–2"
    assert group["layers"]["mlp_gate"] == "mlp.gate_proj"


def test_columns_of_layers_with_several_roles(tiny_gpt2):
    (group,) = check_document("mine", tiny_gpt2)["roles"]
    assert group["layers"]["key"] == "attn.c_attn, columns 64–127"
    assert "mlp_gate" not in group["layers"]
    (group,) = check_document("mine", adapt(build("GPTNeoX")))["roles"]
    assert group["layers"]["key"] == "attention.query_key_value, 64 columns"


def test_blocks_that_differ_are_told_apart(limited):
    found = check_document("mine", limited)
    assert [group["blocks"] for group in found["roles"]] == ["0", "1"]
    assert found["problem"].startswith("block 0 cannot be computed")


def test_what_machines_read(limited, capsys):
    print_model_check("mine", limited, json=True)
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out) == check_document("mine", limited)


def test_what_people_read(tiny_llama, tiny_bert, limited, capsys):
    lines = shown(capsys, "mine", tiny_llama).splitlines()
    sizes = "3 blocks of width 64, 4 heads in 2 groups, no learned positions, 500 tokens"
    assert lines[0] == f"mine: llama, causal, {sizes}"
    assert any("mlp_gate" in line and "mlp.gate_proj" in line for line in lines)
    assert any("logits" in line and "hidden size and output layer" in line for line in lines)
    assert not any(line.startswith("Limited") for line in lines)
    encoder = shown(capsys, "mine", tiny_bert).splitlines()
    assert "bidirectional, 3 blocks of width 64, 4 heads, learned positions" in encoder[0]
    assert any("mlp_gate" in line and "—" in line for line in encoder)
    assert f"Limited: {limited.problem}." in shown(capsys, "mine", limited)


@pytest.mark.parametrize("name", ["[red]mine[/red]", "[/]", "a[b]c", ":smile:", "[link=http://x]mine[/link]"])
def test_a_name_with_markup_is_shown_as_text(name, tiny_llama, capsys):
    assert shown(capsys, name, tiny_llama).startswith(f"{name}: llama")


@pytest.mark.parametrize("name", ["\x1b[2J\x1b]0;owned\x07x", "\u202eevil", "two\nlines"])
def test_a_name_cannot_steer_the_terminal(capsys, tiny_llama, name):
    first = shown(capsys, name, tiny_llama).splitlines()[0]
    assert not set(first) & {"\x1b", "\u202e", "\x07"}
    assert "llama, causal" in first


def test_both_sides_of_an_encoder_decoder_are_one_document(capsys, tmp_path):
    build("T5").save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    check_models(str(tmp_path), True)
    sides = json.loads(capsys.readouterr().out)
    assert [side["direction"] for side in sides] == ["bidirectional", "causal"]
    check_models(str(tmp_path), False)
    assert capsys.readouterr().out.count("Layers found") == 2
