"""Defences of a service, on logits: those that change answers, rounding and noise."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor

from unmask.defences.oracles import ORACLE_DEFENCES, ChangedAnswers, OracleDefence
from unmask.errors import InputError
from unmask.evidence.oracles import FunctionOracle

LogitFunction = Callable[[Int[Tensor, "b n"]], Float[Tensor, "b vocab"]]


def defend_logits(function: LogitFunction, defence: OracleDefence) -> LogitFunction:
    """The logits as a service hands them out behind a defence."""
    if not ORACLE_DEFENCES[defence.name].changes_logits:
        known = " and ".join(f"'{name}'" for name, kind in ORACLE_DEFENCES.items() if kind.changes_logits)
        raise InputError(f"the defence '{defence}' does not apply to logits; {known} do")
    defended = defence(FunctionOracle(function, "logits"))
    assert isinstance(defended, ChangedAnswers)  # as the table says
    return lambda tokens: defended.change_answers(function(tokens).double())
