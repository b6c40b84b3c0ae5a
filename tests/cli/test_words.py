from __future__ import annotations

import ast
from pathlib import Path

import pytest
import typer

import unmask
from unmask import cli
from unmask.cli.words import _PHRASES, OPTIONS, describe_in_options, explain_usage, say_as_options
from unmask.recovery import (
    Ambiguity,
    AmbiguityKind,
    Certificate,
    Cost,
    RecoveredText,
    RecoveredTexts,
    Recovery,
    Status,
)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("it is none; use task='classification', or", "it is none; use --task classification, or"),
        ("state task='next_token' if", "state --task next-token if"),
        ("layer must lie in 0…5, got 9", "--layer must lie in 0…5, got 9"),
        ("padding_side must be 'left' or 'right', got 'up'", "--padding must be 'left' or 'right', got 'up'"),
        ("learning_rate must be above 0, or None, got -1", "--learning-rate must be above 0, got -1"),
        ("all_tokens_predicted=True was", "--all-tokens-predicted was"),
        ("normalise=False was", "--no-normalise was"),
        ("the defence 'noise:seed=1,layer=2' is unknown", "the defence 'noise:seed=1,layer=2' is unknown"),
        ("my-task='x' and old.seed=3", "my-task='x' and old.seed=3"),
        ("the layer must lie", "the layer must lie"),
        ("/dev/stdin holds no text", "standard input holds no text"),
        ("nothing to say", "nothing to say"),
    ],
)
def test_arguments_become_options(said, shown):
    assert say_as_options(said) == shown


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "Invalid value for '--task': Value error, 'next' is not one of 'next-token', 'classification'.",
            "Invalid value for '--task': 'next' is not one of 'next-token', 'classification'. Did you mean "
            "'next-token'?",
        ),
        (
            "No such option '--tsk'. (Did you mean one of: '--out', '--task'?)",
            "No such option '--tsk'. Did you mean '--task'?",
        ),
        (
            "No such option: --chekc (Possible options: --check, --help)",
            "No such option: --chekc Did you mean '--check'?",
        ),
        ("No such command 'x'. Did you mean 'y'? Did you mean 'y'?", "No such command 'x'. Did you mean 'y'?"),
        ("Missing option '--model'.", "Missing option '--model'."),
    ],
)
def test_a_wrong_call_gets_one_suggestion(said, shown):
    assert explain_usage(said) == shown


def test_what_stays_open_is_said_in_options_too():
    why = "it may continue; state all_tokens_predicted=True if none are"
    text = RecoveredText((1,), "a", False, 0.0, ambiguities=(Ambiguity(AmbiguityKind.OPEN_END, why),))
    recovery = Recovery(RecoveredTexts((text,)), Status.PARTIAL, why, Certificate.none("-"), Cost())
    told = describe_in_options(recovery)
    assert told.reason == told.value.texts[0].ambiguities[0].reason == say_as_options(why) != why


def test_every_option_is_one_of_a_command():
    group = typer.main.get_command(cli.app)
    commands = [group]
    known: set[str] = set()
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        for parameter in command.params:
            known |= {*parameter.opts, *parameter.secondary_opts}
    assert set(OPTIONS.values()) <= known


def test_every_phrase_is_one_of_the_source():
    """A message that is written anew must not silently lose its words."""
    texts = []
    for path in Path(unmask.__file__).parent.rglob("*.py"):
        if path.name != "words.py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    texts.append("".join(part.value for part in node.values if isinstance(part, ast.Constant)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    assert not [phrase for phrase in _PHRASES if not any(phrase in text for text in texts)]
