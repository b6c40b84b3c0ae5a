"""The anchor of a heading as GitHub makes it: lower case, no punctuation, a hyphen for each space."""

from __future__ import annotations

import re


def slugify(heading: str, separator: str = "-") -> str:
    """'Beyond B = d' → 'beyond-b--d'."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)
