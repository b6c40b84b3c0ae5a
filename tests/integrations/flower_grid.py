"""A small federation without Ray or sockets: a grid in memory, and clients that train a small classifier."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import transformers
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from tests.tiny_models import bert_config, random_model, word_tokenizer

from unmask.audit.findings.finding import Finding
from unmask.audit.findings.folder import read_audit
from unmask.models import Model, adapt

TEXTS = {
    11: ["w17 w99 w17 w250", "w400 w30 w8", "w44 w45 w46 w47"],
    12: ["w300 w301 w99", "w77 w8 w410", "w6 w7"],
}
FRAME = {"[CLS]", "[SEP]"}
# Flower stamps messages with the process that makes them; there is no public way to say that this is one.
TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1


def words(client: int) -> set[str]:
    """What a client's update gives away: its words, and the frame."""
    return FRAME | {word for text in TEXTS[client] for word in text.split()}


def findings(options: Mapping[str, Any]) -> tuple[Finding, ...]:
    """What an audit with these options has found."""
    return read_audit(options["out"]).findings


def shown(finding: Finding) -> set[str]:
    """The words of a finding's bag."""
    return {piece for piece, _ in finding.tokens}


def classifier() -> Any:
    return random_model(transformers.BertForSequenceClassification, bert_config(num_labels=2))


def audited_model() -> Model:
    """The same architecture without a head and with other weights: those of each round come with its messages."""
    return adapt(random_model(transformers.BertModel, bert_config(), seed=5), word_tokenizer())


def initial_arrays() -> ArrayRecord:
    return ArrayRecord(classifier().state_dict())


def train(message: Message, context: Context) -> Message:
    """As Flower's quick-start: load what was sent, train, send all weights back."""
    return answer(message, new_weights(message.content["arrays"].to_torch_state_dict(), context.node_id))


def new_weights(weights: Mapping[str, torch.Tensor], client: int) -> dict[str, torch.Tensor]:
    """Some steps of AdamW with dropout."""
    net = classifier()
    net.load_state_dict(dict(weights))
    batch = word_tokenizer()(TEXTS[client], padding=True, return_tensors="pt")
    labels = torch.arange(len(TEXTS[client])) % 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(client)
        net.train()
        optimizer = torch.optim.AdamW(net.parameters(), lr=5e-5)
        for _ in range(3):
            net(**batch, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return net.state_dict()


def answer(message: Message, weights: Mapping[str, torch.Tensor]) -> Message:
    metrics = MetricRecord({"train_loss": 0.7, "num-examples": 3})
    return Message(content=RecordDict({"arrays": ArrayRecord(dict(weights)), "metrics": metrics}), reply_to=message)


def client_app(act: Callable[[Message, Context], Message] = train, mods: Iterable[Any] = ()) -> ClientApp:
    app = ClientApp()
    app.train(mods=list(mods))(act)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        content = RecordDict({"metrics": MetricRecord({"accuracy": 0.5, "num-examples": 3})})
        return Message(content=content, reply_to=message)

    return app


class MemoryGrid(Grid):
    """Delivers messages at once. `replies` are those that were handed out, in their order."""

    color = "blue"  # something that no grid has

    def __init__(self, apps: Mapping[int, ClientApp] | None = None) -> None:
        self.apps = apps or dict.fromkeys(TEXTS, client_app())
        self.replies: list[Message] = []
        self._waiting: dict[str, Message] = {}
        self._numbers = itertools.count()
        self._run: Any = None

    def set_run(self, run: Any) -> None:
        self._run = run

    @property
    def run(self) -> Any:
        return self._run

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def get_nodes(self) -> Iterable[Any]:
        return [f"node {number}" for number in self.apps]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in sorted(messages, key=lambda message: message.metadata.dst_node_id):
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = f"message {next(self._numbers)} to {node}"
            context = Context(1, node, {}, RecordDict(), {})
            self._waiting[message.metadata.message_id] = self.apps[node](copy.deepcopy(message), context)
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ready = [self._waiting.pop(key) for key in message_ids if key in self._waiting]
        self.replies += ready
        return ready

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


@functools.cache
def trained(client: int) -> ArrayRecord:
    """What a client sends in the first round."""
    message = train_message(client)
    return train(message, Context(1, client, {}, RecordDict(), {})).content["arrays"]


def train_message(client: int, **options: Any) -> Message:
    return Message(RecordDict({"arrays": initial_arrays()}), client, "train", **options)
