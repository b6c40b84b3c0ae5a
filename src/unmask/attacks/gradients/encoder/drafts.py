"""Texts that a search may go on from: what it found and, while texts are missing, the nearest that it refused."""

from __future__ import annotations

from unmask.attacks.gradients.encoder.position_candidates import Text
from unmask.attacks.gradients.encoder.search import EncoderSearch


def list_drafts(search: EncoderSearch) -> list[Text]:
    """What was found; while texts are missing, refused ones stand in, the nearest first and no two alike."""
    drafts = list(search.found)
    for text, (cost, _) in sorted(search.refused.items(), key=lambda item: item[1][1]):
        is_new = cost < float("inf") and not any(are_alike(text, other, search.settings.alike) for other in drafts)
        if is_new and len(drafts) < (search.num_texts or 0):
            drafts.append(text)
    return drafts


def are_alike(text: Text, other: Text, part: float) -> bool:
    """Whether two texts have more than a part of their places in common."""
    return len(set(text) & set(other)) > part * max(len(text), len(other))
