"""The client, run again: the right batch agrees to the last digits, anything else is far off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from unmask.errors import InputError
from unmask.evidence import GradientEvidence, files, load_evidence
from unmask.models import Model
from unmask.proof.agreement import Products, agree, agreement_of, tolerance_of
from unmask.proof.gradient_visits import only_trainable
from unmask.proof.replay import can_replay, replay, replay_and_agree, why_not_replayed, why_too_large, why_too_long
from unmask.protocols import observe_fedavg, observe_gradients, observe_lora

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49]]
WRONG = {
    "one wrong token": [TEXTS[0], TEXTS[1], [44, 45, 46, 47, 48, 60]],
    "a missing text": TEXTS[:2],
    "a duplicate": [*TEXTS, TEXTS[1]],
    "a ghost": [*TEXTS, [300, 301, 302, 303]],
    "another order of words": [[5, 99, 17, 17, 250], *TEXTS[1:]],
}
FAR = 100  # times the tolerance
Observe = Callable[[Model, Sequence[list[int]]], GradientEvidence]


def sgd(steps: int) -> Observe:
    return lambda model, texts: observe_fedavg(model, texts, local_steps=steps, learning_rate=0.05)


def adamw(model: Model, texts: Sequence[list[int]]) -> GradientEvidence:
    return observe_fedavg(model, texts, local_steps=2, optimizer="adamw", learning_rate=1e-3, weight_decay=0.01)


def lora(model: Model, texts: Sequence[list[int]]) -> GradientEvidence:
    pytest.importorskip("peft", reason="PEFT is missing: pip install 'unmask[lora]'")
    return observe_lora(model, texts, rank=4, steps=2, earlier_texts=[[60, 61, 62], [300, 301]])


PROTOCOLS: dict[str, Observe] = {
    "gradient": observe_gradients,
    "one step": sgd(1),
    "four steps": sgd(4),
    "adamw": adamw,
    "lora": lora,
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_right_batch_agrees_in_any_order_and_no_other_does(tiny_llama, protocol):
    evidence = PROTOCOLS[protocol](tiny_llama, TEXTS)
    for texts in (TEXTS, TEXTS[::-1], [TEXTS[1], TEXTS[2], TEXTS[0]]):
        right = agree(evidence, replay(evidence, tiny_llama, texts))
        assert right.holds, (right, texts)
        assert right.num_tensors == len(evidence.gradients)
        assert right.scale == pytest.approx(1, abs=1e-3)
    for name, texts in WRONG.items():
        wrong = agree(evidence, replay(evidence, tiny_llama, texts))
        assert not wrong.holds_up_to_scale, (name, wrong)
        assert min(wrong.misfit, wrong.misfit_as_is) > FAR * right.tolerance, (name, wrong)


def test_every_family_is_replayed(tiny):
    options: dict[str, Any] = {} if tiny.causal else {"task": "classification", "labels": [0, 1, 1]}
    evidence = observe_gradients(tiny, TEXTS, **options)
    labels = options.get("labels")
    right = agree(evidence, replay(evidence, tiny, TEXTS, labels=labels))
    assert right.holds, right
    for texts in (WRONG["one wrong token"], WRONG["another order of words"]):
        assert agree(evidence, replay(evidence, tiny, texts, labels=labels)).misfit > FAR * right.tolerance


def test_labels_of_classified_texts_count(tiny_bert):
    evidence = observe_gradients(tiny_bert, TEXTS, task="classification", labels=[0, 1, 1])
    wrong = agree(evidence, replay(evidence, tiny_bert, TEXTS, labels=[0, 1, 0]))
    assert wrong.misfit > FAR * wrong.tolerance


def test_padding_on_the_left_is_another_batch(tiny_gpt2):
    evidence = observe_gradients(tiny_gpt2, TEXTS, padding_side="left")
    assert agree(evidence, replay(evidence, tiny_gpt2, TEXTS, padding_side="left")).holds
    assert not agree(evidence, replay(evidence, tiny_gpt2, TEXTS)).holds_up_to_scale


def test_one_factor_on_all_tensors_is_found(tiny_gpt2):
    """As after clipping to a norm that the server does not know."""
    evidence = observe_gradients(tiny_gpt2, TEXTS)
    again = replay(evidence, tiny_gpt2, TEXTS)
    found = agree(replace(evidence, gradients={name: 0.25 * g for name, g in evidence.gradients.items()}), again)
    assert found.scale == pytest.approx(0.25, rel=1e-4)
    assert found.holds_up_to_scale
    assert not found.holds
    negative = replace(evidence, gradients={name: -g for name, g in evidence.gradients.items()})
    assert not agree(negative, again).holds_up_to_scale


def test_a_part_of_the_update_is_enough(tiny_llama):
    evidence = observe_gradients(tiny_llama, TEXTS).only("layers.0.self_attn")
    again = replay(evidence, tiny_llama, TEXTS)
    assert set(again) == set(evidence.gradients)
    assert agree(evidence, again).holds
    assert not agree(evidence, {}).holds
    assert not agree(evidence, {}).holds_up_to_scale


def test_what_was_trainable_is_so_afterwards(tiny_gpt2):
    model = tiny_gpt2.to()
    frozen = "h.0.attn.c_attn.weight"
    model.parameter(frozen).requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with only_trainable(model, [frozen]):
        assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == [frozen]
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    replay(observe_gradients(tiny_gpt2, TEXTS), model, TEXTS)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before


def test_rows_of_equal_tokens_are_compared_together(tiny_llama):
    """Two tokens with one embedding: only rows of the embedding tell them apart, and merged they do not."""
    model = tiny_llama.to()
    with torch.no_grad():
        model.parameter(model.token_embedding)[18] = model.parameter(model.token_embedding)[17]
    texts, other = [[17, 99, 250], [400, 3, 8]], [[18, 99, 250], [400, 3, 8]]
    evidence = observe_gradients(model, texts)
    again = replay(evidence, model, other)
    assert not agree(evidence, again).holds
    assert agree(evidence, again, by_token=[model.token_embedding], equal=[(17, 18)]).holds
    assert agree(evidence, replay(evidence, model, texts), by_token=[model.token_embedding], equal=[(17, 18)]).holds


def test_what_cannot_be_done_again_is_said(tiny_gpt2):
    evidence = observe_gradients(tiny_gpt2, TEXTS)
    assert can_replay(evidence, 3)
    assert not can_replay(replace(evidence, noise_std=1e-3), 3)
    assert can_replay(replace(evidence, local_batch_size=3), 3)
    assert not can_replay(replace(evidence, local_batch_size=2), 3)
    assert not can_replay(evidence, 100_000)
    assert can_replay(replace(evidence, num_texts=100_000), 100_000)
    assert not can_replay(replace(evidence, task="masked_token"), 3)


def test_a_client_of_very_many_steps_is_not_run_again(tiny_gpt2):
    """A replay costs what the training cost, and the number of steps is what somebody states."""
    evidence = replace(sgd(1)(tiny_gpt2, TEXTS), num_steps=10**9)
    assert "1,000,000,000 local steps, and a replay runs 1,000 at most" in why_too_long(evidence)
    assert not can_replay(evidence, 3)
    with pytest.raises(InputError, match="a replay runs 1,000 at most; correct num_steps"):
        replay(evidence, tiny_gpt2, TEXTS)
    assert can_replay(replace(evidence, num_steps=1000), 3)
    assert can_replay(replace(evidence, update="gradient"), 3)


def test_the_tolerance_is_that_of_the_precision(tiny_gpt2):
    evidence = observe_gradients(tiny_gpt2, TEXTS)
    double = observe_gradients(tiny_gpt2.to(dtype=torch.float64), TEXTS)
    coarse = replace(evidence, compute_dtype=torch.bfloat16)
    ordered = [tolerance_of(e) for e in (double, evidence, sgd(1)(tiny_gpt2, TEXTS), coarse)]
    assert ordered == sorted(ordered)
    assert len(set(ordered)) == 4


def test_a_quiet_tensor_is_measured_by_the_typical_one():
    """Gradients of key biases are zero but for rounding: their own norm is no measure."""
    loud = {f"w{i}": Products(100.0, 100.0, 100.0, 100) for i in range(3)}
    noise = Products(1e-12, 0.0, 1e-12, 100)
    assert agreement_of({**loud, "bias": noise}, 5e-5).holds
    assert not agreement_of({**loud, "w": Products(100.0, 99.0, 100.0, 100)}, 5e-5).holds
    assert not agreement_of({}, 5e-5).holds


@pytest.mark.parametrize("name", ["gradient", "one step"])
def test_an_update_on_the_disk_is_compared_tensor_by_tensor(tiny_llama, name, tmp_path, monkeypatch):
    """With the same result as in memory, and without the memory that all gradients take."""
    monkeypatch.setattr(files, "LARGE_BYTES", 1)
    seen = PROTOCOLS[name](tiny_llama, TEXTS)
    stored = load_evidence(seen.save(tmp_path / "update.safetensors"))
    plain = replay_and_agree(seen, tiny_llama, TEXTS)
    monkeypatch.setenv("UNMASK_MEMORY_GB", "1e-6")
    assert can_replay(stored, len(TEXTS), by_tensor=True)
    assert not can_replay(stored, len(TEXTS))
    assert not why_not_replayed(stored, by_tensor=True)
    again = replay_and_agree(stored, tiny_llama, TEXTS)
    assert again.holds
    assert (again.num_tensors, again.tolerance) == (plain.num_tensors, plain.tolerance)
    for texts in WRONG.values():
        assert not replay_and_agree(stored, tiny_llama, texts).holds


def test_what_is_compared_as_a_whole_needs_the_memory_for_it(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGE_BYTES", 1)
    seen = sgd(4)(tiny_llama, TEXTS)
    stored = load_evidence(seen.save(tmp_path / "update.safetensors"))
    assert not why_too_large(stored)
    assert replay_and_agree(stored, tiny_llama, TEXTS).holds
    monkeypatch.setenv("UNMASK_MEMORY_GB", "1e-6")
    assert "it was not done" in why_not_replayed(stored, by_tensor=True)
    assert not can_replay(stored, len(TEXTS), by_tensor=True)
    assert not why_too_large(seen)  # it is in memory already
