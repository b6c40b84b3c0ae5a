"""Sets of edits that add up to a residual are found, and no set edits a slot twice."""

from __future__ import annotations

import torch

from unmask.attacks.outputs.vectors.candidate_edits import Edits
from unmask.attacks.outputs.vectors.combinations import CombinationSettings, combine_edits


def test_the_set_that_adds_up_is_among_them():
    generator = torch.Generator().manual_seed(0)
    effects = torch.randn(2, 60, 32, generator=generator)
    slots = torch.arange(60).expand(2, -1) % 20
    edits = Edits.of_one_slot(slots, torch.arange(60).expand(2, -1), torch.ones(2, 60, dtype=torch.bool))
    chosen = torch.tensor([[3, 11, 25, 38], [1, 22, 47, 59]])
    residuals = torch.stack([effects[row, index].sum(0) for row, index in enumerate(chosen)])
    sets = combine_edits(edits, effects, residuals, CombinationSettings(edits=60))
    for row in range(2):
        found = [
            sorted(value for value, slot in zip(values, own, strict=True) if slot >= 0)
            for values, own in zip(sets.values[row].tolist(), sets.slots[row].tolist(), strict=True)
        ]
        assert chosen[row].tolist() in found


def test_no_slot_is_edited_twice_and_what_is_not_valid_is_left_out():
    effects = torch.randn(1, 30, 8, generator=torch.Generator().manual_seed(1))
    valid = torch.arange(30)[None] < 20
    edits = Edits.of_one_slot(torch.arange(30)[None] % 6, torch.arange(30)[None], valid)
    sets = combine_edits(edits, effects, effects.sum(1), CombinationSettings())
    for slots, values, is_real in zip(sets.slots[0].tolist(), sets.values[0].tolist(), sets.valid[0], strict=True):
        if is_real:
            used = [slot for slot in slots if slot >= 0]
            assert len(set(used)) == len(used) > 1
            assert all(value < 20 for value, slot in zip(values, slots, strict=True) if slot >= 0)


def test_a_move_and_an_edit_of_its_gap_are_not_combined():
    slots = torch.tensor([[[1, 4], [4, -1], [7, -1]]])
    edits = Edits(slots, torch.zeros_like(slots), torch.ones(1, 3, dtype=torch.bool))
    effects = torch.eye(3)[None]
    sets = combine_edits(edits, effects, effects.sum(1), CombinationSettings())
    found = {tuple(sorted(slot for slot in row if slot >= 0)) for row in sets.slots[0][sets.valid[0]].tolist()}
    assert found == {(1, 4, 7), (4, 7)}
