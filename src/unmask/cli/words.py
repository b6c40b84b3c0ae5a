"""Errors and warnings of the Python API in the words of the command line: `--task classification`, not `task=…`.

    phrases       sentences that name Python alone become sentences about options
    NAME must …   at the start of a message becomes --name must …
    NAME='value'  anywhere becomes --name value; NAME=True becomes --name, NAME=False --no-name

Settings inside of defences and attacks (`noise:sigma=1`) stay as they are: they are written so on the command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_SAME = (
    *("attack", "dimensions", "effort", "first_position", "known_beginning", "layer", "learning_rate", "max_length"),
    *("max_norm", "momentum", "normalise", "num_positions", "num_steps", "num_texts", "optimizer", "parts", "pooling"),
    *("all_tokens_predicted", "local_batch_size", "prefix", "seed", "site", "task", "train_mode", "weight_decay"),
    *("batch_size", "device", "dtype", "width"),
)
# Arguments of Python by the options that set them.
OPTIONS: Mapping[str, str] = {
    **{name: f"--{name.replace('_', '-')}" for name in _SAME},
    "padding_side": "--padding",
    "num_clients": "--clients",
    "parameters": "--keep",
    "heads": "--head",
}
_PHRASES: Mapping[str, str] = {
    "pass the gradients (p.grad), or new − old with update='delta'": (
        "pass gradients, or new − old with --delta; of weights after training, give those before with --before, or "
        "--weights where they are the model's own"
    ),
    "pass adapters=…, or load_model(the PEFT model)": (
        "give the folder of the PEFT adapter that the server sent, with --adapter"
    ),
    "state all_tokens_predicted=True if none are": (
        "if none are, say so with `unmask wrap update --all-tokens-predicted`"
    ),
    "are not all known; pass adapters=…": "are not all known; give them with `unmask wrap update --adapter`",
    "parameters must be a list of name parts": "--keep must be a part of a name",
    ", or None, got ": ", got ",
    "/dev/stdin": "standard input",
}
_NAMES = "|".join(sorted(OPTIONS, key=len, reverse=True))
_FIRST = re.compile(rf"^({_NAMES})(?= must )")
_SETTING = re.compile(rf"(?<![\w:,=.-])({_NAMES})=('[^']*'|\"[^\"]*\"|[\w.+-]+|…)")


def say_as_options(message: str) -> str:
    """The message with options in place of Python's arguments."""
    for phrase, words in _PHRASES.items():
        message = message.replace(phrase, words)
    message = _FIRST.sub(lambda match: OPTIONS[match[1]], message)
    return _SETTING.sub(_option, message)


def _option(match: re.Match[str]) -> str:
    option, value = OPTIONS[match[1]], match[2]
    if value in ("True", "False"):
        return option if value == "True" else f"--no-{option.removeprefix('--')}"
    quoted = value[0] in "'\""
    return f"{option} {value[1:-1].replace('_', '-') if quoted else value}"
