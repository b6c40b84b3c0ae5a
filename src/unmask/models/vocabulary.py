"""Text and tokens: what a model knows through its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from unmask.errors import InputError


class Vocabulary:
    """A tokenizer, if there is one, and what follows from it; the rest is told by the model itself."""

    tokenizer: Any
    hf: Any
    config: Any

    @property
    def vocab_size(self) -> int:
        """Number of rows of the token embedding."""
        return int(self.hf.get_input_embeddings().weight.shape[0])

    @property
    def pad_token(self) -> int:
        """The token that fills a batch; masked, so its choice never matters to a client's loss."""
        for owner in (self.tokenizer, self.config):
            for name in ("pad_token_id", "eos_token_id"):
                token = getattr(owner, name, None)
                if isinstance(token, int) and 0 <= token < self.vocab_size:
                    return token
        return 0

    @property
    def gradient_free_token(self) -> int | None:
        """The token whose embedding row never gets a gradient (transformers' `padding_idx`), if there is one."""
        return self.hf.get_input_embeddings().padding_idx

    @property
    def unknown_token(self) -> int | None:
        """The token that stands for what the tokenizer has no tokens for; None where nothing is unknown to it."""
        token = getattr(self.tokenizer, "unk_token_id", None)
        return token if isinstance(token, int) and token != getattr(self.tokenizer, "eos_token_id", None) else None

    @property
    def special_tokens(self) -> frozenset[int]:
        """Tokens that frame a text ([CLS], <s>, padding …), as far as the tokenizer knows them."""
        return frozenset(self.tokenizer.all_special_ids) if self.tokenizer is not None else frozenset()

    @property
    def frame_tokens(self) -> tuple[int, int] | None:
        """The tokens that open and close every text ([CLS] and [SEP], <s> and </s>), where the tokenizer adds both."""
        empty = [] if self.tokenizer is None else self.encode("")
        return (empty[0], empty[1]) if len(empty) == 2 else None

    @cached_property
    def special_frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special tokens that the tokenizer puts in front of every text and behind it, as far as it has any."""
        made = {} if not callable(self.tokenizer) else self.tokenizer("a", return_special_tokens_mask=True)
        tokens, special = (list(made.get(key, ())) for key in ("input_ids", "special_tokens_mask"))
        inner = [place for place, is_special in enumerate(special) if not is_special]
        return (tuple(tokens[: inner[0]]), tuple(tokens[inner[-1] + 1 :])) if inner else ((), ())

    @property
    def mask_token(self) -> int | None:
        """The token that hides another one in masked-token training, where the tokenizer has one."""
        token = getattr(self.tokenizer, "mask_token_id", None)
        return None if token is None else int(token)

    def encode(self, text: str, max_length: int | None = None) -> list[int]:
        """Tokens of a text as the tokenizer makes them, and cuts them to `max_length`; special tokens included."""
        self._require_tokenizer()
        return list(self._encode(max_length, text)["input_ids"])

    def encode_pair(self, first: str, second: str, max_length: int | None = None) -> tuple[list[int], list[int]]:
        """Tokens and token types of two texts in one, special tokens included; the longer part is cut first."""
        if not isinstance(first, str) or not isinstance(second, str):
            raise InputError("a pair must be two strings or two lists of token ids, got one of each")
        self._require_tokenizer()
        both = self._encode(max_length, first, second, return_token_type_ids=True)
        return list(both["input_ids"]), list(both["token_type_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens without what the tokenizer puts around every text; their numbers where there is no tokenizer.

        Special tokens inside are data, and stay: encoding the text of framed tokens gives them again.
        """
        if self.tokenizer is None:
            return " ".join(str(token) for token in tokens)
        begin, end = self.inside(tokens)
        return str(self.tokenizer.decode(list(tokens[begin:end]), skip_special_tokens=False))

    def inside(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Where a text begins and ends within its frame; whole, if there is nothing else.

        A closing token is the frame's only behind a whole opening: else it may be data.
        """
        opening, closing = self.special_frame
        begin, end = len(opening), len(tokens) - len(closing)
        if begin >= len(tokens) or tuple(tokens[:begin]) != opening:
            return 0, len(tokens)
        if tuple(tokens[max(0, end) :]) != closing:
            return begin, len(tokens)
        return (begin, end) if begin < end else (0, len(tokens))

    def _encode(self, max_length: int | None, *texts: str, **options: Any) -> Any:
        """What the tokenizer makes of a text or a pair; it does not warn of long ones, as whoever cuts says so."""
        if max_length is None:
            return self.tokenizer(*texts, verbose=False, **options)
        num_special = self.tokenizer.num_special_tokens_to_add(pair=len(texts) > 1)
        if max_length <= num_special:
            raise InputError(
                f"max_length must be above {num_special}, the special tokens that frame a text here, got {max_length}"
            )
        return self.tokenizer(*texts, truncation=True, max_length=max_length, **options)

    def _require_tokenizer(self) -> None:
        if self.tokenizer is None:
            raise InputError(
                "this model was given without a tokenizer, so texts cannot be encoded; "
                "pass token ids, or load_model(model, tokenizer=…)"
            )
