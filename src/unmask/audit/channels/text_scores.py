"""The auditor's numbers for recovered texts, beside those of somebody who guessed without evidence."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

from unmask.audit.findings.text_marks import mark_bag, pair_texts
from unmask.models.adapter import Model
from unmask.protocols.batch import Texts, make_batch
from unmask.recovery import AmbiguityKind, RecoveredText, RecoveredTexts, Recovery
from unmask.scores.reading import normalise_text
from unmask.scores.tokens import Covers, TextScore, score_texts

Tokens = Sequence[Sequence[int]]


def text_result(
    recovery: Recovery[RecoveredTexts], texts: Texts, others: Texts, model: Model, max_length: int | None = None
) -> dict[str, Any]:
    """Fields of a finding: metrics, chance, texts and tokens.

    Tokens count once each, whatever their number. Special ones ([CLS], padding …) are nobody's secret: they are neither
    tokens nor words here. Texts that are longer than `max_length`, or than the model takes, are cut, as the client cut
    them. Without `others` there is no chance. A text is exact if it reads as the true one does, whatever its tokens
    are.
    """
    true, guessed = (_tokens(model, part, max_length) for part in (texts, others))
    recovered = recovery.value.expand()
    covers = [_covers(text) for text in recovery.value.texts for _ in range(text.count)]
    score = _score(recovered, true, model, covers)
    claimed = recovery.value.token_set.union(*map(set, recovered))
    metrics = {
        **_metrics(score, claimed, true, model),
        "certain_texts": sum(text.count for text in recovery.value.certain),
    }
    covered = set().union(*(text.tokens for text in recovery.value.certain))
    held = set().union(*map(set, true))
    return {
        "metrics": metrics,
        "chance": _chance(guessed, true, model) if guessed else {},
        "texts": pair_texts(recovery.value, true, score.assignment, model, score.exact, score.near_exact),
        "tokens": () if recovery.value.token_set <= covered else mark_bag(recovery.value, held, model),
    }


def _chance(guessed: Tokens, true: Tokens, model: Model) -> dict[str, float]:
    return _metrics(_score(guessed, true, model), frozenset().union(*map(set, guessed)), true, model)


def _metrics(score: TextScore, claimed: frozenset[int], true: Tokens, model: Model) -> dict[str, float]:
    held = frozenset().union(*map(set, true)) - model.special_tokens
    claimed = claimed - model.special_tokens
    right = len(claimed & held)
    metrics = {
        "exact_texts": sum(score.exact),
        "exact_rate": score.exact_rate,
        "near_exact_texts": sum(score.near_exact),
        "false_texts": score.num_false,
        # A text of one word has no pair of words, so that its ROUGE-2 is 0 even if it is exact.
        **{name: max(score.exact_rate, getattr(score, name)) for name in ("rouge1", "rouge2", "rougeL")},
        "token_recall": right / len(held) if held else score.exact_rate,
    }
    return {**metrics, "token_precision": right / len(claimed)} if claimed else metrics


def _score(recovered: Tokens, true: Tokens, model: Model, covers: Sequence[Covers] | None = None) -> TextScore:
    special = model.special_tokens
    folds_case = bool(getattr(model.tokenizer, "do_lower_case", False))

    def decode(tokens: Sequence[int]) -> str:
        return model.decode([token for token in tokens if token not in special])

    return score_texts(
        recovered,
        true,
        lambda tokens: in_latin(decode(tokens)),
        read=lambda tokens: normalise_text(decode(tokens), folds_case),
        covers=covers,
    )


def _covers(text: RecoveredText) -> Covers:
    """Whether a sequence is one of the few that a text stands for; one that is open at an end stands for too many."""
    kinds = {one.kind for one in text.ambiguities}
    is_narrow = bool(kinds & {AmbiguityKind.EQUAL_TOKENS, AmbiguityKind.LEADING_RUN})
    is_whole = not kinds & {AmbiguityKind.OPEN_END, AmbiguityKind.OPEN_BEGINNING}
    return text.covers if is_narrow and is_whole else lambda tokens: False


def _tokens(model: Model, texts: Texts, max_length: int | None) -> list[list[int]]:
    """Tokens of texts as a client makes them."""
    if not texts:
        return []
    batch = make_batch(model, texts, max_length=max_length)
    return [row[mask].tolist() for row, mask in zip(batch.tokens, batch.mask, strict=True)]


def in_latin(text: str) -> str:
    """The text in letters that ROUGE counts, a–z and 0–9: words of other scripts stay words, and differ as before.

    In scripts without spaces every character is a word.
    """
    return "".join(_letters(character) for character in text)


def _letters(character: str) -> str:
    if character.isascii() or not character.isalnum():
        return character
    code = f"u{ord(character):x}"
    return f" {code} " if unicodedata.category(character) == "Lo" else code
