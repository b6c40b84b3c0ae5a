"""LoRA: PEFT's factors against the formula, at initialisation and after some rounds; the caller's model untouched."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from tests.tiny_models import bert_config, random_model
from torch import Tensor

from unmask.errors import InputError
from unmask.evidence import GradientEvidence, Task, Update, load_evidence
from unmask.models import Model, Role, adapt
from unmask.protocols import observe_gradients, observe_lora
from unmask.protocols.batch import make_batch
from unmask.protocols.lora import observe_lora_again

pytest.importorskip("peft", reason="PEFT is missing: pip install 'unmask[lora]'")

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49, 50, 51]]
EARLIER = [[60, 61, 62, 63, 64], [300, 301, 302]]
LABELS = [1, 0, 1]
# Closed forms in float64; transformers' next-token loss and its RMSNorm are rounded to float32 all the same.
FLOAT32_INSIDE = 1e-6
# The same in float32, through a few blocks.
FLOAT32_PARITY = 1e-5


def task_of(model: Model) -> str:
    return "next_token" if model.causal else "classification"


def factors_of(evidence: GradientEvidence, factor: str) -> dict[str, Tensor]:
    return {name: g for name, g in evidence.gradients.items() if name.endswith(f".lora_{factor}.weight")}


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def merged(model: Model, evidence: GradientEvidence, scale: float) -> Model:
    """The model that LoRA amounts to: W + s·B·A in each layer that it adapts."""
    twin = model.to()
    for name, A in evidence.adapters.items():
        if name.endswith(".lora_A.weight"):
            weight = twin.parameter(name.replace(".lora_A.", "."))
            change = scale * evidence.adapters[name.replace("lora_A", "lora_B")] @ A
            weight.data += change if twin.family != "gpt2" else change.T  # Conv1D stores (d_in, d_out)
    return twin


def check_formula(model: Model, evidence: GradientEvidence, scale: float, **options: Any) -> None:
    """∂B = s·∂W·Aᵀ and ∂A = s·Bᵀ·∂W, where ∂W = (∂L/∂Y)ᵀ·X is the gradient of the merged model's full weight.

    So ∂B = s·(∂L/∂Y)ᵀ·(X·Aᵀ), which is what LoRA's back-propagation computes.
    """
    gradients = observe_gradients(merged(model, evidence, scale), TEXTS, **options).gradients
    for name, gradient in evidence.gradients.items():
        module, _, factor = name.removesuffix(".weight").rpartition(".")
        full = gradients[f"{module}.weight"]
        full = full if model.family != "gpt2" else full.T
        A, B = (evidence.adapters[f"{module}.lora_{letter}.weight"] for letter in "AB")
        expected = scale * (full @ A.T if factor == "lora_B" else B.T @ full)
        if bool(expected.any()):
            assert error(gradient, expected) < FLOAT32_INSIDE, name
        else:
            assert not gradient.any()


# At initialisation


def test_at_initialisation_only_b_carries_signal(tiny):
    """∂L/∂A = s·Bᵀ·… = 0 because B = 0."""
    evidence = observe_lora(tiny, TEXTS, task=task_of(tiny))
    down, up = factors_of(evidence, "A"), factors_of(evidence, "B")
    num_modules = tiny.num_blocks * (1 if tiny.family == "gpt2" else 2)  # GPT-2 keeps query and value in one layer
    assert len(down) == len(up) == num_modules
    assert not any(gradient.any() for gradient in down.values())
    assert all(gradient.any() for gradient in up.values())
    assert all(evidence.adapters[name].any() for name in down)
    assert not any(evidence.adapters[name].any() for name in up)


def test_gradients_of_b_are_the_formulas(tiny):
    model, options = tiny.to(dtype=torch.float64), {"task": task_of(tiny), "seed": 1}
    evidence = observe_lora(model, TEXTS, rank=4, alpha=12, **options)
    check_formula(model, evidence, 12 / 4, **options)


def test_gradients_of_b_from_inputs_and_output_gradients(tiny_bert):
    """∂B = s·(∂L/∂Y)ᵀ·(X·Aᵀ) word for word: the rows are taken at the layer, by hooks on a plain copy."""
    evidence = observe_lora(tiny_bert, TEXTS, task="classification", labels=LABELS)
    twin, batch, seen = tiny_bert.to(), make_batch(tiny_bert, TEXTS), {}
    layer = twin.body.encoder.layer[1].attention.self.value
    layer.register_forward_hook(lambda _, inputs, output: seen.update(X=inputs[0].detach()))
    layer.register_full_backward_hook(lambda _, __, gradients: seen.update(Y=gradients[0]))
    head = 0.02 * torch.randn(twin.width, 2, generator=torch.Generator().manual_seed(0))
    states = twin.body(input_ids=batch.tokens, attention_mask=batch.mask.long()).last_hidden_state
    torch.nn.functional.cross_entropy(states[:, 0] @ head, torch.tensor(LABELS)).backward()
    rows, at_output = seen["X"].flatten(0, 1), seen["Y"].flatten(0, 1)
    name = "encoder.layer.1.attention.self.value"
    A = evidence.adapters[f"{name}.lora_A.weight"]
    expected = 2.0 * at_output.T @ (rows @ A.T)
    assert error(evidence.gradients[f"{name}.lora_B.weight"], expected) < FLOAT32_PARITY


# After some rounds


@pytest.mark.parametrize("earlier_texts", [None, EARLIER])
def test_after_some_steps_both_factors_carry_signal(tiny, earlier_texts):
    model, options = tiny.to(dtype=torch.float64), {"task": task_of(tiny), "seed": 1}
    evidence = observe_lora(model, TEXTS, steps=2, learning_rate=1e-2, earlier_texts=earlier_texts, **options)
    assert all(factor.any() for factor in evidence.adapters.values())
    assert all(gradient.any() for gradient in evidence.gradients.values())
    if model.causal:  # a classifier's fresh head was trained along, and the formula's is the first one
        check_formula(model, evidence, 2.0, **options)


def test_earlier_texts_decide_the_factors_and_the_texts_the_gradients(tiny_llama):
    options = {"steps": 2, "learning_rate": 1e-2}
    first = observe_lora(tiny_llama, TEXTS, earlier_texts=EARLIER, **options)
    other = observe_lora(tiny_llama, TEXTS[:1], earlier_texts=EARLIER, **options)
    assert all(torch.equal(factor, other.adapters[name]) for name, factor in first.adapters.items())
    assert not any(torch.equal(gradient, other.gradients[name]) for name, gradient in first.gradients.items())


def test_earlier_texts_may_be_more_than_there_are_labels(tiny_bert):
    more = [*TEXTS, *EARLIER]
    evidence = observe_lora(
        tiny_bert, TEXTS, task="classification", labels=LABELS, steps=1, earlier_texts=more, learning_rate=1e-2
    )
    assert evidence.num_texts == 3


# Targets


@pytest.mark.parametrize(
    ("name", "targets", "modules"),
    [
        ("tiny_llama", ("query",), ["self_attn.q_proj"]),
        ("tiny_llama", (Role.MLP_GATE, "o_proj"), ["mlp.gate_proj", "self_attn.o_proj"]),
        ("tiny_llama", ("mlp.up_proj",), ["mlp.up_proj"]),
        ("tiny_bert", ("query", "key"), ["attention.self.query", "attention.self.key"]),
        ("tiny_bert", ("attention.output.dense",), ["attention.output.dense"]),
        ("tiny_gpt2", ("query", "key", "value", "mlp_out"), ["attn.c_attn", "mlp.c_proj"]),
    ],
)
def test_targets_are_roles_or_ends_of_names(name, targets, modules, request):
    model = request.getfixturevalue(name)
    evidence = observe_lora(model, TEXTS, targets=targets, task=task_of(model))
    blocks = {"llama": "layers", "bert": "encoder.layer", "gpt2": "h"}[model.family]
    expected = {
        f"{blocks}.{block}.{module}.lora_{factor}.weight"
        for block in range(model.num_blocks)
        for module in modules
        for factor in "AB"
    }
    assert set(evidence.gradients) == set(evidence.adapters) == expected
    evidence.check(model)


def test_a_single_module_by_its_whole_name(tiny_llama):
    evidence = observe_lora(tiny_llama, TEXTS, targets=["layers.1.self_attn.v_proj"])
    assert set(factors_of(evidence, "B")) == {"layers.1.self_attn.v_proj.lora_B.weight"}


def test_layers_that_the_loss_does_not_see_are_left_out():
    model = adapt(random_model(transformers.BertModel, bert_config()))
    evidence = observe_lora(model, TEXTS, task="classification", targets=["dense"])
    assert not any("pooler" in name for name in evidence.gradients)
    assert any("intermediate" in name for name in evidence.gradients)


@pytest.mark.parametrize("rank", [1, 3, 16])
def test_the_rank_is_that_of_the_factors(tiny_llama, rank):
    evidence = observe_lora(tiny_llama, TEXTS, rank=rank, targets=["k_proj"])
    assert evidence.gradients["layers.0.self_attn.k_proj.lora_A.weight"].shape == (rank, 64)
    assert evidence.gradients["layers.0.self_attn.k_proj.lora_B.weight"].shape == (32, rank)


# What is said, and what is left alone


def test_what_is_said_about_the_update(tiny_llama, tmp_path):
    evidence = observe_lora(tiny_llama, TEXTS)
    assert (evidence.task, evidence.update, evidence.num_texts) == (Task.NEXT_TOKEN, Update.GRADIENT, 3)
    evidence.check(tiny_llama)
    loaded = load_evidence(evidence.save(tmp_path / "update.safetensors"))
    for before, after in ((evidence.gradients, loaded.gradients), (evidence.adapters, loaded.adapters)):
        assert set(before) == set(after)
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_client_in_bfloat16_has_factors_in_float32(tiny_llama):
    """As PEFT makes them for training."""
    evidence = observe_lora(tiny_llama.to(dtype=torch.bfloat16), TEXTS)
    assert all(tensor.dtype == torch.float32 for tensor in evidence.gradients.values())
    assert evidence.compute_dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"steps": 2, "train_mode": True, "dropout": 0.1}])
def test_the_seed_decides_everything(tiny_gpt2, options):
    first, again, other = (observe_lora(tiny_gpt2, TEXTS, seed=seed, **options) for seed in (1, 1, 2))
    for part in ("gradients", "adapters"):
        tensors = getattr(first, part)
        assert all(torch.equal(tensor, getattr(again, part)[name]) for name, tensor in tensors.items())
        assert not all(torch.equal(tensor, getattr(other, part)[name]) for name, tensor in tensors.items())


def test_the_model_and_the_global_generator_are_left_alone(tiny_gpt2, recwarn):
    model = tiny_gpt2.to()
    before, state = copy.deepcopy(model.hf.state_dict()), torch.random.get_rng_state()
    modules = {name: type(module) for name, module in model.hf.named_modules()}
    with torch.no_grad():
        observe_lora(model, TEXTS, steps=1)
    assert {name: type(module) for name, module in model.hf.named_modules()} == modules
    assert set(model.hf.state_dict()) == set(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.hf.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.hf.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not [str(warning.message) for warning in recwarn if "fan_in_fan_out" in str(warning.message)]


def test_real_weights(minilm):
    """MiniLM, rank 8 on query and value: at most eight directions of the inputs are in what is sent."""
    texts = ["The patient was discharged on Friday.", "Transfer it today, please."]
    evidence = observe_lora(minilm, texts, task="classification")
    assert len(evidence.gradients) == 4 * minilm.num_blocks
    assert not any(gradient.any() for gradient in factors_of(evidence, "A").values())
    assert all(gradient.shape == (384, 8) and gradient.any() for gradient in factors_of(evidence, "B").values())
    evidence.check(minilm)
    full = observe_gradients(minilm, texts, task="classification").gradients
    name = "encoder.layer.0.attention.self.query"
    expected = 2.0 * full[f"{name}.weight"] @ evidence.adapters[f"{name}.lora_A.weight"].T
    # Six blocks of real weights in float32.
    assert error(evidence.gradients[f"{name}.lora_B.weight"], expected) < 1e-4


# Callers' mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be at least 1"),
        ({"steps": -1}, "steps 0 or more"),
        ({"alpha": 0.0}, "alpha must be a finite number above 0"),
        ({"learning_rate": 0.0}, "learning_rate must be a finite number above 0"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\)"),
        ({"targets": []}, "at least one layer"),
        ({"targets": "query"}, "put it into a list"),
        ({"targets": ["q_proj"]}, "no linear layer of this gpt2 model is meant by 'q_proj'.*mlp_gate.*'c_attn'"),
        ({"targets": ["mlp_gate"]}, "no linear layer of this gpt2 model is meant by 'mlp_gate'"),
        ({"targets": ["wte"]}, "no linear layer"),
        ({"task": "translation"}, "task must be one of"),
    ],
)
def test_mistakes_are_refused(tiny_gpt2, options, message):
    with pytest.raises(InputError, match=message):
        observe_lora(tiny_gpt2, TEXTS, **options)


def test_without_peft_the_package_is_named(tiny_gpt2, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"pip install 'unmask\[lora\]'"):
        observe_lora(tiny_gpt2, TEXTS)


@pytest.mark.parametrize("settings", [{"local_steps": 2}, {"local_steps": 3, "optimizer": "sgd", "batch_size": 1}])
def test_local_steps_are_seen_as_a_difference_of_factors(tiny_llama, settings):
    texts = [[5, 6, 7, 8], [9, 10, 11]]
    evidence = observe_lora(tiny_llama, texts, rank=4, steps=1, earlier_texts=[[60, 61, 62]], **settings)
    assert evidence.update is Update.DELTA
    assert evidence.num_steps == settings["local_steps"]
    assert evidence.optimizer == settings.get("optimizer", "adamw")
    assert evidence.local_batch_size == settings.get("batch_size", 2)
    assert any(bool(delta.any()) for delta in evidence.gradients.values())


def test_the_same_local_steps_again_give_the_same_difference(tiny_llama):
    texts = [[5, 6, 7, 8], [9, 10, 11]]
    evidence = observe_lora(tiny_llama, texts, rank=4, steps=1, earlier_texts=[[60, 61, 62]], local_steps=3)
    again = observe_lora_again(evidence, tiny_llama, texts)
    for name, delta in evidence.gradients.items():
        assert torch.equal(again.gradients[name], delta)
    other = observe_lora_again(evidence, tiny_llama, [[5, 6, 7, 9], [9, 10, 11]])
    assert any(not torch.equal(other.gradients[name], delta) for name, delta in evidence.gradients.items())


def test_local_steps_of_no_number_are_refused(tiny_llama):
    with pytest.raises(InputError, match="local_steps 0 or more"):
        observe_lora(tiny_llama, [[5, 6, 7]], local_steps=-1)


@pytest.mark.parametrize("local_steps", [0, 2])
def test_ranks_and_scales_may_differ_from_module_to_module(tiny_llama, local_steps):
    """Ranks 4 and 2 with scales 3 and 5: factors of rank 4 of which two directions are zero give the same."""
    texts, modules = [[5, 6, 7, 8], [9, 10, 11]], ("layers.0.self_attn.q_proj", "layers.1.self_attn.v_proj")
    options = {"targets": modules, "earlier_texts": [[60, 61, 62]], "steps": 1, "local_steps": local_steps}
    wide = observe_lora(tiny_llama, texts, rank=4, alpha=4, **options)
    factors = dict(wide.adapters)
    thin = {name: f[:2] if "_A" in name else f[:, :2] for name, f in factors.items() if modules[1] in name}
    differing = replace(wide, adapters={**factors, **thin}, adapter_scale={modules[0]: 3.0, modules[1]: 5.0})
    folded = {name: f.clone() for name, f in factors.items()}
    folded[f"{modules[1]}.lora_A.weight"][2:] = 0
    for module, scale in zip(modules, (3.0, 5.0), strict=True):
        folded[f"{module}.lora_B.weight"] *= scale
    seen = observe_lora_again(differing, tiny_llama, texts).gradients
    assert seen[f"{modules[1]}.lora_A.weight"].shape == (2, 64)
    if not local_steps:
        expected = observe_lora_again(replace(wide, adapters=folded, adapter_scale=1.0), tiny_llama, texts).gradients
        for module, scale in zip(modules, (3.0, 5.0), strict=True):
            rank = 4 if module == modules[0] else 2
            down, up = (f"{module}.lora_{factor}.weight" for factor in "AB")
            torch.testing.assert_close(seen[down], expected[down][:rank], rtol=1e-4, atol=1e-7)
            torch.testing.assert_close(seen[up], scale * expected[up][:, :rank], rtol=1e-4, atol=1e-7)
