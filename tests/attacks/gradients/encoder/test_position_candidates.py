"""Places: their order, what may stand where, and rows, queries, keys and values against the model's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.attacks.gradients.encoder_batches import END, START, as_places

from unmask.attacks.gradients.encoder.position_candidates import Frame, PositionCandidates
from unmask.models import Model

TOKENS = [START, END, 17, 99, 250]
NUM_POSITIONS = 6


def shares() -> torch.Tensor:
    random = torch.rand(NUM_POSITIONS, len(TOKENS), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return random / random.sum(0)


@torch.no_grad()
def places_of(model: Model, end_type: int = 0, by_type: torch.Tensor | None = None) -> PositionCandidates:
    return PositionCandidates.of(model, torch.tensor(TOKENS), shares(), Frame(START, END, end_type), by_type)


@pytest.fixture(params=[0, 1], ids=["texts", "pairs"])
def places(request, tiny_bert) -> PositionCandidates:
    return places_of(tiny_bert, request.param)


def described(places: PositionCandidates) -> list[tuple[int, int, int]]:
    return list(zip(places.position.tolist(), places.kind.tolist(), places.token.tolist(), strict=True))


def test_every_token_at_every_position_of_every_type_once(places):
    expected = [(p, k, t) for p in range(NUM_POSITIONS) for k in range(places.num_types) for t in TOKENS]
    assert described(places) == expected
    assert places.num_candidates == len(expected)


@torch.no_grad()
def test_rows_queries_keys_and_values_are_the_models(tiny_bert, places):
    for place, (position, kind, token) in enumerate(described(places)):
        p, k, t = (torch.tensor([number]) for number in (position, kind, token))
        row = tiny_bert.first_input(t, p, k)
        torch.testing.assert_close(places.rows[[place]], row)
        queries, keys, values = tiny_bert.queries_keys_values(0, row, p)
        torch.testing.assert_close(places.keys[[place]], keys)
        torch.testing.assert_close(places.values[[place]], values)
        torch.testing.assert_close(places.queries[[place]], queries / tiny_bert.head_width**0.5)


def test_shares_are_those_of_token_and_position(tiny_bert):
    places = places_of(tiny_bert)
    for place, (position, _, token) in enumerate(described(places)):
        assert float(places.share[place]) == float(shares()[position, TOKENS.index(token)])


def test_shares_of_pairs_are_the_positions_times_the_types(tiny_bert):
    by_type = torch.tensor([[1.0, 0.5, 1.0, 0.0, 0.2], [0.0, 0.5, 0.0, 1.0, 0.8]], dtype=torch.float64)
    places = places_of(tiny_bert, 1, by_type)
    for place, (position, kind, token) in enumerate(described(places)):
        index = TOKENS.index(token)
        assert float(places.share[place]) == pytest.approx(float(shares()[position, index] * by_type[kind, index]))


def shapes(places: PositionCandidates) -> Iterator[list[tuple[int, int, bool]]]:
    """(position, type, whether it closes) of every text that fits: START … END, of a pair START … END … END."""
    for length in range(2, NUM_POSITIONS + 1):
        for middle in [0] if places.frame.end_type == 0 else range(1, length - 1):
            kinds = [0] * length if middle == 0 else [0] * (middle + 1) + [1] * (length - middle - 1)
            yield [(p, kind, p in {middle, length - 1} - {0}) for p, kind in enumerate(kinds)]


def test_possible_places_are_those_that_some_text_uses(places):
    used = {row for shape in shapes(places) for row in shape}
    for place, (position, kind, token) in enumerate(described(places)):
        fills = (position, kind, token == END) in used and token != START
        opens = (position, kind, token) == (0, 0, START)
        assert bool(places.is_possible[place]) == (opens if position == 0 else fills)


def test_what_a_place_is(places):
    last = places.num_types - 1
    for place, (position, kind, token) in enumerate(described(places)):
        assert bool(places.is_frame[place]) == (token in (START, END))
        assert bool(places.closes[place]) == (token == END and position > 0)
        assert bool(places.is_end[place]) == (token == END and position > 0 and kind == last)


def test_two_places_fit_if_some_text_has_both(places):
    together = {
        (one[:2], other[:2])
        for shape in shapes(places)
        for one in shape
        for other in shape
        if one != other and not (one[2] or other[2])
    }
    inner = [
        place for place in range(places.num_candidates) if places.is_possible[place] and not places.is_frame[place]
    ]
    for one in inner:
        for other in inner:
            wanted = (described(places)[one][:2], described(places)[other][:2])
            assert places.fit(one, other) == (wanted in together)


def test_the_start_is_the_first_token_at_position_0(places):
    assert described(places)[places.start] == (0, 0, START)
    assert places.is_possible.nonzero()[0, 0] == places.start  # the only possible place at position 0


def test_alternatives_stand_at_the_same_position_and_frame_nothing(places):
    for place, (position, kind, _) in enumerate(described(places)):
        found = [described(places)[other] for other in places.alternatives(place).tolist()]
        assert found == [(position, kind, token) for token in TOKENS if token not in (START, END)]


def test_tokens_of_a_text(places):
    tokens = (START, 250, 17, END)
    assert places.tokens_of(as_places(places, tokens)) == tokens
