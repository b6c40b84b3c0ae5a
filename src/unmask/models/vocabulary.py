"""Text and tokens: what a model knows through its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unmask.errors import InputError


class Vocabulary:
    """A tokenizer, if there is one, and what follows from it."""

    tokenizer: Any

    @property
    def special_tokens(self) -> frozenset[int]:
        """Tokens that frame a text ([CLS], <s>, padding …), as far as the tokenizer knows them."""
        return frozenset(self.tokenizer.all_special_ids) if self.tokenizer is not None else frozenset()

    @property
    def frame_tokens(self) -> tuple[int, int] | None:
        """The tokens that open and close every text ([CLS], [SEP]), where the tokenizer has both."""
        first, last = (getattr(self.tokenizer, name, None) for name in ("cls_token_id", "sep_token_id"))
        return None if first is None or last is None else (int(first), int(last))

    def encode(self, text: str) -> list[int]:
        """Tokens of a text as the tokenizer makes them, special tokens included."""
        if self.tokenizer is None:
            raise InputError(
                "this model was given without a tokenizer, so texts cannot be encoded; "
                "pass token ids, or load_model(model, tokenizer=…)"
            )
        return list(self.tokenizer(text)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; their numbers where there is no tokenizer."""
        if self.tokenizer is None:
            return " ".join(str(token) for token in tokens)
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))
