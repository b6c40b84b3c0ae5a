"""Every example runs by itself, in a process of its own, and says what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PROMISES = {
    "gradients_to_text.py": "score: 100% exact, 0 false",
    "outputs_to_inputs.py": "RECOVERED: 'The spare key lies under the blue flower pot behind the garage.'",
}


# These answer until they are stopped; tests of their own start them.
SERVICES = {"attention_service.py", "openai_service.py"}


def test_every_example_is_listed():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PROMISES) | SERVICES


@pytest.mark.parametrize("name", PROMISES)
@pytest.mark.usefixtures("smollm2")
def test_an_example_keeps_its_promise(name):
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert PROMISES[name] in done.stdout
