"""DP-SGD: Opacus against one gradient a text, clipped and averaged by hand; noise of the stated size; the budget."""

from __future__ import annotations

import copy
import logging
import math
import sys
from typing import Any

import pytest
import torch
import transformers
from tests.models.families import build
from tests.sampling import sample
from tests.tiny_models import bert_config, random_model
from torch import Tensor

from unmask.errors import InputError
from unmask.evidence import Task, Update, load_evidence
from unmask.models import Model, adapt
from unmask.protocols import PrivateUpdate, epsilon_spent, observe_dpsgd, observe_gradients

pytest.importorskip("opacus", reason="Opacus is missing: pip install 'unmask[dp]'")

# No token is 0, the padding of the tiny models, whose row Opacus moves and torch does not.
TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49, 50, 51]]
LABELS = [1, 0, 1]
# Models are compared in float64; transformers' next-token loss and its RMSNorm are rounded to float32 all the same.
FLOAT32_INSIDE = 1e-6
FLOAT64_PARITY = 1e-10


@pytest.fixture(autouse=True, scope="module")
def layer_by_layer(one_thread: None) -> None:
    """Opacus works through many small layers, for which several threads on busy cores wait for each other."""


def worst_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of a tensor, in norm; tensors that are rounding are measured against the largest."""
    assert set(found) == set(expected)
    largest = max(float(tensor.norm()) for tensor in expected.values())
    return max(
        float((found[name] - tensor).norm() / max(float(tensor.norm()), 1e-3 * largest))
        for name, tensor in expected.items()
    )


def norm_of(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def clipped_mean(parts: list[dict[str, Tensor]], bound: float = math.inf) -> dict[str, Tensor]:
    """Each text's gradient, scaled down to the bound, summed and divided by the number of texts."""
    factors = [min(1.0, bound / norm_of(part)) for part in parts]
    return {
        name: sum(factor * part[name] for factor, part in zip(factors, parts, strict=True)) / len(parts)
        for name in parts[0]
    }


def one_by_one(model: Model, **options: Any) -> list[dict[str, Tensor]]:
    labels = options.pop("labels", None)
    return [
        dict(
            observe_gradients(
                model, [text], **options, **({} if labels is None else {"labels": [labels[row]]})
            ).gradients
        )
        for row, text in enumerate(TEXTS)
    ]


def task_of(model: Model) -> str:
    return "next_token" if model.causal else "classification"


# Gradients of single texts


@sample("texts_at_once", [1, 2, 3], [2])
def test_without_noise_and_bound_it_is_the_mean_of_the_texts_gradients(tiny, texts_at_once):
    """Every family, tied output layers included; batches of several texts are where transformers' own ids fail."""
    model, options = tiny.to(dtype=torch.float64), {"task": task_of(tiny), "labels": LABELS}
    update = observe_dpsgd(model, TEXTS, noise_multiplier=0, max_grad_norm=1e6, texts_at_once=texts_at_once, **options)
    assert worst_error(update.evidence.gradients, clipped_mean(one_by_one(model, **options))) < FLOAT32_INSIDE


@sample("side", ["left", "right"], ["left"])
def test_classification_without_noise_is_fedsgd(tiny, side):
    options = {"task": "classification", "padding_side": side, "seed": 2}
    model = tiny.to(dtype=torch.float64)
    update = observe_dpsgd(model, TEXTS, noise_multiplier=0, max_grad_norm=1e6, **options)
    expected = observe_gradients(model, TEXTS, **options).gradients
    tolerance = FLOAT32_INSIDE if tiny.family in ("llama", "qwen2", "mistral") else FLOAT64_PARITY
    assert worst_error(update.evidence.gradients, expected) < tolerance


def test_texts_of_equal_length_without_noise_are_fedsgd(tiny_llama):
    """The mean over each text's targets is then the mean over all targets; else it is not."""
    model, equal = tiny_llama.to(dtype=torch.float64), [text[:3] for text in TEXTS]
    for texts, agree in ((equal, True), (TEXTS, False)):
        update = observe_dpsgd(model, texts, noise_multiplier=0, max_grad_norm=1e6)
        error = worst_error(update.evidence.gradients, observe_gradients(model, texts).gradients)
        assert (error < FLOAT32_INSIDE) == agree


def test_a_classifier_with_a_head_of_its_own():
    """With the pooler in the loss, and shared."""
    model = adapt(random_model(transformers.BertForSequenceClassification, bert_config(num_labels=2))).to(
        dtype=torch.float64
    )
    options = {"task": "classification", "labels": LABELS}
    update = observe_dpsgd(model, TEXTS, noise_multiplier=0, max_grad_norm=1e6, **options)
    assert worst_error(update.evidence.gradients, clipped_mean(one_by_one(model, **options))) < FLOAT64_PARITY
    assert {"pooler.dense.weight", "classifier.weight"} <= set(update.evidence.gradients)


