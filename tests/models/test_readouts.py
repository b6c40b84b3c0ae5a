"""What is seen of the stream: keys move back to position 0 whatever the family does, heads count by their own norms."""

from __future__ import annotations

import pytest
import torch
from tests.models.families import build

from unmask.models import adapt, readouts
from unmask.models.caches import fill_cache, read_cache
from unmask.models.readouts import FINAL_NORM, STREAM, CacheReadout, head_widths, position_maps

TOKENS = torch.tensor([[5, 17, 99, 17, 250, 8]])


@torch.no_grad()
def streams(model, layer):
    return model.hidden_states(TOKENS % model.vocab_size, num_blocks=layer)[layer][0]


@pytest.mark.parametrize("name", ["Llama", "GPTNeoX", "GPT2", "Falcon with ALiBi", "Qwen3"])
def test_a_cache_is_what_the_model_keeps_and_moves_back(name):
    model = adapt(build(name))
    layer, positions = model.num_blocks - 1, torch.arange(TOKENS.shape[1])
    keys, values = read_cache(fill_cache(model, TOKENS % model.vocab_size), layer)
    readout = CacheReadout(layer, tuple(range(keys.shape[2])))
    x = streams(model, layer)
    with torch.no_grad():
        seen = readout(model, x, positions)
        at_zero = readout(model, x, torch.zeros_like(positions))
    torch.testing.assert_close(seen, torch.cat([keys[0].flatten(1), values[0].flatten(1)], 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(readout.align(model, seen, positions), at_zero, rtol=1e-3, atol=1e-4)
    assert readout.problem(model, positions) == ""


def test_rotary_positions_are_rotations_and_learned_ones_do_nothing(tiny_llama, tiny_gpt2):
    turned, still = (position_maps(model, 0, [5])[0].back for model in (tiny_llama, tiny_gpt2))
    eye = torch.eye(turned.shape[1], dtype=torch.float64)
    assert torch.allclose(turned @ turned.transpose(1, 2), eye, atol=1e-4)
    assert not torch.allclose(turned, eye, atol=1e-2)
    assert torch.allclose(still, eye, atol=1e-4)


def test_a_map_that_is_not_linear_is_reported(tiny_llama, monkeypatch):
    monkeypatch.setattr(readouts, "_LINEAR", -1.0)
    monkeypatch.setattr(readouts, "compute_once", lambda model, key, make: make())  # keeps nothing for other tests
    assert CacheReadout(1, (0,)).problem(tiny_llama, torch.tensor([3]))
    assert CacheReadout(0, (0,), keys=False).split(tiny_llama, 16) == (head_widths(tiny_llama, 0)[1],)


def test_heads_count_by_their_own_norms(tiny_llama):
    readout = CacheReadout(0, (0, 1))
    rows = torch.randn(3, sum(readout.split(tiny_llama, 0)), generator=torch.Generator().manual_seed(0))
    rows[:, :16] *= 1000
    weighted = rows * readout.weights(tiny_llama, rows)
    for part in weighted.split(readout.split(tiny_llama, rows.shape[1]), dim=1):
        assert torch.allclose(part.norm(dim=1), torch.ones(3), atol=1e-5)
    assert torch.isfinite(readout.weights(tiny_llama, torch.zeros_like(rows))).all()


def test_streams_are_seen_as_they_are(tiny_gpt2):
    x = streams(tiny_gpt2, 3)
    where = torch.arange(len(x))
    assert STREAM(tiny_gpt2, x, where) is STREAM.align(tiny_gpt2, x, where)
    assert bool((STREAM.weights(tiny_gpt2, x) == 1).all())
    assert torch.equal(FINAL_NORM(tiny_gpt2, x, where), tiny_gpt2.final_norm(x))
    assert STREAM != FINAL_NORM
    assert STREAM.is_stream
    assert not CacheReadout(0, (0,)).is_stream


def test_narrow_readouts_see_less(tiny_llama):
    x, where = streams(tiny_llama, 1), torch.arange(TOKENS.shape[1])
    with torch.no_grad():
        both = CacheReadout(1, (0, 1))(tiny_llama, x, where)
        values = CacheReadout(1, (1,), keys=False)(tiny_llama, x, where)
    assert torch.equal(values, both[:, -values.shape[1] :])
