"""Flower's template for LLMs with its own settings, audited by the one line, on real weights."""

import subprocess

import pytest
import torch
from flwr.serverapp.strategy import FedAvg
from tests.integrations import flower_app
from tests.integrations.flower_grid import MemoryGrid
from tests.integrations.flower_tune import initial_adapters, learning_rate, make_adapters, template_settings, tuning_app

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


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [True, False])
def test_the_template_on_real_weights(settings, tmp_path, smollm2, dropout):
    torch.set_num_threads(1)
    finding = audit(settings if dropout else settings | {"dropout": 0.0}, tmp_path, smollm2)
    held = {smollm2.decode([token]) for text in TEXTS for token in smollm2.encode(text)[:-1]}
    found = {piece for piece, _ in finding.tokens}
    assert found <= held
    if not dropout:
        assert len(found) >= 0.5 * len(held)
    assert finding.outcome.name in ("LEAK", "INCONCLUSIVE")
