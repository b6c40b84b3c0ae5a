"""Rows of prefixes at several blocks, against the model's own forward pass."""

import pytest
import torch

from unmask.attacks.gradients.lora.prefix_states import PrefixStates

TEXT = [5, 17, 99, 250]


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2", "tiny_mistral"])
def test_rows_are_those_of_the_forward_pass(name, request):
    model = request.getfixturevalue(name)
    blocks = tuple(range(1, model.num_blocks))
    states, tokens = PrefixStates(model, blocks), torch.tensor([8, 30, 31])
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
    states = PrefixStates(tiny_llama, (1,))
    (rows,) = states.draw(torch.tensor([5, 6, 7]), 4, 6, torch.Generator().manual_seed(0))
    assert rows.shape == (24, tiny_llama.width)