@pytest.mark.parametrize("texts_at_once", [1, 3])
@pytest.mark.parametrize("name", ["tiny_gpt2", "tiny_qwen2"])
def test_each_text_is_clipped_by_itself(name, texts_at_once, request):
    model = request.getfixturevalue(name).to(dtype=torch.float64)
    parts = one_by_one(model)
    bound = sorted(norm_of(part) for part in parts)[1]  # the smallest gradient stays whole, the largest does not
    update = observe_dpsgd(model, TEXTS, noise_multiplier=0, max_grad_norm=bound, texts_at_once=texts_at_once)
    # Opacus adds 1e-6 to each norm before it divides; the norms here are of order 1.
    assert worst_error(update.evidence.gradients, clipped_mean(parts, bound)) < 1e-5
    assert worst_error(update.evidence.gradients, clipped_mean(parts)) > 1e-2


def test_a_fresh_head_counts_in_the_norm(tiny_bert):
    """All of a text's gradient is clipped together, so what is shared is smaller than the bound."""
    update = observe_dpsgd(tiny_bert, TEXTS[:1], task="classification", noise_multiplier=0, max_grad_norm=1e-3)
    assert norm_of(update.evidence.gradients) < 0.999e-3
    own = observe_dpsgd(
        adapt(random_model(transformers.BertForSequenceClassification, bert_config())),
        TEXTS[:1],
        task="classification",
        noise_multiplier=0,
        max_grad_norm=1e-3,
    )
    # 1e-6 beside a norm of order 1 or more.
    assert norm_of(own.evidence.gradients) == pytest.approx(1e-3, rel=1e-4)


def test_a_text_without_a_target_adds_nothing(tiny_llama):
    with_it = observe_dpsgd(tiny_llama, [[7], *TEXTS], noise_multiplier=0, max_grad_norm=1e6)
    without = observe_dpsgd(tiny_llama, TEXTS, noise_multiplier=0, max_grad_norm=1e6)
    expected = {name: 0.75 * gradient for name, gradient in without.evidence.gradients.items()}
    assert worst_error(with_it.evidence.gradients, expected) < 1e-6  # the same sums in float32, scaled


def test_the_row_of_a_padding_token_in_a_text_moves(tiny_llama):
    """Torch leaves out the row of `padding_idx`; Opacus, which sums rows by itself, does not."""
    assert tiny_llama.gradient_free_token == 0
    texts = [[5, 0, 17, 99]]
    rows = observe_dpsgd(tiny_llama, texts, noise_multiplier=0).evidence.gradients["embed_tokens.weight"]
    plain = observe_gradients(tiny_llama, texts).gradients["embed_tokens.weight"]
    assert bool(rows[0].any())
    assert not bool(plain[0].any())


# Noise


@pytest.mark.parametrize("texts_at_once", [1, 3])
def test_the_noise_has_the_stated_size_on_every_tensor(tiny_gpt2, texts_at_once):
    options = {"max_grad_norm": 0.5, "texts_at_once": texts_at_once}
    noisy = observe_dpsgd(tiny_gpt2, TEXTS, noise_multiplier=3.0, **options).evidence
    clean = observe_dpsgd(tiny_gpt2, TEXTS, noise_multiplier=0.0, **options).evidence
    assert noisy.noise_std == pytest.approx(3.0 * 0.5 / 3)
    assert clean.noise_std == 0
    for name, gradient in noisy.gradients.items():
        noise = (gradient - clean.gradients[name]).double() / noisy.noise_std
        # The standard deviation of n values is off by 1/√(2n); five of these are seen once in a million.
        assert abs(float(noise.square().mean().sqrt()) - 1) < 5 / math.sqrt(2 * noise.numel()), name
        assert abs(float(noise.mean())) < 5 / math.sqrt(noise.numel()), name


def test_every_row_moves_under_noise(tiny_bert):
    rows = observe_dpsgd(tiny_bert, TEXTS, task="classification").evidence.gradients[tiny_bert.token_embedding]
    assert bool((rows != 0).all())


def test_the_seed_decides_the_noise(tiny_gpt2):
    first, again, other = (observe_dpsgd(tiny_gpt2, TEXTS, seed=seed).evidence.gradients for seed in (1, 1, 2))
    assert worst_error(first, again) == 0
    assert worst_error(first, other) > 0.1


def test_dropout_is_on_in_training_mode_only(tiny_gpt2):
    quiet = {"noise_multiplier": 0, "max_grad_norm": 1e6}
    plain = observe_dpsgd(tiny_gpt2, TEXTS, **quiet, seed=1).evidence.gradients
    assert worst_error(plain, observe_dpsgd(tiny_gpt2, TEXTS, **quiet, seed=2).evidence.gradients) == 0
    dropped = observe_dpsgd(tiny_gpt2, TEXTS, **quiet, train_mode=True, seed=1).evidence.gradients
    assert worst_error(dropped, plain) > 1e-2


