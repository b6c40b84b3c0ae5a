"""The auditor's numbers for recovered texts, beside those of somebody who guessed without evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unmask.audit.marks import mark_bag, pair_texts
from unmask.models.adapter import Model
from unmask.recovery import RecoveredTexts, Recovery
from unmask.scores.tokens import TextScore, score_texts

Tokens = Sequence[Sequence[int]]


def text_result(
    recovery: Recovery[RecoveredTexts], texts: Sequence[str], others: Sequence[str], model: Model
) -> dict[str, Any]:
    """Fields of a finding: metrics, chance, texts and tokens.

    Tokens count once each, whatever their number. Special ones ([CLS], padding …) are nobody's secret: they are neither
    tokens nor words here.
    """
    true, guessed = ([model.encode(text) for text in part] for part in (texts, others))
    recovered = recovery.value.expanded()
    score = _score(recovered, true, model)
    claimed = recovery.value.token_set.union(*map(set, recovered))
    metrics = {
        **_metrics(recovered, claimed, true, model),
        "certain_texts": sum(text.count for text in recovery.value.certain),
    }
    covered = set().union(*(text.tokens for text in recovery.value.certain))
    held = set().union(*map(set, true))
    return {
        "metrics": metrics,
        "chance": _metrics(guessed, frozenset().union(*map(set, guessed)), true, model),
        "texts": pair_texts(recovery.value, true, score.assignment, model),
        "tokens": () if recovery.value.token_set <= covered else mark_bag(recovery.value, held, model),
    }


def _metrics(recovered: Tokens, claimed: frozenset[int], true: Tokens, model: Model) -> dict[str, float]:
    score = _score(recovered, true, model)
    held = frozenset().union(*map(set, true)) - model.special_tokens
    claimed = claimed - model.special_tokens
    right = len(claimed & held)
    return {
        "exact_texts": round(score.exact_rate * score.num_true),
        "exact_rate": score.exact_rate,
        "false_texts": score.num_false,
        "rouge1": score.rouge1,
        "rouge2": score.rouge2,
        "rougeL": score.rougeL,
        "token_recall": right / len(held) if held else 0.0,
        "token_precision": right / len(claimed) if claimed else 1.0,
    }


def _score(recovered: Tokens, true: Tokens, model: Model) -> TextScore:
    special = model.special_tokens
    return score_texts(recovered, true, lambda tokens: model.decode([t for t in tokens if t not in special]))
