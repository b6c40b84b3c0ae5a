"""The table of the campaign's parts."""

from __future__ import annotations

from campaign import controls, defended, encoders, federations, files, gradients, kills, lengths, oracles, states
from campaign.outcome import Part

_ALL = (gradients, encoders, federations, states, defended, controls, files, oracles, lengths, kills)
PARTS: dict[str, Part] = {module.PART.name: module.PART for module in _ALL}
