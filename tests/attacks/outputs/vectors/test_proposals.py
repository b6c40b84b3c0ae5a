"""The right token is among the first where one is missing or wrong."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.outputs.vectors.candidate_edits import deletions
from unmask.attacks.outputs.vectors.edits import TextBatch
from unmask.attacks.outputs.vectors.insertion_effects import InsertionEffects
from unmask.attacks.outputs.vectors.neighbours import near_texts
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


@pytest.mark.parametrize(("vocab", "text"), [(100, ()), (100, (3, 7, 5)), (10, (3, 7, 5))])
@pytest.mark.parametrize("width", [1, 4])
def test_a_small_vocabulary_is_proposed_whole(vocab, text, width):
    """First words are 200, and a vector without a signal reaches every stage."""
    draw = torch.Generator().manual_seed(0)
    rows, batch, d = torch.randn(vocab, 8, generator=draw), TextBatch.of([text]), torch.eye(8)
    effects = InsertionEffects(rows, d, d, d, log_prior=torch.full((vocab,), 1 / vocab).log())
    local = torch.zeros(1, batch.tokens.shape[1] + 1, vocab)
    for known in (None, local):
        edits = Proposer(effects)(batch, rows[:1], rows[1:2], rows[None, : len(text)], width, known)
        tested = set(edits.values[0, :, 0][edits.valid[0]].tolist())
        assert tested <= set(range(vocab))
        assert len(tested) == vocab or vocab == 100
        assert near_texts(text, effects, 200).tokens.max() < vocab
