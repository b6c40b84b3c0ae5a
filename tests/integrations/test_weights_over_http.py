"""`unmask recover weights` against the example service, each in a process of its own; requests fail, both sides die."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.test_attention_service import Running, billed, example, started, true_heads

from unmask.evidence.ledger import Ledger
from unmask.linalg.heads import HeadWeights
from unmask.scores.weights import score_heads

WIDTH, NUM_HEADS = 12, 3
LAYER = ("--heads", str(NUM_HEADS), "--width", str(WIDTH), "--seed", "2")
HEADS = true_heads(example.DrawnLayer(NUM_HEADS, WIDTH, WIDTH // NUM_HEADS, 2).heads(), 0)
DONE, STOPPED = 0, 130
REPEATED = 5  # answers to one question that probing repeats, to see noise; an id names it once, so it is billed once
PER_REQUEST, CONCURRENCY = 8, 2  # many small requests, so that there is a middle to be killed in


class Learner:
    """The command, with a ledger and a file of weights in a folder."""

    def __init__(self, commands: Path, url: str, folder: Path) -> None:
        self.ledger, self.out = folder / "ledger.sqlite", folder / "weights.safetensors"
        files = ("--ledger", self.ledger, "--out", self.out, "--json")
        service = ("--oracle", url, "--width", WIDTH, "--per-request", PER_REQUEST, "--concurrency", CONCURRENCY)
        self.command = [str(part) for part in (commands / "unmask", "recover", "weights", *service, *files)]
        self.about = f"{url}, tokens of {WIDTH}"

    def run(self) -> dict:
        done = subprocess.run(self.command, capture_output=True, text=True, timeout=120)
        assert done.returncode == DONE, done.stderr
        assert "Traceback" not in done.stderr
        return json.loads(done.stdout)

    def start(self) -> subprocess.Popen[str]:
        # Where tests run in the background of a shell, they would inherit that interrupts are ignored.
        heed = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
        return subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **heed)

    @property
    def num_heard(self) -> int:
        with closing(Ledger(self.ledger, about=self.about)) as ledger:
            return len(ledger)

    @property
    def weights(self) -> HeadWeights:
        return HeadWeights(**load_file(self.out))


def wait_for(count: Callable[[], int], num: int) -> None:
    deadline = time.monotonic() + 60
    while count() < num:
        assert time.monotonic() < deadline, "the learner does not go on"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def service(commands: Path) -> Iterator[Running]:
    """One that nothing happens to, for all tests that only disturb the learner."""
    with started(commands, *LAYER) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(commands, service, tmp_path_factory: pytest.TempPathFactory) -> tuple[HeadWeights, dict]:
    learner = Learner(commands, service.url, tmp_path_factory.mktemp("undisturbed"))
    document = learner.run()
    return learner.weights, document


@pytest.fixture
def num_all(undisturbed) -> int:
    """The number of answers that the weights cost."""
    return undisturbed[1]["queries"]["in_ledger"]


def test_the_weights_of_the_service_are_recovered(undisturbed):
    weights, document = undisturbed
    score = score_heads(weights, HEADS)
    assert document["status"] == "RECOVERED"
    assert document["certificate"]["holds"]
    assert score.num_missing == score.num_extra == 0
    assert max(score.worst_W_error, score.worst_v_error) < 1e-9
    assert document["queries"]["paid_now"] == document["queries"]["in_ledger"] <= document["queries"]["asked"]


@pytest.mark.slow
def test_failures_and_the_deaths_of_both_sides_change_nothing(commands, tmp_path, undisturbed, num_all):
    bill = tmp_path / "bill"
    bill.touch()
    options = (*LAYER, "--fail", "0.1", "--bill", str(bill))
    with ExitStack() as services:
        first = services.enter_context(started(commands, *options))
        learner = Learner(commands, first.url, tmp_path)
        with learner.start() as killed:
            wait_for(lambda: len(billed(bill)), num_all // 4)
            first.kill()
            services.enter_context(started(commands, *options, "--port", first.port))
            wait_for(lambda: len(billed(bill)), num_all // 2)
            killed.kill()
        assert killed.returncode == -signal.SIGKILL
        num_heard = learner.num_heard
        assert 0 < num_heard < num_all
        again = learner.run()
    assert again["status"] == "RECOVERED"
    assert again["queries"]["paid_now"] == again["queries"]["in_ledger"] - num_heard
    assert len(billed(bill)) == again["queries"]["in_ledger"] - REPEATED  # and no id twice, which `billed` checks
    # The last digits of an answer depend on how batches are cut, and with them the next questions.
    score = score_heads(learner.weights, undisturbed[0])
    assert max(score.worst_W_error, score.worst_v_error) < 1e-9
    assert score.num_missing == score.num_extra == 0


@pytest.mark.slow
def test_a_run_that_was_killed_asks_only_what_it_never_heard(commands, tmp_path, service, num_all):
    learner, before = Learner(commands, service.url, tmp_path), service.num_answered
    with learner.start() as killed:
        wait_for(lambda: service.num_answered - before, num_all // 2)
        killed.kill()
    time.sleep(0.3)  # for requests that the service had already begun
    num_sent, num_heard = service.num_answered, learner.num_heard
    assert 0 <= num_sent - before - num_heard <= CONCURRENCY * PER_REQUEST
    again = learner.run()
    assert again["status"] == "RECOVERED"
    assert service.num_answered - num_sent == again["queries"]["paid_now"]
    assert again["queries"]["paid_now"] == again["queries"]["in_ledger"] - num_heard


def test_ctrl_c_says_what_is_kept(commands, tmp_path, service, num_all):
    learner, before = Learner(commands, service.url, tmp_path), service.num_answered
    with learner.start() as stopped:
        wait_for(lambda: service.num_answered - before, num_all // 8)
        stopped.send_signal(signal.SIGINT)
        out, err = stopped.communicate(timeout=60)
    assert (stopped.returncode, out) == (STOPPED, "")
    assert "Traceback" not in err
    said = re.search(r"has the (\d+) paid answers; the same command continues", " ".join(err.split()))
    assert said
    # The signal may come between writing an answer and counting it.
    assert 0 <= learner.num_heard - int(said[1]) <= PER_REQUEST
