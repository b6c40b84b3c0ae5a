"""Small random models of every family, real weights where they are installed, and the path to `tests.reference`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
import transformers

# `from tests.reference… import …` works however pytest was started, and benchmarks import each other by their rooms.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from tests.tiny_models import NUM_POSITIONS, TINY, bert_config, gpt2_config, llama_sizes, random_model
from tests.warm import warm_unmask

import unmask
from unmask.errors import UnknownModelError
from unmask.models import Model, adapt

hypothesis.settings.register_profile("unmask", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("unmask")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares most begins one half of the tests, so that one worker of two does it, once: others take from ends.

    Tests on SmolLM2, which is loaded and calibrated; contracts, whose recoveries many tests look at.
    """
    items.sort(key=lambda item: "smollm2" not in getattr(item, "fixturenames", ()))
    contracts = [item for item in items if item.path.name == "test_every_attack.py"]
    others = [item for item in items if item.path.name != "test_every_attack.py"]
    half = len(items) // 2
    items[:] = [*others[:half], *contracts, *others[half:]]


# Tests share these models: whoever changes a weight or a mode does it on a copy (`model.to()`).


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread of torch for a whole file; whoever asks for it says why."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_gpt2() -> Model:
    return adapt(random_model(transformers.GPT2LMHeadModel, gpt2_config()))


@pytest.fixture(scope="session")
def tiny_llama() -> Model:
    """Grouped-query attention, an output layer of its own."""
    return adapt(random_model(transformers.LlamaForCausalLM, transformers.LlamaConfig(**llama_sizes())))


@pytest.fixture(scope="session")
def tiny_qwen2() -> Model:
    """As Llama, with biases on queries, keys and values, and a tied output layer."""
    config = transformers.Qwen2Config(**llama_sizes(tie_word_embeddings=True))
    return adapt(random_model(transformers.Qwen2ForCausalLM, config))


@pytest.fixture(scope="session")
def tiny_mistral() -> Model:
    """As Llama, with heads that are wider than d/h and a sliding window that no test text fills."""
    config = transformers.MistralConfig(**llama_sizes(head_dim=24, sliding_window=NUM_POSITIONS))
    return adapt(random_model(transformers.MistralForCausalLM, config))


@pytest.fixture(scope="session")
def tiny_bert() -> Model:
    return adapt(random_model(transformers.BertForMaskedLM, bert_config()))


@pytest.fixture(scope="session", params=TINY)
def tiny(request: pytest.FixtureRequest) -> Model:
    """Each small model in turn."""
    return request.getfixturevalue(request.param)


def _real(name: str) -> Model:
    try:
        return unmask.load_model(name)
    except UnknownModelError as error:  # the message names the package and the command that brings it
        pytest.skip(f"real weights are missing: {error}")


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """SmolLM2-135M; converted once into the cache of the machine."""
    return _real("smollm2-135m")


@pytest.fixture(scope="session")
def low_smollm2(smollm2: Model) -> Model:
    """SmolLM2's first three blocks between its embedding and its head: real weights, a tenth of the time."""
    config = type(smollm2.hf.config).from_dict({**smollm2.hf.config.to_dict(), "num_hidden_layers": 3})
    hf = type(smollm2.hf)(config)
    hf.load_state_dict(smollm2.hf.state_dict(), strict=False)
    return adapt(hf.eval(), smollm2.tokenizer)


@pytest.fixture(scope="session")
def minilm() -> Model:
    """MiniLM-L6, a BERT without a language head."""
    return _real("minilm-l6")


@pytest.fixture(scope="session")
def commands() -> Iterator[Path]:
    """A folder for `PATH`: its `unmask` runs commands in processes that have imported everything."""
    with warm_unmask() as folder:
        yield folder
