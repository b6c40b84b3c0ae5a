"""How often texts are in a batch, by their own updates: whole numbers for those that are, nothing for others."""

import pytest

from unmask.attacks.gradients.decoder.endings import TextEnding
from unmask.attacks.gradients.noisy.text_weights import weigh_texts
from unmask.defences import quantise_bf16
from unmask.protocols import observe_gradients

GHOSTS = ((5, 17, 77), (400, 3, 8, 21, 11), (3, 400))


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1, 3), (1, 0, 1)])
def test_counts_are_those_of_the_batch(tiny_llama, batch, counts):
    texts = [list(text) for text, count in zip(batch, counts, strict=True) for _ in range(count)]
    evidence = quantise_bf16(observe_gradients(tiny_llama, texts))
    endings = [TextEnding((0, text), 1, 0.0) for text in (*batch, *GHOSTS)]
    found = {ending.node[1]: ending.count for ending in weigh_texts(evidence, tiny_llama, endings)}
    assert found == {text: count for text, count in zip(batch, counts, strict=True) if count}


def test_without_the_matrices_texts_are_left_as_they_are(tiny_llama, rounded, batch):
    endings = [TextEnding((0, text), 1, 0.0) for text in batch]
    assert weigh_texts(rounded.only("self_attn"), tiny_llama, endings) == endings
