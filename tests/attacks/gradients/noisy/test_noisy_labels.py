"""Labels behind prefixes from a rounded gradient: all of them, with their weights; and which are wrong, by a replay."""

import pytest
import torch

from unmask.attacks.gradients.decoder.last_block_rows import last_block_rows
from unmask.attacks.gradients.decoder.prefix_search import Forest
from unmask.attacks.gradients.noisy.noisy_labels import NoisyLabels
from unmask.linalg.gap import Gap
from unmask.models.linear import Role
from unmask.protocols import observe_fedavg, observe_gradients


def labels_of(model, evidence, prefixes):
    inner = {tokens[:-1] for tokens in prefixes}
    leaves = [(0, tokens) for tokens in sorted(prefixes) if tokens not in inner]
    rows = last_block_rows(model, Forest(dict.fromkeys(leaves, 0.0), leaves, Gap(0.0, 1.0), 0), 2**28)
    return NoisyLabels(evidence, model, rows, Role.MLP_OUT, 2**28)


@pytest.fixture
def expected(batch):
    total = sum(len(text) - 1 for text in batch)
    found = {}
    for text in batch:
        for length in range(1, len(text)):
            weights = found.setdefault(text[:length], {})
            weights[text[length]] = weights.get(text[length], 0.0) + 1 / total
    return found


def test_every_label_is_read_with_its_weight(tiny_llama, rounded, prefixes, expected):
    reading = labels_of(tiny_llama, rounded, prefixes)
    assert reading.unexplained < 1.2
    for (_, tokens), labels in zip(reading.nodes, reading.read(), strict=True):
        assert labels.weights == pytest.approx(expected[tokens], rel=0.05)


def test_a_missing_prefix_leaves_more_than_noise(tiny_llama, rounded, prefixes):
    assert labels_of(tiny_llama, rounded, prefixes - {(5, 17, 99, 17, 250, 8)}).unexplained > 1.2


@pytest.mark.parametrize("steps", [1, 3])
def test_a_replay_tells_which_last_label_is_wrong(tiny_llama, batch, prefixes, steps):
    def update(texts):
        return observe_fedavg(tiny_llama, [list(text) for text in texts], local_steps=steps, learning_rate=1e-3)

    reading = labels_of(tiny_llama, update(batch), prefixes)
    wrong = [(*batch[0][:-1], 77), *batch[1:]]
    place = {tokens: u for u, (_, tokens) in enumerate(reading.nodes)}
    ends = {place[text[:-1]]: text[-1] for text in wrong}
    again = update(wrong).gradients[reading.layer.parameter]
    step = 1 / sum(len(text) - 1 for text in batch)
    assert reading.correct(again, ends, step) == {place[batch[0][:-1]]: batch[0][-1]}
    right = update(batch).gradients[reading.layer.parameter]
    assert reading.correct(right, {place[text[:-1]]: text[-1] for text in batch}, step) == {}


def test_of_another_model_nothing_is_read(tiny_llama, batch, prefixes):
    evidence = observe_gradients(tiny_llama, [list(text) for text in batch])
    generator = torch.Generator().manual_seed(1)
    noise = {name: torch.randn(g.shape, generator=generator) for name, g in evidence.gradients.items()}
    reading = labels_of(tiny_llama, evidence.with_tensors(noise), prefixes)
    assert not any(labels.weights for labels in reading.read())
