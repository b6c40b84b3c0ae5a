"""The example service as a process of its own: real answers, failures, deaths of either side, and the bill."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from tests.integrations import asker
from tests.integrations.asker import CONCURRENCY, NUM_EACH, NUM_STEPS, PER_REQUEST, WIDTH

from unmask.attacks.queries.profile import probe_oracle
from unmask.evidence.ledger import BudgetSpent, Ledger
from unmask.evidence.oracles import OracleEvidence, Refused
from unmask.integrations.http import HttpOracle, ServiceError
from unmask.linalg.heads import HeadWeights

FILE = Path(__file__).parents[1] / "examples" / "attention_service.py"
LAYER = ("--heads", "2", "--width", str(WIDTH), "--seed", "3", "--readout", "5")
ROUNDING = {"rtol": 1e-12, "atol": 1e-13}  # of sums over a width and a few tokens in float64

_spec = importlib.util.spec_from_file_location("attention_service", FILE)
assert _spec
assert _spec.loader
example = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(example)


class Running:
    """A service that was started, and where it answers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout
        self.url = process.stdout.readline().strip()

    @property
    def port(self) -> str:
        return self.url.rsplit(":")[-1].strip("/")

    @property
    def num_answered(self) -> int:
        with urllib.request.urlopen(f"{self.url}health") as reply:
            return json.load(reply)["num_answered"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def started(commands: Path, *options: str, **variables: str) -> Iterator[Running]:
    """The service, in a process that has imported everything (`tests/warm.py`)."""
    command = [str(commands / "python"), str(FILE), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}) as process:
        try:
            yield Running(process)
        finally:
            was_killed = process.poll() is not None
            process.terminate()
            assert process.wait(20) == 0 or was_killed, "a service that is told to end ends in peace"


@pytest.fixture(scope="module")
def service(commands: Path) -> Iterator[Running]:
    with started(commands, *LAYER, "--max-norm", "1000", "--key", "SERVICE_KEY", SERVICE_KEY="right") as running:
        yield running


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("UNMASK_API_KEY", "right")


def true_heads(layer: HeadWeights, seed: int) -> HeadWeights:
    """What the service's readout sees of a layer."""
    return HeadWeights(W=layer.W, v=layer.v @ example.readout_vector(layer.v.shape[2], seed))


