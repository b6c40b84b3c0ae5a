"""One case of texts whose states, cache or vectors are seen: draw, observe, defend, attack, score."""

from __future__ import annotations

from collections.abc import Callable

import torch

from unmask.attacks.recover import TextEvidence, recover_text
from unmask.audit.cases.case import Case
from unmask.audit.channels.channel_audit import WorkerContext
from unmask.audit.channels.text_scores import text_result
from unmask.audit.findings.finding import Finding
from unmask.audit.findings.result import finding_of
from unmask.models.adapter import Model
from unmask.recovery import RecoveredTexts, Recovery

Observe = Callable[..., TextEvidence]  # of a model, texts and max_length


def recover_case(case: Case, seen: TextEvidence, model: Model) -> Recovery[RecoveredTexts]:
    """The case's attack, with its effort."""
    return recover_text(seen, model, attack=case["attack"], effort=case.spec.get("effort", 1))


def audit_seen_texts(
    case: Case, context: WorkerContext, observe: Observe, parse_defence: Callable[[str], Callable[..., TextEvidence]]
) -> Finding:
    """Texts of the case's data, what is seen of them behind its defences, and the texts that this gives away."""
    model = context.model(case["model"], case["dtype"])
    texts, others = context.data[case["data"]["name"]].draw(case["batch_size"], case["seed"])
    generator = torch.Generator().manual_seed(case.seed)
    max_length = case.spec.get("max_length")
    seen = observe(model, texts, max_length=max_length)
    for text in case["defences"]:
        seen = parse_defence(text)(seen, generator)
    recovery = recover_case(case, seen, model)
    return finding_of(case, model, recovery, text_result(recovery, texts, others, model, max_length))
