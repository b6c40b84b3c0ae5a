"""Flower's template for LLMs with its own settings, audited by the one line, on real weights."""

import copy
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from flwr.serverapp.strategy import FedAvg
from tests.integrations import flower_app
from tests.integrations.flower_grid import MemoryGrid
from tests.integrations.flower_tune import initial_adapters, learning_rate, make_adapters, template_settings, tuning_app
from tests.tiny_models import llama_sizes, random_model, word_tokenizer

from unmask.audit.findings.finding import Outcome
from unmask.audit.findings.folder import read_audit
from unmask.integrations.flower import AuditGrid
from unmask.models import adapt
from unmask.models.catalog import resolve

TEXTS = [
    "The meeting was moved to Thursday at noon.",
    "Please send forty litres of white paint.",
    "Her brother sold two goats near the lake.",
    "Nobody told the driver about the bridge.",
]


@pytest.fixture(scope="module")
def settings():
    try:
        return template_settings(flower_app.find_wheel())
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"Flower's templates are missing ({error}); run: pip download --no-deps {flower_app.PACKAGE}")


def test_the_settings_are_those_that_the_documents_name(settings):
    arguments = settings["train"]["training-arguments"]
    assert settings["model"]["lora"] == {"peft-lora-r": 32, "peft-lora-alpha": 64}
    assert settings["dropout"] == 0.075
    assert (arguments["max-steps"], arguments["per-device-train-batch-size"]) == (10, 16)
    assert learning_rate(settings, 1) == pytest.approx(5e-5, rel=1e-3)


def audit(settings, tmp_path, smollm2):
    """One round with one client; the server tells the audit what it has told its clients."""
    base = str(resolve("smollm2-135m"))
    own = adapt(make_adapters(base, settings | {"dropout": 0.0}).unload(), smollm2.tokenizer)
    grid = MemoryGrid({7: tuning_app(base, settings, TEXTS, tmp_path / "client")})
    watched = AuditGrid(
        grid,
        model=own,
        out=tmp_path / "audit",
        task="next_token",
        num_texts=len(TEXTS),
        optimizer="adamw",
        num_steps=settings["train"]["training-arguments"]["max-steps"],
        learning_rate=learning_rate(settings, 1),
    )
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    strategy.start(grid=watched, initial_arrays=initial_adapters(base, settings), num_rounds=1)
    (finding,) = read_audit(tmp_path / "audit").findings
    return finding


def tokens_of(smollm2):
    return {smollm2.decode([token]) for text in TEXTS for token in smollm2.encode(text)[:-1]}


@pytest.mark.slow
def test_as_shipped_nothing_false_is_claimed_and_the_finding_says_what_hides_it(settings, tmp_path, smollm2):
    finding = audit(settings, tmp_path, smollm2)
    assert {piece for piece, _ in finding.tokens} <= tokens_of(smollm2)
    if finding.outcome is not Outcome.LEAK:
        assert finding.outcome is Outcome.INCONCLUSIVE
        assert "Adam" in finding.reason
        assert "dropout" in finding.reason


@pytest.mark.slow
def test_two_steps_without_dropout_leak(settings, tmp_path, smollm2):
    changed = copy.deepcopy(settings) | {"dropout": 0.0}
    changed["train"]["training-arguments"]["max-steps"] = 2
    finding = audit(changed, tmp_path, smollm2)
    found = {piece for piece, _ in finding.tokens}
    assert finding.outcome is Outcome.LEAK
    assert found <= tokens_of(smollm2)
    assert len(found) >= 0.9 * len(tokens_of(smollm2))


# ---- the recipe of the page, on a small model

PAGE = Path(__file__).parents[3] / "docs" / "flower.md"
SMALL_TEXTS = ["w17 w99 w250 w31", "w400 w30 w8"]
SMALL = {
    "model": {"lora": {"peft-lora-r": 32, "peft-lora-alpha": 64}},
    "dropout": 0.0,
    "num-server-rounds": 10,
    "train": {
        "learning-rate-max": 5e-5,
        "learning-rate-min": 1e-6,
        "seq-length": 64,
        "training-arguments": {
            "max-steps": 2,
            "per-device-train-batch-size": 2,
            "lr-scheduler-type": "constant",
            "save-strategy": "no",
        },
    },
}


@pytest.fixture
def small_base(tmp_path):
    """A small Llama in a folder, as a model hub would hold it."""
    folder, tokenizer = tmp_path / "base", word_tokenizer()
    tokenizer.eos_token = "[SEP]"
    net = random_model(transformers.LlamaForCausalLM, transformers.LlamaConfig(**llama_sizes()))
    for part in (net.bfloat16(), tokenizer):
        part.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
def test_the_recipe_of_the_page_reads_adapters(tmp_path, monkeypatch, small_base, optimizer):
    """Two rounds: in the second one the adapters are not zero any more. Of AdamW, a model this small tells nothing."""
    monkeypatch.chdir(tmp_path)
    settings = copy.deepcopy(SMALL)
    if optimizer == "sgd":
        settings["train"]["learning-rate-max"] = 0.1
        settings["train"]["training-arguments"] |= {"optim": "sgd", "max-grad-norm": 0.0}
    (code,) = re.findall(r"^## FlowerTune.*?^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    assert 'optimizer="adamw"' in code
    code = code.replace('optimizer="adamw"', f"optimizer={optimizer!r}")
    lora = SimpleNamespace(peft_lora_r=32, peft_lora_alpha=64)
    steps = SimpleNamespace(training_arguments=SimpleNamespace(max_steps=2))
    cfg = SimpleNamespace(model=SimpleNamespace(name=small_base, lora=lora), train=steps)
    names = {"cfg": cfg, "grid": MemoryGrid({7: tuning_app(small_base, settings, SMALL_TEXTS, tmp_path / "client")})}
    exec(compile(code, str(PAGE), "exec"), names)
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    strategy.start(grid=names["grid"], initial_arrays=initial_adapters(small_base, settings), num_rounds=2)
    findings = read_audit("runs/flowertune-audit").findings
    true = {"[CLS]", "[SEP]"} | {word for text in SMALL_TEXTS for word in text.split()}
    assert len(findings) == 2
    for finding in findings:
        assert finding.outcome in (Outcome.LEAK, Outcome.INCONCLUSIVE)
        assert {piece for piece, _ in finding.tokens} <= true
    if optimizer == "sgd":
        assert [finding.outcome for finding in findings] == [Outcome.LEAK] * 2