# The budget


def test_epsilon_of_the_gaussian_mechanism_is_bounded_as_published():
    """Without sampling, Rényi DP gives ε ≤ 1/(2σ²) + √(2·ln(1/δ))/σ (Mironov, 1702.07476); Opacus is tighter."""
    for noise_multiplier in (0.5, 1.0, 4.0, 20.0):
        bound = 1 / (2 * noise_multiplier**2) + math.sqrt(2 * math.log(1e5)) / noise_multiplier
        assert 0.6 * bound < epsilon_spent(noise_multiplier, 1.0, 1, 1e-5) <= bound


def test_epsilon_is_that_of_opacus():
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    for _ in range(100):
        accountant.step(noise_multiplier=1.0, sample_rate=0.01)
    # Higher orders than those of Opacus can only lower the bound; at this ε they don't.
    assert epsilon_spent(1.0, 0.01, 100, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)


def test_epsilon_of_little_noise_is_that_of_the_integral():
    """Orders near 1, which Opacus does not try by itself, against E[((1−q) + q·exp((2x−1)/2σ²))^α] summed on a grid."""
    sigma, rate, steps, delta = 0.1, 0.016, 1000, 1e-5
    x = torch.linspace(-12 * sigma, 12 * sigma + 3, 400_001, dtype=torch.float64)
    log_density = -(x**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))
    ratio = math.log(rate) + (2 * x - 1) / (2 * sigma**2)
    log_ratio = torch.logaddexp(ratio, torch.full_like(x, math.log1p(-rate)))
    bounds = []
    for order in (1 + 2.0**-power for power in range(10, 3, -1)):
        log_moment = float(torch.logsumexp(order * log_ratio + log_density, 0)) + math.log(float(x[1] - x[0]))
        conversion = math.log((order - 1) / order) - (math.log(delta) + math.log(order)) / (order - 1)
        bounds.append(steps * log_moment / (order - 1) + conversion)
    # The sum on the grid is exact to about 1e-7, over α − 1 of 1e-3 at the least.
    assert epsilon_spent(sigma, rate, steps, delta) == pytest.approx(min(bounds), rel=1e-4)


def test_epsilon_falls_with_noise_and_rises_with_steps_and_rate(recwarn):
    assert epsilon_spent(0, 0.1) == math.inf
    values = [epsilon_spent(sigma, 0.1) for sigma in (0.01, 0.3, 1.0, 3.0, 100.0)]
    assert values == sorted(values, reverse=True)
    assert epsilon_spent(1.0, 0.1, steps=10) > epsilon_spent(1.0, 0.1, steps=1)
    assert epsilon_spent(1.0, 0.5) > epsilon_spent(1.0, 0.1)
    assert not recwarn.list


def test_the_rate_is_that_of_the_batch_in_the_data_set(tiny_gpt2):
    update = observe_dpsgd(tiny_gpt2, TEXTS, dataset_size=300, steps=20, delta=1e-4)
    assert (update.epsilon, update.delta) == (epsilon_spent(1.0, 0.01, 20, 1e-4), 1e-4)
    assert observe_dpsgd(tiny_gpt2, TEXTS, sample_rate=0.02).epsilon == epsilon_spent(1.0, 0.02)
    assert observe_dpsgd(tiny_gpt2, TEXTS).epsilon == epsilon_spent(1.0, 1.0)


# What is said, and what is left alone


def test_what_is_said_about_the_update(tiny_gpt2, tmp_path):
    update = observe_dpsgd(tiny_gpt2, TEXTS)
    evidence = update.evidence
    assert type(update) is PrivateUpdate
    assert (evidence.task, evidence.update, evidence.num_texts) == (Task.NEXT_TOKEN, Update.GRADIENT, 3)
    assert evidence.learning_rate is None
    evidence.check(tiny_gpt2)
    loaded = load_evidence(evidence.save(tmp_path / "update.safetensors"))
    assert loaded.noise_std == evidence.noise_std == pytest.approx(1 / 3)
    assert "lm_head.weight" not in evidence.gradients


def test_only_a_part_may_be_shared(tiny_gpt2):
    whole = observe_dpsgd(tiny_gpt2, TEXTS).evidence.gradients
    part = observe_dpsgd(tiny_gpt2, TEXTS, parameters=["h.0.attn"]).evidence.gradients
    assert set(part) == {name for name in whole if "h.0.attn" in name}
    assert all(torch.equal(gradient, whole[name]) for name, gradient in part.items())


