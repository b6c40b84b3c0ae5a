"""Flower's template for LLMs with its own settings, audited by the one line, on real weights."""

import copy
import subprocess

import pytest
from flwr.serverapp.strategy import FedAvg
from tests.integrations import flower_app
from tests.integrations.flower_grid import MemoryGrid
from tests.integrations.flower_tune import initial_adapters, learning_rate, make_adapters, template_settings, tuning_app

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
