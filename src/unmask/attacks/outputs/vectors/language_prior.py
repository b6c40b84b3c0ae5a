"""How likely a text is: a language model reads the tokens of another model's vocabulary.

Every token has a spelling, with a space in front or glued to what stands before it, and both are written in the
language model's tokens once. A text is then a row of table entries, no string is made, and one forward pass gives

    −log p(text)    and    p(next token | tokens so far) at every gap

Limits: words are spelled piece by piece, which is not always how the language model would write them; of a token that
takes several, the first one counts, at a fiftieth.
Cost: one forward pass of the language model a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from unmask.attacks.outputs.vectors.edits import EMPTY, TextBatch, squeeze
from unmask.attacks.outputs.vectors.embedder import KERNELS, fused_copy
from unmask.errors import InputError, UnmaskError
from unmask.models.adapter import Model
from unmask.models.inputs import no_cache
from unmask.models.load import load_model
from unmask.models.model_cache import compute_once

USUAL_LANGUAGE = "smollm2-135m"
_LONGEST = 4  # tokens of the language model that one token may take
_OF_SEVERAL = 0.02
_GLUED = frozenset(".,!?;:)]}'’%-")
_GLUES = frozenset("'’-([{$#")
_TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 32_768}


@dataclass
class LanguagePrior:
    """A language model with both tables of spellings."""

    body: torch.nn.Module
    head: Float[Tensor, "words d"]
    start: int
    spaced: Int[Tensor, "vocab m"]
    glued: Int[Tensor, "vocab m"]
    is_glued: Tensor  # (vocab,) bool: never a space in front
    glues: Tensor  # (vocab,) bool: never a space behind
    share: Tensor  # (vocab,) 1, or little for pieces that hardly occur

    @classmethod
    def of(cls, language: Model, reader: Model) -> LanguagePrior:
        """Spell the vocabulary of `reader` in tokens of `language`."""
        pieces = reader.tokenizer.convert_ids_to_tokens(list(range(reader.vocab_size)))
        words = [_spell(piece) for piece in pieces]
        spaced = [(" " + word if has_space is not False else word) for word, has_space in words]
        glued_text = [word for word, _ in words]
        is_glued = torch.tensor([has_space is False or word in _GLUED for word, has_space in words])
        glues = torch.tensor([word in _GLUES for word, _ in words])
        device = language.device
        dtype = torch.bfloat16 if device.type == "cuda" else language.dtype
        hf = fused_copy(language, dtype) if device.type == "cuda" else language.hf
        start = language.tokenizer(".", add_special_tokens=False)["input_ids"][0]
        odd = torch.tensor([has_space is False and not word.isalpha() for word, has_space in words])
        return cls(
            hf.base_model,
            language.unembedding.to(dtype),  # type: ignore[union-attr]
            int(start),
            _table(language, spaced).to(device),
            _table(language, glued_text).to(device),
            is_glued.to(device),
            glues.to(device),
            torch.where(odd, 1e-4, 1.0).to(device),
        )

    def spell(self, texts: TextBatch) -> tuple[TextBatch, Int[Tensor, "k gaps"]]:
        """The texts in the language model's tokens, and which of those stands in front of each gap."""
        tokens, mask = texts.tokens.clamp_min(0), texts.mask
        behind = torch.nn.functional.pad(self.glues[tokens][:, :-1], (1, 0))
        glued = self.is_glued[tokens] | behind
        spelled = torch.where(glued[..., None], self.glued[tokens], self.spaced[tokens])
        spelled = spelled.masked_fill(~mask[..., None], EMPTY)
        counts = (spelled >= 0).sum(2)
        start = torch.full((len(tokens), 1), self.start, device=tokens.device)
        written = squeeze(torch.cat([start, spelled.flatten(1)], 1))
        return written, torch.nn.functional.pad(counts.cumsum(1), (1, 0))

    @torch.no_grad()
    def log_losses(self, texts: TextBatch) -> Float[Tensor, " k"]:
        """−log p of every text, in nats."""
        return self.token_losses(texts).sum(1)

    @torch.no_grad()
    def token_losses(self, texts: TextBatch) -> Float[Tensor, "k n"]:
        """−log p of every token, given those before it."""
        found = []
        for part in texts.tokens.split(self._at_once(texts)):
            written, gaps = self.spell(TextBatch(part))
            tokens = written.tokens.clamp_min(0)
            logits = self._states(tokens)[:, :-1] @ self.head.T
            chosen = logits.gather(2, tokens[:, 1:, None])[..., 0].float() - logits.float().logsumexp(2)
            total = torch.nn.functional.pad((-chosen * written.mask[:, 1:]).cumsum(1), (1, 0))
            found.append(total.gather(1, gaps).diff(dim=1))
        return torch.cat(found)

    @torch.no_grad()
    def next_tokens(self, texts: TextBatch) -> Float[Tensor, "k gaps vocab"]:
        """p(token | what stands before the gap) of every token, not summing to 1."""
        found = []
        first = torch.where(self.is_glued[:, None], self.glued, self.spaced)
        share = torch.where((first >= 0).sum(1) == 1, 1.0, _OF_SEVERAL) * self.share
        for part in texts.tokens.split(max(1, self._at_once(texts) // 2)):
            written, gaps = self.spell(TextBatch(part))
            states = self._states(written.tokens.clamp_min(0))
            states = states.gather(1, gaps[..., None].expand(-1, -1, states.shape[2]))
            chances = (states @ self.head.T).float().softmax(2)
            found.append(chances[..., first[:, 0].clamp_min(0)] * share)
        return torch.cat(found)

    def log_next(self, texts: TextBatch, log_prior: Float[Tensor, " vocab"]) -> Float[Tensor, "k gaps vocab"]:
        """log p of every token in every gap, half of it by frequency alone."""
        return self.next_tokens(texts).add_(log_prior.exp()).mul_(0.5).log_()

    def _states(self, tokens: Tensor) -> Tensor:
        with sdpa_kernel(KERNELS):
            return self.body(input_ids=tokens, **no_cache(self.body)).last_hidden_state

    def _at_once(self, texts: TextBatch) -> int:
        budget = _TOKENS_AT_ONCE.get(texts.tokens.device.type, 1024)
        return max(1, budget // (2 * texts.tokens.shape[1] + 1))


def load_language(name: str, reader: Model) -> LanguagePrior | None:
    """The prior of a model of the catalogue or a folder, for another model's tokens.

    None for 'none', where the reader has no tokenizer, and where the usual one is not installed.
    """
    if name == "none" or reader.tokenizer is None:
        return None

    def make() -> LanguagePrior | None:
        try:
            language = load_model(name, device=str(reader.device))
        except UnmaskError:
            if name == USUAL_LANGUAGE:
                return None
            raise
        if not language.causal or language.unembedding is None:
            raise InputError(f"a language model must write text, and '{name}' does not; choose a decoder, or 'none'")
        return LanguagePrior.of(language, reader)

    return compute_once(reader, ("language prior", name), make)


def _spell(piece: str | None) -> tuple[str, bool | None]:
    """A piece as people write it, and whether a space stands in front: always, never (False), or as it comes (None)."""
    piece = piece or ""
    if piece.startswith("##"):
        return piece[2:], False
    if piece[:1] in ("▁", "Ġ"):
        return piece[1:], True
    return piece, None


def _table(language: Model, spellings: list[str]) -> Int[Tensor, "vocab m"]:
    rows: Any = language.tokenizer(spellings, add_special_tokens=False)["input_ids"]
    padded = [[*row[:_LONGEST], *[EMPTY] * (_LONGEST - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.long)
