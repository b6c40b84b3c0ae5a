"""What an encoder's states are expected to be, and which tokens are crowded."""

from __future__ import annotations

import torch

from unmask.attacks.outputs.prompts.encoder_templates import crowded_tokens, encoder_templates_for, random_texts
from unmask.attacks.outputs.prompts.ranking import direct_metric

SENTENCE = "The spare key lies under the pot beside the old green door, and the code of the alarm is 4711."


def test_embeddings_are_told_apart(tiny_bert):
    """Layer 0: the state is the token's own, up to its position."""
    templates = encoder_templates_for(tiny_bert, 0)
    tokens = torch.arange(10, 40)
    with torch.no_grad():
        states = tiny_bert.embed(tokens, torch.arange(len(tokens)))
    metric = direct_metric(templates.states)
    assert (metric.scores(states @ metric.whiten.T).argmax(1) == tokens).double().mean() > 0.9


def test_a_layer_is_fitted_once(tiny_bert):
    assert encoder_templates_for(tiny_bert, 1) is encoder_templates_for(tiny_bert, 1)
    assert encoder_templates_for(tiny_bert, 1) is not encoder_templates_for(tiny_bert, 2)


def test_random_texts_are_framed_and_fit_the_model(minilm, tiny_bert):
    texts = random_texts(minilm, 10, torch.Generator().manual_seed(0))
    assert texts.shape[1] == 10
    assert (texts[:, 0] == minilm.frame_tokens[0]).all()
    assert (texts[:, -1] == minilm.frame_tokens[1]).all()
    assert random_texts(tiny_bert, 1000, torch.Generator()).shape[1] == tiny_bert.max_positions


def test_near_copies_are_crowded_and_others_are_not():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 64, generator=generator)
    rows[:20] = 3 + 0.1 * rows[:20]
    crowded = crowded_tokens(rows)
    assert crowded[:20].all()
    assert not crowded[20:].any()


def test_where_all_rows_are_alike_none_is_crowded():
    rows = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    assert not crowded_tokens(rows).any()


def test_unused_tokens_of_real_weights_are_crowded(minilm):
    crowded = encoder_templates_for(minilm, 4).crowded
    unused = minilm.tokenizer.convert_tokens_to_ids([f"[unused{number}]" for number in range(100, 200)])
    assert crowded[unused].double().mean() > 0.5
    assert not crowded[minilm.encode(SENTENCE)].any()
    assert crowded.double().mean() < 0.1


def test_first_guess_of_a_sentence(minilm):
    """Middle of the model: nearly all tokens from their own states."""
    tokens = torch.tensor(minilm.encode(SENTENCE))
    with torch.no_grad():
        states = minilm.hidden_states(tokens[None], num_blocks=4)[4][0]
    metric = direct_metric(encoder_templates_for(minilm, 4).states)
    guess = metric.scores(states @ metric.whiten.T).argmax(1)
    assert (guess == tokens)[1:-1].double().mean() > 0.9
