"""Rows of prefixes in the last block, against transformers' own forward pass of every prefix by itself."""

from __future__ import annotations

import pytest
import torch
from tests.reference.layer_inputs import layer_inputs

from unmask.attacks.gradients.decoder.last_block_rows import KnownRows, last_block_rows
from unmask.attacks.gradients.decoder.prefix_search import Forest
from unmask.linalg.gap import Gap
from unmask.models import Model, Role
from unmask.proof.arrivals import is_repetition
from unmask.proof.replay import run_forward
from unmask.protocols import observe_gradients

DECODERS = ("tiny_gpt2", "tiny_llama", "tiny_qwen2", "tiny_mistral")
TEXTS = ((5, 17, 99, 250), (5, 17, 3), (400,), (44, 45, 46, 47, 48))
# Three blocks in float32, padded and unpadded: a few roundings of 6e-8, over some hundred terms.
FLOAT32_PARITY = 2e-5


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def forest_of(leaves: tuple[tuple[int, ...], ...]) -> Forest:
    nodes = {(0, leaf[:length]): 0.0 for leaf in leaves for length in range(1, len(leaf) + 1)}
    return Forest(nodes, [(0, leaf) for leaf in leaves], Gap(0.0, 0.1), 0)


@pytest.mark.parametrize("budget", [1, 2**30])
def test_rows_are_what_transformers_feeds_the_last_down_projection(decoder, budget):
    rows = last_block_rows(decoder, forest_of(TEXTS), budget)
    assert set(rows.nodes) == set(forest_of(TEXTS).nodes)
    assert len(rows.nodes) == len(set(rows.nodes)) == len(rows.hidden) == len(rows.added)
    parameter = decoder.linear(Role.MLP_OUT, decoder.num_blocks - 1).parameter
    for (_, tokens), hidden, state in zip(rows.nodes, rows.hidden, rows.leave(slice(None), rows.added), strict=True):
        alone = torch.tensor([tokens])
        expected = layer_inputs(decoder, alone, parameter)[0, -1]
        torch.testing.assert_close(hidden, expected, atol=FLOAT32_PARITY, rtol=FLOAT32_PARITY)
        with torch.no_grad():
            last = decoder.body(input_ids=alone).last_hidden_state[0, -1]
            torch.testing.assert_close(decoder.final_norm(state), last, atol=FLOAT32_PARITY, rtol=FLOAT32_PARITY)


def test_a_repetition_has_the_rows_of_its_first_token_where_positions_are_rotary(tiny_llama, tiny_gpt2):
    for model in (tiny_llama, tiny_gpt2):
        rows = last_block_rows(model, forest_of(((7, 7, 7), (7, 7, 8))), 2**30)
        by_node = dict(zip(rows.nodes, rows.hidden, strict=True))
        same = torch.allclose(by_node[0, (7,)], by_node[0, (7, 7, 7)], atol=FLOAT32_PARITY)
        assert same is is_repetition(model, (7, 7, 7)) is (model is tiny_llama)
        assert not is_repetition(model, (7,))
        assert not is_repetition(model, (7, 7, 8))


@pytest.mark.parametrize("role", [Role.MLP_OUT, Role.ATTENTION_OUT])
def test_rows_that_are_known_are_those_of_a_new_pass(tiny_llama, monkeypatch, role):
    known = KnownRows(tiny_llama, role, 2**30)
    known.at(forest_of(((5, 17, 99), (400, 3))))
    grown = forest_of(((5, 17, 98, 4), (400, 3)))
    found, expected = known.at(grown), last_block_rows(tiny_llama, grown, 2**30, role)
    assert found.nodes == expected.nodes
    torch.testing.assert_close(found.hidden, expected.hidden, atol=FLOAT32_PARITY, rtol=FLOAT32_PARITY)
    leave = [rows.leave(slice(None), rows.added) for rows in (found, expected)]
    torch.testing.assert_close(*leave, atol=FLOAT32_PARITY, rtol=FLOAT32_PARITY)
    monkeypatch.setattr(tiny_llama, "hidden_states", None)  # nothing is sent through the model again
    assert len(known.at(forest_of(((5, 17), (400,)))).nodes) == 3


@pytest.mark.parametrize("role", [Role.MLP_OUT, Role.ATTENTION_OUT])
def test_rows_of_a_client_that_has_run_are_those_of_a_new_pass(decoder, role):
    client = run_forward(observe_gradients(decoder, [[5, 17, 3]]), decoder, TEXTS)
    assert client is not None
    found, expected = (last_block_rows(decoder, forest_of(TEXTS), 2**30, role, given) for given in (client, None))
    assert set(found.nodes) == set(expected.nodes)
    place = [found.nodes.index(node) for node in expected.nodes]
    for left, right in ((found.hidden, expected.hidden), (found.added, expected.added)):
        torch.testing.assert_close(left[place], right, atol=FLOAT32_PARITY, rtol=FLOAT32_PARITY)
