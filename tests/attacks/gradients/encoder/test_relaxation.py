"""The relaxed system: it vanishes at the texts of the batch, its derivative is right, and weights round to texts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.attacks.gradients.encoder_batches import (
    BATCH,
    END,
    START,
    as_places,
    classified,
    classified_pairs,
    pair_kinds,
    problem_of,
)
from torch import Tensor

from unmask.attacks.gradients.encoder.attending_rows import ProbedLayer
from unmask.attacks.gradients.encoder.position_candidates import Text
from unmask.attacks.gradients.encoder.problem import Problem
from unmask.attacks.gradients.encoder.relaxation import Relaxation, whiten_probes

PAIRS = [(START, 17, 99, END, 250, END), (START, 400, 3, END, 21, 33, END)]
PRIOR = 1 / 3
# Probes are orthogonal to spans of float32 gradients, so the batch's rows leave 1e-7 to 1e-5 of themselves.
VANISHES, REMAINS = 1e-4, 1e-2


@pytest.fixture(scope="module")
def problem(tiny_bert) -> Problem:
    return problem_of(tiny_bert, classified(tiny_bert))


@pytest.fixture(scope="module")
def pair_problem(tiny_bert) -> Problem:
    return problem_of(tiny_bert, classified_pairs(tiny_bert, PAIRS))


def relaxation_of(problem: Problem, num_probes: int = 16) -> Relaxation:
    """Over all possible places, in float64."""
    generator = torch.Generator().manual_seed(0)
    probed = [ProbedLayer(site, site.span.probes(num_probes, generator)) for site in problem.sites]
    return Relaxation(problem.precise, problem.places, problem.places.is_possible.nonzero()[:, 0], probed)


def weights_of(relaxation: Relaxation, text: Text) -> Tensor:
    """1 at the places of a text, 0 elsewhere."""
    return torch.isin(relaxation.chosen, torch.tensor(text)).double()


def random_weights(relaxation: Relaxation, seed: int = 0) -> Tensor:
    return torch.rand(len(relaxation.chosen), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def nothing_removed(problem: Problem) -> Tensor:
    return torch.zeros(problem.places.num_candidates, dtype=torch.bool)


@torch.no_grad()
def residual(relaxation: Relaxation, rows: Sequence[int], weights: Tensor) -> float:
    return float(relaxation.rows(rows).residual(weights).norm())


# ---- the system


@pytest.mark.parametrize("text", BATCH)
def test_every_probe_vanishes_on_every_row_of_a_text_of_the_batch(problem, text):
    relaxation, places = relaxation_of(problem), as_places(problem.places, text)
    scale = residual(relaxation, places, random_weights(relaxation))
    assert residual(relaxation, places, weights_of(relaxation, places)) < VANISHES * scale


@pytest.mark.parametrize("text", BATCH)
def test_one_wrong_token_is_seen_by_every_row(problem, text):
    relaxation = relaxation_of(problem)
    wrong = as_places(problem.places, (*text[:1], 60 if text[1] != 60 else 99, *text[2:]))
    scale = residual(relaxation, wrong, random_weights(relaxation))
    for row in wrong:
        assert residual(relaxation, [row], weights_of(relaxation, wrong)) > REMAINS * scale


@pytest.mark.parametrize("text", PAIRS)
def test_every_probe_vanishes_on_every_row_of_a_pair_of_the_batch(pair_problem, text):
    relaxation = relaxation_of(pair_problem)
    places = as_places(pair_problem.places, text, pair_kinds(text))
    scale = residual(relaxation, places, random_weights(relaxation))
    assert residual(relaxation, places, weights_of(relaxation, places)) < VANISHES * scale


@torch.no_grad()
def test_rows_are_those_of_the_models_own_forward_pass(problem):
    """Weights 0 and 1 are a mask: attention over the text alone."""
    model, places = problem.precise, problem.places
    text = as_places(places, BATCH[1])
    relaxation = relaxation_of(problem)
    tokens, positions = torch.tensor([BATCH[1]]), torch.arange(len(BATCH[1]))[None]
    states = model.embed(tokens, positions)
    mixed = model.mixed_values(0, states, positions, torch.ones_like(tokens, dtype=torch.bool))
    slow = torch.cat([layer.site.rows(model, states, mixed)[0] @ layer.probes for layer in relaxation.probed], dim=1)
    fast = relaxation.rows(text).residual(weights_of(relaxation, text))
    torch.testing.assert_close(fast, slow.flatten(), atol=1e-12, rtol=1e-9)


@torch.no_grad()
def test_a_common_factor_of_all_weights_changes_nothing(problem):
    relaxation = relaxation_of(problem)
    rows, weights = relaxation.rows([relaxation.places.start]), random_weights(relaxation)
    torch.testing.assert_close(rows.residual(3 * weights), rows.residual(weights))


# ---- its derivative


# ---- filled positions


def shapes_of_texts(problem: Problem) -> list[tuple[int, ...]]:
    longest = problem.places.num_positions
    return [(START, *[17] * (length - 2), END) for length in range(2, longest + 1)]


@torch.no_grad()
def test_a_text_of_any_length_fills_every_position(problem):
    relaxation = relaxation_of(problem)
    for text in shapes_of_texts(problem):
        weights = weights_of(relaxation, as_places(problem.places, text))
        torch.testing.assert_close(relaxation._fill @ weights, relaxation._fill_values)


@torch.no_grad()
def test_a_pair_of_any_lengths_fills_every_position(pair_problem):
    relaxation, longest = relaxation_of(pair_problem), pair_problem.places.num_positions
    for first, second in itertools.product(range(longest), repeat=2):
        text = (START, *[17] * first, END, *[250] * second, END)
        if len(text) <= longest:
            weights = weights_of(relaxation, as_places(pair_problem.places, text, pair_kinds(text)))
            torch.testing.assert_close(relaxation._fill @ weights, relaxation._fill_values)


@torch.no_grad()
@pytest.mark.parametrize(
    "tokens",
    [(START, 17, 99, 250), (START, END, 17, END)],
    ids=["a text without an end", "a text that goes on behind its end"],
)
def test_what_is_no_text_does_not_fill(problem, tokens):
    relaxation = relaxation_of(problem)
    weights = weights_of(relaxation, as_places(problem.places, tokens))
    assert float((relaxation._fill @ weights - relaxation._fill_values).abs().max()) > 0.5


@torch.no_grad()
def test_two_tokens_at_one_position_do_not_fill(problem):
    relaxation = relaxation_of(problem)
    text = as_places(problem.places, BATCH[0])
    other = as_places(problem.places, (START, 99))[1]
    weights = weights_of(relaxation, (*text, other))
    assert float((relaxation._fill @ weights - relaxation._fill_values).abs().max()) > 0.5


# ---- bounds


@pytest.mark.parametrize("position", [1, 3, 5])
def test_anchors_are_in_the_text_and_exclude_what_cannot_be(problem, position):
    """Text 0 has six tokens; its last, position 5, is the end."""
    relaxation, places = relaxation_of(problem), problem.places
    text = as_places(places, BATCH[0])
    lower, upper = relaxation.bounds([text[position]], nothing_removed(problem))
    weights = weights_of(relaxation, text)
    assert bool(((lower <= weights) & (weights <= upper)).all())  # the text itself stays in the box
    sure = weights_of(relaxation, (places.start, text[position]))
    assert torch.equal(lower, sure)
    here = relaxation.position == position
    assert torch.equal(upper[here], sure[here])  # nothing else stands there
    assert not bool(upper[relaxation.is_end & (relaxation.position < position)].any())
    if position == 5:
        assert not bool(upper[relaxation.position > 5].any())


def test_removed_places_are_shut(problem):
    relaxation = relaxation_of(problem)
    text, other = (as_places(problem.places, tokens) for tokens in BATCH[:2])
    removed = nothing_removed(problem)
    removed[list(other[1:3])] = True
    lower, upper = relaxation.bounds([text[1]], removed)
    assert float(upper[relaxation.index_of(other[2])]) == 0
    assert float(lower[relaxation.index_of(text[1])]) == 1


def test_an_anchor_that_was_removed_is_open_again(problem):
    relaxation, text = relaxation_of(problem), as_places(problem.places, BATCH[0])
    removed = nothing_removed(problem)
    removed[text[1]] = True
    lower, upper = relaxation.bounds([text[1]], removed)
    assert float(lower[relaxation.index_of(text[1])]) == float(upper[relaxation.index_of(text[1])]) == 1


@pytest.mark.parametrize("text", PAIRS)
def test_every_place_of_a_pair_as_an_anchor_keeps_the_pair_in_the_box(pair_problem, text):
    relaxation = relaxation_of(pair_problem)
    places = as_places(pair_problem.places, text, pair_kinds(text))
    weights = weights_of(relaxation, places)
    for anchor in places[1:]:
        lower, upper = relaxation.bounds([anchor], nothing_removed(pair_problem))
        assert bool(((lower <= weights) & (weights <= upper)).all())


# ---- rounding


@pytest.mark.parametrize("text", BATCH)
def test_the_weights_of_a_text_round_to_it(problem, text):
    relaxation, places = relaxation_of(problem), as_places(problem.places, text)
    weights = weights_of(relaxation, places)
    assert relaxation.round_to_text(weights) == places
    assert relaxation.round_to_text(0.6 * weights + 0.4 * random_weights(relaxation)) == places


@pytest.mark.parametrize("text", PAIRS)
def test_the_weights_of_a_pair_round_to_it(pair_problem, text):
    relaxation = relaxation_of(pair_problem)
    places = as_places(pair_problem.places, text, pair_kinds(text))
    weights = weights_of(relaxation, places)
    assert relaxation.round_to_text(weights) == places
    assert relaxation.round_to_text(0.7 * weights + 0.3 * random_weights(relaxation)) == places


@pytest.mark.parametrize("seed", range(5))
def test_any_weights_round_to_something_that_could_be_a_text(problem, seed):
    relaxation, places = relaxation_of(problem), problem.places
    text = relaxation.round_to_text(random_weights(relaxation, seed))
    tokens = places.tokens_of(text)
    assert places.position[list(text)].tolist() == list(range(len(text)))
    assert (tokens[0], tokens[-1]) == (START, END)
    assert not {START, END} & set(tokens[1:-1])


def test_a_position_that_nothing_can_fill_is_not_filled_by_the_start(problem):
    """All places of position 2 but its end are set aside: no text can be longer than that."""
    whole, places = relaxation_of(problem), problem.places
    open_places = (whole.position != 2) | whole.is_end
    relaxation = Relaxation(whole.model, places, whole.chosen[open_places], whole.probed)
    for seed in range(5):
        text = relaxation.round_to_text(random_weights(relaxation, seed))
        assert places.position[list(text)].tolist() == list(range(len(text)))


# ---- the descent


@pytest.mark.parametrize(("number", "anchor"), [(0, 2), (1, 1), (1, 4), (2, 1)])
def test_a_token_that_occurs_once_leads_to_its_text(problem, number, anchor):
    text = as_places(problem.places, BATCH[number])
    relaxation = whiten_probes(relaxation_of(problem, num_probes=40), [problem.places.start, text[anchor]], PRIOR, 40)
    with torch.no_grad():
        steps = relaxation.descend([text[anchor]], nothing_removed(problem), PRIOR, max_steps=8)
        assert text in [found for found, _ in steps]


@torch.no_grad()
def test_the_descent_ends_when_it_has_settled(problem):
    text = as_places(problem.places, BATCH[1])
    relaxation = relaxation_of(problem, num_probes=40)
    texts = list(relaxation.descend([text[1]], nothing_removed(problem), PRIOR, max_steps=200))
    assert 1 <= len(texts) < 200
    assert len(list(relaxation.descend([text[1]], nothing_removed(problem), PRIOR, max_steps=1))) == 1


@torch.no_grad()
def test_all_of_a_text_as_anchors_is_the_text(problem):
    text = as_places(problem.places, BATCH[1])
    relaxation = relaxation_of(problem)
    found, weights = list(relaxation.descend(text[1:], nothing_removed(problem), PRIOR, max_steps=3))[-1]
    assert found == text
    assert torch.equal(weights.nonzero()[:, 0], torch.tensor(sorted(text)))


# ---- whitening


@torch.no_grad()
def test_whitened_probes_are_still_orthogonal_to_the_batch_and_tell_places_apart_equally(problem):
    relaxation = relaxation_of(problem, num_probes=40)
    rows = [problem.places.start, *as_places(problem.places, BATCH[0])[1:4]]
    white = whiten_probes(relaxation, rows, PRIOR, max_probes=20)
    weights = torch.full((len(white.chosen),), PRIOR, dtype=torch.float64)
    weights[white.index_of(problem.places.start)] = 1
    for layer in white.probed:
        alone = Relaxation(white.model, white.places, white.chosen, [layer])
        jacobians = [alone.rows([row]).linearise_at(weights)[1].dense() for row in rows]
        moments = sum(j @ j.T for j in jacobians) / (len(rows) * len(weights))
        assert moments.shape == (20, 20)
        # Eigenvalues over 8 decades were scaled to 1.
        torch.testing.assert_close(moments, torch.eye(20, dtype=torch.float64), atol=1e-6, rtol=0)
    for text in BATCH:
        places = as_places(problem.places, text)
        scale = residual(white, places, random_weights(white))
        assert residual(white, places, weights_of(white, places)) < 10 * VANISHES * scale  # weak ones were scaled up


def test_whitening_makes_no_probes_up(problem):
    white = whiten_probes(relaxation_of(problem, num_probes=5), [problem.places.start], PRIOR, max_probes=100)
    assert [layer.probes.shape[1] for layer in white.probed] == [5, 5]


def test_without_an_end_of_the_first_text_a_pair_is_any_text(pair_problem):
    relaxation = relaxation_of(pair_problem)
    middles = relaxation.closes & ~relaxation.is_end
    rest = replace(relaxation, chosen=relaxation.chosen[~middles])
    assert rest.round_to_text(random_weights(rest))
