from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.report.findings import HOSTILE, SENTENCES, audit_of, failed, many, realistic, text_case, text_finding

from unmask.audit.findings.folder import Audit
from unmask.audit.findings.verdict import reach_verdict
from unmask.report.html.render import render_html


def render(audit: Audit, show_secrets: bool = False) -> str:
    return render_html(audit, reach_verdict(audit), Path("runs/release"), show_secrets)


class Reader(HTMLParser):
    """Tags, attributes and the text that people see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def of(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def whole() -> str:
    return render(audit_of(realistic(), ["no exact text"], [text_case(batch_size=128)], "Clinic notes"))


def test_the_verdict_comes_first(whole):
    titles = ("Gates", "What is not known", "Summary", "Curves", "Findings", "Manifest", "Responsible use")
    order = ["Gate crossed</h1>", "A gate is crossed", "Exit code", *(f">{title}</h2>" for title in titles)]
    places = [whole.index(text) for text in order]
    assert places == sorted(places)


def test_nothing_is_asked_of_anybody(whole):
    reader = Reader(whole)
    for tag, attributes in reader.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base")
        for name, value in attributes.items():
            assert name not in ("style", "src", "srcset"), tag
            assert not name.startswith("on"), tag
            if name in ("href", "action"):
                assert value.startswith(("#", "data:image/svg+xml,")), value
    assert not re.search(r"@import|url\(", whole)


def test_the_policy_lets_only_this_style_and_this_script_run(whole):
    policy = next(meta["content"] for meta in Reader(whole).of("meta") if "http-equiv" in meta)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "script-src 'sha256-" in policy
    assert "unsafe" not in policy
    assert whole.index("Content-Security-Policy") < whole.index("<style>")


def test_every_figure_has_words_and_numbers(whole):
    reader = Reader(whole)
    charts = [svg for svg in reader.of("svg") if svg.get("class") == "chart"]
    assert len(charts) >= 8
    assert whole.count("Numbers of this figure") == len(charts)
    assert "Mean of 3 seeds; bars: 95 % Student&#39;s t interval" in whole
    assert "Dashed: chance." in whole


def test_one_seed_is_said():
    page = render(audit_of([text_finding(text_case(batch_size=size), 0.5) for size in (1, 4)]))
    assert "One seed a point, so no interval is drawn." in page
    assert "Student" not in page


def test_outcomes_have_words_and_inconclusive_is_never_safe(whole):
    text = Reader(whole).text
    assert "not leaked by this attack" in text
    assert "it never means 'safe'" in text
    assert text.count("'safe'") == 1  # said once, where the words are explained


def test_labels_and_landmarks(whole):
    reader = Reader(whole)
    assert {"header", "main", "nav", "footer", "section"} <= {tag for tag, _ in reader.tags}
    labelled = {attributes.get("id") for attributes in reader.of("input") + reader.of("select")}
    assert labelled == {"q", "by-outcome", "by-channel", "by-gate"}
    assert len(reader.of("label")) == len(labelled)
    assert all(th.get("aria-sort") == "none" for th in reader.of("th") if th.get("role") == "columnheader")
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_redacted_by_default_and_shown_on_demand():
    audit = audit_of(realistic())
    redacted, shown = render(audit), render(audit, show_secrets=True)
    assert not [
        word
        for sentence in SENTENCES
        for word in sentence.split()
        if f'"{word}"' in redacted or f'" {word}"' in redacted
    ]
    assert "Texts are redacted" in redacted
    assert 'id="reveal"' not in redacted
    assert '" biopsy"' in shown
    assert "This file holds the secret." in shown
    assert 'aria-checked="false"' in shown


def test_the_command_that_shows_texts_can_be_pasted():
    audit = audit_of(realistic())
    page = render_html(audit, reach_verdict(audit), Path("my runs"), False)
    assert "unmask report 'my runs' --show-secrets" in unescape(page)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text_everywhere(text):
    finding = text_finding(
        text_case(model=text, protocol=text, defences=[text], data={"name": text, "sha256": text}), 0.5
    )
    audit = audit_of([finding], ["no exact text"], [text_case(model=text)], title=text)
    audit = Audit({**audit.manifest, "versions": {text: text}, "created": text, "unmask": text}, audit.findings)
    page = render(audit, show_secrets=True)
    plain = render(
        audit_of([text_finding(text_case(), 0.5)], ["no exact text"], [text_case(seed=1)]), show_secrets=True
    )
    assert [tag for tag, _ in Reader(page).tags if tag in ("script", "img")] == ["script", "script"]
    assert page.count("<script") == plain.count("<script") == 2
    assert page.count("<!--") == 0
    assert all(character.isprintable() or character == "\n" for character in page)


def test_a_megabyte_line_is_cut():
    page = render(
        audit_of([text_finding(text_case(model="m" * 1_000_000, data={"name": "d" * 10**6, "sha256": ""}), 0.5)])
    )
    assert len(page) < 200_000
    assert "(1000000 characters)" in page


def test_an_empty_audit_and_an_unplanned_one_have_a_page():
    assert "No case has been run yet." in render(Audit({}, ()))
    unplanned = Audit({"schema": 1}, (text_finding(text_case(), 1.0, 4),), num_damaged=1)
    assert "1 line of the findings could not be read" in render(unplanned)


def test_a_thousand_findings_with_their_texts_stay_under_five_megabytes():
    page = render(audit_of(many(1000), ["no exact text"]), show_secrets=True)
    assert len(page.encode()) < 5_000_000


def test_a_redacted_page_names_no_folder_no_host_and_no_hash_of_the_data():
    finding = text_finding(
        text_case(model="/srv/ann/mine"),
        *(1.0, 4),
        reason="read from /srv/ann/texts.txt",
        run={"seconds": 1.0, "host": "anns-laptop"},
    )
    audit = audit_of([finding, failed(text_case(seed=1), "InputError", "no file /srv/ann/b.txt")], ["no exact text"])
    plan = {**audit.manifest["plan"], "path": "/home/ann/plan.toml"}
    data = {"notes": {"sha256": "ab" * 32, "num_texts": 4, "path": "/home/ann/texts.txt"}}
    command = "unmask audit /home/ann/plan.toml --out /srv/ann/runs"
    audit = replace(audit, manifest={**audit.manifest, "plan": plan, "data": data, "command": command})
    redacted, whole = (
        render_html(audit, reach_verdict(audit), Path("/srv/ann/runs"), show_secrets) for show_secrets in (False, True)
    )
    for secret in ("/srv/", "/home/", "anns-laptop", "ab" * 32):
        assert secret not in redacted
        assert secret in whole
    assert "unmask audit plan.toml --out runs" in redacted
    assert "folders are left out" in redacted
