"""The callback in the real Trainer: it finds what a server would, and training does not notice."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("accelerate", reason="the Trainer needs accelerate; run: pip install 'unmask[models]'")
import transformers
from tests.integrations.trainer.trainings import ROWS, causal, classifier, lora, train, without_dropout
from transformers import Trainer, TrainingArguments

import unmask.integrations.trainer as trainer_audit
from unmask.attacks.recover import recover_text
from unmask.audit.findings.finding import ERROR, Outcome
from unmask.audit.findings.folder import read_audit
from unmask.cli import app
from unmask.errors import InputError
from unmask.evidence import load_evidence
from unmask.integrations.trainer import AuditCallback

KNOWN = {"task": "next_token", "num_texts": 2, "all_tokens_predicted": True, "num_clients": 1}


def audited(net, tmp_path, options=None, **changes):
    """The findings of a training."""
    train(net, tmp_path / "training", [AuditCallback(tmp_path / "audit", **(options or {}))], **changes)
    return read_audit(tmp_path / "audit").findings


def numbers(finding):
    return {name: finding.metrics[name] for name in ("exact_texts", "false_texts", "certain_texts")}


def test_a_step_gives_its_texts_away(tmp_path):
    first, third = audited(without_dropout(), tmp_path, {"steps": [1, 3], **KNOWN})
    for finding in (first, third):
        assert (finding.status, finding.outcome) == ("RECOVERED", Outcome.LEAK)
        assert numbers(finding) == {"exact_texts": 2, "false_texts": 0, "certain_texts": 2}
    assert not first.chance  # nothing came before it
    assert third.chance["token_recall"] < 0.5
    expected = {"channel": "gradients", "model": "LlamaForCausalLM", "protocol": "fedsgd", "source": "trainer"}
    expected |= {"step": 1, "batch_size": 2, "attack": "default", "seed": 0, "task": "next_token"}
    assert first.case == expected
    assert third.model_fingerprint != first.model_fingerprint


def test_the_report_shows_it(tmp_path):
    audited(without_dropout(), tmp_path, {"steps": [2]})
    done = CliRunner().invoke(app, ["report", str(tmp_path / "audit")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "audit" / "report.md").read_text()
    assert "step 2" in page
    assert "leaks" in page


def test_all_texts_of_an_accumulated_step_are_found(tmp_path):
    (finding,) = audited(without_dropout(), tmp_path, {"steps": [2]}, gradient_accumulation_steps=2)
    assert finding.case["batch_size"] == 4
    assert finding.metrics["exact_texts"] == 4


def test_an_encoder_with_dropout_gives_its_words_away(tmp_path):
    findings = audited(classifier(), tmp_path, {"every": 2}, gradient_accumulation_steps=2)
    assert [finding.case["step"] for finding in findings] == [1, 2]
    assert all(finding.metrics["token_recall"] == finding.metrics["token_precision"] == 1 for finding in findings)


def test_an_encoder_without_dropout_gives_its_texts_away(tmp_path):
    known = {"task": "classification", "num_texts": 2, "num_clients": 1}
    (finding,) = audited(classifier(dropout=0.0), tmp_path, known)
    assert numbers(finding) == {"exact_texts": 2, "false_texts": 0, "certain_texts": 2}


@pytest.mark.parametrize("how", [pytest.param("autocast", marks=pytest.mark.slow), "weights"])
def test_bfloat16_claims_nothing_false(tmp_path, how):
    net = without_dropout()
    net = net.bfloat16() if how == "weights" else net
    (finding,) = audited(net, tmp_path, {"steps": [2], **KNOWN}, bf16=how == "autocast")
    assert finding.outcome is Outcome.LEAK
    assert finding.metrics["token_recall"] > 0.9
    certain = [pair for pair in finding.texts if pair.certain]
    assert all(pair.exact for pair in certain)


def test_lora_gives_texts_away_once_both_factors_move(tmp_path):
    pytest.importorskip("peft", reason="PEFT is missing; run: pip install 'unmask[lora]'")
    first, second = audited(lora(), tmp_path, {"steps": [1, 2]})
    assert first.metrics["token_recall"] == first.metrics["token_precision"] == 1
    assert second.metrics["exact_texts"] == 2


def test_a_delta_of_sgd_is_the_gradient_again(tmp_path):
    options = {"shares": "delta", **KNOWN}
    (finding,) = audited(without_dropout(), tmp_path, options, optim="sgd", learning_rate=0.1)
    assert finding.case["protocol"] == "fedavg:local_steps=1"
    assert numbers(finding) == {"exact_texts": 2, "false_texts": 0, "certain_texts": 2}


def test_a_round_holds_the_texts_of_all_its_steps(tmp_path):
    (finding,) = audited(classifier(), tmp_path, {"shares": "delta", "local_steps": 2})
    assert (finding.case["protocol"], finding.case["batch_size"]) == ("fedavg:local_steps=2", 4)
    assert finding.metrics["token_recall"] == finding.metrics["token_precision"] == 1


def test_a_round_that_the_end_cuts_short_is_audited(tmp_path):
    first, second = audited(classifier(), tmp_path, {"shares": "delta", "local_steps": 2, "every": 1})
    assert [finding.case["step"] for finding in (first, second)] == [1, 3]
    assert second.case["protocol"] == "fedavg:local_steps=1"


# ---- training does not notice


@pytest.mark.parametrize(
    ("make", "options", "changes"),
    [
        (causal, {"every": 1}, {"gradient_accumulation_steps": 2, "eval_strategy": "no"}),
        pytest.param(causal, {"shares": "delta", "local_steps": 2}, {"bf16": True}, marks=pytest.mark.slow),
        pytest.param(classifier, {"steps": [2]}, {"bf16": True}, marks=pytest.mark.slow),
        pytest.param(classifier, {"every": 1, "shares": "delta"}, {"max_grad_norm": 0.0}, marks=pytest.mark.slow),
        (lambda: lora(dropout=0.1), {"every": 1}, {}),
        pytest.param(lambda: without_dropout().bfloat16(), {"steps": [2]}, {}, marks=pytest.mark.slow),
    ],
    ids=["causal", "causal-round", "encoder-bf16", "encoder-delta", "lora", "bf16-weights"],
)
def test_the_training_is_the_same_bit_for_bit(tmp_path, make, options, changes):
    """Weights, and what comes next of every source of random numbers; dropout is on."""

    def finish(callbacks):
        net = make()
        train(net, tmp_path, callbacks, **changes)
        return net.state_dict(), torch.rand(4), np.random.rand(4).tolist(), random.random()

    weights, *after = finish([])
    others, *other_after = finish([AuditCallback(tmp_path / "audit", **options)])
    assert read_audit(tmp_path / "audit").findings
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert torch.equal(after[0], other_after[0])
    assert after[1:] == other_after[1:]


def test_a_failed_attack_is_a_finding_and_training_goes_on(tmp_path, monkeypatch):
    def fail(*_, **__):
        torch.rand(3)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(trainer_audit, "recover_text", fail)
    net, alone = classifier(), classifier()
    train(net, tmp_path, [AuditCallback(tmp_path / "audit", steps=[1, 2])])
    train(alone, tmp_path)
    findings = read_audit(tmp_path / "audit").findings
    assert [(one.status, one.error["type"], one.case["step"]) for one in findings] == [
        (ERROR, "RuntimeError", step) for step in (1, 2)
    ]
    assert all(torch.equal(new, old) for new, old in zip(net.parameters(), alone.parameters(), strict=True))


def test_a_copy_that_fails_is_a_finding_too(tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError("no memory for a second model")

    monkeypatch.setattr(trainer_audit, "copy_model", fail)
    (finding,) = audited(classifier(), tmp_path)
    assert finding.error["type"] == "MemoryError"


def test_a_model_that_cannot_be_read_is_a_finding(tmp_path):
    """Nothing that attacks read is trained."""
    net = classifier()
    for parameter in net.bert.parameters():
        parameter.requires_grad_(False)
    (finding,) = audited(net, tmp_path)
    assert finding.outcome in (Outcome.INCONCLUSIVE, Outcome.ERROR)


def test_nothing_is_left_in_the_model(tmp_path):
    net = classifier()
    train(net, tmp_path, [AuditCallback(tmp_path / "audit")])
    assert not net._forward_pre_hooks
    assert net.bert.embeddings.word_embeddings.weight.requires_grad


# ---- the fence


def test_the_attack_gets_the_update_and_the_weights_alone(tmp_path, monkeypatch):
    """Evidence from a file gives the same recovery, so nothing else reached the attack."""
    seen = []

    def attack(evidence, model, **options):
        recovery = recover_text(evidence, model, **options)
        seen.append((evidence, model, options, recovery))
        return recovery

    monkeypatch.setattr(trainer_audit, "recover_text", attack)
    audited(without_dropout(), tmp_path, {"steps": [2]})
    ((evidence, model, options, recovery),) = seen
    assert options == {"attack": "default", "seed": 0}
    assert evidence.num_texts is None
    again = recover_text(load_evidence(evidence.save(tmp_path / "update.safetensors")), model)
    assert again.value == recovery.value
    assert len(again.value.texts) == 2
    assert {text.tokens for text in again.value.texts} <= {tuple(row) for row in ROWS}
    assert not model.hf._forward_pre_hooks


# ---- mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": [0]}, "steps must be a whole number"),
        ({"every": 0}, "every must be a whole number"),
        ({"shares": "weights"}, "shares must be one of gradient, delta"),
        ({"local_steps": 3}, "a gradient is of one step"),
        ({"attack": "magic"}, "magic"),
        ({"learning_rates": 1.0}, "unknown option 'learning_rates'"),
    ],
)
def test_mistakes_are_told_before_training(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        AuditCallback(tmp_path, **options)


def test_several_processes_are_refused(tmp_path):
    with pytest.raises(InputError, match="runs in 4 processes"):
        AuditCallback(tmp_path).on_train_begin(SimpleNamespace(world_size=4), None, None, model=None)


# ---- real weights


@pytest.mark.slow
def test_smollm2_gives_its_texts_away(tmp_path, smollm2):
    texts = ["Her brother sold two goats near the lake.", "Please send forty litres of white paint."]
    model = smollm2.to()
    rows = [model.tokenizer(text)["input_ids"] for text in texts]
    data = [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in rows]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=1, report_to="none", use_cpu=True, save_strategy="no"
    )
    collator = transformers.DataCollatorForSeq2Seq(model.tokenizer)
    audit = AuditCallback(tmp_path / "audit", **KNOWN)
    Trainer(
        model.hf,
        arguments,
        train_dataset=data,
        data_collator=collator,
        processing_class=model.tokenizer,
        callbacks=[audit],
    ).train()
    (finding,) = read_audit(tmp_path / "audit").findings
    assert numbers(finding) == {"exact_texts": 2, "false_texts": 0, "certain_texts": 2}
