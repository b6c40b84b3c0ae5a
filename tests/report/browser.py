"""A real headless Chromium without a network, driven by Selenium."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HOW = "apt-get install chromium chromium-driver, and pip install selenium"
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND"),
)


def missing() -> str | None:
    """What is not here, with the command that brings it; None if a browser can be started."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return f"selenium is not installed: {HOW}"
    for name, path in (("Chromium", _chromium()), ("chromedriver", _driver())):
        if path is None:
            return f"{name} was not found: {HOW}"
    return None


@contextmanager
def open_browser() -> Iterator[Any]:
    """A browser with a fresh profile, all hosts unknown and the network switched off."""
    from selenium import webdriver

    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = _chromium() or ""
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(_driver()))
        try:
            browser.execute_cdp_cmd("Network.enable", {})
            browser.execute_cdp_cmd(
                "Network.emulateNetworkConditions",
                {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0},
            )
            yield browser
        finally:
            browser.quit()


def set_size(browser: Any, width: int, height: int, is_phone: bool = False) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def set_media(browser: Any, is_dark: bool = False, is_print: bool = False) -> None:
    """Colours and medium; less motion, so that nothing scrolls away while it is clicked."""
    wishes = {"prefers-color-scheme": "dark" if is_dark else "light", "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in wishes.items()]
    media = "print" if is_print else ""
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def visit(browser: Any, page: Path, width: int = 1240, dark: bool = False) -> None:
    set_size(browser, width, 900, is_phone=width < 500)
    set_media(browser, dark)
    browser.get_log("browser")
    browser.get("about:blank")
    browser.get(page.as_uri())


def has_no_overflow(browser: Any) -> bool:
    root = "document.documentElement"
    return browser.execute_script(f"return {root}.scrollWidth <= {root}.clientWidth")


def _chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM") or next((path for name in names if (path := shutil.which(name))), None)


def _driver() -> str | None:
    return os.environ.get("CHROMEDRIVER") or shutil.which("chromedriver")
