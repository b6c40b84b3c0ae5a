"""Tokens from steps of AdamW and of LoRA's SGD: the formula of the step, the tokens, and controls that stay silent."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from tests.sampling import in_turn, sample

from unmask import recover_text
from unmask.attacks.gradients.bag_of_words.delta_tokens import find_delta_tokens
from unmask.attacks.gradients.bag_of_words.weight_changes import layer_changes, measure_decay
from unmask.protocols import observe_fedavg, observe_gradients, observe_lora
from unmask.recovery import Status

TEXTS = [[5, 17, 99, 250, 8, 11, 30, 31], [400, 3, 9, 21, 77, 78]]
EARLIER = [[60, 61, 62], [70, 71, 72, 73]]
INPUTS = {token for text in TEXTS for token in text[:-1]}
# Gradients of tiny models are large, so a small step shows little more than their signs; real ones take 5e-5.
LATER = {"local_steps": 1, "steps": 2, "earlier_texts": EARLIER, "local_learning_rate": 1e-2}
CLIENTS = {
    "second step of a first round": {"local_steps": 2},
    "one step of a later round": LATER,
    "with decay and clipping": {**LATER, "weight_decay": 0.01, "max_grad_norm": 1.0},
    "one step of SGD": {**LATER, "optimizer": "sgd", "local_learning_rate": 0.1},
}


def tokens(found):
    return set(found.tokens.tolist())


@sample("client, rank", product(CLIENTS, [8, 16]), in_turn(CLIENTS, [8, 16]))
def test_tokens_of_lora_clients(tiny_llama, client, rank):
    evidence = observe_lora(tiny_llama, TEXTS, rank=rank, **CLIENTS[client])
    found = find_delta_tokens(evidence, tiny_llama)
    assert tokens(found) <= INPUTS
    assert len(tokens(found)) >= 0.9 * len(INPUTS), found.reason
    assert found.details["delta_misfit"] < 2


@pytest.mark.parametrize("learning_rate", [1e-3, 1e-1])
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2", "tiny_bert"])
def test_one_adamw_step_of_the_whole_model_gives_no_false_token(name, learning_rate, request):
    """Their gradients are so large that few entries are more than signs."""
    model = request.getfixturevalue(name)
    task = "next_token" if model.causal else "classification"
    evidence = observe_fedavg(model, TEXTS, task=task, optimizer="adamw", learning_rate=learning_rate)
    assert tokens(find_delta_tokens(evidence, model)) <= {token for text in TEXTS for token in text}


def observe_some_client(model, texts, kind, rate):
    task = "next_token" if model.causal else "classification"
    if kind == 0:
        return observe_fedavg(model, texts, optimizer="adamw", learning_rate=rate, task=task)
    if kind == 1:
        return observe_lora(model, texts, task=task, **{**LATER, "local_learning_rate": rate})
    return observe_lora(model, texts, task=task, local_steps=2, local_learning_rate=min(rate, 1e-2))


@pytest.mark.slow
def test_random_clients_give_no_false_token(tiny_llama, tiny_gpt2, tiny_bert):
    """Several sets of tokens may explain what weak entries show: then nothing may be claimed."""
    draw, claimed = torch.Generator().manual_seed(1), 0
    for model in (tiny_llama, tiny_gpt2, tiny_bert):
        for turn in range(96):
            lengths = torch.randint(3, 9, (int(torch.randint(1, 4, (1,), generator=draw)),), generator=draw).tolist()
            texts = [torch.randint(5, 490, (length,), generator=draw).tolist() for length in lengths]
            found = tokens(
                find_delta_tokens(observe_some_client(model, texts, turn % 3, 10.0 ** (-4 + turn % 4)), model)
            )
            assert found <= {token for text in texts for token in text}
            claimed += len(found)
    assert claimed > 100


@pytest.mark.parametrize("rate", [1e-2, 2.5e-3, 1.2345e-2])
def test_a_learning_rate_that_is_not_known_is_the_largest_step(tiny_llama, rate):
    """Steps show it to five digits, and a number of two digits that is as near is the learning rate."""
    evidence = observe_lora(tiny_llama, TEXTS, **{**LATER, "local_learning_rate": rate})
    unstated = replace(evidence, learning_rate=None, optimizer=None, num_steps=None, weight_decay=None)
    found = find_delta_tokens(unstated, tiny_llama)
    assert tokens(found) <= INPUTS
    if rate != 1.2345e-2:
        assert len(tokens(found)) >= 0.9 * len(INPUTS), found.reason


@sample("steps", [3, 10], [10])
def test_more_steps_of_adamw_say_why(tiny_llama, steps):
    evidence = observe_lora(tiny_llama, TEXTS, local_steps=steps, steps=2, earlier_texts=EARLIER)
    recovery = recover_text(evidence, tiny_llama)
    assert recovery.status is Status.NOT_APPLICABLE
    assert "several steps" in recovery.reason
    assert not recovery.value.token_set


@sample("factor", [1 + 1e-5, 1 - 1e-5], [1 - 1e-5])
def test_a_learning_rate_that_is_a_little_off_claims_nothing_false(tiny_llama, factor):
    """It adds errors that tokens can explain, tens of them, down to what rounding leaves."""
    small = {**LATER, "local_learning_rate": 1e-4, "max_grad_norm": 1e-2}
    evidence = observe_lora(tiny_llama, TEXTS, rank=16, **small)
    wrong = replace(evidence, learning_rate=factor * 1e-4)
    assert tokens(find_delta_tokens(wrong, tiny_llama)) <= INPUTS


def test_a_great_many_steps_are_not_tried(tiny_llama):
    evidence = observe_lora(tiny_llama, TEXTS, **{**LATER, "local_steps": 2})
    assert not tokens(find_delta_tokens(replace(evidence, num_steps=10**6), tiny_llama))


def test_a_gradient_is_no_difference(tiny_llama):
    assert "no difference" in find_delta_tokens(observe_gradients(tiny_llama, TEXTS), tiny_llama).reason


DESTROYED = {
    "noise": lambda g, draw: g.abs().mean() * torch.randn(g.shape, generator=draw),
    "shuffled columns": lambda g, draw: g[:, torch.randperm(g.shape[1], generator=draw)],
    "signs alone": lambda g, draw: g.abs().max() * g.sign(),
    "a little noise": lambda g, draw: g + 1e-2 * g.abs().mean() * torch.randn(g.shape, generator=draw),
}


@pytest.mark.parametrize("num_draws", [5, pytest.param(250, marks=pytest.mark.slow)])
@pytest.mark.parametrize("control", DESTROYED)
def test_destroyed_differences_claim_nothing(tiny_llama, control, num_draws):
    evidence = observe_lora(tiny_llama, TEXTS, **CLIENTS["one step of a later round"])
    draw = torch.Generator().manual_seed(0)
    for _ in range(num_draws):
        changed = {name: DESTROYED[control](g, draw) for name, g in evidence.gradients.items()}
        assert not tokens(find_delta_tokens(replace(evidence, gradients=changed), tiny_llama))


def test_the_whole_attack_claims_them(tiny_llama):
    evidence = observe_lora(tiny_llama, TEXTS, **CLIENTS["second step of a first round"])
    recovery = recover_text(evidence, tiny_llama)
    assert recovery.status is Status.PARTIAL
    assert recovery.value.token_set == INPUTS
    assert recovery.certificate.residual <= 0.01
    assert all("lora_A" in name for name in recovery.used)


def test_every_reading_of_an_unstated_difference_is_told(tiny_qwen2):
    evidence = observe_fedavg(tiny_qwen2, TEXTS, optimizer="adamw", learning_rate=1e-3)
    unstated = replace(evidence, optimizer=None, learning_rate=None, num_steps=None, task=None)
    told = []
    recover_text(unstated, tiny_qwen2, progress=lambda step, done, total: told.append(step))
    steps = list(dict.fromkeys(told))
    assert steps.index("writing texts of the model's own") < steps.index("reading the steps of block 0's weights")


def test_real_weights(low_smollm2):
    texts = ["Room four is free after noon.", "Call Dana about the spare keys."]
    evidence = observe_lora(low_smollm2, texts, rank=8, local_steps=2)
    held = {token for text in texts for token in low_smollm2.encode(text)[:-1]}
    assert recover_text(evidence, low_smollm2).value.token_set == held


@pytest.mark.slow
def test_one_adamw_step_of_real_weights(smollm2):
    """Without its embedding, which tells most tokens; those that only begin texts move no queries."""
    texts = ["Room four is free after noon.", "Call Dana about the spare keys."]
    evidence = observe_fedavg(smollm2, texts, optimizer="adamw", parameters=["layers.0.self_attn"])
    held = {token for text in texts for token in smollm2.encode(text)[:-1]}
    found = tokens(find_delta_tokens(evidence, smollm2))
    assert found <= held
    assert len(found) >= 0.8 * len(held)


@sample("rate, decay", [(5e-5, 0.01), (1e-3, 0.1), (3e-4, 0.05)], [(5e-5, 0.01)])
def test_a_decay_that_nobody_states_is_read_off_the_edge_of_the_steps(tiny_llama, rate, decay):
    evidence = observe_fedavg(tiny_llama, TEXTS, optimizer="adamw", learning_rate=rate, weight_decay=decay)
    assert {measure_decay(layer) for layer in layer_changes(evidence, tiny_llama)} <= {(rate, decay), None}
    unstated = replace(evidence, optimizer=None, learning_rate=None, weight_decay=None, num_steps=None)
    found = find_delta_tokens(unstated, tiny_llama)
    assert tokens(found) == tokens(find_delta_tokens(evidence, tiny_llama))
    none = observe_fedavg(tiny_llama, TEXTS, optimizer="adamw", learning_rate=rate)
    assert {measure_decay(layer) for layer in layer_changes(none, tiny_llama)} == {None}
