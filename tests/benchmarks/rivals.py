"""Small clients that TAG and LAMP are tested on."""

from __future__ import annotations

import torch
from tests.tiny_models import bert_config, gpt2_config, random_model
from transformers import BertModel, GPT2LMHeadModel

from unmask.models import Model, adapt

START, END = 1, 2


class Frame:
    """A tokenizer that only knows its frame."""

    eos_token_id, sep_token_id, cls_token_id = None, END, START
    all_special_ids = (0, START, END)

    def __call__(self, text: str, **_: object) -> dict:
        return {"input_ids": [START, END]}

    def decode(self, tokens, **_: object) -> str:
        return " ".join(f"w{token}" for token in tokens)


def encoder() -> Model:
    return adapt(random_model(BertModel, bert_config()), Frame())


def decoder() -> Model:
    return adapt(random_model(GPT2LMHeadModel, gpt2_config()))


def head_of(model: Model) -> torch.Tensor:
    return torch.randn(2, model.width, generator=torch.Generator().manual_seed(0)) * 0.1


def padded(texts: list[list[int]]) -> torch.Tensor:
    longest = max(map(len, texts))
    return torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])


CASES = {
    "encoder": (encoder, [[START, 7, 9, 11, END], [START, 8, 12, END]]),
    "decoder": (decoder, [[7, 9, 11, 13], [8, 12, 10]]),
}