def test_the_model_the_generator_and_the_logger_are_left_alone(tiny_gpt2):
    model = tiny_gpt2.to()
    before, state = copy.deepcopy(model.hf.state_dict()), torch.random.get_rng_state()
    handlers = logging.root.handlers[:]
    attributes = {name: set(vars(parameter)) for name, parameter in model.named_parameters()}
    hooks = [(len(module._forward_hooks), len(module._backward_hooks)) for module in model.hf.modules()]
    with torch.no_grad():
        observe_dpsgd(model, TEXTS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.hf.state_dict().items())
    assert all(parameter.grad is None for parameter in model.hf.parameters())
    assert {name: set(vars(parameter)) for name, parameter in model.named_parameters()} == attributes
    assert [(len(module._forward_hooks), len(module._backward_hooks)) for module in model.hf.modules()] == hooks
    assert not any(module.training for module in model.hf.modules())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert logging.root.handlers == handlers


# Real weights


@pytest.mark.slow
def test_real_weights(minilm):
    """MiniLM: without noise the mean gradient, whose embedding rows tell the tokens; with it every row moves."""
    texts = ["The patient was discharged on Friday.", "Transfer it today, please."]
    options = {"task": "classification", "labels": [0, 1]}
    clean = observe_dpsgd(minilm, texts, noise_multiplier=0, max_grad_norm=1e6, **options).evidence
    expected = observe_gradients(minilm, texts, **options).gradients
    # Six blocks of real weights, one text at a time and two at once.
    assert worst_error(clean.gradients, expected) < 1e-4
    private = observe_dpsgd(minilm, texts, dataset_size=1000, **options)
    assert bool((private.evidence.gradients[minilm.token_embedding] != 0).any(1).all())
    assert 0 < private.epsilon < 10


@pytest.mark.slow
def test_real_weights_of_a_tied_decoder(smollm2):
    """SmolLM2: an embedding that is the output layer too, RMSNorm by functorch; two texts one by one, 3 GiB."""
    texts = ["The patient was discharged on Friday.", "Transfer it today, please."]
    found = observe_dpsgd(smollm2, texts, noise_multiplier=0, max_grad_norm=1e6).evidence.gradients
    parts = [dict(observe_gradients(smollm2, [text]).gradients) for text in texts]
    assert worst_error(found, clipped_mean(parts)) < 1e-3


# Callers' mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier must be a finite number of 0 or more, got -1.0"),
        ({"noise_multiplier": math.inf}, "noise_multiplier must be a finite number"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a finite number above 0"),
        ({"max_grad_norm": math.inf}, "max_grad_norm must be a finite number above 0"),
        ({"texts_at_once": 0}, "texts_at_once must be"),
        ({"sample_rate": 0.0}, r"sample_rate must lie in \(0, 1\]"),
        ({"sample_rate": 1.1}, r"sample_rate must lie in \(0, 1\]"),
        ({"delta": 0.0}, r"delta in \(0, 1\)"),
        ({"steps": 0}, "steps from 1 on"),
        ({"dataset_size": 2}, "dataset_size must be at least the number of texts, 3, got 2"),
        ({"dataset_size": 30, "sample_rate": 0.1}, "both were given"),
        ({"parameters": ["no such"]}, "no trainable parameter"),
        ({"task": "translation"}, "task must be one of"),
    ],
)
def test_mistakes_are_refused(tiny_gpt2, options, message):
    with pytest.raises(InputError, match=message):
        observe_dpsgd(tiny_gpt2, TEXTS, **options)


def test_without_opacus_the_package_is_named(tiny_gpt2, monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(InputError, match=r"pip install 'unmask\[dp\]'"):
        observe_dpsgd(tiny_gpt2, TEXTS)


@pytest.mark.parametrize("texts_at_once", [1, 2])
def test_pairs_are_pairs_however_many_at_once(tiny_bert, texts_at_once):
    model = tiny_bert.to(dtype=torch.float64)
    pairs = [([1, 17, 99, 2], [250, 2]), ([1, 400, 2], [3, 8, 44, 2])]
    options = {"task": "classification", "labels": [1, 0]}
    private = observe_dpsgd(
        model, pairs, noise_multiplier=0.0, max_grad_norm=1e9, texts_at_once=texts_at_once, **options
    )
    plain = observe_gradients(model, pairs, **options)
    assert worst_error(dict(private.evidence.gradients), dict(plain.gradients)) < FLOAT64_PARITY


@pytest.mark.parametrize("family", ["Gemma", "OPT", "Mixtral", "MPNet"])
def test_a_family_that_opacus_does_not_support_is_refused_with_its_reason(family):
    model = adapt(build(family))
    with pytest.raises(InputError, match=f"Opacus cannot compute .* of kind '{model.family}': ."):
        observe_dpsgd(model, [(11, 12, 13), (21, 22)], task="next_token" if model.causal else "classification")
