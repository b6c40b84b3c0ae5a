"""The filter in NVFlare's own chains, and in its simulator."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("nvflare", reason="NVFlare is missing; run: pip install 'unmask[nvflare]'")
import transformers
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import ContentBlockedException, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.task_utils import apply_filters
from nvflare.app_common.app_constant import AppConstants
from tests.integrations.nvflare_job import TEXTS, save_model, simulate, words, write_job

from unmask.attacks.recover import recover_text
from unmask.audit.findings.finding import ERROR, Outcome
from unmask.audit.findings.folder import read_audit
from unmask.cli import app
from unmask.errors import InputError
from unmask.evidence import load_evidence
from unmask.integrations.nvflare import AuditFilter, Held, client_name, round_of
from unmask.models import load_model

PAGE = Path(__file__).parents[2] / "docs" / "nvflare.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("federation") / "model")


@pytest.fixture(scope="module")
def exchange(model):
    """The weights that a server sends, and what a client makes of them in a step of SGD."""
    net = transformers.AutoModelForSequenceClassification.from_pretrained(model).eval()
    before = {f"net.{name}": tensor.numpy().copy() for name, tensor in net.state_dict().items()}
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    batch = tokenizer(TEXTS["site-1"], padding=True, return_tensors="pt")
    net(**batch, labels=torch.tensor([0, 1, 0])).loss.backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    after = {f"net.{name}": tensor.numpy().copy() for name, tensor in net.state_dict().items()}
    return before, after


def pass_through(audit, data, kind, *, is_result, on_client=True, number=0):
    """Send a DXO through the filter as NVFlare's runners do; what comes out."""
    chain = FilterChainType.TASK_RESULT_CHAIN if is_result else FilterChainType.TASK_DATA_CHAIN
    direction = FilterKey.OUT if is_result is on_client else FilterKey.IN
    audit.set_prop(FilterContextKey.CHAIN_TYPE, chain)
    context, peer = FLContext(), FLContext()
    context.set_prop(ReservedKey.IDENTITY_NAME, "site-1" if on_client else "server", private=False)
    peer.set_prop(ReservedKey.IDENTITY_NAME, "server" if on_client else "site-1", private=False)
    context.set_prop(FLContextKey.PEER_CONTEXT, peer)
    shareable = DXO(kind, dict(data)).to_shareable()
    shareable.set_header(AppConstants.CURRENT_ROUND, number)
    filters = {f"train{FilterKey.DELIMITER}{direction}": [audit]}
    return from_shareable(apply_filters("filters", shareable, context, filters, "train", direction)).data


def train(audit, before, after, kind=DataKind.WEIGHTS, **how):
    pass_through(audit, before, DataKind.WEIGHTS, is_result=False, **how)
    return pass_through(audit, after, kind, is_result=True, **how)


def shown(finding):
    return {piece for piece, _ in finding.tokens}


def difference(before, after):
    return {name: after[name] - before[name] for name in before}


def texts_of(finding):
    return {"".join(piece for piece, _ in pair.recovered) for pair in finding.texts}


@pytest.mark.parametrize("on_client", [True, False])
def test_differences_are_audited_and_pass_unchanged(tmp_path, model, exchange, on_client):
    audit = AuditFilter(model=str(model), out=str(tmp_path))
    sent = difference(*exchange)
    got = train(audit, exchange[0], sent, DataKind.WEIGHT_DIFF, on_client=on_client, number=2)
    assert got.keys() == sent.keys()
    assert all(np.array_equal(got[name], sent[name]) for name in sent)
    (finding,) = read_audit(tmp_path).findings
    assert finding.outcome is Outcome.LEAK
    assert shown(finding) == words("site-1")
    assert texts_of(finding) == set(TEXTS["site-1"])
    assert (finding.case["source"], finding.case["client"], finding.case["round"]) == ("nvflare", "site-1", 3)
    assert (tmp_path / "findings-client-site-1.jsonl").exists() is on_client


def test_weights_are_compared_with_those_that_were_sent(tmp_path, model, exchange):
    train(AuditFilter(model=str(model), out=str(tmp_path)), *exchange)
    (finding,) = read_audit(tmp_path).findings
    assert shown(finding) == words("site-1")


def test_the_report_shows_it(tmp_path, model, exchange):
    train(AuditFilter(model=str(model), out=str(tmp_path)), *exchange)
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "report.md").read_text()
    assert "client site-1" in page
    assert "leaks" in page


def test_a_leaking_update_can_be_blocked(tmp_path, model, exchange):
    audit = AuditFilter(model=str(model), out=str(tmp_path), refuse="leaks")
    with pytest.raises(ContentBlockedException, match="the audit says: leaks"):
        train(audit, *exchange)
    assert train(audit, *exchange, on_client=False)  # a server has it already


def test_updates_can_be_kept_for_later(tmp_path, model, exchange):
    audit = AuditFilter(model=str(model), out=str(tmp_path), save_evidence=True)
    train(audit, exchange[0], difference(*exchange), DataKind.WEIGHT_DIFF)
    assert not read_audit(tmp_path).findings
    opened = load_model(model)
    recovery = recover_text(load_evidence(tmp_path / "evidence" / "round-1-client-site-1.safetensors"), opened)
    assert {opened.decode([token]) for token in recovery.value.token_set} == words("site-1")


