"""The example's OpenAI-style server, in a thread of the test."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from tests.tiny_models import llama_sizes, random_model, word_tokenizer

from unmask.integrations.openai.client import OpenAIClient
from unmask.models import Model, adapt

EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_service.py"


def example() -> Any:
    """The example as a module."""
    if "openai_service" not in sys.modules:
        spec = importlib.util.spec_from_file_location("openai_service", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["openai_service"] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules["openai_service"]


def small_model() -> Model:
    """A small random Llama with a tokenizer of words."""
    hf = random_model(transformers.LlamaForCausalLM, transformers.LlamaConfig(**llama_sizes()))
    return adapt(hf, word_tokenizer())


@contextmanager
def serving(model: Model, **policy: Any) -> Iterator[tuple[OpenAIClient, Any]]:
    """A client, and the service that answers it."""
    server = example().make_server(model, example().Policy(**policy))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield OpenAIClient(f"http://127.0.0.1:{server.server_address[1]}", "model", api_key_env=None), server.service
    finally:
        server.shutdown()
        server.server_close()
