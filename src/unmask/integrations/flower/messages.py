"""Messages that a Flower server sends, the replies that belong to them, and what of both an audit reads.

Nothing here raises: a message that cannot be understood is a line in the log, and the federation goes on.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from unmask.integrations.federation.audit import UpdateAudit
from unmask.integrations.live_findings import Program

if TYPE_CHECKING:  # only annotations need Flower
    from flwr.app import Array, Message

log = logging.getLogger("flwr.unmask")  # shown where Flower's own lines are
FLOWER = Program("flower", "flwr run", log)
MAX_VERSIONS = 32  # of the weights, held for replies that may still come

Weights = Mapping[str, "Array"]


class OpenMessages:
    """Train messages that are out, each waiting for its reply, and the audit that sees both.

    Servers of Flower's older interface ask each client in a thread of its own; here they come in one by one.
    """

    def __init__(self, audit: UpdateAudit) -> None:
        self.audit = audit
        self._lock = threading.Lock()
        self._out: dict[str, tuple[float, int | None, Weights | None]] = {}  # until when, the round, what was sent
        self._last: Weights = {}
        self._seen: Counter[int] = Counter()  # replies of each client, for strategies that do not number rounds

    def note(self, messages: Iterable[Message]) -> list[tuple[Message, Weights]]:
        """Train messages, each with the weights that it holds now: their owner may change them once they are sent."""
        noted = []
        for message in messages:
            with survive_errors("a message"), self._lock:
                if is_train(message):
                    noted.append((message, self._hold(message)))
        return noted

    def record_sent(self, noted: Iterable[tuple[Message, Weights]], server_round: int | None = None) -> None:
        """Remember messages that the grid has sent, and so numbered; those that nobody may answer any more are over."""
        with self._lock:
            self._out = {key: waiting for key, waiting in self._out.items() if waiting[0] > time.time()}
            for message, weights in noted:
                with survive_errors("a message that was sent"):
                    about = message.metadata
                    number = round_of(message) if server_round is None else server_round
                    self._out[about.message_id] = (about.created_at + about.ttl, number, weights)
            self._let_old_weights_go()

    def audit_replies(self, replies: Iterable[Message]) -> None:
        """Audit each reply to a message that is out; a client that failed has sent nothing."""
        for reply in replies:
            with survive_errors("a reply"), self._lock:
                self._audit(reply)

    def finish(
        self, noted: list[tuple[Message, Weights]], replies: Iterable[Message], server_round: int | None = None
    ) -> None:
        """Audit an exchange that is over: what has no reply yet will get none."""
        self.record_sent(noted, server_round)
        self.audit_replies(replies)
        with self._lock:
            for message, _ in noted:
                self._out.pop(message.metadata.message_id, None)

    def _audit(self, reply: Message) -> None:
        waiting = self._out.pop(reply.metadata.reply_to_message_id, None)
        if waiting is None or reply.has_error():
            return
        _, number, weights = waiting
        client = reply.metadata.src_node_id
        self._seen[client] += 1
        number = self._seen[client] if number is None else number
        self.audit.audit(number, str(client), weights, *reply_arrays(reply, self.audit.record))

    def _hold(self, message: Message) -> Weights:
        """A copy of a message's weights; the last one, if it has the same bytes, as all messages of a round do."""
        weights = sent_arrays(message, self.audit.record)
        known = self._last
        if list(weights) != list(known) or any(weights[name].data is not known[name].data for name in weights):
            self._last = weights
        return self._last

    def _let_old_weights_go(self) -> None:
        """Hold only the newest versions of the weights; a reply to an older one becomes an inconclusive finding."""
        versions = list(dict.fromkeys(id(weights) for *_, weights in self._out.values() if weights is not None))
        if old := set(versions[:-MAX_VERSIONS]):
            log.warning(
                "unmask: more than %d versions of the weights are out; the oldest is not held any more", MAX_VERSIONS
            )
            self._out = {
                key: (until, number, None if id(weights) in old else weights)
                for key, (until, number, weights) in self._out.items()
            }


@contextmanager
def survive_errors(what: str) -> Iterator[None]:
    """Whatever the audit could not do is said in the log; the federation goes on."""
    try:
        yield
    except Exception as error:
        log.warning("unmask: %s could not be audited, nothing is known of it: %r", what, error)


def is_train(message: Message) -> bool:
    """Whether a message asks for training: 'train' or 'train.<action>'."""
    return message.metadata.message_type.split(".")[0] == "train"


def round_of(message: Message) -> int | None:
    """The round that a message is of, as Flower's strategies tell clients; None where nobody says."""
    records = message.content.config_records.values()
    told = next((record["server-round"] for record in records if "server-round" in record), message.metadata.group_id)
    return int(told) if isinstance(told, int) or (isinstance(told, str) and told.isdecimal()) else None


def sent_arrays(message: Message, record: str | None) -> Weights:
    """A copy of what a client starts from: the record of this name, or the usual one where the message has none."""
    name = record if record in message.content.array_records else None
    return {name: copy.copy(array) for name, array in _arrays(message, name).items()}


def reply_arrays(reply: Message, record: str | None) -> tuple[Weights, list[str]]:
    """The arrays of a reply's record, and the names of its other records, which hold arrays too and are not read."""
    read = _arrays(reply, record)
    return read, [name for name, held in reply.content.array_records.items() if held and held is not read]


def _arrays(message: Message, record: str | None) -> Weights:
    """The arrays of the record of this name; without a name, of 'arrays', or of the first that has any."""
    records = message.content.array_records
    if record is not None:
        return records.get(record) or {}
    return records.get("arrays") or next((held for held in records.values() if held), {})
