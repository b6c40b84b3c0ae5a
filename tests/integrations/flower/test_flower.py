"""Flower's strategies on an audited grid, audited strategies, and the client's own mod."""

from __future__ import annotations

import copy
import difflib
import importlib
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is missing; run: pip install 'unmask[flower]'")
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.common import FitIns, ndarrays_to_parameters
from flwr.common.constant import ErrorCode
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.serverapp import Grid
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, Strategy
from tests.integrations import flower_app
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

import unmask.integrations.federation.audit as federation_audit
from unmask.audit.findings.finding import ERROR, Outcome
from unmask.audit.findings.folder import read_audit
from unmask.audit.findings.verdict import reach_verdict
from unmask.errors import InputError, UnknownModelError
from unmask.integrations.flower import AuditGrid, AuditStrategy, WatchedGrid, audit_mod
from unmask.models.catalog import resolve


@pytest.fixture
def options(tmp_path):
    return {"model": audited_model(), "out": tmp_path / "fl"}


def start(strategy: Strategy, grid: Grid, num_rounds: int = 1):
    return strategy.start(grid=grid, initial_arrays=initial_arrays(), num_rounds=num_rounds)


def contents(messages):
    """A hash of each message's content, as Flower makes them, and the ids that strategies go by."""
    return [(m.metadata.src_node_id, m.metadata.reply_to_message_id, m.content.object_id) for m in messages]


def sent_bytes(messages):
    return [{name: array.data for name, array in message.content["arrays"].items()} for message in messages]


# ---- the grid


def test_every_client_of_every_round_is_audited(options):
    inner = MemoryGrid()
    result = start(FedAvg(), AuditGrid(inner, **options), num_rounds=2)
    held = findings(options)
    assert Counter((f.case["round"], f.case["client"]) for f in held) == {
        (number, str(client)): 1 for number in (1, 2) for client in TEXTS
    }
    assert len({finding.id for finding in held}) == 4
    for finding in held:
        assert finding.outcome is Outcome.LEAK
        assert shown(finding) == words(int(finding.case["client"]))
    assert len({finding.model_fingerprint for finding in held}) == 2  # each round starts from other weights
    assert reach_verdict(read_audit(options["out"])).outcomes[Outcome.LEAK] == 4
    assert result.train_metrics_clientapp.keys() == {1, 2}


def test_the_federation_is_the_same_bit_for_bit(options):
    plain, inner = MemoryGrid(), MemoryGrid()
    without = start(FedAvg(), plain, num_rounds=2)
    audited = start(FedAvg(), AuditGrid(inner, **options), num_rounds=2)
    assert audited.arrays.object_id == without.arrays.object_id
    assert contents(inner.replies) == contents(plain.replies)


def test_messages_and_replies_are_handed_on_as_they_are(options):
    class Recording(MemoryGrid):
        def send_and_receive(self, messages, *, timeout=None):
            self.sent, self.timeout = list(messages), timeout
            return super().send_and_receive(self.sent)

    inner = Recording()
    messages = [train_message(client) for client in TEXTS]
    before = sent_bytes(messages)
    replies = AuditGrid(inner, **options).send_and_receive((message for message in messages), timeout=7.0)
    assert all(one is other for one, other in zip(inner.sent, messages, strict=True))
    assert sent_bytes(messages) == before
    assert all(one is other for one, other in zip(replies, inner.replies, strict=True))
    assert inner.timeout == 7.0


def test_strategies_that_push_and_pull_are_audited_too(options):
    inner = MemoryGrid()
    grid = AuditGrid(inner, **options)
    ids = list(grid.push_messages([train_message(client, group_id="3") for client in TEXTS]))
    assert grid.pull_messages(ids[:1]) == inner.replies
    assert [finding.case["client"] for finding in findings(options)] == ["11"]
    grid.pull_messages(ids)
    assert {(f.case["round"], f.case["client"]) for f in findings(options)} == {(3, "11"), (3, "12")}
    assert grid.pull_messages(ids) == []
    assert len(findings(options)) == 2


def test_everything_else_is_the_grid_that_is_wrapped(options):
    inner = MemoryGrid()
    grid = AuditGrid(inner, **options)
    grid.set_run("a run")
    assert grid.run == inner.run == "a run"
    assert (grid.get_node_ids(), grid.get_nodes()) == (inner.get_node_ids(), inner.get_nodes())
    assert grid.create_message(RecordDict(), "train", 11, "1").metadata.group_id == "1"
    assert grid.color == "blue"
    assert isinstance(grid, Grid)
    with pytest.raises(AttributeError):
        _ = grid.taste
    copy.copy(grid)


