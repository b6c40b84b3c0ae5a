"""How long cases will take, and in how much memory: a rough guess before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unmask.audit.cases.case import Case
from unmask.audit.check import outlines_of
from unmask.audit.running.worker import control_case
from unmask.models.outline import Outline

# Seconds of a case on one core, as (whatever it holds, for each text), and how many copies of the weights it keeps.
# Measured on SmolLM2-135M, and on MiniLM for encoders (`benchmarks/results`); a case with protection is searched longer
# and runs its control as well. `benchmarks/run.py scale estimates` puts findings beside them.
_SECONDS: Mapping[str, tuple[float, float]] = {
    "gradients": (3.0, 0.8),
    "gradients, encoder": (3.0, 6.0),
    "gradients, protected": (10.0, 8.5),
    "gradients, encoder, protected": (10.0, 10.0),
    "outputs": (30.0, 1.0),
    "caches": (30.0, 2.5),
    "vectors": (30.0, 16.0),
    "queries": (10.0, 0.0),
    "inputs": (20.0, 0.0),
}
_MEASURED = {True: 134.5e6, False: 22.7e6}  # numbers of the decoder and of the encoder that these were measured on
_COPIES: Mapping[str, float] = {"gradients": 5.0, "queries": 2.0}  # of the weights; others keep three
_BYTES, _USUAL_GB = 4, 0.7  # of a number; of Python and torch


@dataclass(frozen=True)
class Estimate:
    """What a case may take on one core: within a factor of five or so, as searches end when they end."""

    minutes: float
    gigabytes: float

    def __str__(self) -> str:
        minutes = "under 1 min" if self.minutes < 1 else f"about {self.minutes:.0f} min"
        return f"{minutes}, {self.gigabytes:.1f} GB"


def estimate(case: Case, model: Outline | str | None) -> Estimate | None:
    """Minutes and memory of a case, roughly; None where its model is not known yet, or its channel not measured."""
    if case["model"] and not isinstance(model, Outline):
        return None
    channel, num_parameters, factor = case["channel"], 0, 1.0
    kinds = [channel]
    if isinstance(model, Outline):
        num_parameters = model.num_parameters
        factor = num_parameters / _MEASURED[model.causal]
        kinds += [] if model.causal or channel != "gradients" else ["encoder"]
    control = control_case(case)
    kinds += ["protected"] if control is not None and channel == "gradients" else []
    if (measured := _SECONDS.get(", ".join(kinds))) is None:
        return None
    fixed, each = measured
    seconds = factor * (fixed + each * case.spec.get("batch_size", 1)) * case.spec.get("effort", 1)
    if control is not None and (alone := estimate(control, model)) is not None:
        seconds += 60 * alone.minutes
    seconds = min(seconds, case.time_limit or seconds)
    held = _COPIES.get(channel, 3.0) * _BYTES * num_parameters / 1e9
    return Estimate(seconds / 60, _USUAL_GB + held)


def estimate_all(cases: Sequence[Case]) -> list[Estimate | None]:
    """Of each case."""
    outlines = outlines_of(cases)
    return [estimate(case, outlines.get(case["model"])) for case in cases]
