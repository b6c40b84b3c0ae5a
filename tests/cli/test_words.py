from __future__ import annotations

import ast
from pathlib import Path

import pytest
import typer

import unmask
from unmask import cli
from unmask.cli.words import _PHRASES, OPTIONS, say_as_options


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
