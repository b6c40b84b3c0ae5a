"""A language model behind OpenAI's protocol, to see what such a service gives away. For one machine, not for the world.

python examples/openai_service.py --port 8000 --max-logprobs 20
python examples/openai_service.py --bias-after          # the log-probabilities are those before the bias
unmask recover output-layer --server http://127.0.0.1:8000 --model smollm2-135m
"""

import argparse
import base64
import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

import unmask

LARGEST_BIAS = 100
MOST_PROMPTS = 128
HIDDEN = -9999.0  # what OpenAI says instead of the log-probability of an unlikely token


@dataclass(frozen=True)
class Policy:
    """What the service shows."""

    max_logprobs: int = 20
    full_logits: bool = False
    bias_after: bool = False  # log-probabilities are those before the bias
    show_sampled: bool = False  # … but the sampled token's is told even where it is unlikely
    decimals: int | None = None
    noise: float = 0.0  # standard deviation, added to every logit anew


class BadRequestError(Exception):
    """What the caller did wrong, in a sentence."""


class Service:
    """Completions of one token; the logits of recent prompts are kept."""

    def __init__(self, model: Any, policy: Policy, num_kept: int = 2048) -> None:
        self.model, self.policy, self.num_kept = model, policy, num_kept
        self.kept: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()
        self.lock = threading.Lock()
        self.num_answers = 0

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request of /v1/completions."""
        if request.get("max_tokens", 1) != 1:
            raise BadRequestError("this service completes one token: max_tokens must be 1")
        top = request.get("logprobs") or 0
        if not 0 <= top <= self.policy.max_logprobs:
            raise BadRequestError(f"logprobs must be at most {self.policy.max_logprobs}, got {top}")
        prompts = self._prompts(request.get("prompt", ""))
        bias = self._bias(request.get("logit_bias") or {})
        with self.lock, torch.no_grad():
            logits = self._logits(prompts)
            self.num_answers += len(prompts)
        choices = self._choices(logits, top, bias, bool(request.get("return_tokens_as_token_ids")))
        if self.policy.full_logits and request.get("full_logits"):
            for choice, row in zip(choices, self._blurred(logits), strict=True):
                choice["logits"] = base64.b64encode(row.float().numpy().astype("<f4").tobytes()).decode()
        return {"object": "text_completion", "model": request.get("model"), "choices": choices}

    def _prompts(self, given: Any) -> list[tuple[int, ...]]:
        """Texts or token ids, one or several, as token ids."""
        is_one = isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int))
        several = [given] if is_one else given
        prompts = [tuple(self.model.encode(one) if isinstance(one, str) else one) for one in several]
        if not 1 <= len(prompts) <= MOST_PROMPTS:
            raise BadRequestError(f"from 1 to {MOST_PROMPTS} prompts are taken, got {len(prompts)}")
        for prompt in prompts:
            if not 1 <= len(prompt) <= self.model.max_positions:
                raise BadRequestError(f"a prompt must have 1 to {self.model.max_positions} tokens, got {len(prompt)}")
            if not all(isinstance(token, int) and 0 <= token < self.model.vocab_size for token in prompt):
                raise BadRequestError(f"token ids must be 0 to {self.model.vocab_size - 1}")
        return prompts

    def _bias(self, given: dict[str, float]) -> dict[int, float]:
        bias = {int(token): float(value) for token, value in given.items()}
        if any(not 0 <= token < self.model.vocab_size for token in bias):
            raise BadRequestError(f"logit_bias: token ids must be 0 to {self.model.vocab_size - 1}")
        if any(abs(value) > LARGEST_BIAS for value in bias.values()):
            raise BadRequestError(f"logit_bias: values must be from -{LARGEST_BIAS} to {LARGEST_BIAS}")
        return bias

    def _logits(self, prompts: list[tuple[int, ...]]) -> torch.Tensor:
        """Last-position logits of each prompt; those that were seen lately cost nothing."""
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.kept]
        if missing:
            longest = max(map(len, missing))
            # The model is causal: what pads the end changes nothing before it.
            batch = torch.tensor([prompt + (0,) * (longest - len(prompt)) for prompt in missing])
            last = torch.tensor([len(prompt) - 1 for prompt in missing])
            states = self.model.body(input_ids=batch).last_hidden_state[torch.arange(len(missing)), last]
            self.kept |= zip(missing, self.model.hf.get_output_embeddings()(states), strict=True)
        for prompt in prompts:
            self.kept.move_to_end(prompt)
        found = torch.stack([self.kept[prompt] for prompt in prompts])
        while len(self.kept) > self.num_kept:
            self.kept.popitem(last=False)
        return found

    def _blurred(self, values: torch.Tensor) -> torch.Tensor:
        noisy = values + self.policy.noise * torch.randn_like(values) if self.policy.noise else values
        return noisy if self.policy.decimals is None else noisy.double().round(decimals=self.policy.decimals)

    def _choices(self, logits: torch.Tensor, top: int, bias: dict[int, float], as_ids: bool) -> list[dict[str, Any]]:
        biased = logits.clone()
        if bias:
            biased[:, list(bias)] += torch.tensor(list(bias.values()), dtype=logits.dtype)
        shown = self._blurred((logits if self.policy.bias_after else biased).log_softmax(1))
        sampled = biased.argmax(1)
        best = shown.topk(max(top, 1), dim=1)
        choices = []
        for row, token in enumerate(sampled.tolist()):
            entries = dict(zip(best.indices[row, :top].tolist(), best.values[row, :top].tolist(), strict=True))
            own = float(shown[row, token])
            if self.policy.bias_after and not self.policy.show_sampled and token not in entries:
                own = HIDDEN
            elif top:
                entries.setdefault(token, own)
            names = {token: self._name(token, as_ids) for token in (*entries, token)}
            values = {names[entry]: value for entry, value in entries.items()}
            logprobs = {"tokens": [names[token]], "token_logprobs": [own], "top_logprobs": [values]}
            text = self.model.decode([token])
            choices.append({"index": row, "text": text, "finish_reason": "length", "logprobs": logprobs})
        return choices

    def _name(self, token: int, as_id: bool) -> str:
        return f"token_id:{token}" if as_id else self.model.decode([token])


def make_server(model: Any, policy: Policy, port: int = 0) -> ThreadingHTTPServer:
    """A server on this machine only; port 0 takes any that is free."""
    service = Service(model, policy)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path != "/v1/completions":
                return self._reply(404, {"error": {"message": "only /v1/completions is here"}})
            try:
                return self._reply(200, service.complete(json.loads(body)))
            except (BadRequestError, ValueError, TypeError, AttributeError) as error:
                return self._reply(400, {"error": {"message": str(error)}})

        def _reply(self, status: int, document: dict[str, Any]) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Prompts are nobody's business."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.service = service  # type: ignore[attr-defined]
    return server


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-logprobs", type=int, default=20)
    parser.add_argument("--full-logits", action="store_true", help="answer the extension 'full_logits'")
    parser.add_argument("--bias-after", action="store_true", help="log-probabilities are those before the bias")
    parser.add_argument("--show-sampled", action="store_true", help="… but tell the sampled token's anyway")
    parser.add_argument("--decimals", type=int)
    parser.add_argument("--noise", type=float, default=0.0)
    options = parser.parse_args()
    policy = Policy(
        options.max_logprobs,
        options.full_logits,
        options.bias_after,
        options.show_sampled,
        options.decimals,
        options.noise,
    )
    server = make_server(unmask.load_model(options.model), policy, options.port)
    print(f"{options.model} answers at http://127.0.0.1:{server.server_address[1]}, {policy}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
