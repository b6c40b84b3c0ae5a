"""FedAvg: weight deltas against an obvious training loop, and against FedSGD where they must agree."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import transformers
from tests.tiny_models import bert_config, gpt2_config, random_model
from torch import Tensor
from torch.nn import functional

from unmask.attacks.gradients.bag_of_words.embedding_rows import tokens_from_rows
from unmask.errors import InputError
from unmask.evidence import Task, Update, load_evidence
from unmask.models import Model, adapt
from unmask.protocols import observe_fedavg, observe_gradients
from unmask.protocols.batch import make_batch

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49, 50, 51]]
LABELS = [1, 0, 1]
# One unit of float32 in the sum of a weight and its change, and one more in the subtraction (exact as a rule).
ROUNDING = 2 * torch.finfo(torch.float32).eps
# The same sums in float32 in another order, over some steps.
FLOAT32_PARITY = 1e-5


def step_error(delta: dict[str, Tensor], expected: dict[str, Tensor], weights: dict[str, Tensor]) -> float:
    """The worst error of an entry, in roundings of its weight plus 1e-5 of the tensor's largest change."""
    assert set(delta) == set(expected)
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    return max(
        float(((delta[name] - tensor).abs() / (ROUNDING * weights[name].abs() + 1e-5 * largest)).max())
        for name, tensor in expected.items()
    )


def weights_of(model: Model) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """In norm, over the whole update."""
    assert set(found) == set(expected)
    difference = sum(float((found[name] - tensor).double().square().sum()) for name, tensor in expected.items())
    return math.sqrt(difference / sum(float(tensor.double().square().sum()) for tensor in expected.values()))


def same(first: Any, second: Any) -> bool:
    assert set(first.gradients) == set(second.gradients)
    return all(torch.equal(tensor, second.gradients[name]) for name, tensor in first.gradients.items())


# One step of SGD is FedSGD


