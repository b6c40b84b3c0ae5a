"""Layers that are drawn: their inputs leak from plain outputs, and are scored against what was sent in."""

from __future__ import annotations

import pytest
import torch
from tests.audit.channels.stories import tell
from tests.audit.made import make_plan

from unmask.audit.cases.secrets import parse_layer
from unmask.audit.channels.inputs import draw_layer
from unmask.audit.findings.finding import Finding, Outcome
from unmask.errors import InputError
from unmask.linalg.softmax_attention import AttentionMap


@pytest.fixture(scope="module", autouse=True)
def small_layers(one_thread: None) -> None:
    """Sums in another order have other last digits."""


def group(rest: str = "", secret: str = "random:tokens=4,width=6") -> str:
    return f'[[inputs]]\nsecrets = ["{secret}"]\n{rest}\n'


@pytest.mark.parametrize("secret", ["random:tokens=4,width=6", "random:tokens=3,width=4,causal=true"])
def test_plain_outputs_leak_their_input(tmp_path, secret):
    (found,) = tell(make_plan(tmp_path, group(secret=secret)))
    assert found.outcome is Outcome.LEAK
    assert found.metrics["inputs_found"] == 1
    assert found.metrics["input_error"] < 1e-6
    assert found.metrics["false_inputs"] == 0
    assert found.looked_for == ("inputs",)
    assert Finding.from_json(found.to_json()) == found


def test_outputs_that_were_destroyed_do_not_leak(tmp_path):
    (found,) = tell(make_plan(tmp_path, group('defences = ["noise:sigma=1000"]')))
    assert found.outcome is not Outcome.LEAK
    assert found.metrics["inputs_found"] == 0


def test_another_input_that_gives_noisy_outputs_holds_no_gate(tmp_path):
    """V is square, so noise in the output does not show; 8 bits still give away 99 % of the input."""
    rounded, noisy = tell(make_plan(tmp_path, group('defences = ["int8", "noise:sigma=1"]')))
    assert rounded.status == noisy.status == "RECOVERED"
    assert rounded.metrics["inputs_rate"] > 0.98
    assert rounded.metrics["false_inputs"] == noisy.metrics["false_inputs"] == 1
    assert rounded.looked_for == noisy.looked_for == ()


def test_less_noise_leaves_more_of_the_input(tmp_path):
    rest = 'defences = ["noise:sigma=1e-6", "noise:sigma=1e-3"]'
    small, large = (found.metrics["input_error"] for found in tell(make_plan(tmp_path, group(rest))))
    assert 1e-9 < small < large


def test_a_layer_is_what_its_text_says():
    evidence, X = draw_layer(parse_layer("random:tokens=5,width=7,definite=false,causal=true"), 3)
    assert X.shape == (5, 7)
    assert evidence.causal
    assert float(torch.linalg.eigvalsh(evidence.W + evidence.W.T).min()) < 0
    torch.testing.assert_close(evidence.output, AttentionMap(evidence.W, True)(X) @ evidence.V)
    definite, _ = draw_layer(parse_layer("random:tokens=5,width=7"), 3)
    assert float(torch.linalg.eigvalsh(definite.W).min()) > 0
    again, same = draw_layer(parse_layer("random:tokens=5,width=7"), 3)
    assert torch.equal(again.output, definite.output)
    assert not torch.equal(same, draw_layer(parse_layer("random:tokens=5,width=7"), 4)[1])


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ('models = ["m"]', "belong to no model"),
        ('defences = ["cloak"]', "no meaning for the output of a layer"),
        ('attacks = ["decoder"]', "decoder"),
        ('gates = ["no exact text"]', "do not have"),
    ],
)
def test_what_has_no_meaning_is_refused(tmp_path, rest, words):
    with pytest.raises(InputError, match=words):
        make_plan(tmp_path, group(rest))


def test_unknown_layers_are_refused(tmp_path):
    with pytest.raises(InputError, match="width"):
        make_plan(tmp_path, group(secret="random:tokens=4"))
