"""Text to calibrate with: the same every time, framed where texts are framed, and no trace on the global generator."""

from __future__ import annotations

import torch

from unmask.attacks.outputs.prompts.templates import calibration_tokens


def test_it_is_the_same_every_time(tiny_llama):
    assert torch.equal(calibration_tokens(tiny_llama), calibration_tokens(tiny_llama))
    assert not torch.equal(calibration_tokens(tiny_llama, 1), calibration_tokens(tiny_llama, 2))


def test_the_global_generator_is_left_alone(tiny_gpt2):
    before = torch.random.get_rng_state()
    calibration_tokens(tiny_gpt2)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_there_are_enough_tokens_for_a_regression(tiny):
    tokens = calibration_tokens(tiny)
    assert tokens.numel() >= 7 * tiny.width
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < tiny.vocab_size
    assert tokens.shape[1] <= tiny.max_positions


def test_texts_of_an_encoder_are_framed(minilm):
    tokens = calibration_tokens(minilm)
    first, last = minilm.frame_tokens
    assert (tokens[:, 0] == first).all()
    assert (tokens[:, -1] == last).all()
