"""Models that are small but wide, batches that fit below their width, and what 'exact' means."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import transformers
from tests.tiny_models import gpt2_config, llama_sizes, random_model

from unmask.models import Model, adapt
from unmask.recovery import RecoveredTexts, Recovery

WIDE_VOCAB = 2000
Text = list[int]


def wide_model(family: str, width: int, *, vocab: int = WIDE_VOCAB, num_heads: int = 8, length: int = 256) -> Model:
    """Three blocks of a family at a width, with random weights."""
    if family == "gpt2":
        sizes = {"n_embd": width, "n_head": num_heads, "n_positions": length, "vocab_size": vocab}
        return adapt(random_model(transformers.GPT2LMHeadModel, gpt2_config(**sizes)))
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 2,
        "intermediate_size": 2 * width,
        "vocab_size": vocab,
        "max_position_embeddings": length,
    }
    return adapt(random_model(transformers.LlamaForCausalLM, transformers.LlamaConfig(**llama_sizes(**sizes))))


def random_texts(rng: random.Random, num_tokens: float, vocab: int, longest: int = 24) -> list[Text]:
    """Texts of 2 to `longest` tokens, at most `num_tokens` in all; a third of the words is drawn from only ten.

    A text does not begin with the same token twice: of a rotary model such a beginning is not always determined.
    Token 0 is left out, as Llama's embedding gives padding no gradient. Both have tests of their own.
    """
    common = [rng.randrange(1, vocab) for _ in range(10)]
    texts: list[Text] = []
    while True:
        length = min(rng.randint(2, longest), int(num_tokens) - sum(map(len, texts)))
        if length < 2:
            return texts
        text = [rng.choice(common) if rng.random() < 0.3 else rng.randrange(1, vocab) for _ in range(length)]
        if text[0] != text[1]:
            texts.append(text)


def as_counter(texts: Sequence[Sequence[int]]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(text) for text in texts)


def found(recovery: Recovery[RecoveredTexts]) -> Counter[tuple[int, ...]]:
    """Recovered texts with how often they occur."""
    return Counter({text.tokens: text.count for text in recovery.value.texts})


def certain(recovery: Recovery[RecoveredTexts]) -> Counter[tuple[int, ...]]:
    """The texts that are called certain, with how often they occur."""
    return Counter({text.tokens: text.count for text in recovery.value.certain})
