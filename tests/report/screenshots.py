"""Makes the pictures of docs/reading-the-report.md.

`python tests/report/screenshots.py runs/demo` takes them of a real audit; without a folder, of invented findings.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from selenium.webdriver.common.by import By
from tests.report.browser import open_browser, set_size, visit
from tests.report.findings import audit_of, realistic, text_case, write_audit

from unmask.audit.findings.finding import Finding, Outcome
from unmask.audit.findings.folder import read_audit
from unmask.report import write_reports

DOCS = Path(__file__).parents[2] / "docs"


def main(folder: Path | None) -> None:
    """The top of the page, curves, a finding whose text is revealed, and one with its text hidden on a phone."""
    with tempfile.TemporaryDirectory() as place, open_browser() as browser:
        folder = folder or invented(Path(place) / "runs")
        page = write_reports(folder, formats=["html"], show_secrets=True, out=Path(place) / "report")["html"]
        findings = read_audit(folder).findings

        show(browser, page, 1160, 1210)
        save(browser, "light")
        set_size(browser, 1160, 620)
        browser.execute_script(
            "[...document.querySelectorAll('figure')].find((one) => /noise/.test(one.textContent)).scrollIntoView()"
        )
        save(browser, "curves")

        show(browser, page, 1160, 1210, is_dark=True)
        browser.find_element(By.ID, "reveal").click()
        open_finding(browser, leak_with_most(findings, num_recovered))
        save(browser, "dark")

        show(browser, page, 375, 1100)
        open_finding(browser, leak_with_most(findings, variety))
        save(browser, "phone")


def invented(folder: Path) -> Path:
    missing = [text_case(batch_size=128)]
    audit = audit_of(realistic(), ["no exact text", "rouge2 < 0.9"], missing, "Clinic notes, release 4")
    return write_audit(folder, audit)


def leak_with_most(findings: Sequence[Finding], key: Callable[[Finding], Any]) -> int:
    """Where the leak is that shows most, the first of several."""
    return max(
        (place for place, one in enumerate(findings) if one.outcome is Outcome.LEAK), key=lambda p: key(findings[p])
    )


def num_recovered(finding: Finding) -> int:
    """Texts that can be shown side by side."""
    return sum(pair.true is not None and pair.recovered is not None for pair in finding.texts)


def variety(finding: Finding) -> tuple[int, int]:
    """Marks of different kinds, and how often the rarest occurs."""
    marks = Counter(mark for pair in finding.texts for _, mark in (*(pair.true or ()), *(pair.recovered or ())))
    return len(marks), min(marks.values(), default=0)


def show(browser: Any, page: Path, width: int, height: int, is_dark: bool = False) -> None:
    visit(browser, page, width, is_dark)
    set_size(browser, width, height, is_phone=width < 500)


def open_finding(browser: Any, number: int) -> None:
    """Follow a link to it, and let the page settle."""
    browser.execute_script(f"location.hash = '#f{number}'")
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def save(browser: Any, name: str) -> None:
    browser.save_screenshot(str(DOCS / f"report-{name}.png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
