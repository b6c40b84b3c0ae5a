"""Flower: what each client's update gives away, with one line more in the server app, or in the client's own.

    strategy.start(grid=AuditGrid(grid, model="minilm-l6", out="runs/fl-audit"), …)    # any strategy
    strategy = AuditStrategy(FedAvg(…), model="minilm-l6", out="runs/fl-audit")        # or around the strategy
    app = ClientApp(mods=[audit_mod(model="minilm-l6", out="audit", refuse=True)])     # or before it leaves

Messages pass unchanged. An audit runs when a reply has come, before the strategy sees it; with `save_evidence=True`
updates are only kept, and attacked later. `docs/flower.md` has the whole story.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Unpack

from unmask.audit.finding import Outcome
from unmask.errors import InputError
from unmask.integrations.flower_audit import AuditOptions, UpdateAudit
from unmask.integrations.flower_update import Arrays

try:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
    from flwr.clientapp.typing import ClientAppCallable
    from flwr.common.constant import ErrorCode
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Result, Strategy
except ImportError as error:
    raise ImportError(f"this module is about Flower ({error}); install it with: pip install 'unmask[flower]'") from None

log = logging.getLogger("flwr.unmask")


class Exchanges:
    """Train messages that are out, each waiting for its reply, and the audit that sees both. Nothing raises."""

    def __init__(self, audit: UpdateAudit) -> None:
        self.audit = audit
        self._out: dict[str, tuple[float, int | None, Arrays]] = {}
        self._seen: Counter[int] = Counter()  # replies of each client, for strategies that do not number rounds

    def sent(self, messages: Iterable[Message], server_round: int | None = None) -> None:
        """Remember messages that the grid has sent, and so numbered; those that nobody may answer any more are over."""
        with harmless("a message that was sent"):
            self._out = {key: waiting for key, waiting in self._out.items() if waiting[0] > time.time()}
            for message in filter(is_train, messages):
                about = message.metadata
                number = server_round if server_round is not None else round_of(message)
                self._out[about.message_id] = (about.created_at + about.ttl, number, arrays_of(message))

    def received(self, replies: Iterable[Message]) -> None:
        """Audit each reply to a message that is out; a client that failed has sent nothing."""
        self.audit.expect_new_weights()
        for reply in replies:
            with harmless("a reply"):
                self._audit(reply)

    def _audit(self, reply: Message) -> None:
        waiting = self._out.pop(reply.metadata.reply_to_message_id, None)
        if waiting is None or reply.has_error():
            return
        _, number, arrays = waiting
        client = reply.metadata.src_node_id
        self._seen[client] += 1
        self.audit.audit(number or self._seen[client], str(client), arrays, arrays_of(reply))


@contextmanager
def harmless(what: str) -> Iterator[None]:
    """Whatever the audit could not do is said in the log; the federation goes on."""
    try:
        yield
    except Exception as error:
        log.warning("unmask: %s could not be audited, nothing is known of it: %r", what, error)


class WatchedGrid(Grid):
    """A grid whose train messages and replies are shown to an audit, and that is otherwise the grid that it wraps."""

    def __init__(self, grid: Grid, exchanges: Exchanges) -> None:
        self._grid = grid
        self._exchanges = exchanges

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send, wait, audit, and hand on what came."""
        messages = list(messages)
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        self._exchanges.sent(messages)
        self._exchanges.received(replies)
        return replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send, and remember what was sent."""
        messages = list(messages)
        ids = self._grid.push_messages(messages)
        self._exchanges.sent(messages)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Audit what has come, and hand it on."""
        replies = list(self._grid.pull_messages(message_ids))
        self._exchanges.received(replies)
        return replies

    def set_run(self, *args: Any, **options: Any) -> None:
        """As the grid does."""
        self._grid.set_run(*args, **options)

    @property
    def run(self) -> Any:
        """As the grid has it."""
        return self._grid.run

    def create_message(self, *args: Any, **options: Any) -> Message:
        """As the grid does."""
        return self._grid.create_message(*args, **options)

    def get_node_ids(self) -> Iterable[int]:
        """As the grid does."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """As the grid does."""
        return self._grid.get_nodes()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._grid, name)


class AuditGrid(WatchedGrid):
    """A grid that audits every reply to a train message: `strategy.start(grid=AuditGrid(grid, model=…, out=…), …)`."""

    def __init__(self, grid: Grid, **options: Unpack[AuditOptions]) -> None:
        super().__init__(grid, Exchanges(_prepared(options)))


class AuditStrategy(Strategy):
    """A strategy that audits what it aggregates, and is otherwise the strategy that it wraps.

    It can be started, and it can be wrapped itself, as Flower's strategies for differential privacy do.
    """

    def __init__(self, strategy: Strategy, **options: Unpack[AuditOptions]) -> None:
        self._strategy = strategy
        self._exchanges = Exchanges(_prepared(options))
        self._messages: list[Message] = []

    def start(self, grid: Grid, *args: Any, **options: Any) -> Result:
        """The inner strategy's own start, on a grid that audits."""
        return self._strategy.start(WatchedGrid(grid, self._exchanges), *args, **options)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy does; what it sends is remembered."""
        self._messages = list(self._strategy.configure_train(server_round, arrays, config, grid))
        return self._messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Audit, then as the strategy does."""
        replies = list(replies)
        self._exchanges.sent(self._messages, server_round)
        self._exchanges.received(replies)
        return self._strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy does."""
        return self._strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the strategy does."""
        return self._strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """As the strategy does."""
        self._strategy.summary()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._strategy, name)


