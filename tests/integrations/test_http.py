"""The oracle over HTTP, against servers of this process that misbehave in every way that is known."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import ssl
import threading
import time
import traceback
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.errors import InputError, UnmaskError
from unmask.evidence.ledger import Ledger
from unmask.evidence.oracles import OracleEvidence, Refused, question_keys
from unmask.integrations.http import HttpOracle, NoAnswerError, ServiceError, _seconds_to_wait

KEY = "sk-9f8e7d6c5b4a-do-not-print-me"


class Scripted(ThreadingHTTPServer):
    """A server whose replies are a function of the number of the request and of what is asked.

    A reply is (status, headers, body), or bytes that are sent as they are before the line is cut.
    """

    daemon_threads = True

    def __init__(self, script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script, self.requests, self.lock = script, [], threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/ask"

    def handle_error(self, request, client_address):
        """Askers that hang up are part of the play."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append((dict(self.headers), self.path, asked))
        reply = self.server.script(number, asked)
        if isinstance(reply, bytes):
            self.close_connection = True
            self.wfile.write(reply)
            return
        status, headers, body = reply
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(script):
        server = Scripted(script)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def answered(asked):
    """The sum of each sequence."""
    return 200, {}, json.dumps({"answers": [sum(map(sum, rows)) for rows in asked["sequences"]]}).encode()


def always(reply):
    return lambda number, asked: reply


def failing_first(*replies):
    return lambda number, asked: replies[number] if number < len(replies) else answered(asked)


def error(status, message="no", **headers):
    return status, headers, json.dumps({"error": message}).encode()


def quick(url, **settings):
    return HttpOracle(url, **{"backoff_seconds": 0.001, "retries": 3, "timeout": 5.0, **settings})


def whole(num, width=2):
    """Sequences of small whole numbers: sums are exact in any order."""
    return torch.arange(num * 2 * width, dtype=torch.float64).reshape(num, 2, width)


def ask(oracle, sequences):
    return OracleEvidence(oracle, sequences.shape[2]).ask(sequences)


# Answers


@pytest.mark.parametrize(("concurrency", "per_request"), [(1, 1), (4, 3), (8, 64)])
def test_every_place_is_answered_once(serve, concurrency, per_request):
    server, X = serve(lambda number, asked: answered(asked)), whole(20)
    pieces = list(quick(server.url, concurrency=concurrency, per_request=per_request).pieces(X))
    assert sorted(place for places, _ in pieces for place in places) == list(range(20))
    assert all(torch.equal(answers, X[places].sum((1, 2))) for places, answers in pieces)
    assert len(server.requests) == -(-20 // per_request)


def test_ids_are_those_of_the_ledger(serve):
    server, X = serve(lambda number, asked: answered(asked)), whole(5)
    ask(quick(server.url), X)
    assert server.requests[0][2]["ids"] == [key.hex() for key in question_keys(X)]


def test_pieces_come_before_the_slowest_is_ready(serve):
    late = threading.Event()

    def script(number, asked):
        if asked["sequences"][0][0][0] == 0:
            late.wait(10)
        return answered(asked)

    pieces = quick(serve(script).url, per_request=1).pieces(whole(3))
    assert sorted(next(pieces)[0] + next(pieces)[0]) == [1, 2]
    late.set()
    assert next(pieces)[0] == [0]


@pytest.fixture(scope="module")
def echo():
    def script(number, asked):
        return 200, {}, json.dumps({"answers": [rows[0] for rows in asked["sequences"]]}).encode()

    server = Scripted(script)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield HttpOracle(server.url)
    server.shutdown()
    server.server_close()


@settings(max_examples=40)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=3, max_size=3))
def test_numbers_survive_the_way_there_and_back(echo, numbers):
    X = torch.tensor([[numbers]], dtype=torch.float64)
    assert torch.equal(ask(echo, X)[0].view(torch.int64), X[0, 0].view(torch.int64))


def test_connections_are_kept_for_later_questions(serve):
    server = serve(lambda number, asked: answered(asked))
    oracle = quick(server.url, concurrency=1, retries=0)
    for _ in range(3):
        ask(oracle, whole(2))
    assert len(oracle._idle) == 1
    # A connection that was closed meanwhile costs no trial.
    oracle._idle[0].sock.shutdown(socket.SHUT_RDWR)
    ask(oracle, whole(2))
    assert len(oracle._idle) == 1


