"""Which reply belongs to which message, and what of both is read."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is missing; run: pip install 'unmask[flower]'")
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from tests.integrations.flower_grid import (
    TEXTS,
    MemoryGrid,
    answer,
    audited_model,
    classifier,
    client_app,
    findings,
    initial_arrays,
    new_weights,
    shown,
    train,
    train_message,
    trained,
    words,
)

from unmask.audit.findings.finding import Outcome
from unmask.integrations.flower import AuditGrid, AuditStrategy
from unmask.integrations.flower.messages import MAX_VERSIONS, OpenMessages, round_of
from unmask.protocols import observe_gradients


@pytest.fixture
def options(tmp_path):
    return {"model": audited_model(), "out": tmp_path / "fl"}


class Heard:
    """An audit that only writes down what it is asked."""

    record = None

    def __init__(self):
        self.asked = []

    def audit(self, number, client, sent, received, unread=()):
        self.asked.append(SimpleNamespace(number=number, client=client, sent=sent, received=received, unread=unread))


class Deaf(MemoryGrid):
    """Client 12 never answers."""

    def pull_messages(self, message_ids):
        return [reply for reply in super().pull_messages(message_ids) if reply.metadata.src_node_id != 12]


@pytest.fixture
def exchanges():
    return OpenMessages(Heard())


def numbered(key: str, message: Message) -> Message:
    message.metadata.__dict__["_message_id"] = key
    return message


def test_clients_that_are_asked_in_threads_are_all_audited(options):
    """As servers of Flower's older interface do. Two versions of the weights are out at the same time."""
    numbers = range(20, 28)
    generator = torch.Generator().manual_seed(0)
    first = classifier().state_dict()
    second = {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in first.items()}
    sent = [ArrayRecord(state) for state in (first, second)]
    replies = [new_weights(state, 11) for state in (first, second)]
    all_here = threading.Barrier(len(numbers), timeout=30)

    def act(message: Message, context: Context) -> Message:
        all_here.wait()
        return answer(message, replies[context.node_id % 2])

    grid = AuditGrid(MemoryGrid(dict.fromkeys(numbers, client_app(act))), **options)

    def ask(number):
        grid.send_and_receive([Message(RecordDict({"arrays": sent[number % 2]}), number, "train")])

    with ThreadPoolExecutor(len(numbers)) as threads:
        list(threads.map(ask, numbers))
    held = findings(options)
    assert {int(finding.case["client"]) for finding in held} == set(numbers)
    assert all(shown(finding) == words(11) for finding in held)
    assert len({(int(finding.case["client"]) % 2, finding.model_fingerprint) for finding in held}) == 2


def test_messages_without_an_answer_are_forgotten_once_the_exchange_is_over(options):
    grid = AuditGrid(Deaf(), **options)
    grid.send_and_receive([train_message(client) for client in TEXTS], timeout=1)
    strategy = AuditStrategy(SimpleNamespace(aggregate_train=lambda *_: (None, None)), **options)
    strategy._messages = [numbered("one", train_message(11))]
    strategy.aggregate_train(1, [])
    assert not grid._exchanges._out
    assert not strategy._exchanges._out
    assert not strategy._messages


def test_messages_that_expired_are_not_waited_for(options):
    grid = AuditGrid(MemoryGrid(), **options)
    ids = list(grid.push_messages([train_message(11, ttl=1e-9)]))
    grid.push_messages([train_message(12)])
    assert len(grid.pull_messages(ids)) == 1
    assert not findings(options)


def test_one_version_of_the_weights_is_held_once(exchanges):
    arrays = initial_arrays()
    for key in "abc":
        record = ArrayRecord(dict(arrays))  # the older interface makes a record for each client
        exchanges.record_sent(exchanges.note([numbered(key, Message(RecordDict({"arrays": record}), 11, "train"))]))
    assert len({id(weights) for *_, weights in exchanges._out.values()}) == 1


def test_only_the_newest_versions_are_held(exchanges, caplog):
    messages = []
    for number in range(MAX_VERSIONS + 1):
        record = ArrayRecord({"weight": torch.tensor([float(number)])})
        messages.append(numbered(str(number), Message(RecordDict({"arrays": record}), number, "train")))
        with caplog.at_level(logging.WARNING):
            exchanges.record_sent(exchanges.note(messages[-1:]))
    assert "more than 32 versions" in caplog.text
    exchanges.audit_replies([answer(message, {"weight": torch.zeros(1)}) for message in messages])
    assert [asked.sent is None for asked in exchanges.audit.asked] == [True] + MAX_VERSIONS * [False]


