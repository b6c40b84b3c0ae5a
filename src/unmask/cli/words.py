"""Errors and warnings of the Python API in the words of the command line: `--task classification`, not `task=…`.

    phrases       sentences about Python become sentences about options
    NAME must …   at the start of a message becomes --name must …
    NAME='value'  anywhere becomes --name value; NAME=True becomes --name, NAME=False --no-name

Settings of defences and attacks (`noise:sigma=1`) are written the same on the command line, so they stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from unmask.recovery import RecoveredTexts, Recovery
from unmask.wording import did_you_mean

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
    "state task='classification' if every": "say so with `unmask wrap update --task classification` if every",
    "state pooling='mean' if it takes": "say so with `unmask wrap update --pooling mean` if it takes",
    "are not all known; pass adapters=…": "are not all known; give them with `unmask wrap update --adapter`",
    "state update='delta'": "give --delta",
    "parameters must be a list of name parts": "--keep must be a part of a name",
    ", or None, got ": ", got ",
    "/dev/stdin": "standard input",
}
_NAMES = "|".join(sorted(OPTIONS, key=len, reverse=True))
_FIRST = re.compile(rf"^({_NAMES})(?= must )")
_DOUBLED = re.compile(r"( Did you mean [^?]*\?)\1+")
_OPTIONS_LISTED = re.compile(r" \((?:Did you mean one of|Possible options):[^)]*\)")
_OPTION_NAME = re.compile(r"--?[a-z][\w-]*")
_CHOICE = re.compile(r"'([^']*)' is not one of ((?:'[^']*'(?:, )?)+)")
_SETTING = re.compile(rf"(?<![\w:,=.-])({_NAMES})=('[^']*'|\"[^\"]*\"|[\w.+-]+|…)")


def describe_in_options(recovery: Recovery[RecoveredTexts]) -> Recovery[RecoveredTexts]:
    """The recovery with options in its reason and in what stays open about each text."""
    texts = tuple(
        replace(text, ambiguities=tuple(replace(one, reason=say_as_options(one.reason)) for one in text.ambiguities))
        for text in recovery.value.texts
    )
    return replace(recovery, reason=say_as_options(recovery.reason), value=replace(recovery.value, texts=texts))


def explain_usage(message: str) -> str:
    """What is wrong with a call, with the closest name suggested once: typer and click each have a hint of their "
    "own."""
    message = _DOUBLED.sub(r"\1", message.replace("Value error, ", ""))
    if listed := _OPTIONS_LISTED.search(message):
        name = _OPTION_NAME.search(message)
        options = _OPTION_NAME.findall(listed[0])
        return message[: listed.start()] + (did_you_mean(name[0], options) if name else "") + message[listed.end() :]
    if choice := _CHOICE.search(message):
        return message + did_you_mean(choice[1], re.findall("'([^']*)'", choice[2]))
    return message


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
