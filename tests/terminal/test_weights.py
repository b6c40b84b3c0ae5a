"""Recovered heads: their norms and ranks, what no query tells, and a file only where there is something to write."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from tests.attacks.queries.random_heads import random_head

from unmask.attacks.queries.profile import probe_oracle
from unmask.attacks.recover import recover_from_answers
from unmask.evidence.ledger import Ledger
from unmask.evidence.oracles import FunctionOracle, OracleEvidence
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Certificate, Cost, Recovery, Status
from unmask.terminal.weights import (
    print_oracle_profile,
    print_weights_recovery,
    weights_recovery_document,
    write_weights,
)


def recovery_of(W: torch.Tensor, v: torch.Tensor, residual: float = 1e-12) -> Recovery[HeadWeights]:
    certificate = Certificate("a claim", residual, 1e-9)
    return Recovery(HeadWeights(W=W, v=v), Status.RECOVERED, "a reason", certificate, Cost(queries=20))


@pytest.fixture
def ledger():
    book = Ledger()
    yield book
    book.close()


def test_norms_and_ranks_are_those_of_the_matrices(ledger):
    W = torch.diag(torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64))[None]
    v = torch.tensor([[0.0, 2.0, 0.0]], dtype=torch.float64)
    (head,) = weights_recovery_document(recovery_of(W, v), None, ledger)["heads"]
    assert head == {"norm_W": 5.0, "rank_W": 2, "norm_v": 2.0}
    (doubtful,) = weights_recovery_document(recovery_of(W, v, residual=1.0), None, ledger)["heads"]
    assert doubtful["rank_W"] is None  # nothing certifies the small singular values


def test_entries_that_are_not_known_are_none_and_the_document_is_json(ledger):
    W = torch.full((1, 2, 2), math.nan, dtype=torch.float64)
    document = weights_recovery_document(recovery_of(W, torch.ones(1, 2, dtype=torch.float64)), None, ledger)
    assert document["heads"][0]["norm_W"] is None
    json.dumps(document, allow_nan=False)


def test_a_real_recovery_for_people(ledger, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    evidence = OracleEvidence(FunctionOracle(random_head(4)), 4, ledger)
    profile = probe_oracle(evidence, torch.Generator().manual_seed(0))
    recovery = recover_from_answers(evidence, profile=profile)
    print_oracle_profile(profile)
    print_weights_recovery(recovery, profile, ledger, None, json=False)
    out = capsys.readouterr().out
    assert "1 head" in out
    assert f"{ledger.num_asked:,} asked" in out
    assert "no query can show" in out
    assert "what stops it" in out


def test_a_file_is_written_only_for_heads(tmp_path):
    W, v = torch.randn(2, 3, 3), torch.randn(2, 3)
    path = write_weights(recovery_of(W, v), "an oracle", tmp_path / "heads.safetensors")
    assert torch.equal(load_file(path)["W"], W)
    assert write_weights(recovery_of(W[:0], v[:0]), "an oracle", tmp_path / "none.safetensors") is None
    assert not (tmp_path / "none.safetensors").exists()
