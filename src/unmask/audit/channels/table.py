"""The channels that an audit knows, by the names of their groups in a plan."""

from __future__ import annotations

from collections.abc import Mapping

from unmask.audit.channels.channel_audit import ChannelAudit
from unmask.audit.channels.gradients import GRADIENTS
from unmask.audit.channels.outputs import OUTPUTS
from unmask.audit.channels.queries import QUERIES

CHANNEL_AUDITS: Mapping[str, ChannelAudit] = {"gradients": GRADIENTS, "outputs": OUTPUTS, "queries": QUERIES}
