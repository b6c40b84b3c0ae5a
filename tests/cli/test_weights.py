"""`unmask recover weights`: what it prints, where it keeps answers, and a paragraph for each mistake."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.attacks.queries.random_heads import random_head
from tests.attacks.queries.random_networks import random_layers, random_transformer
from tests.integrations.test_http import Scripted, always, error

from unmask import cli
from unmask.evidence.ledger import Ledger
from unmask.linalg.heads import HeadWeights
from unmask.scores.weights import score_heads

DONE, ERROR, INCONCLUSIVE, USAGE, STOPPED = 0, 2, 3, 4, 130
WIDTH = 4
HEADS = random_head(WIDTH, num_heads=2)
KEY = "sk-0a1b2c3d-do-not-print-me"


def layer(decimals: int | None = None, max_norm: float = float("inf"), heads: HeadWeights | None = None) -> Callable:
    """A service of two heads that knows a key."""

    def script(number, asked):
        X = torch.tensor(asked["sequences"], dtype=torch.float64)
        if X.shape[2] != WIDTH:
            return error(422, f"expected sequences as (batch, length, {WIDTH}): got {tuple(X.shape)}")
        if float(X.norm(dim=2).max()) > max_norm:
            return error(400, "a token is too long")
        answers = (heads or HEADS)(X)
        answers = answers if decimals is None else answers.round(decimals=decimals)
        return 200, {}, json.dumps({"answers": answers.tolist()}).encode()

    return script


@pytest.fixture
def serve() -> Iterator[Callable[[Callable], str]]:
    servers = []

    def start(script: Callable) -> str:
        server = Scripted(script)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server.url

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def call(monkeypatch, capsys, tmp_path) -> Callable[..., tuple[int, str, str]]:
    """The command in this process, in an empty folder: exit code, standard output, standard error as one line."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("UNMASK_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)

    def run(url: str, *options: object) -> tuple[int, str, str]:
        arguments = ["--width", WIDTH, *options] if "--width" not in options else options
        monkeypatch.setattr(sys, "argv", [*["unmask", "recover", "weights", "--oracle"], url, *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capsys.readouterr()
        assert KEY not in out + err
        assert "Traceback" not in err
        return left.value.code, out, " ".join(err.split())

    return run


def files() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


# Results


def test_people_read_the_oracle_first_then_heads_proof_cost_and_what_stops_it(serve, call):
    code, out, err = call(serve(layer(decimals=2)), "--out", "weights.safetensors")
    assert code == DONE
    parts = (
        "the oracle",
        "answers are rounded to multiples of 0.01",
        "RECOVERED",
        "2 heads",
        "norm of W",
        "wrote weights.safetensors",
        "certificate: With these weights 48 fresh random sequences",
        "paid in this run",
        f"each of {2 * (WIDTH**2 + WIDTH)} degrees of freedom",
        "no query can show: the order of heads",
        "what stops it: a bound on the norms of tokens",
    )
    text = " ".join(out.split())
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "--no-ledger: do not save" in err


def test_machines_read_one_document(serve, call):
    code, out, err = call(serve(layer()), "--json", "--no-ledger")
    document = json.loads(out)
    assert (code, err, files()) == (DONE, "", [])
    assert document["status"] == "RECOVERED"
    assert document["oracle"]["is_linear"] is True
    assert document["oracle"]["max_norm"] is None  # no bound
    assert "answers: numbers" in document["oracle"]["sentences"]
    assert [head["rank_W"] for head in document["heads"]] == [WIDTH, WIDTH]
    norms = sorted(float(torch.linalg.matrix_norm(W)) for W in HEADS.W)
    assert sorted(head["norm_W"] for head in document["heads"]) == pytest.approx(norms)
    assert document["queries"]["paid_now"] == document["queries"]["in_ledger"] > 0
    assert document["certificate"]["details"]["learning_queries_per_degree_of_freedom"] > 1
    assert document["written"] is None


def test_the_file_holds_the_weights_and_says_whose(serve, call):
    url = serve(layer())
    assert call(url, "--out", "w.safetensors")[0] == DONE
    score = score_heads(HeadWeights(**load_file("w.safetensors")), HEADS)
    assert max(score.worst_W_error, score.worst_v_error) < 1e-10
    with safe_open("w.safetensors", "pt") as file:
        header = json.loads(file.metadata()["unmask"])
    assert (header["kind"], header["status"], header["oracle"]) == ("weights", "RECOVERED", url)
    assert Path("w.safetensors").stat().st_mode & 0o077 == 0


def test_a_network_behind_the_heads_is_recovered_without_being_named(serve, call):
    transformer = random_transformer(1, WIDTH, random_layers(WIDTH, 4))

    def script(number, asked):
        answers = transformer(torch.tensor(asked["sequences"], dtype=torch.float64))
        return 200, {}, json.dumps({"answers": answers.tolist()}).encode()

    url = serve(script)
    code, out, _ = call(url, "--no-ledger", "--out", "w.safetensors")
    text = " ".join(out.split())
    assert code == DONE
    assert "a network is behind the heads" in text
    assert f"network: 4 neurons on {WIDTH} inputs" in text
    assert {name: tuple(tensor.shape) for name, tensor in load_file("w.safetensors").items()} == {
        "W": (1, WIDTH, WIDTH),
        "normals": (4, WIDTH),
        "signs": (4,),
        "linear": (WIDTH,),
    }
    document = json.loads(call(url, "--no-ledger", "--json")[1])
    assert document["network"] == {"inputs": WIDTH, "neurons": 4}
    assert [head["norm_v"] for head in document["heads"]] == [None]


@pytest.mark.parametrize("after", [lambda answers: answers, torch.sign], ids=["numbers", "signs"])
def test_the_rank_of_a_head_is_shown(serve, call, after):
    heads = random_head(WIDTH, rank=2)

    def script(number, asked):
        answers = after(heads(torch.tensor(asked["sequences"], dtype=torch.float64)))
        return 200, {}, json.dumps({"answers": answers.tolist()}).encode()

    document = json.loads(call(serve(script), "--json", "--no-ledger")[1])
    assert [head["rank_W"] for head in document["heads"]] == [2]


def test_what_is_not_known_is_null(serve, call):
    """With most of the budget, v and some columns of W are known."""
    url = serve(layer())
    needed = json.loads(call(url, "--json", "--no-ledger")[1])["queries"]["in_ledger"]
    code, out, _ = call(url, "--json", "--no-ledger", "--budget", needed - 100, "--out", "w.safetensors")
    document = json.loads(out)
    assert (code, document["status"]) == (INCONCLUSIVE, "BUDGET_EXHAUSTED")
    assert [(head["norm_W"], head["rank_W"]) for head in document["heads"]] == [(None, None)] * 2
    assert document["written"] == "w.safetensors"
    assert load_file("w.safetensors")["W"].isnan().any()


def test_where_nothing_is_found_nothing_is_written(serve, call):
    code, out, _ = call(serve(layer(decimals=1, max_norm=2.0)), "--json", "--out", "w.safetensors", "--no-ledger")
    document = json.loads(out)
    assert (code, document["heads"], document["written"], files()) == (INCONCLUSIVE, [], None, [])
    assert document["oracle"]["max_norm"] <= 2.0


@pytest.mark.parametrize("budget", [0, 20])
def test_a_budget_that_ends_while_probing(serve, call, budget):
    code, out, _ = call(serve(layer()), "--json", "--budget", budget, "--no-ledger")
    document = json.loads(out)
    assert (code, document["status"], document["oracle"]) == (INCONCLUSIVE, "BUDGET_EXHAUSTED", None)
    assert document["queries"]["in_ledger"] <= budget


# The ledger


def test_answers_are_kept_in_a_file_named_after_host_and_width(serve, call):
    url = serve(layer())
    first = json.loads(call(url, "--json")[1])
    name = f"unmask-127.0.0.1_{url.split(':')[2].partition('/')[0]}-width-{WIDTH}.sqlite"
    assert files() == [name]
    with closing(Ledger(name, about=f"{url}, tokens of {WIDTH}")) as ledger:
        assert len(ledger) == first["queries"]["paid_now"]
    second = json.loads(call(url, "--json")[1])
    assert second["queries"]["paid_now"] == 4  # new questions: is it still the same layer?
    assert second["heads"] == first["heads"]


def test_a_ledger_of_another_layer_at_the_same_address_is_seen(serve, call):
    now = [layer()]
    url = serve(lambda number, asked: now[0](number, asked))
    assert json.loads(call(url, "--json")[1])["status"] == "RECOVERED"
    now[0] = layer(heads=HeadWeights(W=HEADS.W.mT.contiguous(), v=HEADS.v))
    code, out, _ = call(url, "--json")
    assert code == INCONCLUSIVE
    assert json.loads(out)["heads"] == []
    assert "Name another ledger" in json.loads(out)["reason"]


def test_a_budget_stops_it_and_a_larger_one_goes_on(serve, call):
    sent = []

    def counted(number, asked):
        sent.extend(asked["sequences"])
        return layer()(number, asked)

    url = serve(counted)
    code, out, _ = call(url, "--json", "--budget", 200)
    stopped = json.loads(out)
    assert (code, stopped["status"]) == (INCONCLUSIVE, "BUDGET_EXHAUSTED")
    num_paid = stopped["queries"]["in_ledger"]
    assert len(sent) == num_paid <= 200
    code, out, _ = call(url, "--json", "--budget", 2000)
    whole = json.loads(out)
    assert (code, whole["status"]) == (DONE, "RECOVERED")
    assert whole["queries"]["paid_now"] == whole["queries"]["in_ledger"] - num_paid
    assert len(sent) == whole["queries"]["in_ledger"]


def test_the_ledger_can_be_named(serve, call):
    _, _, err = call(serve(layer()), "--json", "--ledger", "mine.sqlite")
    assert (err, files()) == ("", ["mine.sqlite"])


@pytest.mark.parametrize(
    ("options", "kept"), [((), "paid answers; the same command continues"), (("--no-ledger",), "are lost")]
)
def test_ctrl_c_says_what_becomes_of_the_answers(serve, call, monkeypatch, options, kept):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("unmask.attacks.recover.recover_from_answers", interrupted)
    code, _, err = call(serve(layer()), *options)
    assert code == STOPPED
    assert kept in err


# Mistakes


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


MISTAKES = {
    "wrong width": (layer(), ("--width", 5), (f"(batch, length, {WIDTH})", "the width of a token")),
    "wrong key": (always(error(401, f"unknown key {KEY}")), (), ("401", "set the variable UNMASK_API_KEY")),
    "not a number": (always((200, {}, b'{"answers": [null]}')), (), ("is not a finite number",)),
    "no such path": (always(error(404, "no such path")), (), ("404", "check the URL")),
    "broken": (always(error(500, "trouble")), ("--retries", 0), ("500", "see that it runs")),
    "no folder": (layer(), ("--out", "none/w.safetensors"), ("there is no folder none",)),
    "a bound below 0": (layer(), ("--max-norm", -1), ("--max-norm must be above 0",)),
    "no time": (layer(), ("--timeout", 0), ("timeout must be above 0",)),
}


@pytest.mark.parametrize(("script", "options", "parts"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_paragraph_and_leaves_nothing_behind(serve, call, script, options, parts):
    code, out, err = call(serve(script), *options)
    assert (code, out, files()) == (ERROR, "", [])
    assert err.startswith("unmask: ")
    assert all(part in err for part in parts)


def test_two_options_that_exclude_each_other(call):
    code, out, err = call("http://127.0.0.1:9/", "--ledger", "x", "--no-ledger")
    assert (code, out, files(), "leave one of them out" in err) == (USAGE, "", [], True)


def test_a_service_that_is_not_there(call):
    code, out, err = call(f"http://127.0.0.1:{free_port()}/", "--retries", 0)
    assert (code, out, files()) == (ERROR, "", [])
    assert "the connection failed" in err


@pytest.mark.parametrize("url", ["localhost", "ftp://host/", "http://someone:secret@host/"])
def test_a_url_that_is_none(call, url):
    code, out, err = call(url)
    assert (code, out) == (ERROR, "")
    assert "secret" not in err


@pytest.mark.parametrize("options", [("--width", 0), ("--width", "wide"), ("--budget", -1), ("--concurrency", 0)])
def test_wrong_usage(call, options):
    assert call("http://127.0.0.1:9/", *options)[0] == USAGE


def test_a_ledger_of_another_service_is_refused(serve, call):
    assert call(serve(layer()), "--ledger", "mine.sqlite", "--json")[0] == DONE
    code, _, err = call(serve(layer()), "--ledger", "mine.sqlite", "--json")
    assert code == ERROR
    assert "name another file, so that answers do not mix" in err
    assert files() == ["mine.sqlite"]
