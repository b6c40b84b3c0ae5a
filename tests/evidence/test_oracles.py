"""Oracles of this process: what they are asked, what is kept, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unmask.errors import InputError, UnmaskError
from unmask.evidence.ledger import BudgetSpent, Ledger
from unmask.evidence.oracles import FunctionOracle, ModuleOracle, OracleEvidence, Refused, question_keys


def some_sequences(num: int, length: int = 2, width: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, length, width, generator=generator, dtype=torch.float64)


def last_sum(sequences):
    return sequences[:, -1].sum(-1)


def test_a_function_is_called_in_batches_of_the_size_that_was_set():
    sizes = []

    def function(sequences):
        sizes.append(len(sequences))
        return last_sum(sequences)

    X = some_sequences(7)
    assert torch.equal(OracleEvidence(FunctionOracle(function, max_batch=3), 3).ask(X), last_sum(X))
    assert sizes == [3, 3, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_module_answers_in_its_own_precision(dtype):
    module = nn.Linear(3, 2).to(dtype)
    X = some_sequences(4, length=1)
    answers = OracleEvidence(ModuleOracle(nn.Sequential(module, nn.Flatten())), 3).ask(X)
    assert answers.dtype == torch.float64
    assert not answers.requires_grad
    assert torch.equal(answers, module(X[:, 0].to(dtype)).double())


def test_the_same_question_is_paid_for_once_unless_it_is_repeated_on_purpose():
    evidence = OracleEvidence(FunctionOracle(lambda sequences: torch.rand(len(sequences))), 3)
    X = some_sequences(5)
    first = evidence.ask(X)
    assert torch.equal(evidence.ask(X.flip(0)), first.flip(0))
    assert len(evidence.ledger) == 5
    assert not torch.equal(evidence.ask(X, repetition=1), first)
    assert len(evidence.ledger) == 10


def test_keys_tell_numbers_lengths_and_repetitions_apart():
    X = some_sequences(2)
    nearly = X.clone()
    nearly[0, 0, 0] = torch.nextafter(X[0, 0, 0], torch.tensor(9.0))
    different = [X, nearly[:1], X.reshape(2, 3, 2), X.reshape(2, 1, 6), X[:, :1]]
    keys = [key for sequences in different for key in question_keys(sequences)] + question_keys(X, repetition=1)
    assert len(set(keys)) == len(keys) == 11
    assert question_keys(X.transpose(1, 2).contiguous().transpose(1, 2)) == question_keys(X)


def test_finite_answers_are_kept_before_the_others_are_refused():
    def function(sequences):
        answers = last_sum(sequences)
        return torch.where(answers > 0, answers, torch.nan)

    X = some_sequences(20)
    evidence = OracleEvidence(FunctionOracle(function), 3)
    num_finite = int((last_sum(X) > 0).sum())
    assert 0 < num_finite < 20
    with pytest.raises(Refused, match=f"{20 - num_finite} of 20 sequences is not a finite number"):
        evidence.ask(X)
    assert len(evidence.ledger) == num_finite
    assert torch.equal(evidence.ask(X[last_sum(X) > 0]), last_sum(X)[last_sum(X) > 0])


@pytest.mark.parametrize(
    "function",
    [
        lambda X: torch.zeros(1),
        lambda X: torch.zeros(()),
        lambda X: torch.zeros(len(X), 2, 2),
        lambda X: torch.zeros(len(X), 0),
    ],
)
def test_a_wrong_number_of_answers_is_told(function):
    with pytest.raises(UnmaskError, match=r"asked 4 sequences and answered with an array of shape"):
        OracleEvidence(FunctionOracle(function), 3).ask(some_sequences(4))


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (lambda X: None, "answered with NoneType, which is no array of numbers"),
        (lambda X: ["a"] * len(X), "answered with list, which is no array of numbers"),
        (lambda X: torch.zeros(len(X), dtype=torch.complex64), "complex numbers"),
    ],
)
def test_answers_that_are_no_numbers_are_told(function, part):
    with pytest.raises(UnmaskError, match=part):
        OracleEvidence(FunctionOracle(function), 3).ask(some_sequences(4))


def test_the_budget_is_checked_before_the_oracle_is_asked():
    calls = []
    oracle = FunctionOracle(lambda sequences: calls.append(len(sequences)) or last_sum(sequences))
    evidence = OracleEvidence(oracle, 3, Ledger(budget=3))
    with pytest.raises(BudgetSpent):
        evidence.ask(some_sequences(4))
    assert calls == []


@pytest.mark.parametrize("shape", [(4, 3), (4, 2, 2), (2, 4, 2, 3)])
def test_sequences_of_another_shape_are_refused(shape):
    with pytest.raises(InputError, match=r"must be \(batch, length, 3\), got"):
        OracleEvidence(FunctionOracle(last_sum), 3).ask(torch.zeros(shape))


@pytest.mark.parametrize("known", [{"width": 0}, {"width": 3, "max_norm": 0.0}, {"width": 3, "max_norm": float("nan")}])
def test_side_knowledge_must_make_sense(known):
    with pytest.raises(InputError, match="must be"):
        OracleEvidence(FunctionOracle(last_sum), **known)


def test_a_module_without_weights_answers_in_the_precision_of_the_question():
    class Mean(torch.nn.Module):
        def forward(self, X):
            return X.mean((1, 2))

    X = torch.randn(3, 2, 4, dtype=torch.float64)
    assert torch.equal(OracleEvidence(ModuleOracle(Mean()), 4).ask(X), X.mean((1, 2)))


@pytest.mark.parametrize("bound", [float("inf"), 1e200, 0.0, float("nan")])
def test_a_bound_that_is_none_is_refused(bound):
    with pytest.raises(InputError, match="max_norm must be above 0"):
        OracleEvidence(FunctionOracle(lambda X: X.sum((1, 2))), 4, max_norm=bound)
