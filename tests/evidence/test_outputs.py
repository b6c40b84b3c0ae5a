"""Evidence of outputs: hidden states of a model, and one attention layer."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.contracts.models import make_model

import unmask
from unmask.errors import EvidenceError
from unmask.evidence import AttentionEvidence, CacheEvidence, HiddenEvidence, Site, load_evidence

# Examples share a folder: each overwrites the file of the one before.
quick = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


def hidden(**changes: object) -> HiddenEvidence:
    parts = {
        "states": torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)),
        "mask": torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
        "layer": 2,
        "model_fingerprint": "0123456789abcdef",
    }
    return HiddenEvidence(**(parts | changes))


def attention(**changes: object) -> AttentionEvidence:
    parts = {"W": torch.eye(4), "V": torch.ones(4, 6), "output": torch.ones(3, 6)}
    return AttentionEvidence(**(parts | changes))


# Hidden states


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_hidden_states_come_back(tmp_path, dtype):
    before = hidden(states=(hidden().states.double() / 3).to(dtype))
    after = load_evidence(before.save(tmp_path / "states.safetensors"))
    assert type(after) is HiddenEvidence
    assert torch.equal(after.states, before.states)
    assert after.states.dtype == dtype
    assert torch.equal(after.mask, before.mask)
    assert after.mask.dtype == torch.bool
    assert (after.layer, after.model_fingerprint) == (2, "0123456789abcdef")


@pytest.mark.parametrize("site", list(Site))
def test_sites_and_precisions_come_back(tmp_path, site):
    before = hidden(site=site, compute_dtype=torch.bfloat16)
    after = load_evidence(before.save(tmp_path / "states.safetensors"))
    assert (after.site, after.compute_dtype) == (site, torch.bfloat16)


def test_a_file_of_the_first_version_is_the_stream_in_float32(tmp_path):
    header = {"format": 1, "kind": "hidden", "layer": 2, "model_fingerprint": "0123456789abcdef"}
    tensors = {"states": hidden().states, "mask": hidden().mask}
    save_file(tensors, tmp_path / "old.safetensors", metadata={"unmask": json.dumps(header)})
    old = load_evidence(tmp_path / "old.safetensors")
    assert (old.site, old.compute_dtype) == (Site.STREAM, torch.float32)


@quick
@given(layer=st.integers(0, 200), fingerprint=st.text())
def test_every_hidden_header_comes_back(tmp_path, layer, fingerprint):
    before = hidden(layer=layer, model_fingerprint=fingerprint)
    after = load_evidence(before.save(tmp_path / "states.safetensors"))
    assert (after.layer, after.model_fingerprint) == (layer, fingerprint)


@pytest.mark.parametrize(
    "changes",
    [
        {"states": torch.ones(5, 64)},
        {"mask": torch.ones(2, 4, dtype=torch.bool)},
        {"mask": torch.ones(10, dtype=torch.bool)},
        {"mask": torch.tensor(True)},
    ],
)
def test_hidden_states_of_a_wrong_shape_are_refused(changes):
    with pytest.raises(EvidenceError, match=r"states must be \(batch, length, width\) and mask \(batch, length\), got"):
        hidden(**changes)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_hidden_states_that_are_not_finite_are_refused(bad):
    states = hidden().states
    states[0, 0, 0] = bad
    with pytest.raises(EvidenceError, match="'states' holds 1 of 640 values"):
        hidden(states=states)


def test_hidden_states_fit_their_model(tiny):
    evidence = hidden(model_fingerprint=tiny.fingerprint())
    evidence.check(tiny)
    for layer in (0, tiny.num_blocks):
        dataclasses.replace(evidence, layer=layer).check(tiny)


def test_hidden_states_of_another_model_are_refused(tiny_gpt2, tiny_llama):
    with pytest.raises(EvidenceError) as error:
        hidden(model_fingerprint=tiny_gpt2.fingerprint()).check(tiny_llama)
    assert tiny_gpt2.fingerprint()[:12] in str(error.value)
    assert tiny_llama.fingerprint()[:12] in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer": 4}, r"layer must be 0…3 for states of this gpt2 model, got 4"),
        ({"layer": 2, "site": "final_norm"}, r"layer must be 3 after the final norm"),
        ({"states": torch.ones(2, 5, 65)}, r"65 numbers wide and this gpt2 model makes 64; load the model that made"),
        ({"states": torch.ones(2, 64, 5), "mask": torch.ones(2, 64)}, r"the last axis is the width: transpose them"),
    ],
)
def test_hidden_states_of_a_layer_that_the_model_lacks_are_refused(tiny_gpt2, changes, words):
    with pytest.raises(EvidenceError, match=words):
        hidden(model_fingerprint=tiny_gpt2.fingerprint(), **changes).check(tiny_gpt2)


# States as users have them


@pytest.fixture(scope="module")
def returned() -> dict[str, Any]:
    """What transformers returns of two texts, the second one padded."""
    kept = {}
    for name in ("tiny_gpt2", "tiny_bert"):
        model = make_model(name)
        with torch.no_grad():
            kept[name] = model.body(input_ids=TOKENS, attention_mask=MASK, output_hidden_states=True)
    return kept


TOKENS = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


@pytest.mark.parametrize("name", ["tiny_gpt2", "tiny_bert"])
def test_what_transformers_returns_is_evidence_of_any_layer(name, returned):
    """Most families return the last states after the final norm, and the same numbers were taken for the stream."""
    model, output = make_model(name), returned[name]
    for layer in (1, model.num_blocks):
        evidence = HiddenEvidence.of(model, output, layer=layer, mask=MASK)
        assert evidence.site is (Site.FINAL_NORM if (name, layer) == ("tiny_gpt2", 3) else Site.STREAM)
        texts = unmask.recover_text(evidence, model).value.texts
        assert [text.tokens for text in texts if text.certain] == [(5, 6, 7, 8, 9), (10, 11, 12)]


def test_one_layer_s_states_in_every_form(returned, tiny_gpt2):
    output = returned["tiny_gpt2"]
    one = output.hidden_states[1]
    expected = HiddenEvidence.of(tiny_gpt2, output, layer=1, mask=MASK)
    forms = (one, one.numpy(), one.tolist(), output.hidden_states, list(output.hidden_states))
    for form in (*forms, torch.stack(output.hidden_states)):
        same = HiddenEvidence.of(tiny_gpt2, form, layer=1, mask=MASK.numpy())
        assert torch.equal(same.states, expected.states)
        assert torch.equal(same.mask, expected.mask)
    assert torch.equal(HiddenEvidence.of(tiny_gpt2, one, layer=1, attention_mask=MASK).mask, MASK.bool())
    alone = HiddenEvidence.of(tiny_gpt2, one[0], layer=1)
    assert (tuple(alone.states.shape), bool(alone.mask.all())) == ((1, 5, 64), True)
    stream = tiny_gpt2.hidden_states(TOKENS, MASK.bool())[-1]
    assert HiddenEvidence.of(tiny_gpt2, stream, layer=3).site is Site.STREAM
    last = type(output)(last_hidden_state=output.last_hidden_state)
    assert HiddenEvidence.of(tiny_gpt2, last).site is Site.FINAL_NORM
    means = HiddenEvidence.of(tiny_gpt2, one.mean(1), layer=1, site="mean")
    assert tuple(means.states.shape) == (2, 1, 64)
    assert HiddenEvidence.of(tiny_gpt2, one.bfloat16(), layer=1).compute_dtype is torch.bfloat16


def test_states_and_caches_of_a_model_in_bfloat16_that_numpy_lengthened_are_read():
    """They were taken for float32, and nothing was found."""
    model = make_model("tiny_llama")
    with torch.no_grad():
        output = model.to(dtype=torch.bfloat16).hf(TOKENS[:1], output_hidden_states=True, use_cache=True)
    kept = output.past_key_values.layers[1]
    parts = {"keys": kept.keys.float().numpy(), "values": kept.values.float().numpy()}
    states = HiddenEvidence.of(model, output.hidden_states[1].float().numpy(), layer=1)
    for evidence in (states, CacheEvidence.of(model, parts, layer=1)):
        assert evidence.compute_dtype is torch.bfloat16
        assert [text.tokens for text in unmask.recover_text(evidence, model).value.certain] == [(5, 6, 7, 8, 9)]
    stored = output.hidden_states[1].to(torch.float8_e4m3fn)  # says nothing of how it was computed
    assert HiddenEvidence.of(model, stored, layer=1).compute_dtype is torch.float32


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda o: o, {}, r"layer must be stated, 0…3: which of the 4 layers'"),
        (lambda o: o, {"layer": 99}, r"layer must be 0…3: which of the 4 layers' states to read, got 99"),
        (lambda o: o, {"layer": -1}, r"layer must be a whole number from 0 on"),
        (lambda o: o.hidden_states[:3], {"layer": 1}, r"states of 3 layers, and this gpt2 model makes 4"),
        (lambda o: type(o)(last_hidden_state=o.last_hidden_state), {"layer": 1}, r"call the model with output_hidden"),
        (lambda o: (o.hidden_states, o.hidden_states), {"layer": 1}, r"each step of generate; join those of one layer"),
        (lambda o: o.hidden_states[1], {}, r"layer must be stated: how many blocks"),
        (
            lambda o: o.hidden_states[1][0, 0],
            {"layer": 1},
            r"with at least one row, got \(64,\)",
        ),
        (lambda o: o.hidden_states[1][:0], {"layer": 1}, r"at least one row, got \(0, 5, 64\)"),
        (lambda o: o.hidden_states[1], {"layer": 1, "mask": [1, 1]}, r"and a mask \(1, 2\)"),
    ],
)
def test_states_that_cannot_be_read_are_refused_with_what_to_do(returned, tiny_gpt2, change, options, words):
    with pytest.raises(EvidenceError, match=words):
        HiddenEvidence.of(tiny_gpt2, change(returned["tiny_gpt2"]), **options)


# One attention layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_attention_layer_comes_back(tmp_path, dtype):
    generator = torch.Generator().manual_seed(0)
    W, V, output = (torch.randn(shape, dtype=dtype, generator=generator) for shape in [(4, 4), (4, 6), (3, 6)])
    before = AttentionEvidence(W=W, V=V, output=output, causal=True, scale=0.5)
    after = load_evidence(before.save(tmp_path / "attention.safetensors"))
    assert type(after) is AttentionEvidence
    assert all(torch.equal(getattr(after, name), getattr(before, name)) for name in ("W", "V", "output"))
    assert (after.causal, after.scale) == (True, 0.5)


@quick
@given(causal=st.booleans(), scale=st.floats(allow_nan=False, allow_infinity=False))
def test_every_attention_header_comes_back(tmp_path, causal, scale):
    after = load_evidence(attention(causal=causal, scale=scale).save(tmp_path / "attention.safetensors"))
    assert (after.causal, after.scale) == (causal, scale)


def test_known_norms_come_back_and_wrong_ones_are_refused(tmp_path):
    n = len(attention().output)
    norms = torch.arange(1.0, n + 1)
    after = load_evidence(attention(row_norms=norms).save(tmp_path / "attention.safetensors"))
    assert torch.equal(after.row_norms, norms)
    assert load_evidence(attention().save(tmp_path / "attention.safetensors")).row_norms is None
    for wrong in (norms[1:], -norms, norms[None], norms.long(), norms * torch.nan):
        with pytest.raises(EvidenceError, match="row_norms"):
            attention(row_norms=wrong)


@pytest.mark.parametrize(
    "changes",
    [
        {"W": torch.ones(4, 5)},
        {"W": torch.ones(16)},
        {"W": torch.tensor(1.0)},
        {"V": torch.ones(5, 6)},
        {"V": torch.tensor(1.0)},
        {"V": torch.ones(4), "output": torch.ones(3)},
        {"output": torch.ones(3, 5)},
        {"output": torch.ones(6)},
        {"output": torch.ones(2, 3, 6)},
    ],
    ids=lambda changes: ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in changes.items()),
)
def test_an_attention_layer_of_a_wrong_shape_is_refused(changes):
    with pytest.raises(EvidenceError, match=r"expected W \(d, d\), V \(d, e\) and output \(n, e\), got"):
        attention(**changes)


@pytest.mark.parametrize("name", ["W", "V", "output"])
def test_an_attention_layer_that_is_not_finite_is_refused(name):
    tensor = getattr(attention(), name).clone()
    tensor[0, 0] = float("nan")
    with pytest.raises(EvidenceError, match=f"'{name}' holds 1 of {tensor.numel()} values"):
        attention(**{name: tensor})


# Damaged files


@pytest.mark.parametrize("kind", ["hidden", "attention"])
def test_a_file_without_its_tensors_is_refused(tmp_path, kind):
    path = tmp_path / "e.safetensors"
    header = {"format": 1, "kind": kind, "layer": 1, "model_fingerprint": "f", "causal": False, "scale": 1.0}
    save_file({"other": torch.ones(2)}, path, metadata={"unmask": json.dumps(header)})
    with pytest.raises(EvidenceError, match=f"evidence of kind '{kind}'.*make the evidence again"):
        load_evidence(path)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("hidden", "layer", None),
        ("hidden", "layer", "two"),
        ("hidden", "layer", float("inf")),
        ("attention", "scale", "large"),
        ("attention", "scale", float("nan")),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, kind, field, value):
    path = tmp_path / "e.safetensors"
    header = {"format": 1, "kind": kind, "layer": 1, "model_fingerprint": "f", "causal": False, "scale": 1.0}
    evidence = hidden() if kind == "hidden" else attention()
    tensors = {name: part for name, part in vars(evidence).items() if isinstance(part, torch.Tensor)}
    save_file(tensors, path, metadata={"unmask": json.dumps(header | {field: value})})
    with pytest.raises(EvidenceError):
        load_evidence(path)


def test_float8_is_read_as_float32():
    coarse = torch.ones(3, 6).to(torch.float8_e4m3fn)
    assert attention(output=coarse).output.dtype is torch.float32
    assert hidden(states=torch.ones(2, 5, 64).to(torch.float8_e4m3fn)).states.dtype is torch.float32
