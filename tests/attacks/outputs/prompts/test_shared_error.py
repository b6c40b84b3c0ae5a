"""Noise is drawn anew at each position; what another model or position leaves is a function of the row."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.outputs.prompts.continuation import Continuation
from unmask.attacks.outputs.prompts.seen_text import ReadToken, SeenText, TextProgress
from unmask.attacks.outputs.prompts.shared_error import doubt_shared_error, shared_error
from unmask.proof.state_noise import StateNoise

LENGTH, WIDTH, PARTS = 10, 48, (16, 16, 16)
TEXT, LAYER = [5, 17, 99, 8, 17, 5, 250, 17], 1


def rows_like_each_other(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(WIDTH, generator=generator) + torch.randn(LENGTH, WIDTH, generator=generator)


def test_noise_has_mean_zero_and_variance_one_whatever_its_sizes():
    generator = torch.Generator().manual_seed(1)
    sizes = torch.tensor([0.1, 1.0, 5.0]).repeat_interleave(16) * torch.logspace(-1, 1, LENGTH)[:, None]
    rows = rows_like_each_other(0)
    drawn = torch.tensor(
        [shared_error(rows, sizes * torch.randn(LENGTH, WIDTH, generator=generator), PARTS) for _ in range(2000)]
    )
    assert abs(float(drawn.mean())) < 4 / 2000**0.5
    assert abs(float(drawn.std()) - 1) < 0.1
    assert float(drawn.max()) < 8


def test_other_weights_and_rotations_are_seen():
    generator = torch.Generator().manual_seed(2)
    rows = rows_like_each_other(0)
    other = 1e-3 * torch.randn(WIDTH, WIDTH, generator=generator)
    angle = torch.tensor(0.3)
    turn = torch.eye(WIDTH)
    turn[:2, :2] = torch.stack([torch.stack([angle.cos(), angle.sin()]), torch.stack([-angle.sin(), angle.cos()])])
    assert shared_error(rows, rows @ other, (WIDTH,)) > 8
    assert shared_error(rows, rows @ (turn - torch.eye(WIDTH)), (WIDTH,)) > 8


def test_residuals_of_zero_are_no_error():
    assert shared_error(rows_like_each_other(0), torch.zeros(LENGTH, WIDTH), PARTS) == 0


@pytest.mark.parametrize("shared", [False, True])
def test_proofs_are_taken_back_where_the_error_is_shared(tiny_llama, shared):
    """Tokens that come again leave the same again, or noise."""
    start = Continuation.start(tiny_llama, LAYER)
    rows = start.run(torch.tensor(TEXT)).states
    generator = torch.Generator().manual_seed(3)
    width = rows.shape[1]
    error = (
        rows @ torch.randn(width, width, generator=generator)
        if shared
        else torch.randn(rows.shape, generator=generator)
    )
    stored = rows + 1e-3 * error
    noise = StateNoise(torch.zeros(len(TEXT)), torch.full((len(TEXT),), 1e-4), torch.ones(len(TEXT)))
    seen = SeenText(stored, stored, torch.ones_like(rows), stored, 0, noise)
    tokens = [ReadToken(token, True, 1e-3, 1e-3) for token in TEXT]
    text = TextProgress(seen, start, start, (), None, torch.zeros(len(TEXT), dtype=torch.bool), tokens=tokens)
    doubt_shared_error(text)
    assert text.is_proven  # without noise there is nothing to doubt
    text.is_noisy = True
    doubt_shared_error(text)
    assert text.is_mismatch is shared
    assert text.is_proven is not shared


@pytest.mark.parametrize(("num_read", "is_borne_out"), [(1, False), (2, False), (4, True), (len(TEXT), True)])
def test_noise_that_one_row_shows_and_the_next_does_not_proves_nothing(tiny_llama, num_read, is_borne_out):
    start = Continuation.start(tiny_llama, LAYER)
    rows = start.run(torch.tensor(TEXT)).states
    stored = rows + 1e-3 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(3))
    noise = StateNoise(torch.zeros(len(TEXT)), torch.full((len(TEXT),), 1e-4), torch.ones(len(TEXT)))
    seen = SeenText(stored, stored, torch.ones_like(rows), stored, 0, noise)
    tokens = [ReadToken(token, True, 1e-3, 1e-3) for token in TEXT[:num_read]]
    unread = torch.zeros(len(TEXT), dtype=torch.bool)
    text = TextProgress(seen, start, start, (), None, unread, tokens=tokens, is_noisy=True)
    doubt_shared_error(text)
    assert text.is_proven is is_borne_out
