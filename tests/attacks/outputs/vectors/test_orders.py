"""Orders of words: every token stays, words stay whole, nothing comes twice."""

from __future__ import annotations

import torch

from unmask.attacks.outputs.vectors.edits import TextBatch
from unmask.attacks.outputs.vectors.orders import continuing_tokens, reorder, split_words, word_orders

CONTINUES = torch.tensor([False, False, False, False, True])  # token 4 continues a word


def test_orders_keep_every_word_and_differ():
    orders = word_orders(5).tolist()
    assert all(sorted(order) == list(range(5)) for order in orders)
    assert len({tuple(order) for order in orders}) == len(orders)
    assert [0, 1, 2, 3, 4] not in orders
    assert [0, 3, 4, 1, 2] in orders  # two words moved
    assert [3, 4, 2, 0, 1] in orders  # two pieces exchanged
    assert [3, 4, 0, 1, 2] in orders


def test_pieces_go_no_farther_than_asked():
    orders = word_orders(6, 1, 1, exchanged=0).tolist()
    assert [1, 0, 2, 3, 4, 5] in orders
    assert [1, 2, 0, 3, 4, 5] not in orders


def test_words_are_not_torn_apart():
    _, found = reorder(TextBatch.of([(0, 4, 1, 2)]), CONTINUES, 100, torch.Generator())
    assert set(found.as_tuples()) == {(0, 4, 2, 1), (1, 0, 4, 2), (1, 2, 0, 4), (2, 0, 4, 1), (2, 1, 0, 4)}


def test_a_piece_in_front_is_a_word_and_few_orders_are_drawn():
    _, found = reorder(TextBatch.of([(4, 1, 2, 3)]), CONTINUES, 7, torch.Generator().manual_seed(0))
    assert len(set(found.as_tuples())) == 7
    assert all(sorted(text) == [1, 2, 3, 4] for text in found.as_tuples())


def test_several_texts_keep_their_own_words():
    rows, found = reorder(TextBatch.of([(0, 4, 1, 4), (3,), (1, 2, 3)]), CONTINUES, 100, torch.Generator())
    both = list(zip(rows.tolist(), found.as_tuples(), strict=True))
    assert [text for row, text in both if row == 0] == [(1, 4, 0, 4)]
    assert {row for row, _ in both} == {0, 2}
    assert all(sorted(text) == [1, 2, 3] for row, text in both if row == 2)
    assert len(both) == 1 + len(word_orders(3))


def test_words_of_texts():
    assert split_words(TextBatch.of([(0, 4, 4, 1), (2,)]), CONTINUES).tolist() == [
        [[0, 4, 4], [1, -1, -1]],
        [[2, -1, -1], [-1, -1, -1]],
    ]


def test_one_word_has_no_other_order():
    rows, _ = reorder(TextBatch.of([(0, 4, 4)]), CONTINUES, 100, torch.Generator())
    assert len(rows) == 0


def test_which_tokens_continue_a_word(minilm, smollm2, tiny_bert):
    pieces = minilm.encode("unsatisfying")[1:-1]
    assert continuing_tokens(minilm)[pieces].tolist() == [False, True, True, True]
    pieces = smollm2.encode(" unsatisfying")
    assert continuing_tokens(smollm2)[pieces].tolist() == [False] + [True] * (len(pieces) - 1)
    assert not continuing_tokens(tiny_bert).any()
