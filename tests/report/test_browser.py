"""The report in a real browser, opened from disk with the network off."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.report.browser import has_no_overflow, missing, set_size, visit
from tests.report.findings import (
    HOSTILE,
    audit_of,
    flower_finding,
    many,
    realistic,
    text_case,
    text_finding,
    write_audit,
)

from unmask.audit.findings.finding import TextPair
from unmask.report import write_reports

if why := missing():
    pytest.skip(why, allow_module_level=True)

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

GATES = ["no exact text"]


@pytest.fixture(scope="module")
def hostile(place: Path) -> Path:
    """Every text that a finding or a manifest can hold is hostile."""
    found = []
    for text in HOSTILE:
        case = text_case(model=text, protocol=text, defences=[text], data={"name": text, "sha256": text})
        pieces = ((text, "place"), (text * 2, "no"), ("x" * 1_000_000, "bag"))
        found.append(
            replace(
                text_finding(case, 0.5),
                reason=text,
                used=(text,),
                tokens=pieces,
                texts=(TextPair(pieces, pieces),),
                certificate={"claim": text, "residual": 1.0, "tolerance": 0.0, "details": {text: 1.0}, "holds": False},
                metrics={"token_recall": 0.5, text: 0.5},
            )
        )
    audit = audit_of(found, GATES, [text_case(model=text) for text in HOSTILE], " ".join(HOSTILE))
    folder = write_audit(place / "hostile", audit)
    return write_reports(folder, formats=["html"], show_secrets=True)["html"]


def num_rows(browser: Any) -> int:
    return browser.execute_script("return document.querySelectorAll('#table tbody > tr[id^=f]:not([hidden])').length")


def column(browser: Any, key: str) -> list[str]:
    script = "return [...document.querySelectorAll(`#table tbody > tr[id^=f]:not([hidden]) .k-${arguments[0]}`)]"
    return browser.execute_script(script + ".map((cell) => cell.textContent)", key)


def requests(browser: Any) -> list[str]:
    """Addresses that the page asked for, itself apart."""
    entries = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [entry["params"]["request"]["url"] for entry in entries if entry["method"] == "Network.requestWillBeSent"]
    return [url for url in sent if not url.startswith(("file:", "data:", "about:", "chrome:"))]


def test_it_opens_without_errors_and_asks_nobody(browser, usual):
    visit(browser, usual)
    assert browser.find_element(By.TAG_NAME, "h1").text == "Gate crossed"
    browser.execute_script("document.querySelectorAll('button.open').forEach((button) => button.click())")
    assert len(browser.find_elements(By.CSS_SELECTOR, "tr.details .panel")) == len(realistic())
    assert browser.get_log("browser") == []
    assert requests(browser) == []


def test_the_log_and_the_policy_would_tell(browser, usual):
    """The two checks above can fail: a script and an image that are added are refused, and it is logged."""
    visit(browser, usual)
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = true'; document.body.append(s);"
        "const i = document.createElement('img'); i.src = 'https://example.org/x.png'; document.body.append(i)"
    )
    assert browser.execute_script("return window.hacked") is None
    assert "Content Security Policy" in str(browser.get_log("browser"))


def test_hostile_text_does_not_run_and_is_shown_as_text(browser, hostile):
    visit(browser, hostile)
    browser.find_element(By.ID, "reveal").click()
    browser.execute_script("document.querySelectorAll('button.open').forEach((button) => button.click())")
    assert browser.execute_script("return window.hacked") is None
    assert browser.get_log("browser") == []
    assert len(browser.find_elements(By.TAG_NAME, "script")) == 2
    assert browser.find_elements(By.TAG_NAME, "img") == []
    seen = browser.execute_script("return document.querySelector('main').textContent")
    for text in (
        "<script>window.hacked = true; alert(1)</script>",
        "\\u202egnp.exe",
        "{{ 7 * 7 }}",
        "(1000000 characters)",
    ):
        assert text in seen
    for character in "\u202e\u2066\u200b\ufeff\x00\x1b":
        assert character not in seen
    for width in (1240, 375):
        set_size(browser, width, 900, is_phone=width < 500)
        assert has_no_overflow(browser)


def test_sorting_by_every_column(browser, usual):
    visit(browser, usual)
    for key in ("case", "channel", "model", "id"):
        button = browser.find_element(By.CSS_SELECTOR, f"[data-sort={key}]")
        button.click()
        up = column(browser, key)
        assert button.find_element(By.XPATH, "..").get_attribute("aria-sort") == "ascending"
        button.click()
        down = column(browser, key)
        assert button.find_element(By.XPATH, "..").get_attribute("aria-sort") == "descending"
        assert up != down
        assert sorted(up) == sorted(down)
        assert (up[0], up[-1]) == (down[-1], down[0])
    browser.find_element(By.CSS_SELECTOR, "[data-sort=leak]").click()
    leaks = column(browser, "leak")
    assert leaks[0] in ("inconclusive", "not measured")  # apart from what is known to be 0
    assert leaks[-1].startswith("100 %")
    browser.find_element(By.CSS_SELECTOR, "[data-sort=outcome]").click()
    assert list(dict.fromkeys(column(browser, "outcome"))) == [
        *("leaks", "error", "inconclusive", "not leaked by this attack")
    ]
    assert len(browser.find_elements(By.CSS_SELECTOR, "[aria-sort=ascending]")) == 1


def test_details_move_with_their_row(browser, usual):
    visit(browser, usual)
    browser.find_element(By.CSS_SELECTOR, "#f3 button").click()
    browser.find_element(By.CSS_SELECTOR, "[data-sort=id]").click()
    assert browser.execute_script("return document.getElementById('f3').nextElementSibling.id") == "d3"


def test_filters_by_words_outcome_channel_and_gate(browser, usual):
    visit(browser, usual)
    everything = num_rows(browser)
    count = browser.find_element(By.ID, "count")
    assert count.text == f"{everything} findings"
    assert count.get_attribute("aria-live") == "polite"
    search = browser.find_element(By.ID, "q")
    search.send_keys("Sigma=0.001 partial")
    some = num_rows(browser)
    assert 0 < some < everything
    assert count.text == f"{some} of {everything} findings"
    assert all("sigma=0.001" in name for name in column(browser, "case"))
    browser.find_element(By.CSS_SELECTOR, "button[type=reset]").click()
    browser.execute_async_script("setTimeout(arguments[0], 0)")
    assert num_rows(browser) == everything
    for field, value, key, word in (
        ("by-outcome", "INCONCLUSIVE", "outcome", "inconclusive"),
        ("by-channel", "queries", "channel", "queries"),
        ("by-gate", "crossed", "gate", "crossed"),
    ):
        browser.execute_script(
            "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
            "s.dispatchEvent(new Event('input', {bubbles: true}))",
            *(field, value),
        )
        assert set(column(browser, key)) == {word}
        browser.find_element(By.CSS_SELECTOR, "button[type=reset]").click()
        browser.execute_async_script("setTimeout(arguments[0], 0)")


def test_nothing_that_fits_is_said(browser, usual):
    visit(browser, usual)
    browser.find_element(By.ID, "q").send_keys("no such thing")
    assert num_rows(browser) == 0
    assert browser.find_element(By.ID, "count").text.startswith("0 of ")


def test_texts_are_hidden_until_the_switch_is_turned(browser, usual):
    visit(browser, usual)
    browser.find_element(By.CSS_SELECTOR, "#f0 button").click()
    panel = browser.find_element(By.ID, "d0")
    switch = browser.find_element(By.ID, "reveal")
    assert switch.get_attribute("aria-checked") == "false"
    assert "spare" not in panel.text
    assert len(panel.find_elements(By.CSS_SELECTOR, ".texts .blocks .block.p")) == 22
    switch.send_keys(Keys.SPACE)
    assert switch.get_attribute("aria-checked") == "true"
    assert panel.text.count("the spare key lies under the blue pot by the door") == 2
    switch.send_keys(Keys.ENTER)
    assert "spare" not in panel.text


def test_a_redacted_report_has_no_switch_and_no_text(browser, usual, place):
    page = write_reports(usual.parent, formats=["html"], out=place / "redacted")["html"]
    visit(browser, page)
    browser.find_element(By.CSS_SELECTOR, "#f0 button").click()
    assert browser.find_elements(By.ID, "reveal") == []
    assert "this file holds no piece of a text" in browser.find_element(By.ID, "d0").text
    assert browser.get_log("browser") == []


def test_a_panel_says_all_that_is_known(browser, usual):
    visit(browser, usual)
    browser.find_element(By.CSS_SELECTOR, "#f2 button").click()
    seen = browser.find_element(By.ID, "d2").text
    for words in (
        *("A federated-learning server", "It holds.", "residual", "tolerance", "What stopped it, in this audit"),
        *("dpsgd:noise_multiplier=1", "reduced to", "inconclusive, which does not count as 'stopped'"),
        *("token_recall", "Chance", "Specification", "unmask audit plan.toml --out", "Limits of the attack"),
    ):
        assert words in seen


def test_words_that_would_mislead_are_not_there(browser, place):
    """A text that matches nothing, a text that was not recovered, a federation whose defences nobody knows."""
    leak = text_finding(text_case(), 0.5)
    pieces = (("secret", "place"),)
    pairs = (TextPair(None, pieces), TextPair(pieces, None))
    live = flower_finding(texts=(TextPair(None, pieces, certain=True),))
    audit = audit_of([replace(leak, texts=pairs, status="NOTHING_FOUND"), live])
    visit(browser, write_reports(write_audit(place / "odd", audit), formats=["html"])["html"])
    browser.execute_script("document.querySelectorAll('button.open').forEach((button) => button.click())")
    known, unknown = (browser.find_element(By.ID, name).text for name in ("d0", "d1"))
    assert "matches no true text" in known
    assert "not known to the auditor" not in known
    assert known.count("a best effort") == 1  # no label where nothing was recovered
    assert "cannot prove it, but its guesses are right" in known
    assert "not known to the auditor" in unknown
    assert "What stopped it" not in unknown
    assert "no defence" not in unknown


def test_a_click_anywhere_on_a_row_opens_it(browser, usual):
    visit(browser, usual)
    cell = browser.find_element(By.CSS_SELECTOR, "#f1 .k-status, #f1 td:last-child")
    cell.click()
    assert browser.find_element(By.ID, "d1").is_displayed()
    cell.click()
    assert not browser.find_element(By.ID, "d1").is_displayed()


def test_links_from_the_verdict_open_the_finding(browser, usual):
    visit(browser, usual)
    browser.find_element(By.ID, "q").send_keys("no such thing")
    link = browser.find_element(By.CSS_SELECTOR, ".gate .named a")
    link.send_keys(Keys.ENTER)
    number = link.get_attribute("href").rpartition("#f")[2]
    assert browser.find_element(By.ID, f"d{number}").is_displayed()
    assert browser.switch_to.active_element.get_attribute("aria-expanded") == "true"


def test_a_thousand_findings(browser, place):
    found = many(1000)
    folder = write_audit(place / "many", audit_of(found, GATES))
    page = write_reports(folder, formats=["html"], show_secrets=True)["html"]
    assert page.stat().st_size < 5_000_000
    visit(browser, page)
    assert num_rows(browser) == 1000
    browser.find_element(By.ID, "q").send_keys("int8")
    assert num_rows(browser) == len([one for one in found if one.case["defences"] == ["int8"]])
    assert browser.get_log("browser") == []
