"""An encoder–decoder (T5, BART): two models that share a tokenizer, each of them asked by itself.

Each side is a `Model` of its own, so whatever reads hidden states or attention works on `model.encoder` and on
`model.decoder`. An update holds both: the tensors of one side are those below its stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unmask.models.adapter import Model
from unmask.models.fingerprint import copy_module, fingerprint_of


@dataclass(frozen=True)
class EncoderDecoder:
    """A model that reads one text and writes another."""

    hf: Any
    tokenizer: Any
    encoder: Model
    decoder: Model

    @classmethod
    def of(cls, hf: Any, tokenizer: Any = None) -> EncoderDecoder:
        """Ask both sides."""
        return cls(hf, tokenizer, Model(hf.get_encoder(), tokenizer), Model(hf.get_decoder(), tokenizer))

    @property
    def family(self) -> str:
        """Its kind, as transformers calls it."""
        return str(self.hf.config.model_type)

    @property
    def start_token(self) -> int:
        """What every text begins with at the decoder."""
        return int(self.hf.config.decoder_start_token_id)

    @property
    def end_token(self) -> int | None:
        """What a text ends with, as a rule."""
        return self.hf.config.eos_token_id

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.encoder.device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights."""
        return self.encoder.dtype

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by the names that transformers gives them."""
        return iter(self.hf.named_parameters())

    def fingerprint(self) -> str:
        """A hash of shapes and of a sample of the weights, the same in every float type."""
        return fingerprint_of(self.family, self.hf.named_parameters())

    def of_side(self, side: Model, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of one side, by its own names; embeddings that both share are left out."""
        names = {id(parameter): name for name, parameter in self.hf.named_parameters()}
        found = {}
        for name, parameter in side.named_parameters():
            whole = names.get(id(parameter), "")
            if whole in tensors and parameter is not self.hf.get_input_embeddings().weight:
                found[name] = tensors[whole]
        return found

    def to(self, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> EncoderDecoder:
        """A copy on another device or in another precision."""
        copied = copy_module(self.hf, torch.device(device or self.device), dtype or self.dtype)
        sides = (
            Model(stack, self.tokenizer, layout=side.layout)
            for stack, side in ((copied.get_encoder(), self.encoder), (copied.get_decoder(), self.decoder))
        )
        return EncoderDecoder(copied, self.tokenizer, *sides)
