"""Labels read off arriving gradients, against sums that are written out and the true next tokens of a batch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from unmask.attacks.gradients.decoder.endings import last_down_projection
from unmask.attacks.gradients.decoder.labels import LabelReader, arriving_gradients
from unmask.attacks.gradients.decoder.last_block_rows import LastBlockRows, last_block_rows
from unmask.attacks.gradients.decoder.prefix_search import Forest
from unmask.linalg.gap import Gap
from unmask.models import Model
from unmask.protocols import observe_gradients

TEXTS = [(5, 17, 99, 250), (5, 17, 3), (5, 17, 3), (44, 45, 46, 47)]
INNER = [text[:-1] for text in TEXTS]


@pytest.fixture(params=["tiny_gpt2", "tiny_llama"])
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def rows_of(model: Model, leaves: list[tuple[int, ...]]) -> LastBlockRows:
    nodes = {(0, leaf[:length]): 0.0 for leaf in leaves for length in range(1, len(leaf) + 1)}
    return last_block_rows(model, Forest(nodes, [(0, leaf) for leaf in leaves], Gap(0.0, 0.1), 0), 2**30)


def follow(texts: list[tuple[int, ...]]) -> dict[tuple[int, ...], Counter[int]]:
    """How often each token follows each prefix."""
    counts: dict[tuple[int, ...], Counter[int]] = {}
    for text in texts:
        for end in range(1, len(text)):
            counts.setdefault(text[:end], Counter())[text[end]] += 1
    return counts


def reader_of(model: Model, rows: LastBlockRows, texts=TEXTS, budget: int = 2**30) -> LabelReader:
    gradient, _ = last_down_projection(observe_gradients(model, [list(text) for text in texts]), model)
    arrived, foreign = arriving_gradients(rows.hidden, gradient)
    return LabelReader(model.token_head, rows, arrived, foreign, budget)


def test_least_squares_gives_back_what_arrived_and_names_foreign_rows():
    generator = torch.Generator().manual_seed(0)
    hidden, delta = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((5, 40), (5, 8)))
    arrived, foreign = arriving_gradients(hidden, hidden.T @ delta)
    torch.testing.assert_close(arrived, delta)
    assert foreign.shape == (8, 0)
    _, foreign = arriving_gradients(hidden[:4], hidden.T @ delta)  # one row is not known
    unit = delta[4] / delta[4].norm()
    torch.testing.assert_close((foreign.T @ unit).abs(), torch.ones(1, dtype=torch.float64))


@torch.no_grad()
@pytest.mark.parametrize("budget", [1, 2**30])
def test_labels_are_the_next_tokens_with_their_counts(model, budget):
    rows = rows_of(model, [*INNER[:2], INNER[3]])
    found = reader_of(model, rows, budget=budget).labels()
    expected = follow(TEXTS)
    unit = min(weight for labels in found for weight in labels.weights.values())
    for (_, prefix), labels in zip(rows.nodes, found, strict=True):
        assert {token: round(weight / unit) for token, weight in labels.weights.items()} == expected[prefix]
        assert labels.residual < 1e-2


@torch.no_grad()
def test_a_prefix_that_is_not_in_the_batch_is_silent(model):
    rows = rows_of(model, [*INNER[:2], INNER[3], (300, 301)])
    reader = reader_of(model, rows)
    silent = {rows.nodes[u][1] for u in reader.silent}
    assert silent == {(300,), (300, 301)}
    assert all(not labels.weights for u, labels in enumerate(reader.labels()) if u in reader.silent)
    # One occurrence behind it would have been seen, so nothing is known of what it predicts.
    assert set(reader.surest(weight=1.0).values()) == {None}


@torch.no_grad()
def test_labels_are_read_beside_rows_that_are_not_known(model):
    """A text is missing; the other's labels are still right, up to a common factor."""
    rows = rows_of(model, [TEXTS[0][:-1]])
    found = reader_of(model, rows, texts=[TEXTS[0], (44, 45)]).labels()
    assert [list(labels.weights) for labels in found] == [[17], [99], [250]]
