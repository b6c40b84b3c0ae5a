"""Models without weights: their direction, their size and their head."""

from __future__ import annotations

import torch
from tests.models.families import DECODERS, ENCODERS

from unmask.models import adapt
from unmask.models.outline import outline_of

DEEPER = {"ModernBert with a window"}


def test_an_outline_on_the_meta_device_says_what_the_model_says():
    for name, build in {**DECODERS, **ENCODERS}.items():
        with torch.device("meta"):
            outline = outline_of(build())
        assert (outline.causal, outline.num_blocks) == (name in DECODERS, 4 if name in DEEPER else 2), name
        assert outline.has_language_head, name


def test_a_body_alone_has_no_head(tiny_gpt2):
    assert not outline_of(tiny_gpt2.hf.base_model).has_language_head
    assert not adapt(tiny_gpt2.hf.base_model).has_language_head
