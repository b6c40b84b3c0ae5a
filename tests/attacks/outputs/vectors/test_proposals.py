"""The right token is among the first where one is missing or wrong."""

from __future__ import annotations

import pytest

from unmask.attacks.outputs.vectors.candidate_edits import deletions
from unmask.attacks.outputs.vectors.edits import TextBatch
from unmask.attacks.outputs.vectors.proposals import ProposalSettings, Proposer

SENTENCE = "The children built a small boat behind the school."


@pytest.fixture(scope="module")
def proposer(effects):
    return Proposer(effects, ProposalSettings(exchanges=20, insertions=20))


def propose(proposer, embedder, text, whole):
    batch = TextBatch.of([text])
    removed = deletions(batch)
    shorter = [text[:place] + text[place + 1 :] for place in range(len(text))]
    without = embedder(TextBatch.of(shorter))[None]
    assert removed.valid.all()
    edits = proposer(batch, embedder(TextBatch.of([whole])), embedder(batch), without)
    return set(zip(edits.slots[0, :, 0].tolist(), edits.values[0, :, 0].tolist(), strict=True))


def test_a_missing_token_is_proposed_in_every_gap(proposer, embedder):
    whole = tuple(embedder.model.encode(SENTENCE)[1:-1])
    found = 0
    for place in range(len(whole)):
        text = whole[:place] + whole[place + 1 :]
        found += (2 * place, whole[place]) in propose(proposer, embedder, text, whole)
    assert found >= len(whole) - 2


def test_a_wrong_token_is_exchanged_for_the_right_one(proposer, embedder):
    whole = tuple(embedder.model.encode(SENTENCE)[1:-1])
    wrong = embedder.model.encode("purple")[1]
    found = 0
    for place in range(len(whole)):
        text = (*whole[:place], wrong, *whole[place + 1 :])
        found += (2 * place + 1, whole[place]) in propose(proposer, embedder, text, whole)
    assert found >= len(whole) - 2


def test_frequent_tokens_are_tested_where_likely_ones_were_in_vain(proposer, embedder):
    text = tuple(embedder.model.encode(SENTENCE)[1:-1])
    batch, without = TextBatch.of([text]), embedder(TextBatch.of([text[1:]])).expand(1, len(text), -1)
    vector = embedder(batch)
    frequent = set(proposer.effects.log_prior.topk(16).indices.tolist())
    for width, missing in ((1, True), (4, False)):
        edits = proposer(batch, vector.flip(1), vector, without, width)
        tested = set(edits.values[0, :, 0][edits.valid[0]].tolist())
        assert bool(frequent - tested) is missing
