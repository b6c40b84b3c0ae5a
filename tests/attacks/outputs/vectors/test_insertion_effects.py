"""The fit explains what insertions do, on sentences that it has not seen."""

from __future__ import annotations

import torch

from unmask.attacks.outputs.vectors.edits import TextBatch

SENTENCES = (
    "The river rose again last night.",
    "Nobody told the children about the letter.",
    "A small dog waited in front of the bakery.",
    "He sold his bicycle to a neighbour.",
)


def test_effects_point_where_insertions_go(embedder, effects):
    cosines = []
    for sentence in SENTENCES:
        tokens = tuple(embedder.model.encode(sentence)[1:-1])
        whole = embedder(TextBatch.of([tokens]))
        for place, token in enumerate(tokens):
            without = embedder(TextBatch.of([tokens[:place] + tokens[place + 1 :]]))
            expected = effects.rows[token] + without[0] @ effects.context  # up to a length
            cosines.append(torch.cosine_similarity(expected, (whole - without)[0], dim=0))
    assert float(torch.stack(cosines).median()) > 0.3


def test_what_is_left_is_less_than_an_exchange(effects):
    assert float(effects.left.trace()) < 0.8 * float(effects.exchanged.trace())


def test_special_tokens_are_never_expected(minilm, effects):
    assert float(effects.log_prior[sorted(minilm.special_tokens)].max()) < -25
    assert float(effects.log_prior.exp().sum()) < 1.01
