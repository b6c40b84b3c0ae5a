"""Logits of chosen tokens after many prompts, whatever little of them one answer shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.evidence.logits import LogitEvidence, LogitQuestion, Prompt

_NUM_TRIED = 8  # prompts on which the bias is chosen
_NUM_HALVINGS = 4  # of the largest bias: below a sixteenth no float32 digit is won any more
_MARGIN = 1.5  # on the bias that a few prompts needed: every answer that needs more is paid for twice
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORDS, _LETTERS_A_WORD = 2, 5  # of a prompt that must be text: 26¹⁰ of them, a handful of tokens each


@dataclass(frozen=True, eq=False)
class LogitReader:
    """Logits up to one constant for each prompt.

    Where an answer shows k biased tokens only, an anchor is asked for in every answer, and

        log p'_i − log p'_a = (z_i + β) − (z_a + β) = z_i − z_a

    holds exactly, whatever the other tokens do: the normaliser and the bias cancel. So k − 1 tokens are read at once.

    Notation: z the logits, p' the probabilities after the bias β on the k tokens, a the anchor.
    Limits: k ≥ 2, or values that share the prompt's constant already. β + z must exceed the other logits; tokens that
    are not shown at the service's largest bias stay NaN. A large β costs digits of a float32 service, so little
    more than a few prompts needed is tried first.
    Cost: ⌈m/(k − 1)⌉ queries a prompt for m tokens, more where β must be raised.
    Source: Carlini et al., arXiv 2403.06634, §5 (top-k with logit bias, differences to one token that every answer
    shows). Here that token is biased too, so that it is always shown, and β is chosen by trying.
    """

    evidence: LogitEvidence
    bias: float = 0.0
    anchor: int | None = None

    @property
    def tokens_an_answer(self) -> int:
        """The number of tokens that one answer reads."""
        return self.evidence.oracle.view.num_tokens - (self.anchor is not None)

    def __call__(self, prompts: Sequence[Prompt], tokens: Sequence[int]) -> Float[Tensor, "n m"]:
        """One row a prompt, one column a token; NaN where a token cannot be shown."""
        values = torch.zeros(len(prompts), len(tokens), dtype=torch.float64, device=self.evidence.device)
        size = self.tokens_an_answer
        for start in range(0, len(tokens) if prompts else 0, size):
            values[:, start : start + size] = self._group(prompts, tuple(tokens[start : start + size]))
        return values

    def even_noise(self, values: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """The same logits in token coordinates in which the service's noise is the same everywhere.

        Differences to the anchor share its noise: their covariance within an answer is σ²·(1 + 11ᵀ), so each answer is
        multiplied by (1 + 11ᵀ)^−½ = 1 − (1 − (1 + s)^−½)·11ᵀ/s, which is invertible and keeps the rank. Without this an
        anchor's noise looks like one more hidden direction for every answer. Then what became of the prompt's constant
        is taken away: without an anchor it is the mean over tokens. With one it is the anchor's own logit, which a
        service repeats in every answer; left in, it is a direction that no output layer has. NaN columns are left as
        they are.
        Notation: s the tokens of an answer that are shown.
        """
        shown = ~values.isnan().any(0)
        if self.anchor is None:
            return values - values[:, shown].mean(dim=1, keepdim=True)
        evened, constant = values.clone(), values.new_ones(values.shape[1])
        size = self.tokens_an_answer
        for start in range(0, values.shape[1], size):
            columns = start + shown[start : start + size].nonzero().flatten()
            share = 1 - (1 + len(columns)) ** -0.5
            evened[:, columns] -= share * values[:, columns].mean(dim=1, keepdim=True)
            constant[columns] -= share
        direction = constant[shown] / constant[shown].norm()
        evened[:, shown] -= torch.outer(evened[:, shown] @ direction, direction)
        return evened

    def _group(self, prompts: Sequence[Prompt], tokens: tuple[int, ...]) -> Float[Tensor, "n k"]:
        asked = tokens if self.anchor is None else (self.anchor, *tokens)
        values = self.evidence.ask([LogitQuestion(prompt, asked, self.bias) for prompt in prompts])
        largest = self.evidence.oracle.view.max_bias
        hidden = values.isnan().any(1).nonzero().flatten().tolist()
        if hidden and self.bias < largest:
            values[hidden] = self.evidence.ask([LogitQuestion(prompts[row], asked, largest) for row in hidden])
        return values if self.anchor is None else values[:, 1:] - values[:, :1]


def open_reader(
    evidence: LogitEvidence, prompts: Sequence[Prompt], tokens: Sequence[int]
) -> tuple[LogitReader, list[int]] | None:
    """The reader for what this service shows, and the tokens that it can read; None where it can read none.

    A service that names tokens by text cannot tell all apart, and some refuse a bias on special tokens; so each token
    is asked for once, after one prompt.
    Cost: a few queries, and ⌈m/(k − 1)⌉ for the m tokens where a bias is needed.
    """
    view = evidence.oracle.view
    if view.closed or (view.constant_per_answer and view.num_tokens < 2):
        return None
    if view.max_bias == 0:
        return LogitReader(evidence), list(tokens)
    if not view.constant_per_answer:
        return LogitReader(evidence, view.max_bias), list(tokens)
    tried, first = prompts[:_NUM_TRIED], tuple(tokens[: view.num_tokens])

    def find_shown(bias: float) -> Tensor:
        return ~evidence.ask([LogitQuestion(prompt, first, bias) for prompt in tried]).isnan().any(0)

    best = find_shown(view.max_bias)
    if int(best.sum()) < 2:
        return None
    bias = view.max_bias
    for _ in range(_NUM_HALVINGS):
        if not torch.equal(find_shown(bias / 2), best):
            break
        bias /= 2
    anchor = first[int(best.nonzero()[0])]
    reader = LogitReader(evidence, min(_MARGIN * bias, view.max_bias), anchor)
    others = [token for token in tokens if token != anchor]
    readable = ~reader(prompts[:1], others)[0].isnan()
    return reader, [token for token, fine in zip(others, readable.tolist(), strict=True) if fine]


def random_prompts(evidence: LogitEvidence, count: int, length: int, generator: torch.Generator) -> list[Prompt]:
    """Distinct random prompts of `length` tokens, as many of `count` as there are; of two words where text is taken."""
    if evidence.oracle.view.takes_tokens:
        shape, largest = (count, length), evidence.oracle.vocab_size
    else:
        shape, largest = (count, _WORDS * _LETTERS_A_WORD), len(_LETTERS)
    rows = torch.randint(0, largest, shape, generator=generator).tolist()
    if evidence.oracle.view.takes_tokens:
        return list(dict.fromkeys(tuple(row) for row in rows))
    texts = ("".join(_LETTERS[letter] for letter in row) for row in rows)
    return list(dict.fromkeys(f"{text[:_LETTERS_A_WORD]} {text[_LETTERS_A_WORD:]}" for text in texts))
