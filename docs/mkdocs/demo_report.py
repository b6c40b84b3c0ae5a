"""The report that the site shows: the first audit of the tutorial, on real weights, in seconds.

Its texts are invented, so the report may show them. It is kept until the tutorial, the notes or the package change.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from notebook_pages import SOURCES, hash_files

ROOT = Path(__file__).parents[2]
NOTES = ROOT / "examples" / "audit" / "notes.txt"


def build_report(tutorial: Path, cache: Path) -> Path:
    """The HTML report of the first plan of the tutorial."""
    folder = cache / f"report-{hash_files(tutorial, NOTES, *sorted(SOURCES.rglob('*.py')))}"
    report = folder / "out" / "report.html"
    if not report.is_file():
        import unmask

        for old in cache.glob("report-*"):
            shutil.rmtree(old)
        folder.mkdir(parents=True)
        plans = re.findall(r"^```toml\n(.*?)^```", tutorial.read_text(encoding="utf-8"), re.S | re.M)
        (folder / "plan.toml").write_text(plans[0], encoding="utf-8")
        shutil.copy(NOTES, folder / "notes.txt")
        unmask.run_audit(folder / "plan.toml", folder / "out")
        unmask.write_reports(folder / "out", show_secrets=True)
    return report
