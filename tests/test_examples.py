"""Every example runs by itself, in a process of its own, and says what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PROMISES = {
    "gradients_to_text.py": ["score: 100% exact, 0 false"],
    "outputs_to_inputs.py": ["RECOVERED: 'The spare key lies under the blue flower pot behind the garage.'"],
    "queries_to_weights.py": ["RECOVERED: 4 heads from", "with tokens up to a norm of 4: NOTHING_FOUND, 0 heads"],
}


# These answer until they are stopped; tests of their own start them.
SERVICES = {"attention_service.py", "openai_service.py"}


def test_every_example_is_listed():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PROMISES) | SERVICES


@pytest.mark.parametrize("name", PROMISES)
def test_an_example_keeps_its_promise(name, request):
    if "smollm2" in (EXAMPLES / name).read_text():
        request.getfixturevalue("smollm2")  # skips where it is not installed
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(promise in done.stdout for promise in PROMISES[name])
