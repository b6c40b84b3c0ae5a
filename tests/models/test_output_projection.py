"""The output projection of an attention module, forth and back."""

from __future__ import annotations

import torch

from unmask.models.output_projection import OutputProjection


def mixed_rows(projection: OutputProjection) -> torch.Tensor:
    return torch.randn(7, projection.weight.shape[0], generator=torch.Generator().manual_seed(0)).double()


@torch.no_grad()
def test_it_is_what_the_model_adds_to_the_stream(tiny_gpt2, tiny_llama, tiny_qwen2):
    for model in (tiny_gpt2, tiny_llama, tiny_qwen2):
        precise = model.to(dtype=torch.float64)
        projection = OutputProjection.of(precise, 1)
        mixed = mixed_rows(projection)
        stream = torch.zeros(7, model.width, dtype=torch.float64)
        assert torch.allclose(projection(mixed), precise.after_attention(1, stream, mixed).added, atol=1e-12)


def test_it_can_be_undone_where_it_is_invertible(tiny_gpt2):
    projection = OutputProjection.of(tiny_gpt2.to(dtype=torch.float64), 0)
    mixed = mixed_rows(projection)
    assert projection.condition < 1e6
    assert torch.allclose(projection.invert(projection(mixed)), mixed, atol=1e-8)


def test_heads_wider_than_the_stream_are_not_determined(tiny_mistral):
    projection = OutputProjection.of(tiny_mistral, 0)
    assert projection.weight.shape[0] > projection.weight.shape[1]
    assert projection.condition == float("inf")