@pytest.mark.parametrize("task", ["next_token", "classification"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_one_step_of_sgd_is_the_gradient(tiny, task, side):
    """ΔW = −η·∂L/∂W, up to the rounding of the weights."""
    if task == "next_token" and not tiny.causal:
        pytest.skip("an encoder has no next-token loss")
    options = {"task": task, "padding_side": side, "seed": 3}
    evidence = observe_fedavg(tiny, TEXTS, learning_rate=0.1, **options)
    gradients = observe_gradients(tiny, TEXTS, **options).gradients
    expected = {name: -0.1 * gradient for name, gradient in gradients.items()}
    assert step_error(evidence.gradients, expected, weights_of(tiny)) < 1


def test_one_step_with_dropout_is_the_gradient_of_the_same_masks(tiny_gpt2):
    evidence = observe_fedavg(tiny_gpt2, TEXTS, learning_rate=0.1, train_mode=True, seed=2)
    gradients = observe_gradients(tiny_gpt2, TEXTS, train_mode=True, seed=2).gradients
    expected = {name: -0.1 * gradient for name, gradient in gradients.items()}
    assert step_error(evidence.gradients, expected, weights_of(tiny_gpt2)) < 1
    plain = observe_fedavg(tiny_gpt2, TEXTS, learning_rate=0.1)
    assert relative_error(evidence.gradients, plain.gradients) > 1e-2


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_head_of_the_models_own_is_trained_and_shared(family):
    if family == "bert":
        hf = random_model(transformers.BertForSequenceClassification, bert_config(num_labels=3))
    else:
        hf = random_model(transformers.GPT2ForSequenceClassification, gpt2_config(num_labels=3))
    model = adapt(hf)
    evidence = observe_fedavg(model, TEXTS, task="classification", labels=[2, 0, 1], learning_rate=0.1)
    gradients = observe_gradients(model, TEXTS, task="classification", labels=[2, 0, 1]).gradients
    expected = {name: -0.1 * gradient for name, gradient in gradients.items()}
    assert step_error(evidence.gradients, expected, weights_of(model)) < 1
    assert any("score" in name or "classifier" in name for name in evidence.gradients)


@pytest.mark.slow
def test_real_weights(minilm):
    """MiniLM, two local AdamW steps with decay: the rows beyond the common decay are the tokens."""
    texts = ["The patient was discharged on Friday.", "Transfer it today, please."]
    evidence = observe_fedavg(
        minilm, texts, task="classification", optimizer="adamw", weight_decay=0.01, local_steps=2, batch_size=1
    )
    tokens = tokens_from_rows(evidence, minilm)
    assert tokens is not None
    assert set(tokens.tolist()) == {token for text in texts for token in minilm.encode(text)}


# Several steps


def obvious_training(model: Model, batches: list[list[list[int]]], descent: Any, clip: float | None = None) -> Any:
    """Next-token training on one batch after the other, with transformers' own loss; the weights' change."""
    twin = model.to()
    twin.hf.eval()
    optimizer = descent(twin.hf.parameters())
    for texts in batches:
        batch = make_batch(twin, texts)
        labels = batch.tokens.masked_fill(~batch.mask, -100)
        optimizer.zero_grad()
        twin.hf(input_ids=batch.tokens, attention_mask=batch.mask.long(), labels=labels).loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(twin.hf.parameters(), clip)
        optimizer.step()
    before = weights_of(model)
    return {name: weight - before[name] for name, weight in weights_of(twin).items()}


@pytest.mark.parametrize(
    ("options", "descent"),
    [
        ({"optimizer": "sgd"}, lambda p: torch.optim.SGD(p, lr=0.1)),
        (
            {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1},
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        ),
        (
            {"optimizer": "adamw", "weight_decay": 0.01, "learning_rate": 1e-2},
            lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.01),
        ),
    ],
)
def test_several_steps_are_those_of_torch(tiny_llama, options, descent):
    evidence = observe_fedavg(tiny_llama, TEXTS, local_steps=3, **({"learning_rate": 0.1} | options))
    expected = obvious_training(tiny_llama, [TEXTS] * 3, descent)
    # AdamW divides by the gradient's size, so the roundings of small entries weigh as much as large entries.
    tolerance = 1e-3 if evidence.optimizer == "adamw" else FLOAT32_PARITY
    assert relative_error(evidence.gradients, expected) < tolerance


def test_the_norm_of_the_gradient_is_clipped(tiny_gpt2):
    evidence = observe_fedavg(tiny_gpt2, TEXTS, local_steps=2, learning_rate=0.1, max_grad_norm=0.01)
    expected = obvious_training(tiny_gpt2, [TEXTS] * 2, lambda p: torch.optim.SGD(p, lr=0.1), clip=0.01)
    # Changes of 1e-3 in all are near the rounding of the weights.
    assert relative_error(evidence.gradients, expected) < 1e-2
    norm = math.sqrt(sum(float(delta.double().square().sum()) for delta in evidence.gradients.values()))
    assert 0.9e-3 < norm < 2.1e-3


def test_an_epoch_sees_every_text_once(tiny_llama):
    """In batches of two, so of two and one; the order is the seed's."""
    evidence = observe_fedavg(tiny_llama, TEXTS, epochs=2, batch_size=2, learning_rate=0.1, seed=1)
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(2):
        order = torch.randperm(3, generator=generator).tolist()
        batches += [[TEXTS[row] for row in order[:2]], [TEXTS[order[2]]]]
    expected = obvious_training(tiny_llama, batches, lambda p: torch.optim.SGD(p, lr=0.1))
    assert evidence.num_steps == 4
    assert relative_error(evidence.gradients, expected) < FLOAT32_PARITY


def test_steps_go_round_the_texts(tiny_llama):
    """Three steps over batches of two of three texts: a pass, and the first batch of the next."""
    three = observe_fedavg(tiny_llama, TEXTS, local_steps=3, batch_size=2, learning_rate=0.1)
    two = observe_fedavg(tiny_llama, TEXTS, epochs=1, batch_size=2, learning_rate=0.1)
    assert (three.num_steps, two.num_steps) == (3, 2)
    assert relative_error(three.gradients, two.gradients) > 1e-2


def test_a_fresh_head_is_trained_along_and_not_shared(tiny_bert):
    """Against a head of our own: the first draw of the seed when labels are given."""
    evidence = observe_fedavg(tiny_bert, TEXTS, task="classification", labels=LABELS, local_steps=2, learning_rate=0.5)
    twin, batch = tiny_bert.to(), make_batch(tiny_bert, TEXTS)
    head = 0.02 * torch.randn(twin.width, 2, generator=torch.Generator().manual_seed(0))
    head.requires_grad_()
    for train_head in (True, False):
        copied, own = twin.to(), head.detach().clone().requires_grad_()
        descent = torch.optim.SGD([*copied.hf.parameters(), *([own] if train_head else [])], lr=0.5)
        for _ in range(2):
            descent.zero_grad()
            states = copied.body(input_ids=batch.tokens, attention_mask=batch.mask.long()).last_hidden_state
            functional.cross_entropy(states[:, 0] @ own, torch.tensor(LABELS)).backward()
            descent.step()
        before = weights_of(tiny_bert)
        expected = {name: weight - before[name] for name, weight in weights_of(copied).items()}
        expected = {name: expected[name] for name in evidence.gradients}
        assert (relative_error(evidence.gradients, expected) < 1e-4) == train_head
    assert not any("head" in name for name in evidence.gradients)
    assert not any(name.startswith("cls.") for name in evidence.gradients)


# Precision


def test_deltas_carry_the_rounding_of_the_weights(tiny_gpt2):
    """Each weight plus its delta is a weight of the same precision: nothing finer than the weights was sent."""
    evidence = observe_fedavg(tiny_gpt2, TEXTS, learning_rate=1e-6)
    weights = weights_of(tiny_gpt2)["h.0.attn.c_attn.weight"].double()
    after = weights + evidence.gradients["h.0.attn.c_attn.weight"].double()
    assert torch.equal(after, after.float().double())
    gradient = observe_gradients(tiny_gpt2, TEXTS).gradients["h.0.attn.c_attn.weight"]
    assert not torch.allclose(evidence.gradients["h.0.attn.c_attn.weight"], -1e-6 * gradient, rtol=1e-3, atol=0)


def test_a_client_in_bfloat16_sends_bfloat16(tiny_gpt2):
    evidence = observe_fedavg(tiny_gpt2.to(dtype=torch.bfloat16), TEXTS, learning_rate=0.1)
    assert all(delta.dtype == torch.bfloat16 for delta in evidence.gradients.values())
    assert evidence.compute_dtype == torch.bfloat16
    evidence.check(tiny_gpt2)


def test_mixed_precision_rounds_the_forward_pass_and_not_the_weights(tiny_llama):
    plain = observe_fedavg(tiny_llama, TEXTS, learning_rate=0.1)
    mixed = observe_fedavg(tiny_llama, TEXTS, learning_rate=0.1, autocast=torch.bfloat16)
    assert mixed.compute_dtype == torch.bfloat16
    assert all(delta.dtype == torch.float32 for delta in mixed.gradients.values())
    # bfloat16 rounds each activation by up to 0.4 %, and a few dozens of roundings add up.
    assert 1e-3 < relative_error(mixed.gradients, plain.gradients) < 0.3


# What is said, and what is left alone


def test_what_is_said_about_the_update(tiny_gpt2, tmp_path):
    evidence = observe_fedavg(tiny_gpt2, TEXTS, optimizer="adamw", weight_decay=0.01, local_steps=2)
    assert (evidence.task, evidence.update, evidence.num_texts) == (Task.NEXT_TOKEN, Update.DELTA, 3)
    told = (evidence.learning_rate, evidence.num_steps, evidence.optimizer, evidence.weight_decay)
    assert told == (5e-5, 2, "adamw", 0.01)
    assert evidence.noise_std is None
    evidence.check(tiny_gpt2)
    loaded = load_evidence(evidence.save(tmp_path / "update.safetensors"))
    assert (loaded.learning_rate, loaded.num_steps) == (5e-5, 2)
    assert observe_fedavg(tiny_gpt2, TEXTS).learning_rate == 0.01
    assert observe_fedavg(tiny_gpt2, TEXTS, share_learning_rate=False).learning_rate is None


def test_the_seed_decides_everything(tiny_gpt2):
    options = {"local_steps": 3, "batch_size": 1, "train_mode": True, "learning_rate": 0.1, "task": "classification"}
    first = observe_fedavg(tiny_gpt2, TEXTS, seed=4, **options)
    torch.rand(3)
    assert same(first, observe_fedavg(tiny_gpt2, TEXTS, seed=4, **options))
    assert not same(first, observe_fedavg(tiny_gpt2, TEXTS, seed=5, **options))


def test_the_model_and_the_global_generator_are_left_alone(tiny_gpt2):
    model = tiny_gpt2.to()
    model.hf.train()
    before, state = copy.deepcopy(model.hf.state_dict()), torch.random.get_rng_state()
    with torch.no_grad():
        observe_fedavg(model, TEXTS, local_steps=2, learning_rate=0.1, train_mode=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.hf.state_dict().items())
    assert all(parameter.grad is None for parameter in model.hf.parameters())
    assert all(module.training for module in model.hf.modules())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_frozen_parameters_are_neither_trained_nor_sent(tiny_gpt2):
    model = tiny_gpt2.to()
    model.parameter("wte.weight").requires_grad_(False)
    names = set(observe_fedavg(model, TEXTS, optimizer="adamw", weight_decay=0.1).gradients)
    assert names == {name for name, _ in model.named_parameters()} - {"wte.weight"}


def test_only_a_part_may_be_shared(tiny_gpt2):
    whole = observe_fedavg(tiny_gpt2, TEXTS, local_steps=2)
    part = observe_fedavg(tiny_gpt2, TEXTS, local_steps=2, parameters=["h.0.attn"])
    assert set(part.gradients) == {name for name in whole.gradients if "h.0.attn" in name}
    assert all(torch.equal(delta, whole.gradients[name]) for name, delta in part.gradients.items())


# Callers' mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_steps": 2, "epochs": 1}, "both were given"),
        ({"local_steps": 0}, "local_steps must be a whole number from 1 on"),
        ({"epochs": 0}, "epochs must be a whole number from 1 on"),
        ({"batch_size": 0}, "batch_size must be a whole number from 1 on"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd, adamw, got 'lion'"),
        ({"optimizer": "lion", "learning_rate": 0.1}, "optimizer must be one of"),
        ({"learning_rate": 0.0}, "learning_rate must be a finite number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number above 0"),
        ({"weight_decay": -0.1}, "weight_decay must be a finite number of 0 or more"),
        ({"momentum": 1.0}, r"momentum must be below 1"),
        ({"optimizer": "adamw", "momentum": 0.9}, "moments of its own"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a finite number above 0"),
        ({"autocast": torch.float16}, "float16 needs a scaled loss"),
        ({"parameters": "h.0"}, "put it into a list"),
        ({"parameters": ["no such"]}, "no trainable parameter"),
        ({"task": "translation"}, "task must be one of"),
        ({"task": "classification", "pooling": "max"}, "pooling must be one of"),
        ({"task": "classification", "pooling": "first"}, "knows only the first token"),
        ({"task": "classification", "labels": [1]}, "there are 3 texts but 1 labels"),
        ({"learning_rate": 1e30, "local_steps": 3}, "training diverged.*lower learning_rate"),
    ],
)
def test_mistakes_are_refused(tiny_gpt2, options, message):
    with pytest.raises(InputError, match=message):
        observe_fedavg(tiny_gpt2, TEXTS, **options)


@pytest.mark.parametrize(
    ("texts", "message"),
    [([], "the batch is empty"), ("one text", "put it into a list"), ([[4], [7]], "at least two tokens")],
)
def test_texts_that_cannot_be_trained_on_are_refused(tiny_gpt2, texts, message):
    with pytest.raises(InputError, match=message):
        observe_fedavg(tiny_gpt2, texts)


def test_an_encoder_has_no_next_token_loss(tiny_bert):
    with pytest.raises(InputError, match=r"a causal model with a language head.*classification"):
        observe_fedavg(tiny_bert, TEXTS, task="next_token")


def test_encoders_are_trained_for_classification_unless_said(tiny_bert, tiny_gpt2):
    assert observe_fedavg(tiny_bert, TEXTS).task is Task.CLASSIFICATION
    assert observe_fedavg(tiny_gpt2, TEXTS).task is Task.NEXT_TOKEN
