"""The report for everybody: by keyboard, read aloud, in the dark, on a phone and on paper."""

from __future__ import annotations

import base64
import re

import pytest
from tests.report.browser import has_no_overflow, missing, set_media, set_size, visit
from tests.report.findings import audit_of, realistic, write_audit

from unmask.report import write_reports

if why := missing():
    pytest.skip(why, allow_module_level=True)

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys


def test_everything_works_from_the_keyboard(browser, usual):
    visit(browser, usual)
    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    skip = browser.switch_to.active_element
    assert skip.text == "Skip to the findings"
    assert browser.execute_script("return getComputedStyle(arguments[0]).outlineStyle", skip) != "none"
    skip.send_keys(Keys.ENTER)
    for _ in range(20):
        focused = browser.switch_to.active_element
        if focused.get_attribute("data-sort") == "case":
            break
        focused.send_keys(Keys.TAB)
    focused.send_keys(Keys.ENTER)
    assert focused.find_element(By.XPATH, "..").get_attribute("aria-sort") == "ascending"
    while "open" not in (focused.get_attribute("class") or ""):
        focused.send_keys(Keys.TAB)
        focused = browser.switch_to.active_element
    focused.send_keys(Keys.SPACE)
    assert focused.get_attribute("aria-expanded") == "true"
    assert browser.find_element(By.ID, focused.get_attribute("aria-controls")).is_displayed()
    focused.send_keys(Keys.ENTER)
    assert focused.get_attribute("aria-expanded") == "false"


@pytest.mark.parametrize("width", [1240, 375])
@pytest.mark.parametrize("dark", [False, True])
def test_light_dark_and_a_phone(browser, usual, width, dark):
    visit(browser, usual, width, dark)
    browser.find_element(By.ID, "reveal").click()
    browser.execute_script("document.querySelectorAll('button.open').forEach((b, at) => at % 9 || b.click())")
    browser.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert has_no_overflow(browser)
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in paper.strip("rgb()").split(",")) / 3
    assert (brightness < 60) is dark


def test_words_can_be_read_on_their_ground(browser, usual):
    """Contrast of the words that carry meaning, by the formula of WCAG 2: 4.5 at the least."""
    script = """
        const ground = (node) => { for (; node; node = node.parentElement) {
          const colour = getComputedStyle(node).backgroundColor; if (!/, 0\\)$/.test(colour)) return colour; } };
        return [...document.querySelectorAll(arguments[0])].map((node) => {
          const { color, opacity } = getComputedStyle(node);
          return [opacity === "1" ? color : ground(node), ground(node)]; });
    """
    for dark in (False, True):
        visit(browser, usual, dark=dark)
        browser.find_element(By.CSS_SELECTOR, "#f0 button").click()
        words = "h1, .pill, .word, .small, .caption, .tile span, nav a, dt, .counts, a, .plain .zero"
        pairs = browser.execute_script(script, words)
        assert len(pairs) > 100
        assert min(contrast(*pair) for pair in pairs) >= 4.5


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = [int(part) / 255 for part in colour.strip("rgba()").split(",")[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, bright = sorted((light(one), light(other)))
    return (bright + 0.05) / (dark + 0.05)


def test_print_has_no_controls_and_all_rows(browser, usual):
    visit(browser, usual)
    set_media(browser, is_print=True)
    assert not browser.find_element(By.ID, "filters").is_displayed()
    last = browser.find_element(By.CSS_SELECTOR, "#table tbody > tr:last-child .k-case")
    assert last.text


def test_print_opens_notes_and_leaves_findings_as_they_are(browser, usual):
    visit(browser, usual)
    browser.find_element(By.CSS_SELECTOR, "#f0 button").click()
    set_media(browser, is_print=True)
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.find_elements(By.CSS_SELECTOR, "details:not([open], figure *)") == []
    panels = [panel for panel in browser.find_elements(By.CSS_SELECTOR, ".panel") if panel.is_displayed()]
    assert len(panels) == 1  # the one that was opened
    set_size(browser, 740, 900)  # paper
    assert has_no_overflow(browser)
    code = browser.find_element(By.CSS_SELECTOR, "#table tbody > tr:not([hidden]) .k-id code")
    assert browser.execute_script("return arguments[0].scrollWidth <= arguments[0].clientWidth", code)
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert browser.find_elements(By.CSS_SELECTOR, ".gate details[open]") == []


def test_a_print_is_short(browser, place):
    """Every finding used to be opened: 78 pages of the demo's 18 findings."""
    folder = write_audit(place / "short", audit_of(realistic()[:18], ["no exact text"]))
    visit(browser, write_reports(folder, formats=["html"], show_secrets=True)["html"])
    paper = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", paper)) <= 12


def test_revealed_tokens_are_told_in_words_too(browser, usual):
    visit(browser, usual)
    browser.find_element(By.ID, "reveal").click()
    browser.find_element(By.CSS_SELECTOR, "#f0 button").click()
    said = browser.execute_script("return document.querySelector('#d0 .pair .hidden').textContent")
    assert said == "11 tokens: 11 in place, 0 known to occur, 0 missed or false."


def test_copying_is_announced(browser, usual):
    visit(browser, usual)
    browser.find_element(By.CSS_SELECTOR, "#f0 button").click()
    status = browser.find_element(By.CSS_SELECTOR, "#d0 [role=status]")
    assert status.text == ""
    browser.execute_script("document.querySelector('#d0 .copy').click()")
    browser.execute_async_script("setTimeout(arguments[0], 200)")
    assert status.text in ("Copied", "Selected: copy it by hand")
    assert browser.find_element(By.CSS_SELECTOR, "#d0 .copy").text == "Copy"


def test_letters_of_a_chart_can_be_read_on_a_phone(browser, usual):
    visit(browser, usual, 375)
    script = """
        return [...document.querySelectorAll('.chart')].map((chart) => {
          const scale = chart.getBoundingClientRect().width / chart.viewBox.baseVal.width;
          const texts = [...chart.querySelectorAll('text')];
          const box = chart.getBoundingClientRect();
          const inside = texts.every((text) => { const one = text.getBoundingClientRect();
            return one.left >= box.left - 1 && one.right <= box.right + 1 && one.bottom <= box.bottom + 1; });
          return [scale * Math.min(...texts.map((text) => parseFloat(getComputedStyle(text).fontSize))), inside]; });
    """
    drawn = browser.execute_script(script)
    assert drawn
    assert min(size for size, _ in drawn) >= 10
    assert all(is_inside for _, is_inside in drawn)


@pytest.mark.parametrize("width", [1240, 390])
def test_the_worst_leaks_are_read_whole(browser, usual, width):
    """'gradien/ts' was cut inside the word, and on a phone the recommendation lay beyond the edge."""
    visit(browser, usual, width)
    lines, edges = browser.execute_script("""
        const names = [...document.querySelectorAll('.worst tbody th')].map((cell) => {
          const range = document.createRange(); range.selectNode(cell.firstChild);
          return range.getClientRects().length; });
        const cells = [...document.querySelectorAll('.worst td:last-child')];
        return [names, cells.map((cell) => cell.getBoundingClientRect().right)];
    """)
    assert set(lines) == {1}
    assert max(edges) <= width
