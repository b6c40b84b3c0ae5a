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

    @property
    def mask_token(self) -> int | None:
        """The token that hides another one in masked-token training, where the tokenizer has one."""
        token = getattr(self.tokenizer, "mask_token_id", None)
        return None if token is None else int(token)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text as the tokenizer makes them, special tokens included."""
        self._require_tokenizer()
        return list(self.tokenizer(text)["input_ids"])

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Tokens and token types of two texts in one, special tokens included."""
        if not isinstance(first, str) or not isinstance(second, str):
            raise InputError("a pair must be two strings or two lists of token ids, got one of each")
        self._require_tokenizer()
        both = self.tokenizer(first, second, return_token_type_ids=True)
        return list(both["input_ids"]), list(both["token_type_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; their numbers where there is no tokenizer."""
        if self.tokenizer is None:
            return " ".join(str(token) for token in tokens)
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def _require_tokenizer(self) -> None:
        if self.tokenizer is None:
            raise InputError(
                "this model was given without a tokenizer, so texts cannot be encoded; "
                "pass token ids, or load_model(model, tokenizer=…)"
            )
