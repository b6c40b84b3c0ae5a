"""What is sent and read, against a server that says what a test tells it."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from unmask.errors import InputError, UnmaskError
from unmask.integrations.openai.client import OpenAIClient

KEY = "sk-very-secret-17"
COMPLETION = {
    "choices": [
        {"index": 0, "logprobs": {"tokens": ["a"], "token_logprobs": [-9999.0], "top_logprobs": [{"b": -0.5, "c": -2}]}}
    ]
}
CHAT = {
    "choices": [
        {
            "index": 0,
            "logprobs": {
                "content": [
                    {"token": "b", "logprob": -0.5, "top_logprobs": [{"token": "b", "logprob": -0.5, "bytes": [98]}]}
                ]
            },
        }
    ]
}


@contextmanager
def saying(*replies):
    """A server that gives these replies in turn, (status, document); yields its address and what it was sent."""
    requests, left = [], list(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, dict(self.headers), body))
            status, document = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(json.dumps(document).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        server.server_close()


def test_a_completion_is_asked_for_and_read():
    with saying((200, COMPLETION)) as (url, requests):
        (found,) = OpenAIClient(url, "m").complete([(5, 6)], 2, {7: 50.0}, {"extra": 1})
    path, _, body = requests[0]
    assert path == "/v1/completions"
    assert (body["prompt"], body["logprobs"], body["logit_bias"], body["extra"]) == ([5, 6], 2, {"7": 50.0}, 1)
    assert (body["max_tokens"], body["temperature"], body["model"]) == (1, 0, "m")
    assert found.top == {"b": -0.5, "c": -2}
    assert (found.sampled, found.sampled_value) == ("a", None)  # −9999 is no log-probability


def test_a_chat_is_asked_for_and_read():
    with saying((200, CHAT)) as (url, requests):
        client = OpenAIClient(f"{url}/v1", "m", chat=True)
        (found,) = client.complete(["hello"], 2)
        with pytest.raises(InputError, match="one text"):
            client.complete([(5, 6)], 2)
    path, _, body = requests[0]
    assert path == "/v1/chat/completions"
    assert (body["messages"][0]["content"], body["logprobs"], body["top_logprobs"]) == ("hello", True, 2)
    assert (found.top, found.sampled_value) == ({"b": -0.5}, -0.5)


def test_a_busy_server_is_asked_again():
    with saying((429, {"error": "slow down"}), (200, COMPLETION)) as (url, requests):
        assert OpenAIClient(url, "m").complete(["x"], 2)[0].sampled == "a"
    assert len(requests) == 2


def test_the_key_is_sent_and_shown_nowhere(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with saying((401, {"error": f"unknown key {KEY}"})) as (url, requests):
        client = OpenAIClient(url, "m")
        with pytest.raises(UnmaskError) as refusal:
            client.complete(["x"], 1)
    assert requests[0][1]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in f"{refusal.value} {client!r} {client.name}"


def test_a_reply_without_log_probabilities_is_said():
    bare = {"choices": [{"index": 0, "text": "a", "logprobs": None}]}
    with saying((200, bare)) as (url, _), pytest.raises(UnmaskError, match="no log-probabilities"):
        OpenAIClient(url, "m").complete(["x"], 1)
    with saying((200, COMPLETION)) as (url, _), pytest.raises(UnmaskError, match="asked 2 prompts and answered 1"):
        OpenAIClient(url, "m").complete(["x", "y"], 1)


def test_hope_is_lost_at_last():
    with saying((500, {"error": "broken"})) as (url, requests), pytest.raises(UnmaskError, match="1 times"):
        OpenAIClient(url, "m", retries=0).complete(["x"], 1)
    assert len(requests) == 1
