from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.report.findings import SENTENCES, audit_of, failed, flower_finding, text_case, text_finding

from unmask.audit.findings.finding import OpenPoint, TextPair
from unmask.audit.findings.verdict import reach_verdict
from unmask.report import secrets
from unmask.report.html.render import render_html
from unmask.report.junit import render_junit
from unmask.report.markdown import render_markdown
from unmask.report.sarif import render_sarif
from unmask.report.secrets import HELD_BACK, Secrets, error_message, error_traceback

# Pieces that no report holds by itself.
PIECES = st.one_of(
    st.text("qxzQXZ", min_size=5, max_size=12),
    st.text(st.characters(min_codepoint=0x4E00, max_codepoint=0x9FFF), min_size=2, max_size=4),
    st.text("<>&'\"\\", min_size=5, max_size=9).map(lambda text: f"zxq{text}zxq"),
)
MARKED = st.lists(st.tuples(PIECES, st.sampled_from(("place", "bag", "no"))), min_size=1, max_size=6).map(tuple)


def forms(piece: str) -> set[str]:
    """A piece as it is, and as HTML, XML and JSON write it."""
    markup = piece.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    quoted = markup.replace('"', "&#34;").replace("'", "&#39;")
    plain = json.dumps(piece)[1:-1]
    island = plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return {piece, markup, quoted, plain, island}


@settings(max_examples=25, phases=(Phase.generate,))  # a report is too slow to shrink
@given(true=MARKED, recovered=MARKED, bag=MARKED)
def test_no_piece_of_a_secret_is_in_a_redacted_report(true, recovered, bag):
    whole = "".join(piece for piece, _ in true)
    found = [
        replace(
            text_finding(text_case(), 0.5),
            texts=(
                TextPair(true, recovered, ambiguities=(OpenPoint("equal_tokens", whole, 1, (whole, recovered[0][0])),)),
                TextPair(None, true),
            ),
        ),
        flower_finding(tokens=bag),
        failed(text_case(seed=9), "ValueError", f"cannot encode {whole!r}: {whole}"),
    ]
    audit = audit_of(found, ["no exact text"])
    verdict = reach_verdict(audit)
    reports = [
        render(audit, verdict, Path("runs")) for render in (render_html, render_markdown, render_junit, render_sarif)
    ]
    for piece, _ in (*true, *recovered, *bag):
        for report in reports:
            assert not [form for form in forms(piece) if form in report]


def test_what_is_open_about_a_text_is_spelled_out_where_secrets_are_shown():
    point = OpenPoint("equal_tokens", "two \u202etokens look alike", 2, ("<file_sep>", "\x1b[2J"))
    found = replace(
        text_finding(text_case(), 0.5),
        texts=(TextPair(None, (("a", "place"),), ambiguities=(point, OpenPoint("new", ""))),),
    )
    plain = "one token may be another one that no forward pass tells apart from it."
    unknown = "something about this text."
    (shown,) = Secrets(show=True).of(found)["texts"]
    spelled = "two \\u202etokens look alike (token 3): '<file_sep>', '\\x1b[2J'"
    assert shown["open"] == [(plain, spelled), (unknown, "")]
    (hidden,) = Secrets(show=False).of(found)["texts"]
    assert hidden["open"] == [(plain, None), (unknown, None)]
    audit = audit_of([found])
    for show_secrets in (True, False):
        page = render_html(audit, reach_verdict(audit), Path("runs"), show_secrets=show_secrets)
        assert ("file_sep" in page) is show_secrets
        assert "<file_sep>" not in page


def test_the_property_can_fail():
    """The same search finds the pieces where secrets are shown."""
    audit = audit_of([text_finding(text_case(), 0.5)])
    shown = render_html(audit, reach_verdict(audit), Path("runs"), show_secrets=True)
    assert all(word in shown for sentence in SENTENCES for word in sentence.split())


def test_marks_stay_where_pieces_go():
    finding = replace(
        text_finding(text_case(), 0.5), texts=(TextPair((("a", "place"), ("b", "bag"), ("c", "no"), ("d", "?")), None),)
    )
    document = Secrets(show=False).of(finding)
    assert document["texts"][0]["true"] == {"marks": "pbnn"}
    assert document["texts"][0]["recovered"] is None
    keeper = Secrets(show=True)
    assert keeper.of(finding)["texts"][0]["true"] == {"marks": "pbnn", "pieces": [0, 1, 2, 3]}
    assert keeper.pieces == ["a", "b", "c", "d"]


def test_endless_texts_are_cut_and_say_so():
    endless = tuple(("x" * 1_000_000, "place") for _ in range(secrets.MAX_TOKENS + 5))
    finding = replace(text_finding(text_case(), 0.5), texts=(TextPair(endless, None), *[TextPair((), None)] * 69))
    keeper = Secrets(show=True)
    document = keeper.of(finding)
    assert document["texts"][0]["true"]["cut"] == secrets.MAX_TOKENS + 5
    assert document["left_out"] == 70 - secrets.MAX_TEXTS
    assert keeper.pieces == ["x" * secrets.LONGEST_PIECE + " … (1000000 characters)"]


def test_a_report_does_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(secrets, "MAX_PIECES", 100)
    keeper = Secrets(show=True)
    finding = text_finding(text_case(), 0.5)
    documents = [keeper.of(finding) for _ in range(5)]
    assert "left_out" not in documents[0]
    assert documents[-1] == {"left_out": len(finding.texts)}


@pytest.mark.parametrize(
    ("kind", "is_shown"), [("InputError", True), ("unmask.errors.EvidenceError", True), ("KeyError", False)]
)
def test_a_foreign_error_may_quote_a_text_and_is_held_back(kind, is_shown):
    finding = failed(text_case(), kind, "the message")
    assert ("the message" in error_message(finding, show=False)) is is_shown
    assert (HELD_BACK in error_message(finding, show=False)) is not is_shown
    assert "the message" in error_message(finding, show=True)
    assert error_traceback(finding, show=False) == []
    assert "the message" in error_traceback(finding, show=True)[-1]
