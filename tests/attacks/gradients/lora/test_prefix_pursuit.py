"""Prefixes that explain the adapters' gradients: all of the batch's and no others."""

import torch

from unmask.attacks.gradients.bag_of_words.lora_tokens import gradients_of_inputs
from unmask.attacks.gradients.lora.prefix_pursuit import PrefixesFound, pursue_prefixes
from unmask.attacks.run import Run
from unmask.protocols import observe_lora

TEXTS = [[5, 17, 99, 17, 250, 8], [400, 3, 8, 21, 11], [400, 3, 8, 9]]


def measure(model, texts):
    evidence = observe_lora(model, texts, rank=4, steps=2, earlier_texts=[[60, 61, 62], [70, 71]])
    blocks = range(1, model.num_blocks)
    trained = model.with_factors(evidence.adapters, evidence.adapter_scale)
    return trained, {b: torch.cat(list(gradients_of_inputs(evidence, model, b).values()), dim=1) for b in blocks}


def test_all_prefixes_and_no_others(tiny_llama):
    trained, measured = measure(tiny_llama, TEXTS)
    tokens = torch.tensor(sorted({token for text in TEXTS for token in text[:-1]}))
    found = pursue_prefixes(Run(), trained, measured, tokens)
    assert set(found.needs) == {tuple(text[:end]) for text in TEXTS for end in range(1, len(text))}
    assert found.residual < 2e-4
    assert found.leaves == [(5, 17, 99, 17, 250), (400, 3, 8, 21)]


def test_a_token_that_is_missing_loses_what_stands_behind_it(tiny_llama):
    trained, measured = measure(tiny_llama, TEXTS[:1])
    found = pursue_prefixes(Run(), trained, measured, torch.tensor([5, 17, 250]))
    assert (5, 17, 99) not in found.needs
    assert found.residual > 1e-2


def test_noise_is_not_explained(tiny_llama):
    trained, measured = measure(tiny_llama, TEXTS[:1])
    draw = torch.Generator().manual_seed(0)
    noise = {block: torch.randn(seen.shape, generator=draw) for block, seen in measured.items()}
    assert pursue_prefixes(Run(), trained, noise, torch.tensor([5, 17, 99, 250])).residual > 1e-2


def test_leaves_are_prefixes_that_none_continues():
    found = PrefixesFound({(1,): 1.0, (1, 2): 1.0, (3,): 1.0}, 0.0, 3)
    assert found.leaves == [(1, 2), (3,)]
