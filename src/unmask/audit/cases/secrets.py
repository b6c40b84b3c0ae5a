"""Secrets of plans: weights that a service keeps (`output-layer`), and layers that are drawn with an input.

`attention:layer=15`, `output-layer`, `random:heads=4,width=16`; `random:tokens=8,width=16`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from unmask.specs import Kind, Spec, flag, whole_number

SECRETS: Mapping[str, Kind] = {
    "attention": Kind("attention:layer=15", "the heads of a layer of the model", dict, (whole_number("layer", 0),)),
    "output-layer": Kind("output-layer", "the model's output layer, behind its logits", dict),
    "random": Kind(
        "random:heads=4,width=16",
        "heads drawn at random",
        dict,
        (whole_number("heads", 1), whole_number("width", 1)),
    ),
}


LAYERS: Mapping[str, Kind] = {
    "random": Kind(
        "random:tokens=8,width=16",
        "an attention layer and its input, drawn at random",
        dict,
        (
            whole_number("tokens", 1),
            whole_number("width", 1),
            flag("definite", default=True),
            flag("causal", default=False),
        ),
    ),
}


class QuerySecret(Spec):
    """A secret with its settings."""

    noun: ClassVar[str] = "secret"
    table: ClassVar[Mapping[str, Kind]] = SECRETS

    @property
    def needs_a_model(self) -> bool:
        """Whether it is part of a model."""
        return self.name != "random"


def parse_secret(text: str) -> QuerySecret:
    """The secret that a text names."""
    return QuerySecret.parse(text)


class DrawnLayer(Spec):
    """A layer with its settings."""

    noun: ClassVar[str] = "secret"
    table: ClassVar[Mapping[str, Kind]] = LAYERS


def parse_layer(text: str) -> DrawnLayer:
    """The layer that a text names."""
    return DrawnLayer.parse(text)
