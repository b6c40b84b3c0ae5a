"""The table of channels: each has an audit, attacks, metrics and a page, and its threat model is whole."""

from __future__ import annotations

from pathlib import Path

from tests.report.findings import flower_finding, text_case

from unmask.attacks.table import ATTACKS
from unmask.audit.channels.table import CHANNEL_AUDITS
from unmask.channels import CHANNELS, LIVE_FEDERATION, UNKNOWN_THREAT, threat_key, threat_of
from unmask.metrics import METRICS
from unmask.recovery import Aim
from unmask.report.html.page_data import attack_limit

ROOT = Path(__file__).parents[1]
THREATS = {**{name: channel.threat for name, channel in CHANNELS.items()}, "live": LIVE_FEDERATION}


def test_every_channel_is_audited_attacked_and_measured():
    assert list(CHANNEL_AUDITS) == list(CHANNELS)
    assert {kind.channel for kind in ATTACKS.values()} == set(CHANNELS)
    assert all(any(metric.is_of(name) for metric in METRICS.values()) for name in CHANNELS)


def test_something_looks_for_every_aim():
    assert set().union(*(channel.aims for channel in CHANNELS.values())) == set(Aim)


def test_threats_are_whole_and_told_apart():
    for name, threat in THREATS.items():
        assert all([threat.title, threat.who, threat.sees, threat.wants, threat.limits]), name
        assert (ROOT / threat.page).is_file(), name
    assert len({threat.title for threat in THREATS.values()}) == len(THREATS)


def test_no_threat_says_that_nothing_found_is_safe():
    for threat in (*THREATS.values(), UNKNOWN_THREAT):
        assert any("no proof" in limit for limit in threat.limits)


def test_a_federation_has_a_threat_model_of_its_own():
    assert "does not know the texts" in threat_of(threat_key(flower_finding().case)).limits[0]


def test_a_channel_of_a_newer_version_claims_nothing():
    assert threat_of(threat_key({"channel": "timing"})).who == "Not known."
    assert threat_of(threat_key({})).limits


def test_the_baseline_is_called_one():
    assert "baseline" in attack_limit(text_case(attack="dager"))
    assert attack_limit(text_case()) is None
