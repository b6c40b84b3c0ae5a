"""Makes the pictures of docs/reading-the-report.md from invented findings: `python tests/report/screenshots.py`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from selenium.webdriver.common.by import By
from tests.report.browser import open_browser, set_media, set_size
from tests.report.findings import audit_of, realistic, text_case, write_audit

from unmask.report import write_reports

DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    """The top of the page, curves, a finding whose text is revealed, and a redacted one on a phone."""
    with tempfile.TemporaryDirectory() as place, open_browser() as browser:
        missing = [text_case(batch_size=128)]
        audit = audit_of(realistic(), ["no exact text", "rouge2 < 0.9"], missing, "Clinic notes, release 4")
        folder = write_audit(Path(place) / "runs", audit)
        redacted = write_reports(folder, formats=["html"], out=folder / "redacted")["html"]
        with_texts = write_reports(folder, formats=["html"], show_secrets=True)["html"]

        visit(browser, redacted, 1160, 1210)
        save(browser, "light")
        set_size(browser, 1160, 620)
        browser.execute_script("document.querySelectorAll('figure')[4].scrollIntoView()")
        save(browser, "curves")

        visit(browser, with_texts, 1160, 1210, is_dark=True)
        browser.find_element(By.ID, "reveal").click()
        open_finding(browser, 12)
        save(browser, "dark")

        visit(browser, redacted, 375, 1100)
        open_finding(browser, 12)
        save(browser, "phone")


def visit(browser: Any, page: Path, width: int, height: int, is_dark: bool = False) -> None:
    set_size(browser, width, height, is_phone=width < 500)
    set_media(browser, is_dark)
    browser.get("about:blank")
    browser.get(page.as_uri())


def open_finding(browser: Any, number: int) -> None:
    """Follow a link to it, and let the page settle."""
    browser.execute_script(f"location.hash = '#f{number}'")
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def save(browser: Any, name: str) -> None:
    browser.save_screenshot(str(DOCS / f"report-{name}.png"))


if __name__ == "__main__":
    main()
