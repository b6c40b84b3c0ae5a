"""What stays open about a text, said as a class of texts."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.gradients.decoder.ambiguity import (
    EqualTokens,
    equal_tokens,
    leading_run,
    open_count,
    open_end,
    texts_of_any_run,
)
from unmask.attacks.gradients.decoder.endings import TextEnding
from unmask.models import Model
from unmask.recovery import AmbiguityKind

A = (5, 20, 99, 7)


@pytest.fixture(scope="module")
def twins(tiny_llama: Model) -> Model:
    """Tokens 20 and 21 have one embedding, 30 and 31 one output row."""
    model = tiny_llama.to()
    with torch.no_grad():
        model.parameter(model.token_embedding)[21] = model.parameter(model.token_embedding)[20]
        assert model.unembedding_name is not None
        model.parameter(model.unembedding_name)[31] = model.parameter(model.unembedding_name)[30]
    return model


def test_every_sentence_says_what_is_open(tiny_gpt2):
    points = [leading_run(4), open_end("why"), open_count("why"), *equal_tokens(tiny_gpt2, A, {20: (20, 21)})]
    assert [point.kind for point in points] == [
        AmbiguityKind.LEADING_RUN,
        AmbiguityKind.OPEN_END,
        AmbiguityKind.COUNT,
        AmbiguityKind.EQUAL_TOKENS,
    ]
    assert all(point.reason.strip() for point in points)
    assert points[-1].position == 1
    assert points[-1].tokens == (20, 21)
    assert "token 2 is one of" in points[-1].reason


def test_a_member_stands_for_its_class_as_well(tiny_gpt2):
    (point,) = equal_tokens(tiny_gpt2, (5, 21, 99), {20: (20, 21)})
    assert point.tokens == (20, 21)
    assert not equal_tokens(tiny_gpt2, (5, 22, 99), {20: (20, 21)})


def test_labels_tell_which_of_equal_tokens_is_meant(twins):
    """Behind the first token every token is a label, and the output layer tells equal embeddings apart."""
    ending = TextEnding((0, A), 1, 0.0)
    names = {(0, A[:length]): frozenset({token}) for length, token in ((2, 21), (3, 99), (4, 7))}
    classes = EqualTokens.of(twins, {20: (20, 21)}, names, [ending])
    tokens, points = classes.resolve(ending, labelled=True)
    assert tokens == (5, 21, 99, 7)
    assert not points
    tokens, points = classes.resolve(ending, labelled=False)
    assert tokens == A
    assert [(point.position, point.tokens) for point in points] == [(1, (20, 21))]


def test_a_first_token_is_no_label(twins):
    ending = TextEnding((0, (20, 5, 7)), 1, 0.0)
    classes = EqualTokens.of(twins, {20: (20, 21)}, {(0, (20,)): frozenset({20})}, [ending])
    _, points = classes.resolve(ending, labelled=True)
    assert [point.position for point in points] == [0]


def test_a_last_token_is_open_where_output_rows_are_equal(twins):
    ending = TextEnding((0, (5, 6, 30)), 1, 0.0)
    classes = EqualTokens.of(twins, {}, {(0, (5, 6, 30)): frozenset({30})}, [ending])
    _, points = classes.resolve(ending, labelled=True)
    assert [(point.position, set(point.tokens)) for point in points] == [(2, {30, 31})]


def test_runs_are_plain_where_positions_are_learned(tiny_gpt2):
    assert not texts_of_any_run(tiny_gpt2, [TextEnding((0, (4, 4, 4)), 1, 0.0)], labelled=False)


def test_texts_of_one_repeated_token_are_of_any_run(tiny_llama):
    endings = [TextEnding((0, (4, 4)), 1, 0.0), TextEnding((0, (5, 6, 7)), 1, 0.0)]
    assert texts_of_any_run(tiny_llama, endings, labelled=False) == {(0, (4, 4))}


def test_labels_leave_a_run_open_only_if_texts_can_trade_it(tiny_llama):
    alone = [TextEnding((0, (4, 4, 9)), 1, 0.0), TextEnding((0, (5, 6, 7)), 1, 0.0)]
    assert not texts_of_any_run(tiny_llama, alone, labelled=True)
    of_one_token = TextEnding((0, (4, 4, 4)), 1, 0.0)
    assert texts_of_any_run(tiny_llama, [of_one_token], labelled=True) == {of_one_token.node}
    traded = [TextEnding((0, (4, 4, 9)), 1, 0.0), TextEnding((0, (4, 4, 4)), 1, 0.0)]
    assert texts_of_any_run(tiny_llama, traded, labelled=True) >= {(0, (4, 4, 4))}


def test_a_run_that_later_rows_show_is_not_open(tiny_llama):
    """The random model's rows behind a run of two and of three differ by more than a tenth."""
    endings = [TextEnding((0, (4, 4, 9, 10, 11)), 1, 0.0)]
    assert not texts_of_any_run(tiny_llama, endings, labelled=False)
