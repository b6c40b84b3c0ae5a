from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.report.findings import HOSTILE, SENTENCES, audit_of, failed, many, text_case, text_finding
from tests.report.html.test_render import Reader

from unmask.audit.findings.folder import Audit
from unmask.report.comparison import compare_audits
from unmask.report.html.compare import MAX_ROWS, render_comparison
from unmask.report.trend import trend_of
from unmask.safe_text import last_name


def render(before: Audit, after: Audit, folders: tuple[str, str] = ("runs/a", "runs/b")) -> str:
    return render_comparison(compare_audits(before, after), (before, after), [last_name(folder) for folder in folders])


@pytest.fixture(scope="module")
def page() -> str:
    cases = [text_case(batch_size=size) for size in (1, 4, 16)]
    before = [text_finding(cases[0], 0.5), text_finding(cases[1], 1.0, 4), text_finding(cases[2], 1.0)]
    return render(audit_of(before), audit_of([text_finding(cases[0], 1.0, 1), before[1], failed(cases[2])]))


def test_the_regression_comes_first(page):
    order = ["Regression</h1>", "1 case got worse; 1 not compared, 1 same.", "Worse: regressions</h2>"]
    order += ["Texts recovered exactly: 0 → 1", "Could not be compared</h2>", "now: error", "The same</h2>"]
    places = [page.index(text) for text in order]
    assert places == sorted(places)


def test_it_is_green_nowhere_and_yellow_where_something_is_not_known():
    one = text_finding(text_case(), 1.0, 4)
    assert 'class="hero neutral"' in render(audit_of([one]), audit_of([one]))
    assert 'class="hero unclear"' in render(audit_of([one]), audit_of([failed(one.case)]))


def test_what_is_open_names_its_cause():
    """New leaks read as 'had a result before and have none now'."""
    old, fresh = text_finding(text_case(), 1.0, 4), text_finding(text_case(seed=1), 1.0, 4)
    new_leak, lost = (
        render(audit_of([old]), audit_of([old, fresh])),
        render(audit_of([old]), audit_of([failed(old.case)])),
    )
    assert ("New cases leak" in new_leak, "have none now" in new_leak) == (True, False)
    assert ("New cases leak" in lost, "have none now" in lost) == (False, True)
    never = audit_of([failed(old.case)])
    assert "No case has a result in both audits" in render(never, never)


def test_nothing_is_asked_of_anybody_and_no_script_runs(page):
    reader = Reader(page)
    for tag, attributes in reader.tags:
        assert tag not in ("script", "img", "iframe", "object", "embed", "base", "form")
        for name, value in attributes.items():
            assert name not in ("style", "src", "srcset"), tag
            assert not name.startswith("on"), tag
            if name == "href":
                assert value.startswith(("#", "data:image/svg+xml,")), value
    policy = next(meta["content"] for meta in reader.of("meta") if "http-equiv" in meta)
    assert "script-src 'none'" in policy
    assert not re.search(r"@import|url\(", page)
    assert "prefers-color-scheme: dark" in page


def test_no_text_is_in_it(page):
    words = {word for sentence in SENTENCES for word in sentence.split() if len(word) > 5} - {"before"}
    assert not [word for word in words if word in page]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_stay_text(text):
    case = text_case(model=text, attack=text, defences=[text], data={"name": text, "sha256": "ab" * 32})
    before = audit_of([replace(text_finding(case, 0.5), reason=text)], title=text)
    after = audit_of([replace(text_finding(case, 1.0, 4), reason=text)], title=text)
    page = render(before, after, ("runs/a", f"runs/{text.replace('/', '').replace(chr(0), '')}"))
    reader = Reader(page)
    assert {"script", "img"}.isdisjoint(tag for tag, _ in reader.tags)
    assert not [sign for sign in page if not sign.isprintable() and sign != "\n"]


def test_a_large_audit_is_cut_and_says_so():
    audit = audit_of(many(MAX_ROWS + 7))
    page = render(audit, audit)
    assert "and 7 more; <code>unmask compare --json</code>" in page


def test_the_trend_has_a_column_for_each_audit():
    audits = [audit_of([text_finding(text_case(seed=seed), *found) for seed, found in enumerate(one)]) for one in RUNS]
    comparison = compare_audits(*audits[-2:])
    page = render_comparison(comparison, audits, ["<b>first", "second", "third"], trend_of(audits))
    assert "Trend</h2>" in page
    assert page.index("&lt;b&gt;first</th>") < page.index("second</th>") < page.index("third</th>")
    assert re.search('<polyline points="2.0,2.0 50.0,12.0 98.0,22.0"/>', page)
    assert page.count("<h3>") == 3
    assert "Trend" not in render_comparison(comparison, audits[-2:], ["second", "third"])


RUNS = [[(1.0, 4), (1.0, 4)], [(1.0, 4), (0.0,)], [(0.0,), (0.0,)]]
