"""Low-rank adapters: what leaks below the rank, what does not above it, and controls that must stay silent."""

from dataclasses import replace

import pytest
import torch

from unmask import recover_text
from unmask.attacks.gradients.bag_of_words.lora_tokens import find_lora_tokens
from unmask.protocols import observe_lora
from unmask.recovery import Status

SHORT = [[5, 17, 99, 250]]
LONG = [[5, 17, 99, 250, 8, 11, 30, 31], [400, 3, 9, 21, 77, 78]]
TASKS = {"tiny_gpt2": "next_token", "tiny_llama": "next_token", "tiny_bert": "classification"}


def find(evidence, model):
    return find_lora_tokens(evidence, model, 32, torch.Generator().manual_seed(0))


def held(texts, task):
    return {token for text in texts for token in (text[:-1] if task == "next_token" else text)}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("steps", [0, 1])
def test_fewer_inputs_than_the_rank_are_told_exactly(name, steps, request):
    model, task = request.getfixturevalue(name), TASKS[name]
    evidence = observe_lora(model, SHORT, task=task, rank=8, steps=steps, earlier_texts=[[60, 61, 62]])
    found = find(evidence, model)
    assert found.candidates is not None
    assert found.candidates.tokens == held(SHORT, task)
    assert found.candidates.gap.decades > 1
    assert all("lora_A" in name if steps else "lora_B" in name for name in found.used)


@pytest.mark.parametrize("name", TASKS)
def test_as_many_inputs_as_the_rank_tell_nothing(name, request):
    model = request.getfixturevalue(name)
    found = find(observe_lora(model, LONG, task=TASKS[name], rank=4), model)
    assert found.candidates is None
    assert "4 directions" in found.reason


def test_an_update_of_other_adapters_yields_nothing(tiny_bert):
    """Negative control: gradients taken at other adapter weights than the server believes."""
    evidence = observe_lora(tiny_bert, SHORT, task="classification", rank=8)
    generator = torch.Generator().manual_seed(3)
    for tensor in evidence.adapters.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    found = find(evidence, tiny_bert)
    assert found.candidates is None or found.candidates.gap.decades < 1 or not found.candidates.tokens


def test_without_adapters_the_reason_says_so(tiny_bert):
    evidence = observe_lora(tiny_bert, SHORT, task="classification", rank=8)
    assert "no adapter" in find(evidence.only("layer.1."), tiny_bert).reason


def test_real_weights(minilm):
    texts = [minilm.encode("Ring at Petersen.")]
    found = find(observe_lora(minilm, texts, task="classification", rank=8), minilm)
    assert found.candidates is not None
    assert found.candidates.tokens == set(texts[0])


# Through the whole attack


@pytest.mark.parametrize("name", TASKS)
def test_below_the_rank_the_bag_of_words_is_recovered(name, request):
    model, task = request.getfixturevalue(name), TASKS[name]
    recovery = recover_text(observe_lora(model, SHORT, task=task, rank=8), model)
    assert recovery.status is Status.PARTIAL, recovery.reason
    assert recovery.value.token_set == held(SHORT, task)
    assert not recovery.value.texts
    assert recovery.certificate.holds
    assert recovery.used
    assert all("lora_B" in used for used in recovery.used)


@pytest.mark.parametrize("name", TASKS)
def test_above_the_rank_the_reason_names_it(name, request):
    model = request.getfixturevalue(name)
    recovery = recover_text(observe_lora(model, LONG, task=TASKS[name], rank=4), model)
    assert recovery.status is Status.NOT_IDENTIFIABLE
    assert "rank show 4 directions" in recovery.reason
    assert not recovery.value.token_set


def test_adapters_of_later_blocks_are_missing_evidence(tiny_bert):
    evidence = observe_lora(tiny_bert, SHORT, task="classification", rank=8)
    assert recover_text(evidence.only("layer.1."), tiny_bert).status is Status.MISSING_EVIDENCE


def test_noise_in_place_of_the_factors_yields_nothing(tiny_bert):
    evidence = observe_lora(tiny_bert, SHORT, task="classification", rank=8)
    generator = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(g.shape, generator=generator) for name, g in evidence.gradients.items()}
    recovery = recover_text(replace(evidence, gradients=noise), tiny_bert)
    assert not recovery.status.conclusive
    assert not recovery.value.token_set
