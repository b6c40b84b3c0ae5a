"""Flower: what each client's update gives away, with one line more in the server app, or in the client's own.

    strategy.start(grid=AuditGrid(grid, model="minilm-l6", out="runs/fl-audit"), …)    # any strategy
    strategy = AuditStrategy(FedAvg(…), model="minilm-l6", out="runs/fl-audit")        # or around the strategy
    app = ClientApp(mods=[audit_mod(model="minilm-l6", out="audit", refuse=True)])     # or before it leaves

Messages pass unchanged. An audit runs when a reply has come, before the strategy sees it; with `save_evidence=True`
updates are only kept, and attacked later. `docs/flower.md` has the whole story.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Unpack

from unmask.audit.findings.finding import Outcome
from unmask.integrations.federation.audit import AuditOptions, UpdateAudit
from unmask.integrations.federation.refusal import refused_outcomes
from unmask.integrations.flower.messages import FLOWER, OpenMessages, is_train, log, reply_arrays, round_of, sent_arrays

try:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord
    from flwr.clientapp.typing import ClientAppCallable
    from flwr.common.constant import ErrorCode
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Result, Strategy
except ImportError as error:
    raise ImportError(f"this module is about Flower ({error}); install it with: pip install 'unmask[flower]'") from None


class WatchedGrid(Grid):
    """A grid whose train messages and replies are shown to an audit, and that is otherwise the grid that it wraps."""

    def __init__(self, grid: Grid, exchanges: OpenMessages) -> None:
        self._grid = grid
        self._exchanges = exchanges

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send, wait, audit, and hand on what came."""
        messages = list(messages)
        noted = self._exchanges.note(messages)
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        self._exchanges.finish(noted, replies)
        return replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send, and remember what was sent."""
        messages = list(messages)
        noted = self._exchanges.note(messages)
        ids = self._grid.push_messages(messages)
        self._exchanges.record_sent(noted)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Audit what has come, and hand it on."""
        replies = list(self._grid.pull_messages(message_ids))
        self._exchanges.audit_replies(replies)
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
        super().__init__(grid, OpenMessages(_prepare(options)))


class AuditStrategy(Strategy):
    """A strategy that audits what it aggregates, and is otherwise the strategy that it wraps.

    It can be started, and it can be wrapped itself, as Flower's strategies for differential privacy do.
    """

    def __init__(self, strategy: Strategy, **options: Unpack[AuditOptions]) -> None:
        self._strategy = strategy
        self._exchanges = OpenMessages(_prepare(options))
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
        messages, self._messages = self._messages, []
        self._exchanges.finish(self._exchanges.note(messages), replies, server_round)
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

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._strategy, name, value)


def audit_mod(*, refuse: bool | str = False, **options: Unpack[AuditOptions]) -> AuditMod:
    """A mod that audits the client's own update before it leaves: `ClientApp(mods=[audit_mod(…), …])`.

    Put it first, so that it sees what other mods (clipping, noise) made of the update. With `refuse="unless-clear"`,
    or True, an update is sent only if the attacks ran to their end and found nothing. With `refuse="leaks"`, one is
    sent too if the audit is inconclusive, as it mostly is under noise; not if it leaks or if its audit failed. Else
    the server gets a Flower error, which strategies count as a failed client and leave out. (To answer with unchanged
    weights would pull the average towards the old model.)
    """
    refused = refused_outcomes(refuse, save_evidence=options.get("save_evidence", False))
    return AuditMod(UpdateAudit(FLOWER, own_file=True, **options), refused)


@dataclass(frozen=True)
class AuditMod:
    """See `audit_mod`."""

    audit: UpdateAudit
    refused: frozenset[Outcome]

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Train, audit, send or refuse."""
        if not is_train(message):
            return call_next(message, context)
        sent = sent_arrays(message, self.audit.record)
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        client, number = str(message.metadata.dst_node_id), round_of(message)
        received = reply_arrays(reply, self.audit.record)
        finding = self.audit.audit(1 if number is None else number, client, sent, *received)
        if finding is None or finding.outcome not in self.refused:
            return reply
        reason = f"unmask: this client does not send its update, since the audit says: {finding.outcome.value}"
        log.warning("%s. The finding is in %s", reason, self.audit.folder)
        return Message(Error(code=ErrorCode.MOD_FAILED_PRECONDITION, reason=reason), reply_to=message)


def _prepare(options: AuditOptions) -> UpdateAudit:
    audit = UpdateAudit(FLOWER, **options)
    audit.prepare()
    return audit
