"""Gradients tensor by tensor: the very ones that a plain backward pass gives, and nothing is left behind."""

from __future__ import annotations

import pytest
import torch

from unmask.models import Model
from unmask.proof.gradient_visits import visit_gradients
from unmask.protocols import observe_gradients

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49]]


def visited(model: Model, names: set[str], **options) -> dict[str, torch.Tensor]:
    seen: dict[str, torch.Tensor] = {}

    def visit(name: str, gradient: torch.Tensor) -> None:
        assert name not in seen
        seen[name] = gradient

    visit_gradients(model, TEXTS, names, visit, **options)
    return seen


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gpt2"])
def test_they_are_those_of_a_plain_backward_pass(family, side, request):
    model = request.getfixturevalue(family)
    plain = observe_gradients(model, TEXTS, padding_side=side).gradients
    seen = visited(model, set(plain), padding_side=side)
    assert set(seen) == set(plain)
    for name in plain:
        assert torch.allclose(seen[name], plain[name], atol=1e-7, rtol=1e-5), name


def test_only_what_is_asked_for_is_visited_and_all_is_as_it_was(tiny_llama):
    parameters = dict(tiny_llama.named_parameters())
    name = next(each for each in parameters if "layers.0." in each and "down" in each)
    kept = torch.ones_like(parameters[name])
    parameters[name].grad = kept
    before = {each: parameter.requires_grad for each, parameter in parameters.items()}
    try:
        assert set(visited(tiny_llama, {name})) == {name}
        assert parameters[name].grad is kept
    finally:
        parameters[name].grad = None
    assert before == {each: parameter.requires_grad for each, parameter in parameters.items()}
    blocks = [tiny_llama.block_module(index) for index in range(tiny_llama.num_blocks)]
    assert not any("forward" in vars(block) for block in blocks)
    assert all(parameter.grad is None for parameter in parameters.values())


def test_an_error_on_the_way_leaves_the_model_as_it_was(tiny_llama):
    def refuse(name: str, gradient: torch.Tensor) -> None:
        raise RuntimeError("enough")

    names = {name for name, _ in tiny_llama.named_parameters()}
    with pytest.raises(RuntimeError, match="enough"):
        visit_gradients(tiny_llama, TEXTS, names, refuse)
    assert not any("forward" in vars(tiny_llama.block_module(index)) for index in range(tiny_llama.num_blocks))
    assert all(not parameter._post_accumulate_grad_hooks for _, parameter in tiny_llama.named_parameters())
    assert all(parameter.grad is None for _, parameter in tiny_llama.named_parameters())
