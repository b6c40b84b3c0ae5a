"""What a worker audits with: one model at a time."""

from __future__ import annotations

import torch

from unmask.audit.channels.channel_audit import WorkerContext


def test_one_model_stays_loaded(bert_folder, llama_folder):
    context = WorkerContext({})
    first = context.model(str(bert_folder))
    assert context.model(str(bert_folder)) is first
    assert context.model(str(bert_folder), "bfloat16").dtype is torch.bfloat16
    assert context.model(str(llama_folder)) is context.model(str(llama_folder))
    assert context.model(str(bert_folder)) is not first


def test_contexts_do_not_share_what_they_loaded(bert_folder):
    first, second = WorkerContext({}), WorkerContext({})
    assert first.model(str(bert_folder)) is not second.model(str(bert_folder))