def test_without_the_weights_that_were_sent_nothing_is_known(tmp_path, model, exchange, caplog):
    with caplog.at_level(logging.WARNING):
        pass_through(AuditFilter(model=str(model), out=str(tmp_path)), exchange[1], DataKind.WEIGHTS, is_result=True)
    (finding,) = read_audit(tmp_path).findings
    assert finding.outcome is Outcome.INCONCLUSIVE
    assert "put the filter into task_data_filters" in caplog.text


def test_ciphertext_is_an_error_that_says_so(tmp_path, model, exchange):
    audit = AuditFilter(model=str(model), out=str(tmp_path))
    encrypted = dict.fromkeys(exchange[1], b"secret")
    assert train(audit, exchange[0], encrypted, DataKind.WEIGHT_DIFF) == encrypted
    (finding,) = read_audit(tmp_path).findings
    assert finding.status == ERROR
    assert "must be an array, got bytes; put the audit before filters that encrypt" in finding.reason


def test_mistakes_are_told_when_the_filter_is_made(tmp_path):
    with pytest.raises(InputError, match="unknown option 'rate'"):
        AuditFilter(model="minilm-l6", out=str(tmp_path), knowledge={"rate": 1})
    with pytest.raises(InputError, match="refuse must be one of"):
        AuditFilter(model="minilm-l6", out=str(tmp_path), refuse="always")
    with pytest.raises(InputError, match="shares must be one of"):
        AuditFilter(model="minilm-l6", out=str(tmp_path), shares="logits")


def test_arrays_of_torch_and_numpy():
    assert Held("a", torch.ones(2, dtype=torch.bfloat16)).numpy().dtype == np.float32
    array = np.zeros(2)
    copied = Held("a", array).copy()
    array += 1
    assert copied.numpy().tolist() == [0, 0]


def test_names_and_rounds():
    context = FLContext()
    context.set_prop(ReservedKey.IDENTITY_NAME, "a/b c", private=False)
    assert client_name(context, on_client=True) == "a_b_c"
    assert client_name(context, on_client=False) == "unknown"
    shareable = DXO(DataKind.WEIGHTS, {"a": np.ones(1)}).to_shareable()
    assert round_of(shareable, context) == 1
    shareable.add_cookie(AppConstants.CONTRIBUTION_ROUND, 4)
    assert round_of(shareable, context) == 5


# ---- the whole of it


def page_config(model, out):
    """The lines of the page, for this model and this folder."""
    (text,) = re.findall(r"^```json\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    return json.loads(text.replace("minilm-l6", str(model)).replace("/data/nvflare-audit", str(out)))


def test_the_python_of_the_page_makes_a_job(tmp_path):
    """As NVFlare writes it: a class by its path, and its arguments."""
    from nvflare.app_common.workflows.fedavg import FedAvg
    from nvflare.job_config.api import FedJob

    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    job = FedJob(name="page")
    job.to_server(FedAvg(num_clients=1))
    exec(compile(code, str(PAGE), "exec"), {"job": job})
    job.export_job(str(tmp_path))
    (written,) = tmp_path.rglob("config_fed_client.json")
    config = json.loads(written.read_text())
    for chains in (config["task_data_filters"], config["task_result_filters"]):
        (made,) = chains[0]["filters"]
        assert made["path"] == "unmask.integrations.nvflare.AuditFilter"
        assert made["args"]["model"] == "minilm-l6"
        assert AuditFilter(**made["args"]).out == "/data/nvflare-audit"
    assert not [path for path in written.parents[1].rglob("*.py") if "nvflare" in path.name]


@pytest.mark.slow
def test_nvflares_simulator_with_the_lines_of_the_page(tmp_path, model):
    """Two clients and one round; clients attack at once, the server keeps evidence."""
    client = page_config(model, tmp_path / "clients")
    server = page_config(model, tmp_path / "server")
    for chains in server.values():
        chains[0]["filters"][0]["args"]["save_evidence"] = True
    said = simulate(write_job(tmp_path / "job", model, client=client, server=server), tmp_path / "workspace")
    assert said.count("ACCEPTED by the aggregator") == 2
    findings = {finding.case["client"]: finding for finding in read_audit(tmp_path / "clients").findings}
    assert set(findings) == set(TEXTS)
    for name, finding in findings.items():
        assert finding.outcome is Outcome.LEAK
        assert texts_of(finding) == set(TEXTS[name])
    opened = load_model(model)
    for name in TEXTS:
        evidence = load_evidence(tmp_path / "server" / "evidence" / f"round-1-client-{name}.safetensors")
        tokens = recover_text(evidence, opened).value.token_set
        assert {opened.decode([token]) for token in tokens} == words(name)
    assert CliRunner().invoke(app, ["report", str(tmp_path / "clients")]).exit_code == 0
