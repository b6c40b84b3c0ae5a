"""PEFT models: the base without its wrappers, sharing weights; the factors beside it; what cannot be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.tiny_models import gpt2_config, llama_sizes, random_model

import unmask
from unmask.attacks.recover import recover_text
from unmask.errors import UnsupportedModelError
from unmask.evidence import GradientEvidence
from unmask.models import load_model
from unmask.models.peft_adapters import scale_at
from unmask.recovery import Status

peft = pytest.importorskip("peft", reason="PEFT is not installed; pip install 'unmask[lora]'")

TEXTS = [[5, 6, 7], [9, 10]]


def llama(hf_class: Any = transformers.LlamaForCausalLM, **changes: Any) -> Any:
    return random_model(hf_class, transformers.LlamaConfig(**llama_sizes(**changes)))


def with_lora(hf: Any, **changes: Any) -> Any:
    options = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]} | changes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return peft.get_peft_model(hf, peft.LoraConfig(**options))


def gradients_of(model: Any) -> dict[str, torch.Tensor | None]:
    """As a training loop leaves them: None where a layer is frozen."""
    tokens = torch.tensor([TEXTS[0]])
    model.eval()(input_ids=tokens, labels=tokens).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_the_base_is_the_model_before_lora():
    plain = load_model(llama())
    wrapped = load_model(with_lora(llama()))
    assert wrapped.fingerprint() == plain.fingerprint()
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in plain.named_parameters()]
    tokens = torch.tensor([TEXTS[0]])
    assert torch.equal(wrapped.hf(tokens).logits, plain.hf(tokens).logits)
    assert all(parameter.requires_grad for _, parameter in wrapped.named_parameters())


def test_weights_are_shared_and_the_peft_model_stays_as_it_is():
    wrapped = with_lora(llama())
    before = {name: parameter.requires_grad for name, parameter in wrapped.named_parameters()}
    model = load_model(wrapped)
    own = wrapped.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    assert model.parameter("layers.0.self_attn.q_proj.weight").data_ptr() == own.data_ptr()
    assert {name: parameter.requires_grad for name, parameter in wrapped.named_parameters()} == before


def test_the_adapters_are_known_by_canonical_names():
    model = load_model(with_lora(llama()))
    names = [f"layers.{block}.self_attn.{layer}" for block in range(3) for layer in ("q_proj", "v_proj")]
    assert set(model.adapters.factors) == {f"{name}.lora_{letter}.weight" for name in names for letter in "AB"}
    assert model.adapters.scale == 2.0
    assert model.to(dtype=torch.float64).adapters is model.adapters


def test_scales_that_differ_are_known_by_module():
    scales = load_model(with_lora(llama(), alpha_pattern={"v_proj": 8}, rank_pattern={"layers.1.*q_proj": 4}))
    names = {f"layers.{block}.self_attn.{layer}_proj" for block in range(3) for layer in "qv"}
    expected = {name: 0.5 if "v_proj" in name else 2.0 for name in names} | {"layers.1.self_attn.q_proj": 8.0}
    assert scales.adapters.scale == expected


def test_a_scale_that_is_not_stated_is_one():
    assert (scale_at(None, "q"), scale_at(2.0, "q"), scale_at({"q": 3.0}, "q"), scale_at({"q": 3.0}, "v")) == (
        1,
        2,
        3,
        1,
    )


def test_training_the_peft_model_leaves_the_loaded_one_as_it_is():
    """What evidence is judged against: factors, and modules that are trained as a whole."""
    wrapped = with_lora(llama(), modules_to_save=["lm_head"])
    model = load_model(wrapped)
    factors = {name: factor.clone() for name, factor in model.adapters.factors.items()}
    head = model.parameter("lm_head.weight").detach().clone()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter += parameter.requires_grad
    assert all(torch.equal(factor, factors[name]) for name, factor in model.adapters.factors.items())
    assert torch.equal(model.parameter("lm_head.weight"), head)


@pytest.mark.parametrize(
    "options",
    [
        {"rank_pattern": {"q_proj": 3}},
        {"alpha_pattern": {"layers.1": 64}},
        {"target_modules": ["lm_head", "q_proj", "v_proj"]},
        {"target_modules": ["lm_head", "q_proj", "v_proj"], "tie_word_embeddings": True},
    ],
)
def test_texts_are_recovered_where_modules_differ_and_where_the_head_is_adapted(options):
    tied = {"tie_word_embeddings": options.pop("tie_word_embeddings", False)}
    wrapped = with_lora(llama(**tied), **({"init_lora_weights": False, "r": 8} | options))
    model = load_model(wrapped)
    known = {"num_texts": 1, "task": "next_token", "num_clients": 1, "all_tokens_predicted": True}
    evidence = GradientEvidence.of(model, gradients_of(wrapped), **known)
    recovery = recover_text(evidence, model)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert [text.tokens for text in recovery.value.certain] == [tuple(TEXTS[0])]


@pytest.mark.parametrize("as_inner_model", [False, True])
def test_evidence_takes_the_adapters_from_the_model(as_inner_model):
    """Also where only the model inside was kept, which PEFT changes in place."""
    wrapped = with_lora(llama())
    update = gradients_of(wrapped)
    model = load_model(wrapped.get_base_model() if as_inner_model else wrapped)
    evidence = GradientEvidence.of(model, update, num_texts=1)
    assert set(evidence.gradients) == set(evidence.adapters) == set(model.adapters.factors)
    assert evidence.adapter_scale == 2.0
    recovery = recover_text(evidence, model)  # nothing is predicted behind the last token, which so leaves no trace
    assert recovery.status is Status.PARTIAL
    assert recovery.value.token_set == set(TEXTS[0][:-1])


def test_evidence_without_adapters_says_so():
    update = gradients_of(with_lora(llama()))
    with pytest.warns(UserWarning, match=r"LoRA factors, but not the weights of the adapters.*adapters=…"):
        evidence = GradientEvidence.of(load_model(llama()), update)
    assert not evidence.adapters


def test_a_head_that_is_trained_as_a_whole_is_the_one_in_use():
    wrapped = with_lora(llama(transformers.LlamaForSequenceClassification), task_type="SEQ_CLS")
    with torch.no_grad():
        wrapped.base_model.model.score.modules_to_save["default"].weight.fill_(3.0)
    model = load_model(wrapped)
    assert bool((model.parameter("score.weight") == 3).all())
    named = {"base_model.model.score.modules_to_save.default.weight": torch.randn(2, 64)}
    assert list(GradientEvidence.of(model, named).gradients) == ["score.weight"]


def test_gpt2_with_its_fused_layer():
    hf = random_model(transformers.GPT2LMHeadModel, gpt2_config())
    wrapped = with_lora(hf, target_modules=["c_attn"], fan_in_fan_out=True)
    model = load_model(wrapped)
    evidence = GradientEvidence.of(model, gradients_of(wrapped), num_texts=1)
    assert recover_text(evidence, model).value.token_set == set(TEXTS[0][:-1])
    assert unmask.observe_gradients(model, TEXTS).gradients.keys() == {name for name, _ in model.named_parameters()}


def test_what_cannot_be_read_is_refused():
    merged = with_lora(llama())
    merged.merge_adapter()
    two = with_lora(llama())
    two.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    two.base_model.set_adapter(["default", "other"])
    ia3 = peft.get_peft_model(
        llama(), peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
    )
    adalora = peft.get_peft_model(llama(), peft.AdaLoraConfig(total_step=10, target_modules=["q_proj"]))
    for wrapped, words in (
        (adalora, "PEFT's adalora at .* cannot be read; LoRA on linear layers can"),
        (with_lora(llama(attention_bias=True), lora_bias=True), "bias beside its factors"),
        (with_lora(llama(), alora_invocation_tokens=[5], task_type="CAUSAL_LM"), "is a variant of LoRA"),
        (merged, r"merged into its weights; call unmerge_adapter\(\)"),
        (two, "2 active adapters"),
        (ia3, "PEFT's ia3 at .* cannot be read; LoRA on linear layers can"),
        (with_lora(llama(), use_dora=True), "is DoRA"),
        (with_lora(llama(), target_modules=["embed_tokens"]), "cannot be read; LoRA on linear layers can"),
    ):
        with pytest.raises(UnsupportedModelError, match=words):
            load_model(wrapped)


def test_the_scale_of_rank_stabilised_lora():
    adapters = load_model(with_lora(llama(), use_rslora=True)).adapters
    assert adapters is not None
    assert adapters.scale == 32 / 16**0.5
