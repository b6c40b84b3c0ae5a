"""Moves under noise: costs are about one for texts of the batch, and moves lead back to them."""

from __future__ import annotations

import pytest
import torch
from tests.attacks.gradients.encoder_batches import BATCH, END, FRAME, as_places, candidates_of, classified

from unmask.attacks.gradients.encoder.noisy_swaps import NoisySwaps
from unmask.attacks.gradients.encoder.problem import Problem, set_up
from unmask.defences import parse_defence


@pytest.fixture(scope="module")
def swaps(tiny_bert) -> NoisySwaps:
    evidence = parse_defence("bf16")(classified(tiny_bert), torch.Generator().manual_seed(0))
    with torch.no_grad():
        problem = set_up(evidence, tiny_bert, candidates_of(tiny_bert, evidence), FRAME, noisy=True)
    assert isinstance(problem, Problem), problem
    return NoisySwaps(problem, problem.places.is_possible.nonzero()[:, 0])


def places_of(swaps: NoisySwaps, tokens: tuple[int, ...]) -> tuple[int, ...]:
    return as_places(swaps.problem.places, tokens)


@torch.no_grad()
def test_texts_of_the_batch_cost_about_what_noise_leaves(swaps):
    for text in BATCH:
        places = torch.tensor([places_of(swaps, text)])
        assert float(swaps.costs(places)[0]) < 4
        assert swaps.costs(places)[0] == pytest.approx(float(swaps.row_costs(places).mean()))


@torch.no_grad()
def test_a_wrong_token_costs_more(swaps):
    text = (BATCH[0][0], 60, *BATCH[0][2:])
    assert float(swaps.costs(torch.tensor([places_of(swaps, text)]))[0]) > 10


@torch.no_grad()
@pytest.mark.parametrize("index", [1, 2])  # single moves do not always get out of two swapped tokens
def test_moves_replace_a_wrong_token(swaps, index):
    text = BATCH[1]
    wrong = (*text[:index], 60, *text[index + 1 :])
    found, cost = swaps.improve(places_of(swaps, wrong), max_sweeps=3)
    assert swaps.problem.places.tokens_of(found) == text
    assert cost < 4


@torch.no_grad()
@pytest.mark.parametrize("shift", [-1, 1], ids=["too short", "too long"])
def test_moves_shift_the_end(swaps, shift):
    text = BATCH[0]
    wrong = (*text[:-2], END) if shift < 0 else (*text[:-1], 60, END)
    found, _ = swaps.improve(places_of(swaps, wrong), max_sweeps=3)
    assert swaps.problem.places.tokens_of(found) == text


@torch.no_grad()
def test_a_right_text_stays(swaps):
    places = places_of(swaps, BATCH[2])
    assert swaps.improve(places, max_sweeps=2)[0] == places


@torch.no_grad()
def test_candidates_of_a_position_cost_what_all_rows_say(swaps):
    """Short texts: every row is a reader, so that the comparison is the cost."""
    text = torch.tensor(places_of(swaps, BATCH[1]))
    options = swaps.problem.places.alternatives(int(text[2]))
    texts = text.repeat(len(options), 1)
    texts[:, 2] = options
    torch.testing.assert_close(swaps.compare(text, 2, options), swaps.costs(texts), rtol=1e-2, atol=1e-2)
