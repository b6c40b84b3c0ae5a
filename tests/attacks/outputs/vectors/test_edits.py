"""Edits of many texts at once equal those of Python's lists, one by one."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from unmask.attacks.outputs.vectors.edits import (
    EMPTY,
    TextBatch,
    TextHash,
    concatenate,
    first_of_each,
)

TEXTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple), min_size=1, max_size=4)


def edit_slowly(text: tuple[int, ...], edits: dict[int, int]) -> tuple[int, ...]:
    found = []
    for slot in range(2 * len(text) + 1):
        value = edits.get(slot, text[slot // 2] if slot % 2 else EMPTY)
        found += [value] if value != EMPTY else []
    return tuple(found)


@given(TEXTS, st.data())
def test_edits_of_several_slots_are_made_together(texts, data):
    batch = TextBatch.of(texts)
    rows, slots, values, expected = [], [], [], []
    for row, text in enumerate(texts):
        places = st.lists(st.integers(0, 2 * len(text)), unique=True, min_size=1, max_size=3)
        chosen = data.draw(places)
        edits = {slot: data.draw(st.integers(0, 9)) for slot in chosen}
        if len(text) > 1 and chosen[0] % 2:
            edits[chosen[0]] = EMPTY  # taken out
        padding = 3 - len(edits)
        rows.append(row)
        slots.append([*edits, *[EMPTY] * padding])
        values.append([*edits.values(), *[0] * padding])
        expected.append(edit_slowly(text, edits))
    found = batch.edit(torch.tensor(rows), torch.tensor(slots), torch.tensor(values))
    assert found.as_tuples() == expected


def test_batches_of_other_lengths_stand_behind_each_other():
    both = concatenate([TextBatch.of([(1, 2, 3)]), TextBatch.of([(4,), (5, 6)])])
    assert both.as_tuples() == [(1, 2, 3), (4,), (5, 6)]
    assert both.lengths.tolist() == [3, 1, 2]


@given(TEXTS)
def test_equal_texts_have_equal_hashes_and_others_do_not(texts):
    hashes = TextHash(10)(TextBatch.of(texts)).tolist()
    wider = TextHash(10)(TextBatch.of(texts, length=9)).tolist()
    assert hashes == wider
    for i, one in enumerate(texts):
        for j, other in enumerate(texts):
            assert (hashes[i] == hashes[j]) == (one == other)


def test_the_first_of_each_number():
    values, first = first_of_each(torch.tensor([7, 3, 7, 7, 3, 1]))
    assert dict(zip(values.tolist(), first.tolist(), strict=True)) == {1: 5, 3: 1, 7: 0}