def test_no_proxy_of_the_environment_is_used(serve, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/")
    assert ask(quick(serve(lambda number, asked: answered(asked)).url), whole(1)).tolist() == [6.0]


# Failures that pass


@pytest.mark.parametrize(
    "reply",
    [
        *(error(status) for status in (408, 425, 429, 500, 502, 503, 504)),
        b"",
        b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"answers": [',
        b"nonsense\r\n\r\n",
    ],
    ids=lambda reply: str(reply[0] if isinstance(reply, tuple) else reply[:12]),
)
def test_a_passing_failure_is_asked_again(serve, reply):
    server, X = serve(failing_first(reply, reply)), whole(3)
    assert torch.equal(ask(quick(server.url), X), X.sum((1, 2)))
    assert len(server.requests) == 3
    assert server.requests[0][2] == server.requests[2][2]


def test_a_slow_reply_is_asked_again(serve):
    def script(number, asked):
        time.sleep(0.6 if number == 0 else 0)
        return answered(asked)

    server = serve(script)
    assert ask(quick(server.url, timeout=0.2), whole(1)).tolist() == [6.0]
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (error(503, "closed for today"), r"it answered 503 'closed for today', 4 times; .* what it answered is kept"),
        (b"", r"the connection failed \(Remote end closed connection without response\), 4 times"),
    ],
)
def test_hope_ends_with_the_last_trial(serve, reply, message):
    server = serve(always(reply))
    with pytest.raises(ServiceError, match=message):
        ask(quick(server.url), whole(1))
    assert len(server.requests) == 4


def test_nobody_there():
    with pytest.raises(ServiceError, match=r"the connection failed .*refused.* 2 times; see that it runs"):
        ask(quick("http://127.0.0.1:9/", retries=1), whole(1))


def test_retry_after_is_honoured(serve):
    server = serve(failing_first(error(429, **{"Retry-After": "0.3"})))
    start = time.monotonic()
    ask(quick(server.url), whole(1))
    assert time.monotonic() - start >= 0.3


def test_a_wait_that_is_too_long_ends_the_run(serve):
    server = serve(always(error(429, "quota", **{"Retry-After": "3600"})))
    with pytest.raises(ServiceError, match=r"429 'quota' and asks to wait 3600 s; start again after that"):
        ask(quick(server.url), whole(1))
    assert len(server.requests) == 1


def test_retry_after_in_seconds_and_as_a_date():
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    assert 85 < _seconds_to_wait(soon) <= 90
    past = format_datetime(datetime.now(UTC) - timedelta(days=1), usegmt=True)
    values = {"7": 7.0, " 0.5 ": 0.5, "-3": 0.0, "soon": 0.0, "": 0.0, "nan": 0.0, past: 0.0}
    assert {text: _seconds_to_wait(text) for text in values} == values
    assert _seconds_to_wait(None) == 0.0


# Failures that stay


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (error(404, "no such path"), ServiceError, r"answered 404 'no such path'; check the URL"),
        (error(401, "who are you"), NoAnswerError, r"401 'who are you'; set the variable UNMASK_API_KEY to a key"),
        (error(403), NoAnswerError, r"set the variable UNMASK_API_KEY"),
        (
            error(400, "the norm of a token is above 10"),
            Refused,
            r"does not take such tokens: it answered 400 'the norm",
        ),
        (error(422, "Tokens must be shorter"), Refused, r"does not take such tokens"),
        (error(413, "token too long"), Refused, r"does not take such tokens"),
        (error(400, "bad JSON"), ServiceError, r"400 'bad JSON'; check the URL"),
        (error(413, "payload too large"), ServiceError, r"ask fewer than 64 sequences in a request"),
        ((418, {}, b"<html>\n a  teapot</html>"), ServiceError, r"answered 418 '<html> a teapot</html>'"),
        ((200, {}, b"<html>hello"), ServiceError, r"must reply with .*\"answers\".*, got '<html>hello'; check the URL"),
        ((200, {}, b'{"answer": [1]}'), ServiceError, r"must reply with"),
        ((200, {}, b'{"answers": [1, 2]}'), ServiceError, r"was asked 1 sequences and sent 2 answers"),
        ((200, {}, b'{"answers": ["1"]}'), ServiceError, r"must reply with"),
        ((200, {}, b'{"answers": [true]}'), ServiceError, r"must reply with"),
        ((200, {}, b'{"answers": 3}'), ServiceError, r"must reply with"),
        ((200, {}, b"[" * 100_000), ServiceError, r"must reply with"),
        ((200, {}, b'{"answers": [1' + b"0" * 400 + b"]}"), ServiceError, r"must reply with"),
        ((200, {}, b'{"answers": [NaN]}'), Refused, r"1 of 1 sequences is not a finite number"),
        ((200, {}, b'{"answers": [null]}'), Refused, r"1 of 1 sequences is not a finite number"),
        ((200, {}, b'{"answers": [Infinity]}'), Refused, r"not a finite number"),
        ((200, {}, b" " * 300_000), ServiceError, r"sent more than 200,000 bytes for 64 sequences"),
    ],
)
def test_a_lasting_failure_is_told_at_once(serve, reply, kind, message):
    server = serve(always(reply))
    with pytest.raises(UnmaskError, match=message) as caught:
        ask(quick(server.url, max_reply_bytes=200_000), whole(1))
    assert caught.type is kind
    assert len(server.requests) == 1


