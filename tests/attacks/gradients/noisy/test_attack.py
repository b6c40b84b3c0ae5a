"""Texts from updates with few digits, noise and local steps: exact, certain by a replay, never certain and false."""

from collections import Counter
from itertools import product

import pytest
import torch
from tests.sampling import in_turn, sample

from unmask import recover_text
from unmask.attacks.gradients.noisy.attack import NoisyAttack, is_blurred
from unmask.audit.cases.data import INVENTED_TEXTS
from unmask.defences import parse_defence
from unmask.protocols import observe_fedavg, observe_gradients
from unmask.recovery import Status

FIRST, LONGER, SHARED = (5, 17, 99, 17, 250, 8, 30), (400, 3, 8, 21, 11, 12), (400, 3, 8, 9)
BATCHES = {
    "one text": [FIRST],
    "texts that share a start": [FIRST, LONGER, SHARED],
    "one text twice": [FIRST, LONGER, FIRST],
    "a text that another one begins with": [LONGER, LONGER[:4], FIRST],
    "a first token twice": [(5, 5, 17, 99, 250), LONGER],
}
DEFENCES = ["bf16", "fp16", "fp8", "noise:sigma=1e-5", "laplace:sigma=1e-5", "topk:share=0.5"]
STRONG_DEFENCES = ["noise:sigma=1e-2", "noise:sigma=1", "topk:share=0.01", "random:share=0.1", "int8"]
ROTARY = ["tiny_llama", "tiny_qwen2", "tiny_mistral"]


def observe(model, texts, defence=None):
    evidence = observe_gradients(model, [list(text) for text in texts])
    return evidence if defence is None else parse_defence(defence)(evidence, torch.Generator().manual_seed(1))


@sample(
    "batch, defence", product(BATCHES, ["bf16", "noise:sigma=1e-5"]), in_turn(BATCHES, ["bf16", "noise:sigma=1e-5"])
)
def test_every_text_is_recovered(tiny_llama, batch, defence):
    recovery = recover_text(observe(tiny_llama, BATCHES[batch], defence), tiny_llama)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert Counter(recovery.value.expand()) == Counter(BATCHES[batch])
    assert recovery.value.token_set == {token for text in BATCHES[batch] for token in text}


@sample("name, defence", product(ROTARY, DEFENCES), in_turn(ROTARY, DEFENCES))
def test_digits_and_noise_are_no_obstacle(name, defence, request):
    model = request.getfixturevalue(name)
    recovery = recover_text(observe(model, BATCHES["texts that share a start"], defence), model)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert set(recovery.value.expand()) == {FIRST, LONGER, SHARED}


@sample("steps", [2, 4], [4])
def test_local_steps_are_no_obstacle(tiny_llama, steps):
    texts = BATCHES["texts that share a start"]
    evidence = observe_fedavg(tiny_llama, [list(text) for text in texts], local_steps=steps, learning_rate=1e-3)
    recovery = recover_text(evidence, tiny_llama)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert Counter(recovery.value.expand()) == Counter(texts)


@sample("batch, defence", product(BATCHES, STRONG_DEFENCES), in_turn(BATCHES, STRONG_DEFENCES))
def test_nothing_certain_is_false(tiny_llama, batch, defence):
    recovery = NoisyAttack()(observe(tiny_llama, BATCHES[batch], defence), tiny_llama)
    assert {text.tokens for text in recovery.value.certain} <= set(BATCHES[batch])


def test_a_clean_update_is_not_blurred(tiny_llama):
    assert not is_blurred(observe(tiny_llama, [FIRST]), tiny_llama)
    assert is_blurred(observe(tiny_llama, [FIRST], "bf16"), tiny_llama)


def test_noise_alone_is_no_text(tiny_llama):
    evidence = observe(tiny_llama, [FIRST])
    generator = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(g.shape, generator=generator) for name, g in evidence.gradients.items()}
    for tensors in (noise, {name: g.bfloat16().float() for name, g in noise.items()}):
        recovery = NoisyAttack()(evidence.with_tensors(tensors), tiny_llama)
        assert not recovery.status.conclusive
        assert not recovery.value.certain


@pytest.mark.slow
@pytest.mark.parametrize("defence", ["bf16", "fp16", "fp8", "int8", "noise:sigma=1e-5"])
def test_real_weights(smollm2, defence):
    texts = [tuple(smollm2.encode(text)) for text in INVENTED_TEXTS[:4]]
    recovery = recover_text(observe(smollm2, texts, defence), smollm2)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert Counter(recovery.value.expand()) == Counter(texts)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 4])
def test_real_weights_after_local_steps(smollm2, steps):
    texts = [tuple(smollm2.encode(text)) for text in INVENTED_TEXTS[:4]]
    recovery = recover_text(observe_fedavg(smollm2, texts, local_steps=steps, learning_rate=0.01), smollm2)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert Counter(recovery.value.expand()) == Counter(texts)
