"""Questions about next tokens: paid for once, kept, limited, and checked."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from unmask.errors import InputError, UnmaskError
from unmask.evidence.ledger import BudgetSpent, Ledger
from unmask.evidence.logits import FunctionLogitOracle, LogitEvidence, LogitQuestion, LogitView
from unmask.evidence.oracles import Refused

VOCAB = 40
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
ALL = LogitView(VOCAB)
QUESTIONS = [LogitQuestion((first, 3), (1, 5, 9)) for first in range(6)]


def table(prompts):
    return TABLE[prompts[:, 0]] + TABLE[prompts[:, -1]].roll(1, dims=1)


@dataclass(frozen=True)
class Fixed:
    """Answers the same to everything."""

    answer: torch.Tensor
    vocab_size: int = VOCAB
    name: str = "fixed"
    view: LogitView = ALL

    def pieces(self, questions):
        yield list(range(len(questions))), self.answer


def test_everything_is_shown_as_it_is():
    values = LogitEvidence(FunctionLogitOracle(table, VOCAB)).ask(QUESTIONS)
    assert torch.equal(values, table(torch.tensor([[q, 3] for q in range(6)]))[:, [1, 5, 9]].double())


def test_prompts_of_several_lengths_keep_their_places():
    questions = [LogitQuestion((1, 2), (0,)), LogitQuestion((4,), (0,)), LogitQuestion((7, 2), (0,))]
    values = LogitEvidence(FunctionLogitOracle(table, VOCAB)).ask(questions)
    alone = [LogitEvidence(FunctionLogitOracle(table, VOCAB)).ask([question])[0] for question in questions]
    assert torch.equal(values, torch.stack(alone))


def test_a_question_is_paid_for_once_and_outlives_the_process(tmp_path):
    path = tmp_path / "answers.sqlite"
    first = LogitEvidence(FunctionLogitOracle(table, VOCAB), Ledger(path, about="a table"))
    values = first.ask(QUESTIONS + QUESTIONS[:2])
    assert (first.ledger.num_asked, first.ledger.num_paid) == (8, 6)
    first.ledger.close()
    again = LogitEvidence(Fixed(torch.zeros(0)), Ledger(path, about="a table"))
    assert torch.equal(again.ask(QUESTIONS), values[:6])
    assert again.ledger.num_paid == 0


def test_the_bias_the_tokens_and_the_prompt_make_a_question():
    one = LogitQuestion((1, 2), (3,), 5.0)
    others = [LogitQuestion((1, 2), (3,), 6.0), LogitQuestion((1, 2), (4,), 5.0), LogitQuestion((1,), (3,), 5.0)]
    assert len({one.key, LogitQuestion("1, 2", (3,), 5.0).key, *(other.key for other in others)}) == 5


def test_only_the_top_is_shown_and_a_bias_lifts_into_it():
    oracle = FunctionLogitOracle(table, VOCAB, top=3)
    plain = LogitEvidence(oracle).ask([LogitQuestion((2, 3), tuple(range(VOCAB)))])[0]
    assert int((~plain.isnan()).sum()) == 3
    low = tuple(table(torch.tensor([[2, 3]]))[0].argsort()[:3].tolist())
    assert LogitEvidence(oracle).ask([LogitQuestion((2, 3), low)]).isnan().all()
    lifted = LogitEvidence(oracle).ask([LogitQuestion((2, 3), low, 50.0)])[0]
    assert float(lifted.exp().sum()) == pytest.approx(1)


def test_a_budget_ends_the_asking_before_it_is_overdrawn():
    evidence = LogitEvidence(FunctionLogitOracle(table, VOCAB), Ledger(budget=7))
    evidence.ask(QUESTIONS)
    with pytest.raises(BudgetSpent):
        evidence.ask([LogitQuestion((1, 1), (0, 1, 2)), LogitQuestion((1, 4), (0, 1, 2))])
    assert len(evidence.ledger) == 6


def test_broken_answers_are_refused():
    with pytest.raises(UnmaskError, match="3 tokens after 6 prompts"):
        LogitEvidence(Fixed(torch.zeros(6, 2))).ask(QUESTIONS)
    with pytest.raises(Refused, match="infinite"):
        LogitEvidence(Fixed(torch.full((6, 3), -math.inf))).ask(QUESTIONS)


def test_callers_mistakes_are_named():
    with pytest.raises(InputError, match="same number of tokens"):
        LogitEvidence(FunctionLogitOracle(table, VOCAB)).ask([QUESTIONS[0], LogitQuestion((1,), (2,))])
    with pytest.raises(InputError, match="vocab_size"):
        LogitEvidence(FunctionLogitOracle(table, 1))
    with pytest.raises(InputError, match="a token or more"):
        LogitEvidence(FunctionLogitOracle(table, VOCAB, top=0))


def test_a_closed_service_needs_no_vocabulary():
    LogitEvidence(Fixed(torch.zeros(0), vocab_size=0, view=LogitView(0, closed="nothing is shown")))
