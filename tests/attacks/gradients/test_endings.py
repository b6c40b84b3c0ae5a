"""Last tokens, multiplicities and ends, given the right prefixes; and with some of them missing or wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from unmask.attacks.gradients.endings import Ending, endings_of_classification, endings_of_next_token
from unmask.attacks.gradients.labels import EXPLAINED
from unmask.attacks.gradients.node_rows import LastBlockRows, last_block_rows
from unmask.attacks.gradients.prefix_search import Forest
from unmask.linalg.gap import Gap
from unmask.models import Model, Role
from unmask.protocols import observe_gradients

DECODERS = ("tiny_gpt2", "tiny_llama", "tiny_qwen2", "tiny_mistral")
TEXTS = [[5, 17, 99, 17, 250], [5, 17, 99, 301], [400, 3, 8], [44, 45, 46, 47, 48, 49]]
Text = Sequence[int]


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def rows_of(model: Model, branches: Sequence[Text]) -> LastBlockRows:
    """Rows of all prefixes of the branches, as if a search had found them."""
    leaves = sorted({tuple(branch) for branch in branches if len(branch)})
    nodes = {(0, leaf[:length]): 0.0 for leaf in leaves for length in range(1, len(leaf) + 1)}
    return last_block_rows(model, Forest(nodes, [(0, leaf) for leaf in leaves], Gap(0.0, 0.1), 0), 2**30)


def last_gradient(model: Model, texts: Sequence[Text], **options: str) -> Tensor:
    gradient = observe_gradients(model, texts, **options).linear(model, Role.MLP_OUT, model.num_blocks - 1)
    assert gradient is not None
    return gradient


def read(model: Model, texts: Sequence[Text], branches: Sequence[Text] | None = None) -> list[Ending]:
    """Endings of next-token training; the branches that are known are the texts without their last tokens."""
    rows = rows_of(model, [text[:-1] for text in texts] if branches is None else branches)
    generator = torch.Generator().manual_seed(0)
    return endings_of_next_token(model, rows, last_gradient(model, texts), generator, 2**30)


def counted(endings: Sequence[Ending]) -> Counter[tuple[int, ...]]:
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


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    generator = torch.Generator().manual_seed(0)
    endings = endings_of_next_token(tiny_llama, rows, last_gradient(tiny_llama, TEXTS), generator, budget)
    assert counted(endings) == as_counter(TEXTS)


# ---- classification at the last token


def classified(model: Model, texts: Sequence[Text], **options: str) -> list[Ending] | None:
    gradient = last_gradient(model, texts, task="classification", **options)
    return endings_of_classification(model, rows_of(model, texts), gradient)


def test_only_the_ends_of_classified_texts_are_in_the_last_span(decoder):
    texts = [*TEXTS, TEXTS[3][:3]]
    endings = classified(decoder, texts)
    assert endings is not None
    assert counted(endings) == as_counter(texts)
    # Rows at rounding level; a prefix that ends nothing is 0.1 and more away.
    assert max(ending.residual for ending in endings) < EXPLAINED / 10


def test_where_every_position_has_gradient_the_span_cannot_tell(decoder):
    assert classified(decoder, TEXTS, pooling="mean") is None


def test_a_text_of_one_token_is_not_certain_where_positions_are_rotary(tiny_llama, tiny_gpt2):
    for model, is_certain in ((tiny_llama, False), (tiny_gpt2, True)):
        endings = classified(model, [[7], [44, 45, 46]])
        assert endings is not None
        residuals = {ending.node[1]: ending.residual for ending in endings}
        assert (residuals[7,] <= EXPLAINED) is is_certain
        assert residuals[44, 45, 46] <= EXPLAINED
