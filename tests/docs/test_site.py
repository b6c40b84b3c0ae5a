"""The built site in a real browser without a network: pages load, the search answers, nothing asks another host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from tests.docs.pages import ROOT
from tests.report import browser as chromium

pytestmark = pytest.mark.slow

# One page of each part of the navigation, and a heading or sentence of it.
SECTIONS = {
    "index.html": "Start here",
    "tutorial.html": "From installation to a gate in CI",
    "notebooks/gradients.html": "Does noise help?",
    "gradients.html": "Gradients → text",
    "plans.html": "Exit codes",
    "reading-the-report.html": "In one minute",
    "defences.html": "The map",
    "flower.html": "One line",
    "api/recover.html": "recover_text",
    "evidence-format.html": "An update that was captured elsewhere",
    "paper-dager.html": "DAGER",
    "measured.html": "What was measured",
    "architecture.html": "Five drills",
    "changelog.html": "Changelog",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site as `make docs` builds it, strictly: a warning is an error."""
    pytest.importorskip("material", reason="the site needs MkDocs Material: pip install 'unmask[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if why := chromium.missing():
        pytest.skip(why)
    with chromium.open_browser() as started:
        yield started


class Links(HTMLParser):
    """Where a page leads (`href`), what it loads (`src`, style sheets, icons), and the names of its places."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.leads: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if "src" in given or (tag == "link" and given.get("rel") not in ("canonical", "prev", "next")):
            self.loads.append(given.get("src") or given.get("href", ""))
        elif tag == "a" and "href" in given:
            self.leads.append(given["href"])


def test_no_link_is_broken(site):
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    faults = []
    for path, links in pages.items():
        for link in (*links.leads, *links.loads):
            parts = urlsplit(link)
            if parts.scheme or path.name == "404.html":
                continue
            home = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            home = home / "index.html" if home.is_dir() else home
            if not home.is_file():
                faults.append(f"{path.relative_to(site)}: {link} is no file")
            elif parts.fragment and home in pages and unquote(parts.fragment) not in pages[home].places:
                faults.append(f"{path.relative_to(site)}: {link} is no place")
    assert len(pages) > 40
    assert not faults


def test_nothing_is_loaded_from_elsewhere(site):
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    loads = {link for links in pages.values() for link in links.loads}
    assert loads
    assert not [link for link in loads if urlsplit(link).scheme not in ("", "data")]


def test_notebooks_show_what_they_printed(site):
    assert "certain: The biopsy was positive" in (site / "notebooks" / "gradients.html").read_text(encoding="utf-8")
    assert (site / "notebooks" / "gradients.ipynb").is_file()


@pytest.mark.parametrize("page", SECTIONS)
def test_a_page_of_each_section_loads(page, site, browser):
    open_page(browser, site / page)
    assert SECTIONS[page] in browser.find_element("tag name", "article").text
    assert complaints(browser) == []
    assert foreign_requests(browser) == []


def test_a_phone_shows_a_page_without_scrolling_sideways(site, browser):
    open_page(browser, site / "index.html", width=390)
    assert chromium.has_no_overflow(browser)


def test_the_search_answers(site, browser):
    open_page(browser, site / "index.html")
    field = browser.find_element("css selector", "input.md-search__input")
    field.click()
    field.send_keys("ledger")
    deadline = time.monotonic() + 60
    while not (found := browser.find_elements("css selector", "a.md-search-result__link")):
        assert time.monotonic() < deadline, "the search gave no answer"
        time.sleep(0.2)
    assert any("queries.html" in link.get_attribute("href") for link in found)
    assert complaints(browser) == []
    assert foreign_requests(browser) == []


def test_the_report_is_shown(site, browser):
    open_page(browser, site / "reading-the-report.html")
    browser.switch_to.frame(browser.find_element("css selector", "iframe.report"))
    assert "A gate is crossed" in browser.find_element("tag name", "body").text
    browser.switch_to.default_content()
    assert complaints(browser) == []


def open_page(browser: Any, page: Path, width: int = 1240) -> None:
    browser.get_log("performance")
    chromium.visit(browser, page, width)


def complaints(browser: Any) -> list[str]:
    """What the console holds, errors and warnings."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def foreign_requests(browser: Any) -> list[str]:
    """Addresses that were asked for and are no files of this machine."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    addresses = {params["request"]["url"] for params in sent}
    return [url for url in addresses if urlsplit(url).scheme not in ("file", "data", "blob", "about", "chrome")]
