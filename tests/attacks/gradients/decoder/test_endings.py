"""Last tokens, multiplicities and ends, given the right prefixes; and with some of them missing or wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import unmask
from unmask.attacks.gradients.decoder.endings import (
    EndingsRead,
    TextEnding,
    endings_at_leaves,
    endings_of_classification,
    endings_of_next_token,
    unit_weight,
)
from unmask.attacks.gradients.decoder.labels import EXPLAINED
from unmask.attacks.gradients.decoder.last_block_rows import LastBlockRows, last_block_rows
from unmask.attacks.gradients.decoder.prefix_search import Forest
from unmask.linalg.gap import Gap
from unmask.models import Model, Role
from unmask.proof.label_flow import label_layer
from unmask.proof.update_rows import arrivals_at
from unmask.protocols import observe_gradients
from unmask.recovery import Status

DECODERS = ("tiny_gpt2", "tiny_llama", "tiny_qwen2", "tiny_mistral")
TEXTS = [[5, 17, 99, 17, 250], [5, 17, 99, 301], [400, 3, 8], [44, 45, 46, 47, 48, 49]]
Text = Sequence[int]


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def forest_of(branches: Sequence[Text]) -> Forest:
    """All prefixes of the branches, as if a search had found them."""
    branches = sorted({tuple(branch) for branch in branches if len(branch)})
    nodes = {(0, branch[:length]): 0.0 for branch in branches for length in range(1, len(branch) + 1)}
    inner = {tokens[:-1] for _, tokens in nodes}
    leaves = [(0, branch) for branch in branches if branch not in inner]
    return Forest(nodes, leaves, Gap(0.0, 0.1), 0)


def rows_of(model: Model, branches: Sequence[Text]) -> LastBlockRows:
    """Rows of all prefixes of the branches."""
    return last_block_rows(model, forest_of(branches), 2**30)


def last_gradient(model: Model, texts: Sequence[Text], **options: str) -> Tensor:
    gradient = observe_gradients(model, texts, **options).linear(model, Role.MLP_OUT, model.num_blocks - 1)
    assert gradient is not None
    return gradient


def read(model: Model, texts: Sequence[Text], branches: Sequence[Text] | None = None) -> list[TextEnding]:
    """Endings of next-token training; the branches that are known are the texts without their last tokens."""
    return reading_of(model, texts, branches).endings


def reading_of(model: Model, texts: Sequence[Text], branches: Sequence[Text] | None = None) -> EndingsRead:
    rows = rows_of(model, [text[:-1] for text in texts] if branches is None else branches)
    return endings_of_next_token(model, rows, last_gradient(model, texts), 2**30)


def counted(endings: Sequence[TextEnding]) -> Counter[tuple[int, ...]]:
    return Counter({ending.node[1]: ending.count for ending in endings})


def as_counter(texts: Sequence[Text]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(text) for text in texts)


# ---- next token


def test_every_text_gets_its_last_token(decoder):
    endings = read(decoder, TEXTS)
    assert counted(endings) == as_counter(TEXTS)
    # Float32 leaves 1e-5 of an arriving gradient; EXPLAINED, a thousand times as much, would accept a sloppy fit.
    assert max(ending.residual for ending in endings) < EXPLAINED / 10


def test_a_text_that_ends_inside_another_is_seen(decoder):
    texts = [*TEXTS, TEXTS[3][:3], TEXTS[3][:2]]
    assert counted(read(decoder, texts)) == as_counter(texts)


def test_several_last_tokens_behind_one_prefix(decoder):
    texts = [[5, 17, last] for last in (3, 4, 90, 91)]
    assert counted(read(decoder, texts)) == as_counter(texts)


@pytest.mark.parametrize("num_labels", [6, 8, 12, 20])
def test_labels_that_are_not_all_found_make_no_false_text_certain(decoder, num_labels):
    """Where some labels behind u·y are not found, y seems to end there; what is left unexplained must say so."""
    texts = [[5, 17, last] for last in range(100, 100 + num_labels)]
    believed = [ending for ending in read(decoder, texts) if ending.residual <= EXPLAINED]
    assert counted(believed) <= as_counter(texts)


def test_texts_that_occur_more_than_once_are_counted(decoder):
    texts = [TEXTS[0], TEXTS[2], TEXTS[2], TEXTS[2], TEXTS[3]]
    assert counted(read(decoder, texts)) == as_counter(texts)


def test_counts_are_right_even_if_most_texts_occur_more_than_once(decoder):
    texts = [TEXTS[0]] * 3 + [TEXTS[3]] * 2 + [TEXTS[2]]
    assert counted(read(decoder, texts)) == as_counter(texts)


def label_counts(texts: Sequence[Text]) -> Counter[tuple[int, ...]]:
    """How often each prefix is followed by its next token."""
    return Counter(tuple(text[: end + 1]) for text in texts for end in range(1, len(text)))


@settings(max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.lists(st.sampled_from([5, 17, 99, 400]), min_size=2, max_size=5), min_size=1, max_size=6))
def test_any_small_batch_is_counted(tiny_gpt2, texts):
    """Up to a factor that all counts share: the mean loss of a batch and of the batch twice are the same."""
    factor = math.gcd(*label_counts(texts).values())
    expected = Counter({text: count // factor for text, count in as_counter(texts).items()})
    assert counted(read(tiny_gpt2, texts)) == expected


def test_a_text_that_was_missed_does_not_spoil_the_others(decoder):
    known = [text[:-1] for text in TEXTS[:3]]
    endings = read(decoder, TEXTS, branches=known)
    assert counted(endings) == as_counter(TEXTS[:3])
    # What the missed text adds is projected out; the labels still explain what is left.
    assert max(ending.residual for ending in endings) < EXPLAINED


def test_a_prefix_that_is_not_in_the_batch_ends_nothing(decoder):
    known = [*(text[:-1] for text in TEXTS), [300, 301, 302]]
    assert counted(read(decoder, TEXTS, branches=known)) == as_counter(TEXTS)


@pytest.mark.parametrize("budget", [1, 2**20])
def test_a_small_budget_reads_the_same(tiny_llama, budget):
    rows = rows_of(tiny_llama, [text[:-1] for text in TEXTS])
    reading = endings_of_next_token(tiny_llama, rows, last_gradient(tiny_llama, TEXTS), budget)
    assert counted(reading.endings) == as_counter(TEXTS)


def test_labels_name_the_last_token_of_every_prefix(decoder):
    reading = reading_of(decoder, TEXTS)
    expected = {(0, tuple(text[:end])) for text in TEXTS for end in range(2, len(text) + 1)}
    assert reading.names == {node: frozenset({node[1][-1]}) for node in expected}
    assert not reading.has_masked_labels


def test_of_equal_tokens_the_one_that_the_label_names_is_told(decoder):
    """The search has 17 for 17 and 18; the output layer tells them apart."""
    texts = [[5, 18, 99, 301], [400, 3, 8]]
    gradient = last_gradient(decoder, texts)
    true = rows_of(decoder, [text[:-1] for text in texts])
    shown = {(0, (5, 18)): (0, (5, 17)), (0, (5, 18, 99)): (0, (5, 17, 99))}
    rows = LastBlockRows([shown.get(node, node) for node in true.nodes], true.hidden, true.added, true.leave)
    reading = endings_of_next_token(decoder, rows, gradient, 2**30, {17: (17, 18)})
    assert reading.names[0, (5, 17)] == {18}
    assert counted(reading.endings) == as_counter([[5, 17, 99, 301], [400, 3, 8]])


# ---- classification at the last token


def classified(
    model: Model, texts: Sequence[Text], pooling: str | None = None, known: str | None = None
) -> list[TextEnding] | None:
    """Ends of classified texts, where the client's pooling is `pooling` and the adversary knows `known`."""
    options = {} if pooling is None else {"pooling": pooling}
    evidence = observe_gradients(model, texts, task="classification", **options)
    nodes, arrivals, _ = arrivals_at(evidence, model, forest_of(texts).leaves)
    assert arrivals is not None
    return endings_of_classification(model, nodes, arrivals.sizes, known)


