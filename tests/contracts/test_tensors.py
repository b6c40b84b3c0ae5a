"""Whatever a user hands over, of any kind of evidence, type and layout: the same recovery, or a clear refusal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.attacks.outputs.attention_layers import random_layer
from tests.contracts.models import make_model
from torch import Tensor

import unmask
from unmask.errors import EvidenceError
from unmask.evidence import (
    AttentionLayer,
    AttentionStackEvidence,
    CacheEvidence,
    GradientEvidence,
    HiddenEvidence,
    SampleEvidence,
    load_evidence,
)
from unmask.recovery import Status

TEXTS = [[5, 6, 7, 8, 9], [10, 11, 12]]
Change = Callable[[Tensor], Any]


def without_graph(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


# The same numbers in another form: the evidence must be the same to the last bit.
FORMS: Mapping[str, Change] = {
    "a view that is not contiguous": lambda t: torch.stack([t, -t.float()], -1)[..., 0].to(t.dtype),
    "transposed in memory": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda t: t[None].expand(2, *t.shape)[0],
    "with a graph": lambda t: t.clone().requires_grad_() * 1 if t.is_floating_point() else t,
    "a parameter": lambda t: torch.nn.Parameter(t.clone(), requires_grad=t.is_floating_point()),
    "of inference mode": without_graph,
    "sparse": lambda t: t.to_sparse(),
    "numpy": lambda t: t.detach().numpy(),
    "numpy of the other order of bytes": lambda t: t.numpy().astype(t.numpy().dtype.newbyteorder(">")),
    "numpy that is read-only": lambda t: np.broadcast_to(t.numpy(), t.shape),
    "a list of tensors": lambda t: list(t.clone()),
}
MASKS: Mapping[str, Change] = {
    **{str(dtype): lambda m, dtype=dtype: m.to(dtype) for dtype in (torch.int64, torch.int32, torch.uint8, torch.int8)},
    **{str(dtype): lambda m, dtype=dtype: m.to(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)},
    "numpy int64": lambda m: m.long().numpy(),
    "numpy uint32": lambda m: m.numpy().astype(np.uint32),
    "nested lists of 0 and 1": lambda m: m.int().tolist(),
    "nested lists of booleans": lambda m: m.tolist(),
    **{f"{name}, int64": lambda m, form=form: form(m.long()) for name, form in FORMS.items()},
}
REFUSED: Mapping[str, tuple[Change, str]] = {
    "integers": (lambda t: (10 * t).long(), "holds int64, expected floating-point numbers"),
    "numpy integers": (lambda t: (10 * t).long().numpy(), "holds int64, expected floating-point numbers"),
    "booleans": (lambda t: t > 0, "holds bool, expected floating-point numbers"),
    "complex": (lambda t: torch.complex(t, t), r"holds complex\d+, expected floating-point numbers"),
    "quantised": (lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8), r"call \.dequantize\(\)"),
    "nested": (lambda t: torch.nested.nested_tensor([t, t]), "is a nested tensor.*to_padded_tensor"),
    "meta": (lambda t: t.to("meta"), "holds no numbers; load them first"),
    "NaN": (lambda t: torch.full_like(t, float("nan")), "NaN or Inf"),
    "words": (lambda t: np.full(t.shape, "a"), "an array of numbers, got an array of <U1"),
    "an object": (lambda t: {1, 2}, "must be a tensor or an array of numbers, got an object of set"),
    "rows of two widths": (lambda t: [[1.0], [1.0, 2.0]], "no array of numbers.*rows of one width"),
}


@cache
def seen() -> Mapping[str, Any]:
    """One piece of evidence of each kind."""
    llama, bert, layer = make_model("tiny_llama"), make_model("tiny_bert"), random_layer("pd", 3, 4)[0]
    generator = torch.Generator().manual_seed(0)
    return {
        "gradients": unmask.observe_gradients(llama, TEXTS, task="next_token"),
        "delta": unmask.observe_fedavg(llama, TEXTS, task="next_token", learning_rate=0.1),
        "LoRA": unmask.observe_lora(llama, TEXTS, task="next_token", steps=2, earlier_texts=[[60, 61, 62]]),
        "states": unmask.observe_hidden(llama, TEXTS, layer=2),
        "attention module": unmask.observe_hidden(llama, TEXTS, site="attention"),
        "cache": unmask.observe_cache(llama, TEXTS, layer=1),
        "vectors": unmask.observe_vectors(bert, TEXTS),
        "attention": layer,
        "stack": AttentionStackEvidence((AttentionLayer(layer.W, layer.V),), layer.output),
        "samples": SampleEvidence(torch.randn(20, 3, 4, generator=generator), torch.randn(20, generator=generator)),
    }


def hand_over(evidence: Any, change: Change) -> Any:
    """The same kind of evidence, made of changed tensors, as a user makes it."""
    if isinstance(evidence, GradientEvidence):
        gradients = {name: change(tensor) for name, tensor in evidence.gradients.items()}
        adapters = {name: change(tensor) for name, tensor in evidence.adapters.items()}
        return dataclasses.replace(evidence, gradients=gradients, adapters=adapters)
    if isinstance(evidence, AttentionStackEvidence):
        layers = tuple(AttentionLayer(change(layer.W), change(layer.V)) for layer in evidence.layers)
        return AttentionStackEvidence(layers, change(evidence.output))
    names = ("states", "keys", "values", "vectors", "W", "V", "output", "sequences", "answers")
    return dataclasses.replace(
        evidence, **{name: change(getattr(evidence, name)) for name in names if hasattr(evidence, name)}
    )


def tensors_of(evidence: Any) -> dict[str, Tensor]:
    if isinstance(evidence, GradientEvidence):
        return {**evidence.gradients, **evidence.adapters}
    if isinstance(evidence, AttentionStackEvidence):
        return {"output": evidence.output, "W": evidence.layers[0].W, "V": evidence.layers[0].V}
    return {name: held for name, held in vars(evidence).items() if isinstance(held, Tensor)}


def require_same(one: Any, other: Any) -> None:
    mine, others = tensors_of(one), tensors_of(other)
    assert mine.keys() == others.keys()
    for name, tensor in mine.items():
        held = others[name]
        assert type(held) is Tensor, name
        assert torch.equal(tensor, held), name
        assert tensor.dtype is held.dtype, name
        plain = held.is_contiguous(), not held.requires_grad, held.layout is torch.strided, not held.is_inference()
        assert all(plain), (name, plain)


OF_TEXTS = ("gradients", "delta", "LoRA", "states", "attention module", "cache", "vectors")
KINDS = (*OF_TEXTS, "attention", "stack", "samples")


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_numbers_in_any_form_are_the_same_evidence(kind):
    evidence = seen()[kind]
    for change in FORMS.values():
        require_same(evidence, hand_over(evidence, change))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", KINDS)
def test_what_would_lose_something_is_refused(kind):
    evidence = seen()[kind]
    for change, words in REFUSED.values():
        with pytest.raises(EvidenceError, match=words):
            hand_over(evidence, change)


@pytest.mark.parametrize("kind", [kind for kind in OF_TEXTS if kind != "LoRA"])
def test_a_fingerprint_that_was_not_called_is_explained(kind):
    model = make_model("tiny_llama")
    with pytest.raises(EvidenceError, match=r"that model\.fingerprint\(\) gives, got method; call it, with \(\)"):
        dataclasses.replace(seen()[kind], model_fingerprint=model.fingerprint)


@pytest.mark.parametrize("kind", ["states", "cache"])
def test_a_mask_of_any_type_is_the_same_evidence(kind, tmp_path):
    evidence = seen()[kind]
    for name, change in MASKS.items():
        masked = dataclasses.replace(evidence, mask=change(evidence.mask))
        require_same(evidence, masked)
        if name == "torch.int64":
            require_same(evidence, load_evidence(masked.save(tmp_path / "e.safetensors")))


OTHER_MASKS: Mapping[str, Change] = {
    "1 for tokens and 0 for padding.*mask == 0": lambda m: (1.0 - m.float()) * torch.finfo(torch.float32).min,
    "got numbers from 0 to 2": lambda m: m.long() * 2,
    "got numbers from 1 to 5": lambda m: m.long().cumsum(1),
    r"and a mask \(2, 1, 5\)": lambda m: m[:, None],
    "the mask is 0 everywhere": lambda m: m & False,
    "'mask' must be a tensor or an array of numbers, got an object of NoneType": lambda m: None,
}


@pytest.mark.parametrize("kind", ["states", "cache"])
def test_a_mask_that_says_something_else_is_refused(kind):
    evidence = seen()[kind]
    for words, change in OTHER_MASKS.items():
        with pytest.raises(EvidenceError, match=words):
            dataclasses.replace(evidence, mask=change(evidence.mask))


@pytest.mark.parametrize("kind", ["states", "cache"])
def test_only_padding_may_hold_what_is_no_number(kind):
    evidence = seen()[kind]
    holes = ~evidence.mask.reshape(2, 5, *[1] * (1 if kind == "states" else 2))
    require_same(evidence, hand_over(evidence, lambda t: t.masked_fill(holes, float("nan"))))
    with pytest.raises(EvidenceError, match="NaN or Inf"):
        hand_over(evidence, lambda t: t.masked_fill(~holes, float("inf")))


def test_evidence_says_the_precision_of_what_was_handed_over():
    """Of tensors that are all in half precision; what was stated, and what numpy lengthened, stays."""
    llama, states, cache = make_model("tiny_llama"), seen()["states"], seen()["cache"]
    for dtype, of_gradients in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
        found = GradientEvidence.of(llama, {n: t.to(dtype) for n, t in seen()["gradients"].gradients.items()})
        assert found.compute_dtype is of_gradients
        about = states.mask, 2, states.model_fingerprint
        assert HiddenEvidence(states.states.to(dtype), *about).compute_dtype is dtype
        stated = HiddenEvidence(states.states.to(dtype), *about, compute_dtype="float32")
        assert stated.compute_dtype is torch.float32
        parts = {name: part.transpose(1, 2).to(dtype) for name, part in cache.parts.items()}
        assert CacheEvidence.of(llama, parts, layer=1).compute_dtype is dtype
    long = HiddenEvidence(states.states.double().numpy(), *about)
    assert (long.states.dtype, long.compute_dtype) == (torch.float32, torch.float32)


@cache
def certain_texts(kind: str, dtype: torch.dtype) -> tuple[set[tuple[int, ...]], Status]:
    """What is read of evidence whose tensors are of some type."""
    model = make_model("tiny_bert" if kind == "vectors" else "tiny_llama")
    found = unmask.recover_text(hand_over(seen()[kind], lambda t: t.to(dtype)), model)
    return {text.tokens for text in found.value.certain}, found.status


# What is slow takes the way of the gradients.
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in ("delta", "LoRA") else kind for kind in OF_TEXTS]
)
def test_other_float_types_read_the_same_or_less(kind):
    """Half precision is a rounding that was there before; whoever hands it over loses texts at most."""
    expected, status = certain_texts(kind, torch.float32)
    assert expected
    assert certain_texts(kind, torch.float64) == (expected, status)
    for dtype in (torch.float16, torch.bfloat16):
        texts, status = certain_texts(kind, dtype)
        assert texts == expected or (texts < expected and status is not Status.RECOVERED), (dtype, texts, status)
