"""A cloaked cache: one secret matrix a head, the same for all tokens, that can be undone."""

from __future__ import annotations

import pytest
import torch

from unmask.defences import defend_states, parse_defence
from unmask.errors import InputError
from unmask.protocols import observe_cache, observe_hidden

CLOAK = parse_defence("cloak")


def cloaked(evidence, seed: int = 0):
    return defend_states(evidence, CLOAK, torch.Generator().manual_seed(seed))


def test_each_head_is_mixed_by_one_invertible_matrix(tiny_llama):
    texts = [list(range(start, start + 40)) for start in (5, 60)]
    evidence = observe_cache(tiny_llama, texts, layer=1)
    hidden = cloaked(evidence)
    for name, part in evidence.parts.items():
        for head in range(part.shape[2]):
            plain, mixed = (each[:, :, head].flatten(0, 1).double() for each in (part, hidden.parts[name]))
            matrix = torch.linalg.lstsq(plain, mixed).solution
            assert float((plain @ matrix - mixed).norm() / mixed.norm()) < 1e-4
            assert 1 < float(torch.linalg.cond(matrix)) < 4.1
            assert not torch.allclose(plain, mixed, atol=0.1)


def test_seeds_give_other_matrices_and_padding_stays(tiny_llama):
    evidence = observe_cache(tiny_llama, [[5, 6, 7], [8]], layer=0)
    assert torch.equal(cloaked(evidence).keys, cloaked(evidence).keys)
    assert not torch.equal(cloaked(evidence).keys, cloaked(evidence, 1).keys)
    assert not cloaked(evidence).values[~evidence.mask].any()


def test_it_is_a_defence_of_caches_alone(tiny_llama):
    with pytest.raises(InputError, match="choose another"):
        cloaked(observe_hidden(tiny_llama, [[5, 6]], layer=1))
