"""A service that answers with one real attention layer, to be asked by `unmask.integrations.http.HttpOracle`.

python examples/attention_service.py --port 8000 --heads 4 --width 16
python examples/attention_service.py --model smollm2-135m --layer 0 --readout 7

    f(X) = Σ_h Σ_i softmax_i(x_iᵀ W_h x_n)·v_hᵀ x_i,    x_n the last row

By default the layer's projections are drawn from --seed. With --model they are those of a real model: a token is a row
that enters the query, key and value projections (so after the norm), all tokens stand at one position, where rotary
positions cancel, and the answer is what the output projection hands out, times a vector drawn from --readout.

POST {"sequences": [[[0.5, …], …], …], "ids": ["9f…", …]} → {"answers": [0.25, …]}. GET / and GET /health.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import random
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unmask.defences import BoundedNormOracle, NoisyOracle, RoundedOracle, SignOracle
from unmask.errors import InputError, UnmaskError
from unmask.evidence.oracles import ModuleOracle, Oracle, Refused, question_keys
from unmask.linalg.heads import HeadWeights
from unmask.models import Model, load_model
from unmask.models.heads import heads_of, layer_heads

MAX_BODY_BYTES = 2**26


class DrawnLayer(nn.Module):
    """Multi-head attention without biases, with weights drawn from a seed."""

    def __init__(self, num_heads: int, width: int, head_width: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.num_heads, self.head_width = num_heads, head_width
        inner = num_heads * head_width
        for name, rows, columns in (("q", width, inner), ("k", width, inner), ("v", width, inner), ("o", inner, width)):
            drawn = torch.randn(rows, columns, generator=generator, dtype=torch.float64) / rows**0.5
            self.register_parameter(name, nn.Parameter(drawn, requires_grad=False))

    def forward(self, X: Tensor) -> Tensor:
        """(batch, length, width) → what the last token gets, (batch, width)."""
        query, keys, values = (
            (rows @ weight).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for rows, weight in ((X[:, -1:], self.q), (X, self.k), (X, self.v))
        )
        mixed = nn.functional.scaled_dot_product_attention(query, keys, values)
        return mixed[:, :, 0].flatten(1) @ self.o

    def heads(self) -> HeadWeights:
        """W_h and V_h of every head."""
        return heads_of((self.q, self.k, self.v, self.o), self.num_heads, self.num_heads, self.head_width**-0.5)


class ModelLayer(nn.Module):
    """The attention module of one layer of a real model, all tokens at position 0."""

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        self.model, self.layer = model, layer
        self.body = model.hf  # so that its parameters are this module's

    def forward(self, X: Tensor) -> Tensor:
        """(batch, length, width) → what the output projection hands out for the last token, (batch, width)."""
        positions = torch.zeros(X.shape[:2], dtype=torch.long, device=X.device)
        queries, keys, values = self.model.queries_keys_values(self.layer, X, positions)
        everything = torch.ones(len(X), 1, X.shape[1], dtype=torch.bool, device=X.device)
        mixed = self.model.mix(self.layer, queries[:, -1:], keys, values, everything)[:, 0]
        return self.model.after_attention(self.layer, X.new_zeros(len(X), X.shape[2]), mixed).added


class Readout(nn.Module):
    """A layer's output times a vector: one number."""

    def __init__(self, layer: nn.Module, width: int, seed: int) -> None:
        super().__init__()
        self.layer, self.vector = layer, nn.Parameter(readout_vector(width, seed), requires_grad=False)

    def forward(self, X: Tensor) -> Tensor:
        """(batch, length, width) → (batch,)."""
        return self.layer(X) @ self.vector


