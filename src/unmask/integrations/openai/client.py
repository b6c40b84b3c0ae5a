"""One completion of one token from an OpenAI-style server, with the log-probabilities that come with it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from unmask.errors import InputError, ServiceError
from unmask.evidence.logits import Prompt
from unmask.integrations.http import HttpOracle

_HIDDEN = -9000.0  # OpenAI writes -9999 for a token that it does not tell the log-probability of


@dataclass(frozen=True)
class Completion:
    """What came back for one prompt: the likeliest tokens, and the one that was sampled."""

    top: Mapping[str, float]
    sampled: str
    sampled_value: float | None  # None: not told
    logits: Float[np.ndarray, " vocab"] | None = None


@dataclass(frozen=True)
class OpenAIClient:
    """A server that speaks OpenAI's protocol, at its address without '/v1'.

    The key comes from the environment, is sent and kept nowhere, as `HttpOracle` does it. `chat` uses
    /v1/chat/completions, which takes one text a request; otherwise /v1/completions.
    """

    url: str = field(repr=False)
    model: str
    chat: bool = False
    api_key_env: str | None = "OPENAI_API_KEY"
    timeout: float = 120.0
    retries: int = 6
    _line: HttpOracle = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if "?" in self.url or "#" in self.url:
            raise InputError(
                "the address of a server must end before its path, as http://host:port; this one has a query"
            )
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        url = self.url.rstrip("/").removesuffix("/v1") + path
        line = HttpOracle(url, self.api_key_env, timeout=self.timeout, retries=self.retries)
        object.__setattr__(self, "_line", line)

    @property
    def name(self) -> str:
        """The address and the model; holds no secret."""
        return f"{self._line.name} {self.model}"

    def complete(
        self,
        prompts: Sequence[Prompt],
        top: int,
        bias: Mapping[int, float] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """One token after each prompt, with the `top` likeliest; `extras` are fields that not every server knows."""
        payload: dict[str, Any] = {"model": self.model, "max_tokens": 1, "temperature": 0, **(extras or {})}
        if bias:
            payload["logit_bias"] = {str(token): value for token, value in bias.items()}
        if self.chat:
            if len(prompts) != 1 or not isinstance(prompts[0], str):
                raise InputError("a chat takes one text a request")
            payload |= {"messages": [{"role": "user", "content": prompts[0]}], "logprobs": True, "top_logprobs": top}
        else:
            payload |= {"prompt": prompts[0] if len(prompts) == 1 else list(prompts), "logprobs": top}
        reply = _json(self._line.post(payload), self.name)
        try:
            choices = sorted(reply["choices"], key=lambda choice: choice["index"])
            completions = [(_of_chat if self.chat else _of_completion)(choice) for choice in choices]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ServiceError(
                f"{self.name} sent no log-probabilities in the form that was expected ({type(error).__name__}: {error})"
            ) from None
        if len(completions) != len(prompts):
            raise ServiceError(f"{self.name} was asked {len(prompts)} prompts and answered {len(completions)}")
        return completions


def _json(body: bytes, name: str) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        raise ServiceError(f"{name} answered something that is not JSON; check the URL") from None


def _of_completion(choice: Mapping[str, Any]) -> Completion:
    shown = choice["logprobs"]
    logits = choice.get("logits")
    return Completion(
        {str(token): float(value) for token, value in (shown["top_logprobs"][0] or {}).items()},
        str(shown["tokens"][0]),
        _number_or_none(shown["token_logprobs"][0]),
        None if logits is None else np.frombuffer(base64.b64decode(logits), dtype="<f4"),
    )


def _of_chat(choice: Mapping[str, Any]) -> Completion:
    first = choice["logprobs"]["content"][0]
    top = {str(entry["token"]): float(entry["logprob"]) for entry in first["top_logprobs"]}
    return Completion(top, str(first["token"]), _number_or_none(first["logprob"]))


def _number_or_none(value: float | None) -> float | None:
    return None if value is None or value < _HIDDEN else float(value)
