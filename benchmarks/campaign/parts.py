"""The table of the campaign's parts."""

from __future__ import annotations

from campaign import (
    controls,
    decayed,
    defended,
    encoders,
    federations,
    files,
    gradients,
    kills,
    lengths,
    oracles,
    permuted,
    states,
)
from campaign.outcome import Part

_DRAWN = gradients, decayed, encoders, federations, states, defended, permuted
_ALL = (*_DRAWN, controls, files, oracles, lengths, kills)
PARTS: dict[str, Part] = {module.PART.name: module.PART for module in _ALL}
