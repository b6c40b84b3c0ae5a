"""What can be told of a model that has no weights yet: enough to refuse a plan before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outline:
    """A model's direction and size, whether it has a language head, and how many numbers it holds."""

    causal: bool
    num_blocks: int
    has_language_head: bool
    num_parameters: int = 0


def outline_of(hf: Any) -> Outline:
    """Of a transformers model on any device, the meta device included."""
    from transformers.models.auto import modeling_auto

    kind, config = hf.config.model_type, hf.config
    both_ways = kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    return Outline(
        causal=not both_ways and kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        num_blocks=int(config.num_hidden_layers),
        has_language_head=hf.get_output_embeddings() is not None,
        num_parameters=sum(parameter.numel() for parameter in hf.parameters()),
    )
