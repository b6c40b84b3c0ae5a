"""What enters block 0: the norm of a sum where it is that, asked one by one elsewhere, and the model's own in both."""

from __future__ import annotations

import pytest
import torch
from tests.models.families import build
from torch import Tensor

from unmask.models import Model, adapt
from unmask.models.linear import Role
from unmask.models.record import input_of

SUMS = ("GPT2", "OPT", "BioGpt", "Bert", "Roberta", "Electra with a projection")
OTHERS = ("Llama", "Gemma", "Bloom", "OPT with projections", "DebertaV2 with relative positions")
FLOAT32 = {"atol": 2e-5, "rtol": 1e-4}
MATRIX = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))


def distance(wanted: Tensor, *parts: Tensor) -> float:
    """How much of a row is no combination of others."""
    span = torch.cat(parts).T
    return float((span @ (torch.linalg.pinv(span) @ wanted.T) - wanted.T).norm())


@pytest.fixture(scope="module", params=(*SUMS, *OTHERS))
def family(request: pytest.FixtureRequest) -> tuple[str, Model]:
    return request.param, adapt(build(request.param))


@torch.no_grad()
def test_first_inputs_are_what_the_model_gives_its_queries(family):
    _, model = family
    tokens = torch.tensor([[11, 12, 13, 14, 15]])
    layer = model.body.get_submodule(model.linear(Role.QUERY, 0).module)
    own = input_of(layer, lambda: model.body(tokens)).view(5, -1)
    torch.testing.assert_close(model.first_input(tokens[0], torch.arange(5)), own, **FLOAT32)
    assert not torch.allclose(model.first_input(tokens[0].flip(0), torch.arange(5)), own, **FLOAT32)


@torch.no_grad()
def test_the_norm_of_a_sum_is_the_first_input(family):
    name, model = family
    summed = model.first_input_sum(torch.arange(9))
    assert (summed is not None) == (name in SUMS)
    if summed is None:
        return
    for position, rows in zip((0, 7), summed.project_positions(torch.eye(64), (0, 7)), strict=True):
        expected = model.first_input(torch.arange(9), torch.full((9,), position))
        torch.testing.assert_close(rows, expected, **FLOAT32)


@torch.no_grad()
def test_projections_are_products_with_every_first_input(family):
    _, model = family
    everyone = torch.arange(model.vocab_size)
    for position, found in zip((3, 0), model.project_first_inputs(MATRIX, (3, 0)), strict=True):
        expected = model.first_input(everyone, torch.full_like(everyone, position)) @ MATRIX
        torch.testing.assert_close(found, expected, **FLOAT32)


@torch.no_grad()
def test_every_first_input_is_a_combination_of_the_parts(family):
    _, model = family
    tokens = torch.tensor([21, 22, 23])
    words, positions, shift = model.first_input_parts(tokens, 4)
    assert len(positions) == (4 if model.first_input_sum() is not None else 0)
    at = 3 if len(positions) else 0
    for index, token in enumerate(tokens):
        wanted, shared = model.first_input(token[None], torch.tensor([at])), (positions[at : at + 1], shift[None])
        assert distance(wanted, words[index : index + 1], *shared) < 1e-4
        assert distance(wanted, words.roll(1, 0)[index : index + 1], *shared) > 0.1


@pytest.mark.parametrize(("name", "scale"), [("BioGpt", 8.0), ("OPT", 1.0)])
def test_a_scaled_embedding_is_scaled_in_the_sum(name, scale):
    model = adapt(build(name))
    for tokens in (None, torch.tensor([5, 9])):
        rows = model.parameter(model.token_embedding)
        rows = rows if tokens is None else rows[tokens]
        torch.testing.assert_close(model.first_input_sum(tokens).tokens, scale * rows)


@torch.no_grad()
def test_other_token_types_add_their_differences(tiny_bert, tiny_llama):
    token, position = torch.tensor([11]), torch.tensor([2])
    zero, one = (tiny_bert.first_input(token, position, torch.tensor([kind])) for kind in (0, 1))
    assert distance(one, zero, tiny_bert.token_type_directions) < 1e-4
    assert distance(one, zero) > 0.1
    assert tiny_llama.token_type_directions.shape == tiny_llama.token_type_differences.shape == (0, 64)
