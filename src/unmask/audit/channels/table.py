"""The channels that an audit knows, by the names of their groups in a plan.

How the channel 'gradients' is audited is `GRADIENTS` in `gradients.py` beside this file, and so on for each: a new
channel needs no line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from unmask.audit.channels.channel_audit import ChannelAudit
from unmask.channels import CHANNELS


def _audit_of(channel: str) -> ChannelAudit:
    audit: ChannelAudit = getattr(import_module(f"unmask.audit.channels.{channel}"), channel.upper())
    return audit


CHANNEL_AUDITS: Mapping[str, ChannelAudit] = {channel: _audit_of(channel) for channel in CHANNELS}
