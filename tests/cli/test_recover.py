"""`unmask recover`: what it prints is what the library finds, and the exit code says whether anything is certified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.attacks.outputs.attention_layers import random_layer
from tests.audit.made import WORDS, save_llama
from typer.testing import CliRunner

import unmask
from unmask.cli.options import EXIT_DONE, EXIT_INCONCLUSIVE
from unmask.cli.recover import recover
from unmask.errors import InputError

TEXTS = list(WORDS[:2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def update(folder: Path) -> Path:
    path = folder / "update.safetensors"
    unmask.observe_gradients(unmask.load_model(str(folder)), TEXTS).save(path)
    return path


def run(*arguments: object):
    return CliRunner().invoke(recover, [str(argument) for argument in arguments], catch_exceptions=False)


def test_texts_of_an_update(folder, update):
    done = run("text", update, "-m", folder, "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["status"]) == (EXIT_DONE, "RECOVERED")
    assert all(text in done.stdout for text in TEXTS)


def test_an_attack_by_name(folder, update):
    done = run("text", update, "-m", folder, "--json", "--attack", "bag-of-words")
    assert (done.exit_code, json.loads(done.stdout)["status"]) == (EXIT_DONE, "PARTIAL")
    with pytest.raises(InputError, match="Choose one of"):
        run("text", update, "-m", folder, "--attack", "prompt")


def test_what_lacks_everything_ends_as_inconclusive(folder, update, tmp_path):
    unmask.load_evidence(update).only("norm").save(tmp_path / "part.safetensors")
    done = run("text", tmp_path / "part.safetensors", "-m", folder, "--json")
    assert (done.exit_code, json.loads(done.stdout)["status"]) == (EXIT_INCONCLUSIVE, "MISSING_EVIDENCE")


def test_inputs_of_a_layer_and_of_something_else(update, tmp_path):
    evidence, X = random_layer("pd", 3, 6)
    evidence.save(tmp_path / "layer.safetensors")
    done = run("inputs", tmp_path / "layer.safetensors", "--json", "-o", tmp_path / "X.safetensors")
    assert (done.exit_code, json.loads(done.stdout)["status"]) == (EXIT_DONE, "RECOVERED")
    assert (tmp_path / "X.safetensors").exists()
    assert X.shape == (3, 6)
    with pytest.raises(InputError, match="recover text"):
        run("inputs", update)


def test_a_known_beginning_is_text_or_a_file(folder, tmp_path):
    model = unmask.load_model(str(folder))
    cache = unmask.observe_cache(model, TEXTS[:1], layer=1).save(tmp_path / "cache.safetensors")
    beginning = " ".join(TEXTS[0].split()[:2])
    (tmp_path / "template.txt").write_text(beginning)
    for option in (beginning, f"@{tmp_path / 'template.txt'}"):
        done = run("text", cache, "-m", folder, "--json", "--known-beginning", option)
        document = json.loads(done.stdout)
        assert (done.exit_code, document["status"]) == (EXIT_DONE, "RECOVERED")
        assert "were given" in document["reason"]
    with pytest.raises(InputError, match="there is no file"):
        run("text", cache, "-m", folder, "--known-beginning", "@nowhere.txt")


def test_the_help_says_what_the_library_says():
    shown = " ".join(run("text", "--help").stdout.replace("│", " ").split())
    described = " ".join(unmask.recover_text.__doc__.split())
    assert "caches of decoders, and for vectors" in shown
    assert "caches of decoders, or vectors, are read" in described
    assert "Try N times as often while texts are missing. For updates of encoders, and for vectors" in shown
    assert "so many times as many attempts, while texts are missing, where updates of encoders, or vectors" in described