@pytest.mark.parametrize(("wrapped", "own"), [(Grid, WatchedGrid), (Strategy, AuditStrategy)])
def test_no_method_is_forgotten(wrapped, own):
    assert {name for name in vars(wrapped) if not name.startswith("_")} <= set(vars(own))


def test_evaluation_and_failed_clients_are_no_updates(options):
    def fail(message: Message, context: Context) -> Message:
        from flwr.app import Error

        return Message(Error(code=2, reason="no data"), reply_to=message)

    grid = AuditGrid(MemoryGrid({11: client_app(), 12: client_app(fail)}), **options)
    start(FedAvg(), grid)  # evaluates too
    assert [finding.case["client"] for finding in findings(options)] == ["11"]


def test_an_action_of_training_is_training(options):
    app = client_app()
    app.train("carefully")(train)
    grid = AuditGrid(MemoryGrid({11: app}), **options)
    grid.send_and_receive([Message(RecordDict({"arrays": initial_arrays()}), 11, "train.carefully")])
    assert len(findings(options)) == 1


def test_an_audit_that_fails_does_not_break_the_federation(options, monkeypatch):
    def fail(*_, **__):
        raise MemoryError("no memory for the attack")

    plain, inner = MemoryGrid(), MemoryGrid()
    without = start(FedAvg(), plain)
    monkeypatch.setattr(federation_audit, "recover_text", fail)
    audited = start(FedAvg(), AuditGrid(inner, **options))
    assert audited.arrays.object_id == without.arrays.object_id
    assert [(finding.status, finding.error["type"]) for finding in findings(options)] == 2 * [(ERROR, "MemoryError")]


def test_nan_passes_as_it_is(options):
    def explode(message: Message, context: Context) -> Message:
        return answer(message, {k: v * torch.nan for k, v in trained(11).to_torch_state_dict().items()})

    inner = MemoryGrid({11: client_app(explode)})
    (reply,) = AuditGrid(inner, **options).send_and_receive([train_message(11)])
    assert reply.content["arrays"]["classifier.bias"].numpy().shape == (2,)
    assert contents([reply]) == contents(inner.replies)
    assert findings(options)[0].status == ERROR


def test_a_model_that_cannot_be_loaded_is_told_before_the_first_round(tmp_path):
    with pytest.raises((UnknownModelError, InputError)):
        AuditGrid(MemoryGrid(), model="no-such-model", out=tmp_path / "fl")
    assert not (tmp_path / "fl").exists()


def test_clients_that_only_number_their_arrays_are_read_by_names(tmp_path):
    """Flower's older interface, both sides of it; its arrays have neither shape nor type."""
    state = classifier().state_dict()

    class Client(NumPyClient):
        def fit(self, parameters, config):
            weights = dict(zip(state, map(torch.tensor, parameters), strict=True))
            return [tensor.numpy() for tensor in new_weights(weights, 11).values()], 3, {}

    def ask(options):
        grid = AuditGrid(MemoryGrid({11: ClientApp(client_fn=lambda context: Client().to_client())}), **options)
        parameters = ndarrays_to_parameters([tensor.numpy() for tensor in state.values()])
        GridClientProxy(11, grid, 1).fit(FitIns(parameters, {}), timeout=None, group_id=6)
        (finding,) = findings(options)
        return finding

    named = ask({"model": audited_model(), "out": tmp_path / "named", "names": list(state)})
    assert (named.case["round"], shown(named)) == (6, words(11))
    numbered = ask({"model": audited_model(), "out": tmp_path / "numbered"})
    assert "`names` where clients only number" in numbered.reason


# ---- the strategy


def test_a_strategy_can_be_wrapped_instead(options):
    plain, inner = MemoryGrid(), MemoryGrid()
    strategy = AuditStrategy(FedAvg(fraction_train=1.0), **options)
    audited, without = start(strategy, inner, 2), start(FedAvg(), plain, 2)
    assert audited.arrays.object_id == without.arrays.object_id
    assert {(f.case["round"], f.case["client"]) for f in findings(options)} == {
        (number, str(client)) for number in (1, 2) for client in TEXTS
    }
    assert all(shown(finding) == words(int(finding.case["client"])) for finding in findings(options))
    assert strategy.fraction_train == 1.0


def test_settings_of_a_wrapped_strategy_can_be_changed(options):
    inner = FedAvg()
    audited = AuditStrategy(inner, **options)
    audited.fraction_train = 0.25
    assert inner.fraction_train == audited.fraction_train == 0.25


