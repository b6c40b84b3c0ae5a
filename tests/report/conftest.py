"""One browser, and one usual report, for all tests that look at it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.report.browser import missing, open_browser
from tests.report.findings import audit_of, realistic, text_case, write_audit

from unmask.report import write_reports


@pytest.fixture(scope="session")
def browser():
    if why := missing():
        pytest.skip(why)
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="session")
def usual(place: Path) -> Path:
    audit = audit_of(realistic(), ["no exact text"], [text_case(batch_size=128)], "Clinic notes")
    return write_reports(write_audit(place / "usual", audit), formats=["html"], show_secrets=True)["html"]
