"""Rows of prefixes at several blocks, against the model's own forward pass."""

import pytest
import torch

from unmask.attacks.gradients.prefix_states import INPUTS, PrefixStates, attention_layers

TEXT = [5, 17, 99, 250]


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2", "tiny_mistral"])
def test_rows_are_those_of_the_forward_pass(name, request):
    model = request.getfixturevalue(name)
    blocks = tuple(range(1, model.num_blocks))
    states, tokens = PrefixStates(model, attention_layers(blocks)), torch.tensor([8, 30, 31])
    prefix = states.begin()
    for token in TEXT:
        extensions = states.extend(prefix, torch.tensor([token]))
        prefix = states.cache(prefix, token, extensions, 0)
    assert prefix.tokens == tuple(TEXT)
    extended = states.extend(prefix, tokens)
    for column, token in enumerate(tokens.tolist()):
        streams = model.hidden_states(torch.tensor([[*TEXT, token]]))
        for block, rows in zip(blocks, extended.rows, strict=True):
            torch.testing.assert_close(rows[column], model.attention_input(block, streams[block])[0, -1])


def test_drawn_rows_are_of_all_positions(tiny_llama):
    states = PrefixStates(tiny_llama, attention_layers((1,)))
    (rows,) = states.draw(torch.tensor([5, 6, 7]), 4, 6, torch.Generator().manual_seed(0))
    assert rows.shape == (24, tiny_llama.width)


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2"])
def test_every_input_of_a_block_is_that_of_the_forward_pass(name, request):
    model = request.getfixturevalue(name)
    states = PrefixStates(model, tuple((block, role) for block in range(2) for role in INPUTS))
    prefix = states.begin()
    for token in TEXT[:-1]:
        prefix = states.cache(prefix, token, states.extend(prefix, torch.tensor([token])), 0)
    rows = iter(states.extend(prefix, torch.tensor(TEXT[-1:])).rows)
    tokens = torch.tensor([TEXT])
    streams, positions, mask = (
        model.hidden_states(tokens),
        torch.arange(len(TEXT))[None],
        torch.ones_like(tokens).bool(),
    )
    for block in range(2):
        mixed = model.mixed_values(block, streams[block], positions, mask)
        attended = model.after_attention(block, streams[block], mixed)
        for whole in (model.attention_input(block, streams[block]), mixed, model.mlp_input(block, attended)):
            torch.testing.assert_close(next(rows)[0], whole[0, -1])
