"""The one loop of all continuous solvers: it owns the budget, the check for finite numbers and the report.

A solver is a frozen object of settings with two methods: `init` makes a state from a start, `step` makes the next state
from a state. A state says by itself whether it is done, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from jaxtyping import Float
from torch import Tensor

from unmask.progress import tell_detail


class Ending(Enum):
    """Why a solver stopped. The value of a member is the sentence that a user reads."""

    CONVERGED = "The residual is at the tolerance that was asked for."
    STALLED = "No step makes the residual smaller, and it is not at the tolerance: a local minimum, or rounding."
    BUDGET = "The number of steps ran out."
    NOT_FINITE = "The iteration left the finite numbers; the last finite state is kept."


class State(Protocol):
    """Where a solver is. `ending` is None while it should go on."""

    @property
    def x(self) -> Tensor:
        """The point."""

    @property
    def value(self) -> float:
        """What the solver makes small."""

    @property
    def ending(self) -> Ending | None:
        """Why this state is the last one, if it is."""


@dataclass(frozen=True)
class ResidualState:
    """A point and its residual."""

    x: Float[Tensor, " m"]
    residual: Float[Tensor, " e"]

    @property
    def value(self) -> float:
        """‖r‖."""
        return float(self.residual.norm())


S = TypeVar("S", bound=State)
P = TypeVar("P", contravariant=True)


class Solver(Protocol[P, S]):
    """A method: settings, a first state, a next state."""

    def init(self, problem: P, start: Tensor) -> S:
        """The state at the start."""

    def step(self, problem: P, state: S) -> S:
        """The state after one step."""


@dataclass(frozen=True)
class IterationResult(Generic[S]):
    """The last state, why it is the last, and how many steps led to it; `values` begins with the start's."""

    state: S
    ending: Ending
    num_steps: int
    values: tuple[float, ...]


def iterate(
    solver: Solver[P, S],
    problem: P,
    start: Tensor,
    *,
    max_steps: int,
    watch: Callable[[int, S], None] | None = None,
) -> IterationResult[S]:
    """Step until the state says that it is done, the budget ends, or numbers stop being finite."""
    state = solver.init(problem, start)
    values = [state.value]
    for num_steps in range(max_steps):
        tell_detail("solving equations")
        if watch is not None:
            watch(num_steps, state)
        if state.ending is not None:
            return IterationResult(state, state.ending, num_steps, tuple(values))
        following = solver.step(problem, state)
        if not (following.x.isfinite().all() and following.value < float("inf")):
            return IterationResult(state, Ending.NOT_FINITE, num_steps, tuple(values))
        state = following
        values.append(state.value)
    return IterationResult(state, state.ending or Ending.BUDGET, max_steps, tuple(values))


class System(Protocol):
    """r: Rᵐ → Rᵉ. Points and residuals are flat rows."""

    def residuals(self, xs: Float[Tensor, "k m"]) -> Float[Tensor, "k e"]:
        """r at k points, in one batch."""

    def jacobian(self, x: Float[Tensor, " m"]) -> Float[Tensor, "e m"]:
        """∂r/∂x at one point, dense."""
