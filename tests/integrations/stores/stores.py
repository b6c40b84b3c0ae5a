"""Vectors to fill stores with, and documents that must not come out again."""

from __future__ import annotations

import numpy as np

_NUMBERS = np.random.default_rng(0)
ROWS = _NUMBERS.standard_normal((300, 32)).astype(np.float32)
UNITS = ROWS / np.linalg.norm(ROWS, axis=1, keepdims=True)
SECRET = "the patient was discharged on friday"
