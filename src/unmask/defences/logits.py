"""Defences of a service, on logits: those that change answers, rounding and noise."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor

from unmask.defences.oracles import NoisyOracle, OracleDefence, RoundedOracle, nobody
from unmask.errors import InputError

LogitFunction = Callable[[Int[Tensor, "b n"]], Float[Tensor, "b vocab"]]


def defend_logits(function: LogitFunction, defence: OracleDefence) -> LogitFunction:
    """The logits as a service hands them out behind a defence."""
    wrapper = defence(nobody())
    if not isinstance(wrapper, (RoundedOracle, NoisyOracle)):
        raise InputError(f"the defence '{defence}' does not apply to logits; 'round' and 'noise' do")
    return lambda tokens: wrapper.changed(function(tokens).double())
