"""What is said of texts behind vectors: only what agrees, alone, in enough digits, is certain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unmask.attacks.outputs.vectors.claim import ReadVector, claim_texts
from unmask.attacks.run import Run
from unmask.recovery import Status

GOOD = ReadVector((5, 6), 1e-6, 1e-6, 1e-5, 0.1, (), True)
FAR = replace(GOOD, distance=0.3, excess=0.3, rejected=None)


@pytest.mark.parametrize(
    ("read", "status", "num_certain"),
    [
        ([GOOD, GOOD], Status.RECOVERED, 2),
        ([FAR, GOOD], Status.PARTIAL, 1),
        ([FAR], Status.NOTHING_FOUND, 0),
        ([replace(GOOD, others=((5, 7),))], Status.NOT_IDENTIFIABLE, 0),
        ([replace(GOOD, tells_apart=False)], Status.NOT_IDENTIFIABLE, 0),
        ([replace(FAR, tokens=())], Status.NOTHING_FOUND, 0),
    ],
)
def test_statuses(tiny_bert, read, status, num_certain):
    recovery = claim_texts(read, tiny_bert, 100, Run())
    assert recovery.status is status
    assert len(recovery.value.certain) == num_certain
    assert recovery.status.conclusive == recovery.certificate.holds
    assert bool(recovery.value.token_set) == bool(num_certain)


def test_certain_texts_come_first_and_know_their_vector(tiny_bert):
    recovery = claim_texts([FAR, GOOD], tiny_bert, 100, Run())
    assert [text.row for text in recovery.value.texts] == [1, 0]


def test_another_text_that_agrees_is_named(tiny_bert):
    (text,) = claim_texts([replace(GOOD, others=((5, 7),))], tiny_bert, 100, Run()).value.texts
    assert not text.certain
    assert text.covers((5, 7))
    assert not text.covers((7, 5))
