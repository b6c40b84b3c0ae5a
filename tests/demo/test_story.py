"""The demo in a terminal: the adversary in words, texts escaped, and a row for each finding."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

from rich.console import Console
from tests.audit.made import HOSTILE, finding, spec

from unmask.audit.findings.finding import TextPair
from unmask.channels import CHANNELS
from unmask.demo.story import print_channel, print_results


def told(print_it, *arguments) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_it(console, *arguments)
    return console.file.getvalue()


def test_each_channel_is_told_with_its_part_of_the_plan():
    plan = SimpleNamespace(text="\n\n".join(f"[[{channel}]]\nseeds = [0]" for channel in CHANNELS))
    for channel, entry in CHANNELS.items():
        out = told(print_channel, channel, plan)
        assert entry.threat.title in out
        assert entry.threat.wants in out
        assert f"[[{channel}]]" in out
        assert sum(f"[[{other}]]" in out for other in CHANNELS) == 1


def test_findings_of_texts_have_a_row_each():
    first = replace(finding(), texts=(TextPair(None, (("the biopsy", "place"),), certain=True),))
    control = finding("NOTHING_FOUND", {"exact_texts": 0, "token_recall": 0.0}, spec(defences=["noise:sigma=1000"]))
    out = told(print_results, [first, control], {control.id})
    assert "the biopsy" in out
    assert "2 of 2" in out
    assert "control: noise:sigma=1000" in out
    assert "not leaked by this attack" in out


def test_findings_of_weights_have_other_columns():
    case = {"channel": "queries", "model": "", "secret": "random:heads=1,width=4", "defences": []}
    found = finding(metrics={"weights_found": 1, "weight_error": 1e-12}, case=case, cost={"queries": 1234})
    lost = finding("NOTHING_FOUND", {"weights_found": 0, "weight_error": 1.0}, {**case, "seed": 1})
    out = told(print_results, [found, lost], ())
    assert "1,234" in out
    assert "1e-12" in out
    assert "not found" in out


def test_a_hostile_text_is_shown_escaped():
    hostile = replace(finding(), texts=(TextPair(None, ((HOSTILE, "place"),)),))
    out = told(print_results, [hostile], ())
    assert "guess" in out
    assert not any(sign in out for sign in ("\x1b", "\x07", "\u202e", "\u2066"))
