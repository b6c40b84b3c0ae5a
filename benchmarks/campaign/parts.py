"""The table of the campaign's parts."""

from __future__ import annotations

from campaign import gradients
from campaign.outcome import Part

PARTS: dict[str, Part] = {part.name: part for part in (gradients.PART,)}