@pytest.mark.parametrize("deep", [False, True])
def test_weights_may_change_once_they_are_sent(options, deep):
    grid = AuditGrid(MemoryGrid(), **options)
    message = train_message(11)
    ids = grid.push_messages([message])
    record = message.content["arrays"]
    for name, array in ArrayRecord({k: v + 1 for k, v in record.to_torch_state_dict().items()}).items():
        if deep:
            record[name].data = array.data
        else:
            record[name] = array
    grid.pull_messages(ids)
    assert shown(findings(options)[0]) == words(11)


def test_weights_that_changed_between_two_messages_are_another_version(exchanges):
    message = train_message(11)
    (_, before), *_ = exchanges.note([message])
    message.content["arrays"]["classifier.bias"] = trained(11)["classifier.bias"]
    (_, after), *_ = exchanges.note([message])
    assert before["classifier.bias"].data != after["classifier.bias"].data


# ---- records


def test_a_gradient_beside_unchanged_weights_is_never_clear(options, tmp_path):
    gradients = observe_gradients(audited_model(), ["w17 w99 w17 w250"], task="classification").gradients

    def act(message: Message, context: Context) -> Message:
        reply = answer(message, message.content["arrays"].to_torch_state_dict())
        reply.content["gradients"] = ArrayRecord({f"bert.{name}": tensor for name, tensor in gradients.items()})
        return reply

    read_as = {"record": "gradients", "shares": "gradient", "task": "classification"}
    chosen = {**options, "out": tmp_path / "chosen", **read_as}
    grid = AuditGrid(AuditGrid(MemoryGrid({11: client_app(act)}), **options), **chosen)
    grid.send_and_receive([train_message(11)])
    (unread,) = findings(options)
    assert unread.outcome is Outcome.INCONCLUSIVE
    assert "not read, in 'gradients'" in unread.reason
    (read,) = findings(chosen)
    assert read.outcome is Outcome.LEAK
    assert "not read, in 'arrays'" in read.reason


def asked_about(exchanges, reply_records):
    message = numbered("one", train_message(11))
    exchanges.record_sent(exchanges.note([message]))
    exchanges.audit_replies([Message(RecordDict(reply_records), reply_to=message)])
    return exchanges.audit.asked[-1]


def test_records_without_arrays_are_no_other_records(exchanges):
    arrays = initial_arrays()
    assert asked_about(exchanges, {"empty": ArrayRecord(), "arrays": arrays}).unread == []
    asked = asked_about(exchanges, {"arrays": ArrayRecord(), "new": arrays, "old": arrays})
    assert (asked.received is arrays, asked.unread) == (True, [])  # the same record twice


def test_a_record_that_was_asked_for_is_not_replaced_by_another(exchanges):
    exchanges.audit.record = "gradients"
    asked = asked_about(exchanges, {"arrays": initial_arrays()})
    assert not asked.received
    assert asked.unread == ["arrays"]
    assert asked.sent.keys() == initial_arrays().keys()  # what it started from is in the usual one


# ---- rounds


def test_rounds_that_nobody_numbers_are_counted(options):
    grid = AuditGrid(MemoryGrid(), **options)
    for _ in range(2):
        grid.send_and_receive([train_message(11)])
    assert [finding.case["round"] for finding in findings(options)] == [1, 2]


def test_the_round_is_what_the_strategy_says():
    told = RecordDict({"config": ConfigRecord({"server-round": 5})})
    assert round_of(Message(told, 11, "train", group_id="7")) == 5
    assert round_of(Message(RecordDict(), 11, "train", group_id="7")) == 7
    assert round_of(Message(RecordDict(), 11, "train", group_id="a batch")) is None


def test_round_0_is_a_round(exchanges):
    message = numbered("one", train_message(11, group_id="0"))
    exchanges.finish(exchanges.note([message]), [train(message, Context(1, 11, {}, RecordDict(), {}))])
    assert exchanges.audit.asked[0].number == 0


# ---- what cannot be understood


def test_messages_that_cannot_be_understood_pass_with_a_warning(options, monkeypatch, caplog):
    monkeypatch.setattr("unmask.integrations.flower.messages._arrays", lambda *_: 1 / 0)
    inner = MemoryGrid()
    with caplog.at_level(logging.WARNING):
        replies = AuditGrid(inner, **options).send_and_receive([train_message(11)])
    assert replies == inner.replies
    assert "could not be audited, nothing is known of it: ZeroDivisionError" in caplog.text


def test_one_message_that_cannot_be_understood_does_not_hide_the_others(exchanges, caplog):
    good = numbered("one", train_message(11))
    with caplog.at_level(logging.WARNING):
        noted = exchanges.note([object(), good])
    assert [message for message, _ in noted] == [good]
    assert "could not be audited" in caplog.text
