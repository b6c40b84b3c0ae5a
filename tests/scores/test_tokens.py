"""Text scores: parity with rouge-score, a brute-force assignment, and what a one-to-one score must obey."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from unmask.errors import InputError
from unmask.scores import rouge_l, rouge_n, score_texts

SCORER = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
# Both sides are quotients of small integers; they round in a different order.
ROUNDING = 1e-12

quick = settings(max_examples=60)
# Few words, so that overlaps, repetitions and ties are common; the rest tries the splitting of words.
words = ["the", "cat", "The", "ON", "42", "été", "don't", "x-ray", "_", "..."]
prose = st.lists(st.sampled_from(words)).map(" ".join)
any_text = prose | st.text(max_size=30)
token_text = st.lists(st.integers(0, 3), max_size=5)
batch = st.lists(token_text, min_size=1, max_size=4)


def assert_parity(recovered: str, true: str) -> None:
    ours, theirs = (
        score_texts([[0]], [[1]], lambda tokens: (recovered, true)[tokens[0]]),
        SCORER.score(true, recovered),
    )
    for name in ("rouge1", "rouge2", "rougeL"):
        assert getattr(ours, name) == pytest.approx(theirs[name].fmeasure, abs=ROUNDING), name


@quick
@given(any_text, any_text)
def test_rouge_equals_rouge_score(recovered, true):
    assert_parity(recovered, true)


@pytest.mark.parametrize(
    ("recovered", "true"),
    [
        ("The quick brown dog jumps on the log.", "The quick brown fox jumps over the lazy dog"),
        ("the the the", "the"),
        ("a b c d", "d c b a"),
        ("Don't STOP—now", "don t stop now"),
        ("naïve İstanbul", "nave istanbul"),
        ("word", "word"),
        ("", ""),
        ("", "something"),
        ("?!", "?!"),
    ],
)
def test_rouge_equals_rouge_score_on_fixed_texts(recovered, true):
    assert_parity(recovered, true)


def test_rouge_by_hand():
    assert rouge_n("abcd", "abxd", 1) == 3 / 4
    assert rouge_n("abcd", "abxd", 2) == 1 / 3
    assert rouge_l("abcd", "acbd") == 3 / 4
    with pytest.raises(InputError, match="at least 1"):
        rouge_n("ab", "ab", 0)


def brute_force(recovered, true) -> tuple[int, float]:
    """The best (number of exact pairs, sum of ROUGE-1 + ROUGE-2) over all injective partial assignments."""
    values = []
    for chosen in permutations([*recovered, *[None] * len(true)], len(true)):
        pairs = list(zip(chosen, true, strict=True))
        similarity = sum(rouge_n(found or [], text, n) for found, text in pairs for n in (1, 2))
        values.append((sum(found == text for found, text in pairs), similarity))
    return max(values)


@quick
@given(st.lists(token_text, max_size=3), st.lists(token_text, min_size=1, max_size=3))
def test_assignment_equals_brute_force(recovered, true):
    score = score_texts(recovered, true)
    num_exact, similarity = brute_force(recovered, true)
    assert score.exact_rate == pytest.approx(num_exact / len(true))
    assert (score.rouge1 + score.rouge2) * len(true) == pytest.approx(similarity, abs=ROUNDING)


def test_exact_matches_come_before_similarity():
    whole, first_half, second_half = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4], [5, 6, 7, 8]
    crosswise = sum(rouge_n(half, whole, n) for half in (first_half, second_half) for n in (1, 2))
    assert crosswise > 2  # what the exact pair alone is worth
    score = score_texts([whole, first_half], [whole, second_half])
    assert score.assignment == (0, None)
    assert score.exact_rate == 0.5


@quick
@given(st.lists(token_text, max_size=4), batch, st.randoms(use_true_random=False))
def test_order_of_the_batch_does_not_matter(recovered, true, random):
    score = score_texts(recovered, true)
    recovered, true = random.sample(recovered, len(recovered)), random.sample(true, len(true))
    shuffled = score_texts(recovered, true)
    unordered = {"assignment": (), "exact": (), "near_exact": ()}
    assert replace(shuffled, **unordered) == replace(score, **unordered)
    assert sorted(shuffled.exact) == sorted(score.exact)


@quick
@given(st.lists(token_text, max_size=4), batch)
def test_bounds_and_one_to_one(recovered, true):
    score = score_texts(recovered, true)
    for name in ("exact_rate", "rouge1", "rouge2", "rougeL", "token_precision", "token_recall"):
        assert 0 <= getattr(score, name) <= 1, name
    used = [index for index in score.assignment if index is not None]
    assert len(score.assignment) == score.num_true == len(true)
    assert len(set(used)) == len(used)
    assert set(used) <= set(range(score.num_recovered))
    assert score.num_false <= score.num_recovered == len(recovered)


@quick
@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=5), min_size=1, max_size=4))
def test_self_score_is_perfect(true):
    score = score_texts(true, true)
    assert score.exact_rate == score.rouge1 == score.rouge2 == score.rougeL == 1
    assert score.token_precision == score.token_recall == 1
    assert score.num_false == 0


def test_one_recovered_text_cannot_match_two_equal_true_texts():
    score = score_texts([[1, 2]], [[1, 2], [1, 2]])
    assert score.assignment == (0, None)
    assert score.exact_rate == score.rouge1 == score.rouge2 == score.token_recall == 0.5
    assert score.token_precision == 1
    assert score_texts([[1, 2], [1, 2]], [[1, 2], [1, 2]]).exact_rate == 1


def test_unrelated_texts_score_nothing():
    score = score_texts([[1, 2, 3], [4, 5]], [[6, 7], [8, 9]])
    assert score.exact_rate == score.rouge1 == score.rouge2 == score.rougeL == 0
    assert score.token_precision == score.token_recall == 0
    assert score.num_false == 2
    assert score.assignment == (None, None)


def test_shuffled_words_are_a_bag_and_not_a_text():
    score = score_texts([[4, 3, 2, 1]], [[1, 2, 3, 4]])
    assert score.exact_rate == score.rouge2 == 0
    assert score.rouge1 == score.token_precision == score.token_recall == 1
    assert score.num_false == 1


def test_equal_words_from_other_tokens_are_not_exact():
    score = score_texts([[1]], [[0]], decode=lambda tokens: ["a cat", "A cat!"][tokens[0]])
    assert score.rouge1 == score.rouge2 == score.rougeL == 1
    assert score.exact_rate == 0


READ = ("a cat", "a cat", "a dog sat on the mat.", "a dog sat on the mat", "something else", "")


def read(tokens):
    """Each token is a whole text."""
    return READ[tokens[0]]


def test_another_tokenisation_is_the_same_text():
    score = score_texts([[1]], [[0]], read=read)
    assert score.exact_rate == 1
    assert score.num_false == 0
    assert score_texts([[1]], [[0]]).exact_rate == 0


def test_a_text_but_for_its_full_stop_is_near_exact():
    score = score_texts([[3], [4]], [[2]], read=read)
    assert (score.exact, score.near_exact) == ((False,), (True,))
    assert score.exact_rate == 0
    assert score.assignment == (0,)
    assert score.num_false == 2  # neither is a text of the batch


def test_near_exact_pairs_come_before_many_words_in_common():
    """Words in common are compared by tokens here, of which the near-exact text has none."""
    score = score_texts([[2, 7], [3]], [[2, 9]], read=lambda tokens: READ[tokens[0]] + " x" * (tokens[-1] == 7) * 9)
    assert score.assignment == (1,)
    assert score.near_exact == (True,)


def test_what_reads_as_nothing_equals_nothing_but_itself():
    assert score_texts([[5, 5]], [[5]], read=read).exact_rate == 0
    assert score_texts([[5]], [[5]], read=read).exact_rate == 1
    assert score_texts([[0]], [[5]], read=read).near_exact == (False,)


def test_a_class_of_alternatives_that_holds_the_true_text_is_near_exact_and_not_false():
    stands_for = [lambda tokens: list(tokens) == [4], lambda tokens: False]
    score = score_texts([[0], [2]], [[4]], read=read, covers=stands_for)
    assert (score.exact, score.near_exact, score.assignment) == ((False,), (True,), (0,))
    assert score.num_false == 1
    with pytest.raises(InputError, match="one entry for each"):
        score_texts([[0]], [[4]], covers=stands_for)


def test_empty_things():
    nothing = score_texts([], [[1, 2]])
    assert nothing.exact_rate == nothing.rouge1 == nothing.token_precision == nothing.token_recall == 0
    empty_text = score_texts([[]], [[]])
    assert empty_text.exact_rate == 1
    assert empty_text.rouge1 == 0
    with pytest.raises(InputError, match="no text"):
        score_texts([[1]], [])


def test_arrays_and_tensors_are_token_sequences():
    assert score_texts([np.array([1, 2])], [torch.tensor([1, 2])]).exact_rate == 1
    assert score_texts(torch.tensor([[1, 2]]), [[1, 2]]).exact_rate == 1


@pytest.mark.parametrize("recovered", [[1, 2], ["text"], [[1.5]]])
def test_what_is_no_token_sequence_is_refused(recovered):
    with pytest.raises(InputError, match="token ids"):
        score_texts(recovered, [[1, 2]])