HEADS = true_heads(example.DrawnLayer(2, WIDTH, WIDTH // 2, 3).heads(), 5)


def sequences(num: int, length: int = 2, width: int = WIDTH, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, length, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def patient(url: str, **settings) -> HttpOracle:
    return HttpOracle(url, **{"backoff_seconds": 0.05, "retries": 9, "per_request": 16, **settings})


# The layer


@pytest.mark.parametrize("length", [1, 2, 7])
def test_answers_are_those_of_the_layer(service, length):
    X = sequences(40, length)
    answers = OracleEvidence(patient(service.url), WIDTH).ask(X)
    assert torch.allclose(answers, HEADS(X), **ROUNDING)


def oracle_of(*options: str):
    return example.build_oracle(example.parse_options([*LAYER, *options]))[0]


@pytest.mark.parametrize(("dtype", "least", "most"), [("float64", 0, 1e-13), ("float32", 1e-9, 1e-5)])
def test_it_computes_in_the_precision_that_was_asked_for(dtype, least, most):
    X = sequences(30)
    error = float((OracleEvidence(oracle_of("--dtype", dtype), WIDTH).ask(X) - HEADS(X)).abs().max())
    assert least <= error < most


def test_it_can_answer_with_the_whole_output():
    X = sequences(5, 3)
    answers = OracleEvidence(oracle_of("--vector"), WIDTH).ask(X)
    assert torch.allclose(answers, example.DrawnLayer(2, WIDTH, WIDTH // 2, 3).heads()(X), **ROUNDING)


def test_defences_are_those_of_the_options():
    X = sequences(50)
    plain = HEADS(X)
    rounded = OracleEvidence(oracle_of("--decimals", "2"), WIDTH).ask(X)
    assert torch.equal(rounded, plain.round(decimals=2))
    assert torch.equal(OracleEvidence(oracle_of("--signs"), WIDTH).ask(X), plain.sign())
    noise = OracleEvidence(oracle_of("--noise", "0.1"), WIDTH).ask(X) - plain
    assert 0.05 < float(noise.std()) < 0.2  # 50 draws tell it within a tenth
    with pytest.raises(Refused):
        OracleEvidence(oracle_of("--max-norm", "0.1"), WIDTH).ask(X)


REAL = ("--model", "smollm2-135m", "--layer", "1", "--readout", "7")


def test_a_real_model_answers_as_its_heads_do(smollm2):
    check_real(smollm2, example.build_oracle(example.parse_options([*REAL]))[0])


@pytest.mark.slow
def test_a_real_model_is_served(smollm2, commands):
    with started(commands, *REAL) as running:
        check_real(smollm2, patient(running.url))


def check_real(model, oracle):
    X = sequences(6, 2, model.width)
    answers = OracleEvidence(oracle, model.width).ask(X)
    heads = true_heads(example.layer_heads(model, 1), 7)
    assert torch.allclose(answers, heads(X), rtol=1e-9, atol=1e-11 * float(answers.abs().max()))


# The door


def test_it_says_what_it_is(service):
    with urllib.request.urlopen(service.url) as reply:
        about = json.load(reply)
    assert about["width"] == WIDTH
    assert "2 heads" in about["layer"]


def test_a_token_that_is_too_long_is_refused(service):
    oracle = patient(service.url, retries=0)
    with pytest.raises(Refused, match=r"400 'a token has the norm .* tokens up to 1000 are taken'"):
        OracleEvidence(oracle, WIDTH).ask(1e4 * sequences(2))


def test_probing_finds_the_bound_on_norms(service):
    profile = probe_oracle(OracleEvidence(patient(service.url), WIDTH), torch.Generator().manual_seed(0))
    assert 900 < profile.max_norm <= 1000
    assert profile.is_linear
    assert profile.precision < 1e-14


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--key", "NO_SUCH_VARIABLE"), "the variable NO_SUCH_VARIABLE is empty"),
        (("--model", "smollm2-135m", "--layer", "30"), "layer must be from 0 to 29, got 30"),
        (("--decimals", "-1"), "'decimals' must be a whole number"),
        (("--model", "no-such-model"), "no-such-model"),
    ],
)
@pytest.mark.usefixtures("smollm2")
def test_a_mistake_is_told_before_anything_is_served(monkeypatch, options, message):
    monkeypatch.setattr(sys, "argv", ["attention_service.py", *LAYER, *options])
    with pytest.raises(SystemExit, match=f"attention_service: .*{message}"):
        example.main()


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"sequences": []},
        {"sequences": [[[1.0]]]},
        {"sequences": "x"},
        {"sequences": [[[0.0] * WIDTH]], "ids": ["0"]},
    ],
)
def test_what_is_no_question_is_told(service, asked):
    headers = {"Authorization": "Bearer right"}
    request = urllib.request.Request(service.url, json.dumps(asked).encode(), headers, method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    with caught.value:
        assert caught.value.code == 422
        assert "expected sequences as (batch, length, 8)" in json.load(caught.value)["error"]


@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_key_is_needed_where_one_was_set(service, monkeypatch, key):
    monkeypatch.setenv("UNMASK_API_KEY", key)
    with pytest.raises(ServiceError, match=r"401.*set the variable UNMASK_API_KEY"):
        OracleEvidence(patient(service.url), WIDTH).ask(sequences(1))


# Failures and deaths


def billed(bill: Path) -> list[str]:
    """The ids that were charged; charging one twice is what must never happen."""
    ids = bill.read_text().split()
    assert len(ids) == len(set(ids))
    return ids


def test_a_tenth_of_all_requests_may_fail(tmp_path, commands):
    X, bill = sequences(1500), tmp_path / "bill"
    with started(commands, *LAYER, "--fail", "0.1", "--bill", str(bill)) as running:
        evidence = OracleEvidence(patient(running.url), WIDTH)
        assert torch.allclose(evidence.ask(X), HEADS(X), **ROUNDING)
        # Some replies were lost after they were computed; asked again, they were not charged again.
        assert running.num_answered > 1500
    assert len(billed(bill)) == len(evidence.ledger) == 1500


def test_the_service_may_be_killed_and_come_back(tmp_path, commands):
    X, bill = sequences(3000), tmp_path / "bill"
    with started(commands, *LAYER, "--bill", str(bill)) as first:
        pieces = patient(first.url, retries=100, max_wait_seconds=0.3).pieces(X)
        heard = [next(pieces)]
        first.kill()
        with started(commands, *LAYER, "--bill", str(bill), "--port", first.port) as second:
            heard += pieces
            assert 0 < second.num_answered < 3000
    answers = torch.full((3000,), torch.nan, dtype=torch.float64)
    for places, values in heard:
        assert answers[places].isnan().all()
        answers[places] = values
    assert torch.allclose(answers, HEADS(X), **ROUNDING)
    assert len(billed(bill)) == 3000


def test_the_budget_ends_before_the_bill_does_and_a_larger_one_continues(tmp_path, service):
    before, X = service.num_answered, sequences(300, seed=9)
    oracle = patient(service.url)
    with closing(Ledger(tmp_path / "l", budget=150, about=oracle.name)) as ledger:
        evidence = OracleEvidence(oracle, WIDTH, ledger)
        evidence.ask(X[:100])
        with pytest.raises(BudgetSpent, match="100 of 150 queries were paid for and the next step needs 200 more"):
            evidence.ask(X)
    assert service.num_answered - before == 100
    with closing(Ledger(tmp_path / "l", budget=300, about=oracle.name)) as ledger:
        assert torch.allclose(OracleEvidence(oracle, WIDTH, ledger).ask(X), HEADS(X), **ROUNDING)
    assert service.num_answered - before == 300


def test_the_asker_may_be_killed_and_asks_only_what_it_never_heard(tmp_path, commands):
    """Answers are rounded: computed in another batch they differ in the last bits, and so would what follows."""
    bill, ledger, num_all = tmp_path / "bill", tmp_path / "ledger", NUM_STEPS * NUM_EACH
    with started(commands, *LAYER, "--decimals", "8", "--bill", str(bill)) as running:
        with subprocess.Popen([commands / "python", asker.__file__, running.url, ledger]) as killed:
            while not bill.exists() or len(bill.read_text().split()) < num_all / 3:
                time.sleep(0.005)
            killed.kill()
        assert killed.returncode == -signal.SIGKILL
        time.sleep(0.3)  # for requests that the service had already begun
        num_sent = running.num_answered
        with closing(Ledger(ledger, about=running.url)) as kept:
            num_heard = len(kept)
        assert num_all / 4 < num_heard < num_all
        assert 0 <= num_sent - num_heard <= CONCURRENCY * PER_REQUEST

        again = subprocess.run(
            [commands / "python", asker.__file__, running.url, ledger], capture_output=True, text=True, check=True
        )
        answers, num_paid = ast.literal_eval(again.stdout)
        assert num_paid == running.num_answered - num_sent == num_all - num_heard
        assert len(billed(bill)) == num_all

        # One that was never killed hears the same, so it asks nothing that is not on the bill already.
        assert asker.asked(running.url, None) == (answers, num_all)
        assert len(billed(bill)) == num_all