def test_of_a_long_complaint_the_start_is_shown(serve):
    with pytest.raises(ServiceError, match="404 'word word") as caught:
        ask(quick(serve(always((404, {}, b"word " * 10_000))).url), whole(1))
    assert len(str(caught.value)) < 500


def test_a_redirect_is_told_and_not_followed(serve, monkeypatch):
    monkeypatch.setenv("UNMASK_API_KEY", KEY)
    elsewhere = serve(lambda number, asked: answered(asked))
    server = serve(always((307, {"Location": f"{elsewhere.url}?key=secret"}, b"")))
    with pytest.raises(ServiceError, match=rf"answered 307 and points to {elsewhere.url}; check the URL"):
        ask(quick(server.url), whole(1))
    assert elsewhere.requests == []


def test_what_other_requests_bring_is_kept_before_the_error(serve):
    """Four requests under way, one of them refused at once: the other three are paid for, the rest is never sent."""
    received = threading.Barrier(4)

    def script(number, asked):
        received.wait(10)
        if asked["sequences"][0][0][0] == 0:
            return error(404)
        time.sleep(0.2)
        return answered(asked)

    server = serve(script)
    evidence = OracleEvidence(quick(server.url, concurrency=4, per_request=5), 2)
    with pytest.raises(ServiceError, match="404"):
        evidence.ask(whole(100))
    assert len(server.requests) == 4
    assert len(evidence.ledger) == 15


def test_finite_answers_of_a_request_are_kept(serve):
    evidence = OracleEvidence(quick(serve(always((200, {}, b'{"answers": [1.5, null, 2.5]}'))).url), 2)
    with pytest.raises(Refused, match="1 of 3 sequences"):
        evidence.ask(whole(3))
    assert len(evidence.ledger) == 2
    assert evidence.ask(whole(3)[[0, 2]]).tolist() == [1.5, 2.5]


def test_vectors_are_refused_one_by_one(serve):
    evidence = OracleEvidence(quick(serve(always((200, {}, b'{"answers": [[1, 2], [3, null]]}'))).url), 2)
    with pytest.raises(Refused, match="1 of 2 sequences"):
        evidence.ask(whole(2))
    assert evidence.ask(whole(2)[:1]).tolist() == [[1.0, 2.0]]


# The key


def test_the_key_is_a_bearer_token(serve, monkeypatch):
    server = serve(lambda number, asked: answered(asked))
    monkeypatch.delenv("UNMASK_API_KEY", raising=False)
    ask(quick(server.url), whole(1))
    monkeypatch.setenv("UNMASK_API_KEY", f" {KEY}\n")
    monkeypatch.setenv("OTHER", "other-key")
    ask(quick(server.url), whole(1))
    ask(quick(server.url, api_key_env="OTHER"), whole(1))
    ask(quick(server.url, api_key_env=None), whole(1))
    sent = [headers.get("Authorization") for headers, _, _ in server.requests]
    assert sent == [None, f"Bearer {KEY}", "Bearer other-key", None]