def test_a_wrapped_strategy_can_be_wrapped_again(options):
    audited = AuditStrategy(FedAvg(), **options)
    clipping = DifferentialPrivacyServerSideFixedClipping(
        audited, noise_multiplier=0.0, clipping_norm=1e6, num_sampled_clients=2
    )
    start(clipping, MemoryGrid(), 2)
    assert {(f.case["round"], f.case["client"]) for f in findings(options)} == {
        (number, str(client)) for number in (1, 2) for client in TEXTS
    }


# ---- the client's mod


def run_client(*mods, server_round: int = 4) -> Message:
    message = train_message(11)
    message.content["config"] = ConfigRecord({"server-round": server_round})
    return client_app(mods=mods)(message, Context(1, 11, {}, RecordDict(), {}))


def test_a_client_audits_its_own_update(options):
    reply = run_client(audit_mod(**options))
    assert reply.content["arrays"].object_id == trained(11).object_id
    (finding,) = findings(options)
    assert (finding.case["round"], finding.case["client"]) == (4, "11")
    assert shown(finding) == words(11)
    assert (options["out"] / "findings-client-11.jsonl").is_file()


def test_a_client_knows_round_0(options):
    run_client(audit_mod(**options), server_round=0)
    assert findings(options)[0].case["round"] == 0


def test_a_client_refuses_to_send_what_leaks(options):
    reply = run_client(audit_mod(refuse=True, **options))
    assert reply.has_error()
    assert not reply.has_content()
    assert reply.error.code == ErrorCode.MOD_FAILED_PRECONDITION
    assert not [word for word in words(11) if word in reply.error.reason]
    assert len(findings(options)) == 1


def send_only_the_head(message: Message, context: Context) -> Message:
    return answer(message, {"classifier.bias": torch.ones(2)})


def send_nothing_new(message: Message, context: Context) -> Message:
    return answer(message, message.content["arrays"].to_torch_state_dict())


@pytest.mark.parametrize(
    ("refuse", "sent"),
    [
        (False, {train, send_only_the_head, send_nothing_new}),
        ("leaks", {send_only_the_head, send_nothing_new}),
        ("unless-clear", {send_nothing_new}),
        (True, {send_nothing_new}),
    ],
)
def test_what_is_sent_is_chosen_by_refuse(options, refuse, sent):
    mod, context = audit_mod(refuse=refuse, **options), Context(1, 11, {}, RecordDict(), {})
    acts = (train, send_only_the_head, send_nothing_new)
    assert {act for act in acts if client_app(act, [mod])(train_message(11), context).has_content()} == sent
    assert {f.outcome for f in findings(options)} == {Outcome.LEAK, Outcome.INCONCLUSIVE, Outcome.NO_LEAK}


def test_a_second_record_of_arrays_is_not_sent_unread(options):
    def act(message: Message, context: Context) -> Message:
        reply = send_nothing_new(message, context)
        reply.content["gradients"] = initial_arrays()
        return reply

    mod, context = audit_mod(refuse=True, **options), Context(1, 11, {}, RecordDict(), {})
    assert client_app(act, [mod])(train_message(11), context).has_error()
    assert "not read, in 'gradients'" in findings(options)[0].reason


def test_a_refusal_that_is_none_is_told(options):
    with pytest.raises(InputError, match="refuse must be one of False, True, 'unless-clear', 'leaks', got 'leak'"):
        audit_mod(refuse="leak", **options)


def test_the_others_go_on_without_a_client_that_refuses(options):
    apps = {11: client_app(mods=[audit_mod(refuse=True, **options)]), 12: client_app()}
    result = start(FedAvg(), MemoryGrid(apps))
    assert result.arrays.object_id == trained(12).object_id


def test_a_client_that_cannot_audit_sends_only_if_it_does_not_refuse(options, monkeypatch):
    monkeypatch.setattr(federation_audit, "recover_text", lambda *_, **__: 1 / 0)
    assert run_client(audit_mod(**options)).content["arrays"].object_id == trained(11).object_id
    assert "error" in run_client(audit_mod(refuse=True, **options)).error.reason
    missing = audit_mod(model="no-such-model", out=options["out"])
    assert run_client(missing).has_content()


