"""Parts of first inputs: every input is a combination of its token's, its position's and the shift."""

from __future__ import annotations

import torch

from unmask.models import Model


@torch.no_grad()
def test_every_first_input_is_a_combination_of_its_parts(tiny: Model):
    model = tiny.to(dtype=torch.float64)
    tokens = torch.tensor([3, 99, 250])
    words, places, shift = model.first_input_parts(tokens, 5)
    assert words.shape == (3, model.width)
    assert len(places) == (5 if model.learned_positions else 0)
    for index, token in enumerate(tokens):
        for position in range(5 if model.learned_positions else 1):
            row = model.first_input(token, torch.tensor(position))
            parts = torch.cat([words[index : index + 1], places[position : position + 1], shift[None]])
            rest = row - parts.T @ torch.linalg.lstsq(parts.T, row[:, None], driver="gelsd").solution[:, 0]
            assert float(rest.norm() / row.norm()) < 1e-10  # float64