def test_gradient_arrives_only_at_the_ends_of_classified_texts(decoder):
    texts = [*TEXTS, TEXTS[3][:3]]
    for known in (None, "last"):
        endings = classified(decoder, texts, known=known)
        assert endings is not None
        assert counted(endings) == as_counter(texts)


def test_where_every_position_has_gradient_ends_are_not_told(decoder):
    for known in (None, "mean"):
        assert classified(decoder, TEXTS, pooling="mean", known=known) is None


def test_how_often_a_single_token_is_repeated_is_open_where_positions_are_rotary(tiny_llama, tiny_gpt2):
    for model, is_open in ((tiny_llama, True), (tiny_gpt2, False)):
        endings = classified(model, [[7], [44, 45, 46]])
        assert endings is not None
        runs = {ending.node[1]: ending.has_open_run for ending in endings}
        assert runs == {(7,): is_open, (44, 45, 46): False}


def test_a_leaf_of_one_token_is_an_open_run_where_positions_are_rotary(tiny_llama, tiny_gpt2):
    for model, is_open in ((tiny_llama, True), (tiny_gpt2, False)):
        endings = endings_at_leaves(model, [(0, (7,)), (0, (44, 45))])
        assert [ending.has_open_run for ending in endings] == [is_open, False]


# ---- weights of labels


def test_the_unit_is_the_largest_of_which_all_weights_are_multiples():
    assert unit_weight([]) is None
    assert unit_weight([0.1, 0.2, 0.3]) == pytest.approx(0.1)
    assert unit_weight([0.2, 0.2]) == pytest.approx(0.2)
    assert unit_weight([1.0, 2.0**0.5, 3.0**0.5] * 2) != pytest.approx(1.0)


def test_the_output_projection_tells_ends_where_the_down_projection_is_missing(tiny_llama):
    texts = [(5, 17, 99), (5, 17), (44, 45, 46), (44, 45, 46)]
    whole = unmask.observe_gradients(tiny_llama, texts)
    assert label_layer(whole, tiny_llama) is Role.MLP_OUT
    attention = whole.with_tensors({name: g for name, g in whole.gradients.items() if "mlp" not in name})
    assert label_layer(attention, tiny_llama) is Role.ATTENTION_OUT
    recovery = unmask.recover_text(attention, tiny_llama)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert sorted(recovery.value.expand()) == sorted(texts)
    neither = attention.with_tensors({name: g for name, g in attention.gradients.items() if "o_proj" not in name})
    assert label_layer(neither, tiny_llama) is None
    assert not unmask.recover_text(neither, tiny_llama).value.certain