def test_noise_hides_the_words_if_the_audit_comes_after_it(options, tmp_path):
    """Mods run from the outside in: the first of the list sees what the others have made of the reply."""
    noise = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=20.0, delta=1e-5)
    assert run_client(audit_mod(refuse="leaks", **options), noise).has_content()
    (finding,) = findings(options)
    assert finding.outcome is not Outcome.LEAK
    assert not finding.tokens
    inside = {**options, "out": tmp_path / "inside"}
    assert run_client(noise, audit_mod(**inside)).has_content()
    assert shown(findings(inside)[0]) == words(11)


def test_the_mod_lets_evaluation_and_errors_pass(options):
    def fail(message: Message, context: Context) -> Message:
        from flwr.app import Error

        return Message(Error(code=2, reason="no data"), reply_to=message)

    mod, context = audit_mod(refuse=True, **options), Context(1, 11, {}, RecordDict(), {})
    assert client_app(fail, [mod])(train_message(11), context).error.reason == "no data"
    evaluate = Message(RecordDict({"arrays": initial_arrays()}), 11, "evaluate")
    reply = answer(evaluate, trained(11).to_torch_state_dict())
    assert mod(evaluate, context, lambda *_: reply) is reply
    assert not options["out"].exists()


def test_refusing_needs_an_answer_at_once(options):
    with pytest.raises(InputError, match="leave save_evidence out"):
        audit_mod(refuse=True, save_evidence=True, **options)


def test_a_client_that_changes_its_message_is_still_compared_with_what_it_got(options):
    def in_place(message: Message, context: Context) -> Message:
        record = message.content["arrays"]
        for name, array in trained(11).items():
            record[name] = array
        return Message(message.content, reply_to=message)

    client_app(in_place, [audit_mod(**options)])(train_message(11), Context(1, 11, {}, RecordDict(), {}))
    assert shown(findings(options)[0]) == words(11)


def test_without_flower_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    monkeypatch.delitem(sys.modules, "unmask.integrations.flower")
    with pytest.raises(ImportError, match=r"pip install 'unmask\[flower\]'"):
        importlib.import_module("unmask.integrations.flower")


# ---- Flower's own quick-start


@pytest.fixture(scope="module")
def wheel():
    for name in ("ray", "flwr_datasets", "evaluate"):
        pytest.importorskip(name, reason=f"{name} is missing; run: pip install -e '.[dev]'")
    try:
        return flower_app.find_wheel()
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"Flower's templates are missing ({error}); run: pip download --no-deps {flower_app.PACKAGE}")


@pytest.fixture
def folder():
    """Not pytest's own: the paths of Ray's sockets, which lie in it, may have 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="fl-", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.mark.slow
def test_the_token_sets_of_flowers_own_clients(wheel, minilm, folder):
    """Flower's Hugging Face quick-start, as its package has it; the audit line is the only change.

    Its clients load a fresh head, run two steps of AdamW with dropout and send all weights. Both batches of an epoch
    are used, so that the order in which a client draws its texts does not matter.
    """
    server = flower_app.render(wheel, folder)
    theirs = server.read_text()
    ours = theirs.replace("grid=grid,", 'grid=AuditGrid(grid, model="minilm-l6", out="audit"),')
    ours = ours.replace(
        "# Create ServerApp\n", "from unmask.integrations.flower import AuditGrid\n\n# Create ServerApp\n"
    )
    changes = [line.split() for line in difflib.ndiff(theirs.split("\n"), ours.split("\n")) if line[0] in "+-"]
    changes = [" ".join(words) for words in changes if len(words) > 1]
    assert changes == [
        "+ from unmask.integrations.flower import AuditGrid",
        "- grid=grid,",
        '+ grid=AuditGrid(grid, model="minilm-l6", out="audit"),',
    ]
    server.write_text(ours)

    model = str(resolve("minilm-l6"))
    config = {"num-server-rounds": 1, "fraction-train": 1.0, "local-steps": 5, "model-name": model, "num-labels": 2}
    output = flower_app.simulate(folder, config, limit_s=300)
    assert "aggregate_train: Received 2 results and 0 failures" in output
    assert "aggregate_evaluate: Received 2 results and 0 failures" in output

    held = read_audit(folder / "audit").findings
    assert [finding.status for finding in held] == 2 * ["PARTIAL"]
    assert all(not finding.texts for finding in held)
    assert len({finding.case["client"] for finding in held}) == 2
    secrets = flower_app.training_texts(folder)
    assert [len(texts) for texts in secrets] == [40, 40]
    true = [{minilm.decode([token]) for text in texts for token in minilm.encode(text)} for texts in secrets]
    assert true[0] != true[1]
    reported = [shown(finding) for finding in held]
    assert reported in (true, true[::-1])  # clients have random numbers
