"""Benchmarks import each other by their rooms, as `benchmarks/run.py` does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
