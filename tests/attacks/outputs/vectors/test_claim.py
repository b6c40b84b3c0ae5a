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
        ([replace(GOOD, tokens=())], Status.RECOVERED, 1),  # the empty text
    ],
)
def test_statuses(tiny_bert, read, status, num_certain):
    recovery = claim_texts(read, tiny_bert, 100, Run(), not_read="it is far")
    assert recovery.status is status
    assert len(recovery.value.certain) == num_certain
    assert recovery.status.conclusive == recovery.certificate.holds
    assert bool(recovery.value.token_set) == any(each.certain and each.tokens for each in read)


def test_certain_texts_come_first_and_know_their_vector(tiny_bert):
    recovery = claim_texts([FAR, GOOD], tiny_bert, 100, Run(), not_read="it is far")
    assert [text.row for text in recovery.value.texts] == [1, 0]


def test_another_text_that_agrees_is_named(tiny_bert):
    (text,) = claim_texts([replace(GOOD, others=((5, 7),))], tiny_bert, 100, Run(), not_read="it is far").value.texts
    assert not text.certain
    assert text.covers((5, 7))
    assert not text.covers((7, 5))


def test_a_text_that_may_have_been_cut_has_an_open_end(tiny_bert):
    recovery = claim_texts([replace(GOOD, may_go_on=True)], tiny_bert, 100, Run(), not_read="it is far")
    (text,) = recovery.value.texts
    assert recovery.status is Status.PARTIAL
    assert not text.certain
    assert text.covers((5, 6, 7))
    assert recovery.value.token_set == {5, 6}
    assert "may continue" in recovery.reason


def test_time_that_ran_out_is_said(tiny_bert):
    ended = claim_texts([FAR], tiny_bert, 100, Run(), not_read="it is far", stopped=True)
    assert ended.status is Status.BUDGET_EXHAUSTED
    assert "it is far" in ended.reason


def test_what_the_tokenizer_does_not_know_is_said(minilm):
    unknown = replace(GOOD, tokens=(5, minilm.unknown_token))
    recovery = claim_texts([unknown], minilm, 100, Run(), not_read="it is far")
    assert "texts with [UNK], which hides what was written there: 1" in recovery.reason
