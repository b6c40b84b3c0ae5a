import pytest
import torch
from tests.sampling import sample

from unmask.errors import InputError
from unmask.models.heads import heads_of, layer_heads


def sequences(num: int, length: int, width: int) -> torch.Tensor:
    return torch.randn(num, length, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# At the first position the rotary embedding is exactly one; elsewhere transformers computes it in float32, so that
# 11·θ is off by 1e-7, and cos² + sin² by as much.
POSITIONS = {0: 1e-11, 11: 1e-5}


def check_layer(model, layer, position, allowed):
    X = 3 * sequences(6, 5, model.width)
    attention = model.body.layers[layer].self_attn
    rotary = model.body.rotary_emb(X, torch.full((6, 5), position))
    visible = torch.zeros(6, 1, 5, 5, dtype=X.dtype).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    with torch.no_grad():
        expected = attention(X, position_embeddings=rotary, attention_mask=visible)[0][:, -1]
    error = (layer_heads(model, layer)(X) - expected).abs().max() / expected.abs().max()
    assert float(error) < allowed


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("layer", [0, 1])
def test_heads_of_a_grouped_layer_are_what_hugging_face_computes(tiny_llama, layer, position):
    check_layer(tiny_llama.to(dtype=torch.float64), layer, position, POSITIONS[position])


@pytest.mark.parametrize("position", POSITIONS)
def test_heads_that_are_wider_than_their_share(tiny_mistral, position):
    check_layer(tiny_mistral.to(dtype=torch.float64), 0, position, POSITIONS[position])


@sample("layer", [0, 29], [0])
def test_heads_of_a_real_layer_are_what_hugging_face_computes(smollm2, layer):
    """Nine query heads in three groups; orientation, groups and the scale of scores are all in it."""
    # With real weights transformers takes the softmax in float32.
    check_layer(smollm2.to(dtype=torch.float64), layer, position=0, allowed=1e-6)


def test_a_layer_with_biases_is_refused(tiny_qwen2):
    with pytest.raises(InputError, match="layer 0 has biases"):
        layer_heads(tiny_qwen2, 0)


def test_heads_of_a_group_share_keys_and_values():
    """Two groups of two heads, head by head."""
    width, size, scale = 6, 3, 0.5
    q, o = sequences(1, width, 4 * size)[0], sequences(2, 4 * size, width)[1]
    k, v = sequences(3, width, 2 * size)[1:]
    heads = heads_of([q, k, v, o], num_heads=4, num_groups=2, scale=scale)
    for head in range(4):
        own, group = slice(head * size, (head + 1) * size), slice(head // 2 * size, (head // 2 + 1) * size)
        assert torch.allclose(heads.W[head], k[:, group] @ q[:, own].T * scale)
        assert torch.allclose(heads.v[head], v[:, group] @ o[own])