def readout_vector(width: int, seed: int) -> Tensor:
    """A random direction."""
    drawn = torch.randn(width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn / drawn.norm()


class Bill:
    """Which questions were charged: one line for each id, written before the reply is sent."""

    def __init__(self, path: Path | None) -> None:
        self._lock = threading.Lock()
        self._billed = set(path.read_text().split()) if path and path.exists() else set()
        self._file = path.open("a") if path else None

    def charge(self, ids: list[str]) -> None:
        """Add the ids that were never charged; nobody is charged twice for what got lost on the way."""
        with self._lock:
            new = [name for name in dict.fromkeys(ids) if name not in self._billed]
            self._billed.update(new)
            if self._file and new:
                self._file.write("".join(f"{name}\n" for name in new))
                self._file.flush()


class Handler(BaseHTTPRequestHandler):
    """One connection of an asker."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every reply waits for the asker's acknowledgement of its header
    timeout = 60
    server: Service

    def do_GET(self) -> None:
        """What this is, and whether it lives."""
        if self.path == "/health":
            self._reply(200, {"status": "ok", "num_answered": self.server.num_answered})
        else:
            self._reply(200, self.server.about)

    def do_POST(self) -> None:
        """Answers to a batch of sequences."""
        length = int(self.headers.get("Content-Length") or 0)
        if length > MAX_BODY_BYTES:
            self.close_connection = True
            return self._reply(413, {"error": f"more than {MAX_BODY_BYTES} bytes; ask less at once"})
        body = self.rfile.read(length)
        if not self.server.knows(self.headers.get("Authorization", "")):
            return self._reply(401, {"error": "a key is needed: Authorization: Bearer …"})
        failure = self.server.next_failure()
        if failure == "dropped before":
            return self._drop()
        if failure in ("500", "429"):
            return self._reply(int(failure), {"error": "try again"}, {"Retry-After": "0"})
        try:
            answers = self.server.answer(json.loads(body))
        except Refused as error:
            return self._reply(400, {"error": str(error)})
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            return self._reply(422, {"error": f"expected sequences as {self.server.shape}: {error}"})
        return self._drop() if failure == "dropped after" else self._reply(200, {"answers": answers})

    def _reply(self, status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _drop(self) -> None:
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""


class Service(ThreadingHTTPServer):
    """The layer behind its defences, a bill, a key, and failures on purpose."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, oracle: Oracle, width: int, options: argparse.Namespace) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.oracle, self.width = oracle, width
        self.shape = f"(batch, length, {width})"
        self.about = {"service": "one attention layer", "layer": oracle.name, "width": width, "ask": "POST sequences"}
        self.num_answered = 0
        self._bill = Bill(options.bill)
        self._share, self._chance = options.fail, random.Random(options.seed)
        self._key = os.environ.get(options.key, "").strip() if options.key else None
        if self._key == "":
            raise InputError(f"the variable {options.key} is empty; set it to the key that askers need")
        self._lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """An asker that hangs up or dies is no news; anything else is."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def answer(self, asked: dict[str, Any]) -> list[Any]:
        """Answers as JSON has them; the bill is written before they are handed out."""
        sequences = torch.tensor(asked["sequences"], dtype=torch.float64)
        if sequences.ndim != 3 or sequences.shape[2] != self.width or not sequences.numel():
            raise ValueError(f"got {tuple(sequences.shape)}")
        names = [key.hex() for key in question_keys(sequences)]
        # An id is taken for what it names, not for what the asker says: else one id would buy every answer.
        if asked.get("ids", names) != names:
            raise ValueError("ids must be those of these sequences")
        answers = torch.zeros(0)
        for places, values in self.oracle.pieces(sequences):
            answers = answers if len(answers) else values.new_zeros((len(sequences), *values.shape[1:]))
            answers[places] = values
        with self._lock:
            self.num_answered += len(sequences)
        self._bill.charge(names)
        return _as_json(answers.double().tolist())

    def knows(self, authorization: str) -> bool:
        """Whether the asker has the key, if one is needed."""
        return self._key is None or hmac.compare_digest(authorization.encode(), f"Bearer {self._key}".encode())

    def next_failure(self) -> str | None:
        """What goes wrong with this request, if anything."""
        with self._lock:
            if self._chance.random() >= self._share:
                return None
            return self._chance.choice(["500", "429", "dropped before", "dropped after"])


def _as_json(answer: Any) -> Any:
    """Numbers that are not finite as null, which JSON has."""
    if isinstance(answer, list):
        return [_as_json(entry) for entry in answer]
    return answer if abs(answer) < float("inf") else None


def build_oracle(options: argparse.Namespace) -> tuple[Oracle, int]:
    """The layer that the options name behind the defences that they name, and its width."""
    dtype = getattr(torch, options.dtype)
    if options.model:
        model = load_model(options.model)
        if not 0 <= options.layer < model.num_blocks:
            raise InputError(f"layer must be from 0 to {model.num_blocks - 1}, got {options.layer}")
        model = model.to(dtype=dtype, num_blocks=options.layer + 1)
        layer_heads(model, options.layer)  # refuses a layer with biases
        layer, width, name = ModelLayer(model, options.layer), model.width, f"{options.model}, layer {options.layer}"
    else:
        head_width = options.head_width or max(1, options.width // options.heads)
        layer = DrawnLayer(options.heads, options.width, head_width, options.seed)
        width, name = options.width, f"{options.heads} heads of width {head_width}, seed {options.seed}"
    module = layer if options.vector else Readout(layer, width, options.readout)
    oracle: Oracle = ModuleOracle(module.to(dtype), f"{name}, {options.dtype}")
    if options.noise:
        oracle = NoisyOracle(oracle, options.noise, options.seed)
    if options.decimals is not None:
        oracle = RoundedOracle(oracle, options.decimals)
    if options.signs:
        oracle = SignOracle(oracle)
    if options.max_norm:
        oracle = BoundedNormOracle(oracle, options.max_norm)
    return oracle, width


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--head-width", type=int, help="width / heads unless given")
    parser.add_argument("--seed", type=int, default=0, help="of weights, noise and failures")
    parser.add_argument("--model", help="a model of `unmask models` without biases, as smollm2-135m")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--readout", type=int, default=0, help="seed of the vector that makes the output one number")
    parser.add_argument("--vector", action="store_true", help="answer with the whole output")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--decimals", type=int, help="round answers")
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation added to answers")
    parser.add_argument("--max-norm", type=float, help="refuse longer tokens")
    parser.add_argument("--signs", action="store_true", help="answer with signs only")
    parser.add_argument("--fail", type=float, default=0.0, help="share of requests that go wrong")
    parser.add_argument("--key", metavar="VARIABLE", help="require the bearer token that this variable holds")
    parser.add_argument("--bill", type=Path, help="append the id of every sequence that was charged")
    return parser.parse_args(arguments)


def main() -> None:
    """Serve until told to end."""
    torch.set_num_threads(1)
    options = parse_options()
    try:
        service = Service(options.port, *build_oracle(options), options)
    except (UnmaskError, OSError) as error:
        sys.exit(f"attention_service: {error}")
    # Shutting down waits for the loop to end, so it cannot be done from within it.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=service.shutdown).start())
    print(f"http://127.0.0.1:{service.server_port}/", flush=True)
    try:
        service.serve_forever(poll_interval=0.1)
    except KeyboardInterrupt:
        pass
    finally:
        service.server_close()


if __name__ == "__main__":
    main()
