"""Sketches of gradients: what they estimate, and that nothing is left behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from unmask import recover_text
from unmask.evidence import files, load_evidence
from unmask.models import Model
from unmask.proof.gradient_sketches import GradientSketches, Sketch, seed_of
from unmask.proof.sketched_replay import replay_sketched
from unmask.protocols import observe_gradients
from unmask.recovery import Status


@pytest.fixture(params=["tiny_gpt2", "tiny_llama"])
def model(request: pytest.FixtureRequest) -> Model:
    """Conv1D with tied embeddings; Linear."""
    return request.getfixturevalue(request.param)


def test_nothing_is_left_behind(model):
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    hooks = [len(module._forward_hooks) for module in model.hf.modules()]  # other tests may have left some
    sketched = GradientSketches(model, set(before))
    assert sketched.owners
    with pytest.raises(ZeroDivisionError), sketched:
        raise ZeroDivisionError
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    assert [len(module._forward_hooks) for module in model.hf.modules()] == hooks
    assert all(parameter.grad is None for _, parameter in model.named_parameters())


def test_a_backward_pass_leaves_sketches_and_no_gradients(model):
    """Of a sum of outputs: G·R is what autograd's gradient times R is."""
    names = {name for name, _ in model.named_parameters()}
    tokens = torch.tensor([[5, 9, 3, 7]])
    formed = dict(model.named_parameters())
    whole = torch.autograd.grad(model.hf(tokens).logits.square().sum(), list(formed.values()), allow_unused=True)
    with GradientSketches(model, names) as sketched:
        others = {name: p for name, p in model.named_parameters() if name not in sketched.owners}
        sketched.send_back(model.hf(tokens).logits.square().sum(), others)
    for name, gradient in zip(formed, whole, strict=True):
        if name in sketched.sketches and gradient is not None:
            sketch = sketched.sketches[name]
            torch.testing.assert_close(sketch.value, sketch.of(gradient), rtol=1e-3, atol=1e-4 * float(gradient.norm()))


def test_a_padding_token_has_no_row_of_an_embedding(model, monkeypatch):
    """torch leaves it out of the embedding's gradient; a tied output layer has it all the same."""
    tokens, embedding = torch.tensor([[5, 9, 3, 9]]), model.hf.get_input_embeddings()
    weight = embedding.weight
    monkeypatch.setattr(embedding, "padding_idx", 9)
    whole = torch.autograd.grad(model.hf(tokens).logits.square().sum(), weight)[0]
    with GradientSketches(model, {model.token_embedding}) as sketched:
        sketched.send_back(model.hf(tokens).logits.square().sum(), {})
    sketch = sketched.sketches[model.token_embedding]
    torch.testing.assert_close(sketch.value, sketch.of(whole), rtol=1e-3, atol=1e-4 * float(whole.norm()))


def test_the_norm_of_a_difference_is_estimated():
    """‖D·R‖² has the mean ‖D‖², also of a difference of rank 1."""
    ways = torch.randn(300, 16, generator=torch.Generator().manual_seed(0)) / 4
    difference = torch.outer(torch.randn(50), torch.randn(300))
    estimate = float(Sketch(torch.zeros(50, 16), ways).of(difference).norm() / difference.norm())
    assert 0.4 < estimate < 1.8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_entry_has_a_part_in_the_seed(dtype):
    """A change that was prepared for one seed meets another; the same update has the same seed again."""
    update = {"b": torch.arange(12.0).view(3, 4).T.to(dtype), "a": torch.ones(5, dtype=dtype)}
    seed = seed_of(update)
    assert seed == seed_of({name: tensor.clone() for name, tensor in reversed(update.items())})
    for place in range(12):
        changed = update["b"].contiguous().clone()
        changed.view(-1)[place] += 1
        assert seed_of({**update, "b": changed}) != seed
    assert seed_of({"a": update["b"], "b": update["a"]}) != seed


def test_a_file_is_not_read_for_its_seed(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGE_BYTES", 1)
    path = tmp_path / "update.safetensors"
    observe_gradients(tiny_llama, [[5, 9, 3]]).save(path)
    stored = load_evidence(path).gradients
    assert seed_of(stored) == seed_of(load_evidence(path).gradients)
    assert stored.num_bytes_read == 0


def test_a_change_that_one_sketch_does_not_see_is_seen(tiny_gpt2):
    """E·R = 0 for the columns that the right update has, and E is as large as G."""
    texts = [[5, 6, 7, 8], [9, 10, 11]]
    evidence = observe_gradients(tiny_gpt2, texts)
    name = "h.1.mlp.c_proj.weight"
    gradient = evidence.gradients[name]
    again = replay_sketched(evidence, tiny_gpt2, {tuple(text): 1 for text in texts})
    ways = again[name].ways.double()
    noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    blind = noise - noise @ ways @ torch.linalg.pinv(ways)
    forged = gradient + (blind * gradient.norm() / blind.norm()).float()
    assert again[name].of(forged - gradient).norm() < 1e-3 * gradient.norm()
    found = recover_text(replace(evidence, gradients={**evidence.gradients, name: forged}), tiny_gpt2)
    assert found.status is not Status.RECOVERED
