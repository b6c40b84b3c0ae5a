"""What shells and notebooks show: short, complete where it counts, and harmless."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from tests.audit.made import make_plan, random_group
from tests.report.findings import SENTENCES, audit_of, text_case, text_finding
from tests.tiny_models import VOCAB

import unmask
from unmask.audit.findings.verdict import reach_verdict
from unmask.displays import MOST_ROWS, Displayed, DisplayedFields
from unmask.recovery import Certificate, Cost, RecoveredText, RecoveredTexts, Recovery, Status

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202ered"


def recovery(*texts: RecoveredText, **value: frozenset[int]) -> Recovery[RecoveredTexts]:
    certificate = Certificate("the client sends this", 1e-7, 1e-5)
    return Recovery(RecoveredTexts(texts, **value), Status.RECOVERED, "all texts", certificate, Cost(1.25, 40, 2))


def text(words: str, certain: bool = True) -> RecoveredText:
    return RecoveredText((1, 2, 3), words, certain, 0.0)


def test_a_recovery_fits_a_screen_and_says_what_counts():
    shown = repr(recovery(*(text(f"sentence {n}") for n in range(40))))
    lines = shown.splitlines()
    assert lines[0] == "RECOVERED: all texts"
    assert len(lines) == MOST_ROWS + 1
    assert "31 more; .show() prints all" in shown
    assert lines[-2].split()[:6] == ["certificate", "1.0e-07", "of", "at", "most", "1.0e-05:"]
    assert lines[-1].split() == ["cost", "1.2", "s,", "40", "candidates,", "2", "forward", "passes"]


def test_show_prints_all(capsys):
    recovery(*(text(f"sentence {n}") for n in range(40))).show()
    assert capsys.readouterr().out.count("sentence") == 40


def test_what_is_not_certain_is_said_and_the_bag_is_counted():
    shown = repr(recovery(text("sure"), text("guess", certain=False), token_set=frozenset({1, 2})))
    assert "best effort" in shown
    assert "2 tokens" in shown.splitlines()[-3]
    assert "nothing" in repr(recovery())


def test_hostile_text_is_harmless_everywhere(capsys):
    found = recovery(text(HOSTILE), text(HOSTILE * 200, certain=False))
    page = found._repr_html_()
    found.show()
    for shown in (repr(found), page, capsys.readouterr().out):
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert max(map(len, shown.splitlines())) < 4000
    assert "<script" not in page


def test_evidence_is_shown_by_shapes_not_by_numbers(tiny_gpt2):
    evidence = unmask.observe_gradients(tiny_gpt2, [[5, 6, 7]])
    shown = repr(evidence)
    assert len(shown) < 300
    assert f"{len(evidence.gradients)} tensors" in shown
    assert "adapters" not in shown  # nothing that has its default
    heads = unmask.HeadWeights(W=torch.zeros(2, 4, 4), v=torch.zeros(2, 4))
    assert repr(heads) == "HeadWeights(W=float32 (2, 4, 4), v=float32 (2, 4))"


def test_a_value_that_is_no_text_is_shown_by_its_own_words():
    heads = unmask.HeadWeights(W=torch.zeros(1, VOCAB, VOCAB), v=torch.zeros(1, VOCAB))
    shown = repr(Recovery(heads, Status.RECOVERED, "one head", Certificate("holds", 0.0, 1.0), Cost()))
    assert "HeadWeights(W=float32" in shown
    assert len(shown) < 400


def test_fields_without_a_display_are_left_out():
    @dataclass(frozen=True, repr=False)
    class Evidence(DisplayedFields):
        number: int
        secret: str = field(default="", repr=False)
        more: dict[str, int] = field(default_factory=dict)

    assert repr(Evidence(3, "key", {})) == "Evidence(number=3)"


def test_who_is_displayed_says_how():
    with pytest.raises(NotImplementedError):
        repr(Displayed())


def test_a_model_is_shown_by_its_sizes(tiny_gpt2, tiny_bert):
    assert repr(tiny_gpt2).startswith("Model(gpt2, decoder, ")
    assert f"{tiny_gpt2.vocab_size:,} tokens, float32 on cpu)" in repr(tiny_gpt2)
    assert "encoder" in repr(tiny_bert)


def test_audits_are_shown_without_texts():
    findings = [text_finding(text_case(seed=seed), 1.0, 4) for seed in range(20)]
    audit = audit_of(findings, ["no exact text"])
    verdict = reach_verdict(audit)
    for shown in (repr(audit), repr(verdict), repr(findings[0]), verdict._repr_html_()):
        assert len(shown.splitlines()) <= MOST_ROWS + 1
        assert not any(sentence[:12] in shown for sentence in SENTENCES)
        assert max(map(len, repr(verdict).splitlines())) < 200
    assert repr(audit).startswith("Audit: 20 findings, 0 cases not run")
    assert repr(verdict).startswith("Verdict, exit code 1: A gate is crossed: 'no exact text' by 20 cases")
    assert repr(findings[0]).startswith("Finding: leaks")
    assert "gradients · smollm2-135m" in repr(findings[0])


def test_a_plan_is_shown_by_its_cases(tmp_path):
    plan = make_plan(tmp_path, random_group(range(40)), top='title = "Forty"')
    assert repr(plan).startswith("Plan, 40 cases: Forty")
    assert len(repr(plan).splitlines()) == MOST_ROWS + 1
