from __future__ import annotations

from tests.report.findings import flower_finding, text_case

from unmask.channels import CHANNELS, LIVE_FEDERATION, threat_key, threat_of
from unmask.report.html.page_data import attack_limit


def test_every_channel_has_a_threat_model_of_its_own():
    assert len({threat_of(threat_key({"channel": channel})).title for channel in CHANNELS}) == len(CHANNELS)


def test_a_federation_has_a_threat_model_of_its_own():
    assert "does not know the texts" in threat_of(threat_key(flower_finding().case)).limits[0]


def test_a_channel_of_a_newer_version_claims_nothing():
    assert threat_of(threat_key({"channel": "timing"})).who == "Not known."
    assert threat_of(threat_key({})).limits


def test_every_limit_says_that_nothing_found_is_no_proof():
    assert all(
        "no proof" in threat.limits[-1]
        for threat in (LIVE_FEDERATION, *(channel.threat for channel in CHANNELS.values()))
    )


def test_the_baseline_is_called_one():
    assert "baseline" in attack_limit(text_case(attack="dager"))
    assert attack_limit(text_case()) is None
