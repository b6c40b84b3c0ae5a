"""What a worker audits with: one model at a time, and the attack that a case names."""

from __future__ import annotations

import torch
from tests.audit.made import spec

from unmask.audit.cases.case import Case
from unmask.audit.channels.channel_audit import WorkerContext, attack_of


def test_one_model_stays_loaded(bert_folder, llama_folder):
    context = WorkerContext({})
    first = context.model(str(bert_folder))
    assert context.model(str(bert_folder)) is first
    assert context.model(str(bert_folder), "bfloat16").dtype is torch.bfloat16
    assert context.model(str(llama_folder)) is context.model(str(llama_folder))
    assert context.model(str(bert_folder)) is not first


def test_the_default_attack_has_no_name():
    assert attack_of(Case(spec())) is None
    assert attack_of(Case(spec(attack="dager:rank_margin=0"))) == "dager:rank_margin=0"


def test_contexts_do_not_share_what_they_loaded(bert_folder):
    first, second = WorkerContext({}), WorkerContext({})
    assert first.model(str(bert_folder)) is not second.model(str(bert_folder))
