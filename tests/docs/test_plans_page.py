"""The pages about plans: every plan on them loads, and nothing that a plan may hold is missing from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from unmask.audit.channels.table import CHANNEL_AUDITS
from unmask.audit.findings.gates import PHRASES
from unmask.audit.plan import load_plan
from unmask.metrics import METRICS

ROOT = Path(__file__).parents[2]
PAGES = ("docs/plans.md", "docs/tutorial.md")
PLANS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```toml\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M), start=1)
]


def load(block, folder):
    (folder / "notes.txt").write_text((ROOT / "examples/audit/notes.txt").read_text())
    (folder / "plan.toml").write_text(block)
    return load_plan(folder / "plan.toml")


@pytest.mark.parametrize("block", PLANS)
def test_a_plan_on_a_page_loads(block, tmp_path):
    assert load(block, tmp_path).cases


def test_the_first_plan_has_as_many_cases_as_the_page_says(tmp_path):
    (said,) = re.findall(r"= (\d+) cases", (ROOT / PAGES[0]).read_text())
    assert len(load(PLANS[0].values[0], tmp_path).cases) == int(said)


def test_the_last_plan_of_the_tutorial_is_the_example(tmp_path):
    """So that what the tutorial measured is what the tests run."""
    ours, example = load(PLANS[-1].values[0], tmp_path), load_plan(ROOT / "examples/audit/plan.toml")
    assert [(case.id, case.gates) for case in ours.cases] == [(case.id, case.gates) for case in example.cases]


def test_every_key_metric_and_sentence_is_explained():
    page = (ROOT / "docs/plans.md").read_text()
    words = {key for audit in CHANNEL_AUDITS.values() for key in audit.axes}
    words |= set(METRICS) | set(PHRASES)
    assert not [word for word in words if f"`{word}`" not in page]


@pytest.mark.parametrize("page", ["plans", "tutorial", "ci", "responsible-use"])
def test_links_lead_somewhere(page):
    path = ROOT / "docs" / f"{page}.md"
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    assert links
    assert not [link for link in links if "://" not in link and not (path.parent / link).exists()]
