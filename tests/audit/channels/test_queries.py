"""Services that answer with secret weights: open ones give them away, noise does not, and mistakes have messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.tiny_models import bert_config, random_model

import unmask
from unmask.audit.cases.case import Case
from unmask.audit.channels import queries
from unmask.audit.channels.queries import interrogate
from unmask.errors import InputError
from unmask.models import Model, adapt
from unmask.recovery import Recovery, Status


@pytest.fixture(scope="module", autouse=True)
def small_layers(one_thread: None) -> None:
    """Threads on busy cores wait for each other."""


@pytest.fixture(scope="module")
def model(llama_folder: Path) -> Model:
    return unmask.load_model(str(llama_folder))


def ask(secret: str, *defences: str, model: Model | None = None, seed: int = 0) -> tuple[Recovery[Any], dict[str, Any]]:
    said = {"channel": "queries", "model": "m", "secret": secret, "defences": list(defences), "seed": seed}
    return interrogate(Case(said | {"attack": "default"}), model)


SECRETS = ("random:heads=2,width=8", "attention:layer=1", "output-layer")
DESTROYED = {  # so much noise, and no way to make it small
    "random:heads=2,width=8": ("noise:sigma=1000", "norm:max_norm=2"),
    "attention:layer=1": ("noise:sigma=1000", "norm:max_norm=2"),
    "output-layer": ("noise:sigma=1000",),
}


@pytest.mark.parametrize("secret", SECRETS)
def test_an_open_service_gives_its_weights_away(model, secret):
    recovery, scores = ask(secret, model=model)
    assert recovery.status is Status.RECOVERED
    assert scores["metrics"]["weights_found"] > 0
    assert scores["metrics"]["weight_error"] < 1e-4
    assert scores["metrics"]["false_weights"] == 0
    assert scores["metrics"]["weights_rate"] == 1 - scores["metrics"]["weight_error"]
    # Any matrix of the right size explains a part of an output layer.
    assert 0.5 < scores["chance"]["weight_error"] <= 1.0
    assert (scores["chance"]["weight_error"] < 1) == (secret == "output-layer")
    assert ("hidden_size_found" in scores["metrics"]) == (secret == "output-layer")


@pytest.mark.parametrize("secret", SECRETS)
def test_answers_that_were_destroyed_give_nothing(model, secret):
    """The negative control."""
    recovery, scores = ask(secret, *DESTROYED[secret], model=model)
    assert recovery.status is not Status.RECOVERED
    assert scores["metrics"]["weights_found"] == 0
    assert scores["metrics"].get("hidden_size_found", 0) == 0
    assert scores["metrics"]["weight_error"] > 0.5


def test_weights_that_noise_hides_were_not_looked_for():
    """Who averages more answers reads more: that nothing stood out is no end of a search, and no word on the heads."""
    recovery, _ = ask("random:heads=1,width=8", "norm:max_norm=1", "noise:sigma=10")
    assert recovery.status is Status.NOTHING_FOUND
    assert not recovery.looked_for
    assert "No head's influence on the answers stands out from the oracle's error, about" in recovery.reason


def test_seeds_draw_other_heads():
    errors = {ask("random:heads=1,width=4", seed=seed)[0].certificate.residual for seed in (0, 1)}
    assert len(errors) == 2
    again = [ask("random:heads=1,width=4", seed=5)[0] for _ in range(2)]
    assert torch.equal(again[0].value.W, again[1].value.W)


def test_noise_is_the_case_s_own_unless_it_has_a_seed(monkeypatch):
    oracles = []

    def spy(oracle: Any, **options: Any) -> Any:
        oracles.append(oracle)
        return recover(oracle, **options)

    recover = queries.recover_weights
    monkeypatch.setattr(queries, "recover_weights", spy)
    for seed in (0, 1, 0):
        ask("random:heads=1,width=4", "noise:sigma=1e-9", seed=seed)
    ask("random:heads=1,width=4", "noise:sigma=1e-9,seed=5")
    seeds = [oracle.seed for oracle in oracles]
    assert seeds[0] == seeds[2] != seeds[1]
    assert seeds[3] == 5


def test_a_service_that_makes_one_wait_gives_the_same_digits():
    """How many answers come at once depends on the clock; what they are must not."""
    pairs = [ask("random:heads=1,width=4", "rate:queries=37,seconds=0.02") for _ in range(2)]
    (first, one), (second, other) = pairs
    assert torch.equal(first.value.W, second.value.W)
    assert one == other
    assert first.certificate == second.certificate


def test_a_service_that_stops_answering_is_inconclusive():
    recovery, scores = ask("random:heads=2,width=8", "rate:queries=100,seconds=1000000,wait=false")
    assert recovery.status is Status.BUDGET_EXHAUSTED
    assert "limit on queries" in recovery.reason
    assert not recovery.certificate.holds
    assert scores["metrics"]["weights_found"] == 0


def test_rounding_of_logits_costs_digits(model):
    _, plain = ask("output-layer", model=model)
    _, rounded = ask("output-layer", "round:decimals=3", model=model)
    assert plain["metrics"]["weight_error"] < rounded["metrics"]["weight_error"] < 0.1


def test_a_layer_that_the_model_lacks(model):
    with pytest.raises(InputError, match="it has 3 blocks, from 0 on"):
        ask("attention:layer=3", model=model)


def test_a_model_without_an_output_layer():
    body = adapt(random_model(transformers.BertModel, bert_config()))
    with pytest.raises(InputError, match="has no output layer to hide"):
        ask("output-layer", model=body)


def test_a_defence_that_logits_cannot_have(model):
    with pytest.raises(InputError, match="does not apply to logits"):
        ask("output-layer", "norm:max_norm=2", model=model)