def audit_mod(*, refuse: bool = False, **options: Unpack[AuditOptions]) -> AuditMod:
    """A mod that audits the client's own update before it leaves: `ClientApp(mods=[audit_mod(…), …])`.

    Put it first, so that it sees what other mods (clipping, noise) made of the update. With `refuse`, an update that
    leaks is not sent, nor one whose audit failed: the server gets a Flower error instead, which strategies count as a
    failed client and leave out. (To answer with unchanged weights would pull the average towards the old model.)
    """
    if refuse and options.get("save_evidence"):
        raise InputError("refuse needs the attack's answer at once; leave save_evidence out")
    return AuditMod(UpdateAudit(own_file=True, **options), refuse)


@dataclass(frozen=True)
class AuditMod:
    """See `audit_mod`."""

    audit: UpdateAudit
    refuse: bool

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Train, audit, send or refuse."""
        if not is_train(message):
            return call_next(message, context)
        sent = dict(arrays_of(message))  # a client may change its message
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        client = str(message.metadata.dst_node_id)
        finding = self.audit.audit(round_of(message) or 1, client, sent, arrays_of(reply))
        if not self.refuse or finding is None or finding.outcome not in (Outcome.LEAK, Outcome.ERROR):
            return reply
        reason = f"unmask: this client does not send its update, since the audit says: {finding.outcome.value}"
        log.warning("%s. The finding is in %s", reason, self.audit.folder)
        return Message(Error(code=ErrorCode.MOD_FAILED_PRECONDITION, reason=reason), reply_to=message)


def is_train(message: Message) -> bool:
    """Whether a message asks for training: 'train' or 'train.<action>'."""
    return message.metadata.message_type.split(".")[0] == MessageType.TRAIN


def round_of(message: Message) -> int | None:
    """The round that a message is of, as Flower's strategies tell clients; None where nobody says."""
    records = message.content.config_records.values()
    told = next((record["server-round"] for record in records if "server-round" in record), message.metadata.group_id)
    return int(told) if isinstance(told, int) or (isinstance(told, str) and told.isdecimal()) else None


def arrays_of(message: Message) -> Arrays:
    """The arrays of a message by name: those of its record 'arrays', or of its first; none if it has no record."""
    content: RecordDict = message.content
    records = content.array_records
    record = records.get("arrays") or next(iter(records.values()), None)
    return {} if record is None else record


def _prepared(options: AuditOptions) -> UpdateAudit:
    audit = UpdateAudit(**options)
    audit.prepare()
    return audit
