"""Secrets of services as text."""

from __future__ import annotations

import pytest

from unmask.audit.cases.secrets import SECRETS, parse_secret
from unmask.errors import InputError


@pytest.mark.parametrize("example", [kind.example for kind in SECRETS.values()])
def test_every_example_comes_back(example):
    secret = parse_secret(example)
    assert str(secret) == example
    assert parse_secret(str(secret)) == secret
    assert secret.needs_a_model == (not example.startswith("random"))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "there is no secret ''"),
        ("head", "attention:layer=15"),
        ("attention", "needs 'layer'"),
        ("attention:layer", "key=value"),
        ("attention:layer=-1", "from 0 on, got '-1'"),
        ("attention:layer=1.5", "whole number"),
        ("attention:layer=x", "whole number"),
        ("attention:layer=²", "whole number"),
        ("attention:layer=1,head=2", "no setting 'head'. Usage: its settings are layer"),
        ("attention:layer=1,layer=2", "given twice"),
        ("output-layer:layer=1", "it has no settings"),
        ("random:heads=0,width=4", "from 1 on, got '0'"),
        ("random:heads=2", "needs 'width'"),
    ],
)
def test_a_secret_that_is_not_understood(text, part):
    with pytest.raises(InputError, match=part):
        parse_secret(text)