ECHOES = {
    "error": error(400, f"bad header: Bearer {KEY}"),
    "tokens": error(422, f"tokens of {KEY}"),
    "denied": error(401, f"unknown key {KEY}"),
    "passing": error(500, f"traceback: {KEY}"),
    "many": (404, {}, (KEY * 400).encode()),
    "at the end of what is shown": (404, {}, ("x" * 290 + KEY).encode()),
    "waiting": error(429, KEY, **{"Retry-After": "9999"}),
    "html": (200, {}, f"<html>{KEY}".encode()),
    "moved": (302, {"Location": f"http://user:{KEY}@127.0.0.1/?key={KEY}"}, b""),
    "moved nowhere": (302, {"Location": KEY}, KEY.encode()),
    "status line": f"HTTP/9 {KEY}\r\n\r\n".encode(),
    "cut": b"",
}


@pytest.mark.parametrize("reply", ECHOES.values(), ids=ECHOES)
def test_the_key_is_never_shown_or_stored(serve, monkeypatch, tmp_path, capfd, caplog, reply):
    """Not even where the service repeats it: errors with their tracebacks, logs, names, the ledger."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("UNMASK_API_KEY", KEY)
    server = serve(lambda number, asked: reply if number else answered(asked))
    oracle = quick(f"{server.url}?token=query-{KEY[::-1]}", retries=1, concurrency=1)
    with closing(Ledger(tmp_path / "ledger", about=oracle.name)) as ledger:
        evidence = OracleEvidence(oracle, 2, ledger)
        evidence.ask(whole(1))
        with pytest.raises(UnmaskError) as caught:
            evidence.ask(whole(3))
        seen = [str(caught.value), repr(caught.value), *traceback.format_exception(caught.value)]
        seen += [oracle.name, repr(oracle), str(oracle), repr(evidence)]
        seen += [file.read_bytes().decode(errors="replace") for file in tmp_path.iterdir()]
    out, err = capfd.readouterr()
    everything = "\n".join([*seen, out, err, caplog.text])
    assert server.requests[0][0]["Authorization"] == f"Bearer {KEY}"
    assert server.requests[0][1] == f"/ask?token=query-{KEY[::-1]}"
    assert KEY[:12] not in everything
    assert KEY[::-1] not in everything


@pytest.mark.parametrize("key", ["two\nlines", "with space", "snøwman", "a\x7fb"])
def test_a_key_that_no_header_can_hold_is_told_without_it(monkeypatch, key):
    monkeypatch.setenv("UNMASK_API_KEY", key)
    with pytest.raises(InputError, match="the variable UNMASK_API_KEY holds signs that no key has") as caught:
        ask(quick("http://127.0.0.1:9/"), whole(1))
    assert key not in str(caught.value)


# Settings


@pytest.mark.parametrize(
    "url",
    ["", "localhost:80", "ftp://host/", "http://", "http://host:port/", "http://a b/", "http://a..b/", "http://h/\n"],
)
def test_a_url_must_be_one(url):
    with pytest.raises(InputError, match="must look like https://host:port/path"):
        HttpOracle(url)


def test_a_password_in_the_url_is_refused_without_repeating_it():
    with pytest.raises(InputError, match="set the variable UNMASK_API_KEY instead") as caught:
        HttpOracle("https://someone:hunter2@api.example/")
    assert "hunter2" not in str(caught.value)


def test_the_name_is_the_url_with_a_digest_of_its_query():
    oracle = HttpOracle("https://api.example:8443/v1/ask?key=abc#there")
    assert oracle.name.startswith("https://api.example:8443/v1/ask?")
    assert "abc" not in repr(oracle)
    other = HttpOracle("https://api.example:8443/v1/ask?key=abd")
    assert other.name != oracle.name  # another query may be another layer, whose answers must not be mixed up
    assert HttpOracle("https://api.example/ask#there").name == "https://api.example/ask"


@pytest.mark.parametrize(
    "settings", [{"concurrency": 0}, {"per_request": 0}, {"timeout": 0}, {"retries": -1}, {"max_wait_seconds": -1.0}]
)
def test_settings_must_make_sense(settings):
    with pytest.raises(InputError, match=f"{next(iter(settings))} must be"):
        HttpOracle("http://localhost/", **settings)


def test_a_service_without_a_valid_certificate_is_told_at_once(monkeypatch):
    def connect(self):
        failure = ssl.SSLCertVerificationError("certificate verify failed")
        failure.verify_message = "self-signed certificate"
        raise failure

    monkeypatch.setattr(http.client.HTTPSConnection, "connect", connect)
    with pytest.raises(ServiceError, match=r"no valid certificate \(self-signed certificate\)"):
        ask(HttpOracle("https://127.0.0.1/"), whole(1))
