"""Rows in the spans of later blocks: those of the batch lie there, those of other texts do not."""

from __future__ import annotations

import pytest
import torch

from unmask.linalg.subspace import column_span
from unmask.models import Role
from unmask.proof.arrivals import TextInput
from unmask.proof.later_spans import IN_SPAN, distances_of_ends, lies_in, spans_of_blocks
from unmask.protocols import observe_gradients

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8]]
WRONG = [[5, 17, 99, 18, 250], [17, 5, 99, 17, 250], [44, 45]]
FAMILIES = ("tiny_gpt2", "tiny_llama", "tiny_bert")


@pytest.fixture(params=FAMILIES)
def observed(request):
    model = request.getfixturevalue(request.param)
    return model, observe_gradients(model, TEXTS, task="classification", pooling="mean")


def test_texts_of_the_batch_lie_in_later_spans_and_others_do_not(observed):
    model, evidence = observed
    spans = spans_of_blocks(evidence, model, [1, 2])
    assert set(spans) == {1, 2}
    assert all(lies_in(model, TextInput(tuple(text)), spans) for text in TEXTS)
    assert not any(lies_in(model, TextInput(tuple(text)), spans) for text in WRONG)


def test_a_span_is_that_of_all_three_gradients_side_by_side(observed):
    model, evidence = observed
    gradients = [evidence.linear(model, role, 1) for role in (Role.QUERY, Role.KEY, Role.VALUE)]
    whole = column_span(*gradients)
    assert spans_of_blocks(evidence, model, [1])[1].rank == whole.rank == sum(map(len, TEXTS))


def test_without_spans_nothing_lies_in_them(observed):
    model, evidence = observed
    assert spans_of_blocks(evidence, model, [0, 99]) == {}  # block 0 sees tokens, not texts
    assert not lies_in(model, TextInput(tuple(TEXTS[0])), {})
    assert not lies_in(model, TextInput(()), spans_of_blocks(evidence, model, [1]))
    last = model.num_blocks - 1
    without = evidence.only(*(name for name in evidence.gradients if f".{last}." not in name))
    assert distances_of_ends(without, model, [TextInput((5,))]) is None


def test_full_spans_are_left_out(tiny_llama):
    many = torch.randint(1, 500, (20, 8), generator=torch.Generator().manual_seed(0)).tolist()
    assert not spans_of_blocks(observe_gradients(tiny_llama, many), tiny_llama, [1, 2])


def test_ends_of_classified_texts_are_near_and_other_ends_are_far(tiny_llama):
    evidence = observe_gradients(tiny_llama, TEXTS, task="classification", pooling="last")
    near, cut = (distances_of_ends(evidence, tiny_llama, [TextInput(tuple(t[:end])) for t in TEXTS]) for end in (9, -1))
    assert max(near) < IN_SPAN < 0.1 < min(cut)
