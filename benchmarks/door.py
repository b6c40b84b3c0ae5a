"""One door to several scripts: the mode says which one runs, and it gets all the options."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from unittest.mock import patch

# Scripts with their modes and a sentence for each. A script with one mode is that mode, and is not told.
Modes = Mapping[str, Mapping[str, str]]


def enter(about: str, scripts: Modes, arguments: Sequence[str] | None = None) -> None:
    """Pass everything on to the script of the mode."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listing(about, scripts))
        return
    script = script_of(arguments[0], about, scripts)
    told = arguments if len(scripts[script]) > 1 else arguments[1:]
    with patch.object(sys, "argv", [f"{script}.py", *told]):  # not every script's main takes arguments
        importlib.import_module(script).main()


def script_of(mode: str, about: str, scripts: Modes) -> str:
    """The script that knows the mode."""
    for script, modes in scripts.items():
        if mode in modes:
            return script
    raise SystemExit(f"no mode '{mode}'; choose one of these:\n\n{listing(about, scripts)}")


def listing(about: str, scripts: Modes) -> str:
    """All modes, one line each, by script."""
    lines = [about.strip()]
    for script, modes in scripts.items():
        lines += ["", f"{script}.py", *(f"  {mode:<18}{sentence}" for mode, sentence in modes.items())]
    return "\n".join(lines)
