"""The auditor's numbers for recovered texts, beside those of somebody who guessed without evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unmask.audit.marks import mark_bag, pair_texts
from unmask.models.adapter import Model
from unmask.recovery import RecoveredTexts, Recovery
from unmask.scores.tokens import score_texts

Tokens = Sequence[Sequence[int]]


def text_result(
    recovery: Recovery[RecoveredTexts], texts: Sequence[str], others: Sequence[str], model: Model
) -> dict[str, Any]:
    """Fields of a finding: metrics, chance, texts and tokens.

    Tokens count once each, whatever their number, special ones ([CLS], padding …) not at all: nobody's secret.
    """
    true, guessed = ([model.encode(text) for text in part] for part in (texts, others))
    recovered = recovery.value.expanded()
    score = score_texts(recovered, true, model.decode)
    claimed = recovery.value.token_set.union(*map(set, recovered))
    metrics = {
        **_metrics(recovered, claimed, true, model),
        "certain_texts": sum(text.count for text in recovery.value.certain),
    }
    return {
        "metrics": metrics,
        "chance": _metrics(guessed, frozenset().union(*map(set, guessed)), true, model),
        "texts": pair_texts(recovery.value, true, score.assignment, model),
        "tokens": () if recovered else mark_bag(recovery.value, set().union(*map(set, true)), model),
    }


def _metrics(recovered: Tokens, claimed: frozenset[int], true: Tokens, model: Model) -> dict[str, float]:
    score = score_texts(recovered, true, model.decode)
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
