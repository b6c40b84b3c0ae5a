"""A user's texts, the bill that a service writes for them, and the words that the bill gives away."""

from __future__ import annotations

import torch

from unmask.attacks.table import Attack, Secret
from unmask.audit.cases.case import Case
from unmask.audit.channels.axes import DATA, DEFENCES, MODELS, SEEDS, Axis, attack_axis, whole_number
from unmask.audit.channels.channel_audit import ChannelAudit, WorkerContext
from unmask.audit.channels.text_scores import text_result
from unmask.audit.findings.finding import Finding
from unmask.audit.findings.result import finding_of
from unmask.defences.table import parse_defence
from unmask.evidence.counts import CountEvidence
from unmask.protocols.batch import make_batch


def audit_counts(case: Case, context: WorkerContext) -> Finding:
    """A user's texts, the bill for them behind defences, and the tokens that the bill gives away."""
    model = context.model(case["model"])
    texts, others = context.data[case["data"]["name"]].draw(case["batch_size"], case["seed"])
    batch = make_batch(model, texts)
    evidence = CountEvidence.of(batch.tokens[batch.mask], model.vocab_size)
    for text in case["defences"]:
        evidence = parse_defence(text)(evidence, torch.Generator().manual_seed(case.seed))
    recovery = Attack.parse(case["attack"]).make()(evidence, model)
    return finding_of(case, model, recovery, text_result(recovery, texts, others, model))


COUNTS = ChannelAudit(
    axes={
        "models": MODELS,
        "data": DATA,
        "batch_sizes": Axis("batch_size", whole_number(1), (1,)),
        "defences": DEFENCES,
        "attacks": Axis("attack", attack_axis("counts", Secret.TOKENS), ("counts",)),
        "seeds": SEEDS,
    },
    run=audit_counts,
    find_fault=lambda spec: None,
    find_model_fault=lambda spec, model: None,
)
