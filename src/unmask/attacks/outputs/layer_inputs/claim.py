"""Pre-images of an attention layer's output as a recovery: status, reason, certificate.

A refusal is nature's: a value matrix that loses part of the input, an output that no input gives. Which number of
pre-images may be called what is in `attack.py`.
"""

from __future__ import annotations

from unmask.attacks.outputs.layer_inputs.known_norms import norm_error
from unmask.attacks.outputs.layer_inputs.preimages import Preimages
from unmask.attacks.outputs.layer_inputs.problem import AttentionProblem, Posed
from unmask.attacks.run import Run
from unmask.recovery import Aim, Certificate, Recovery, Status, searches_of

USED = ("W", "V", "output")
FEWEST_STARTS = 24  # a search from fewer says nothing: with 24, other roots have at most 3/24 of the starts
COARSE = 1e-5  # of the largest entry: coarser than float32
_PREMISE = "V is square, so noise in the output would not show: it must be exactly what the layer computed"
_WIDE_PREMISE = "norms are not known, so a wrong W or rows in another order would not show"
_OFF_RANGE_ROUNDINGS = 1e3  # an exact output leaves the row space of V by rounding of its own number type


def refuse(posed: Posed, residual_tolerance: float, run: Run) -> Recovery[Preimages] | None:
    """Why nothing can be recovered, where that shows before any search."""
    width = len(posed.W)
    if posed.value_rank < width:
        return _nothing(
            Status.NOT_IDENTIFIABLE,
            f"the value matrix has rank {posed.value_rank} of {width}, so a continuum of inputs gives this output",
            run,
        )
    error = posed.output_error / float(posed.B.norm().clamp(min=1e-300))
    if posed.off_range > max(residual_tolerance, _OFF_RANGE_ROUNDINGS * posed.rounding) + error:
        return _nothing(
            Status.NOTHING_FOUND,
            f"{posed.off_range:.1e} of the output's norm lies outside the row space of the value matrix: no input "
            "gives it exactly; it holds noise, or comes from another layer",
            run,
        )
    if float(posed.Y.norm()) == 0:
        return _nothing(Status.NOTHING_FOUND, "the output is zero, which has no isolated pre-image", run)
    return None


def claim_preimages(
    posed: Posed,
    problem: AttentionProblem,
    found: Preimages,
    residual_tolerance: float,
    least_power: float,
    run: Run,
) -> Recovery[Preimages]:
    """The ending that the pre-images deserve."""
    if len(found) == 0 and found.budget_ended:
        return _nothing(Status.BUDGET_EXHAUSTED, "the causal search ended before any branch did", run, found)
    if len(found) == 0:
        exists = "one exists, as sym(W) is positive definite" if found.definite else "there may be none"
        known = f" whose rows have the known norms ({found.num_refused} have others)" if found.normed else ""
        reason = f"no pre-image{known} found from the output itself and {found.num_starts} starts; {exists}"
        return _nothing(Status.NOTHING_FOUND, reason, run, found)
    status, reason = _judge(posed, problem, found, least_power)
    worst = max(preimage.residual for preimage in found.preimages)
    certificate = Certificate(
        claim=f"each of the {len(found)} inputs listed gives this output under the weights given; {reason}",
        residual=worst,
        tolerance=residual_tolerance,
        details={
            "num_preimages": float(len(found)),
            "num_certified": float(sum(preimage.certified for preimage in found.preimages)),
            "worst_radius": max(preimage.radius for preimage in found.preimages),
            "unique_within": min(preimage.unique_within for preimage in found.preimages),
            "degree": float(found.degree),
            "least_eigenvalue": problem.least_eigenvalue,
            "search_power": found.num_converged / max(1, found.num_starts),
            "proved_unique": float(found.proved_complete and len(found) == 1),
            "value_condition": posed.value_condition,
        },
    )
    used = (*USED, "row_norms") if found.normed else USED
    searches = searches_of(Aim.INPUTS, stopped=found.budget_ended, unconfirmed=status is not Status.RECOVERED)
    return Recovery(found, status, reason, certificate, run.cost(), used, searches)


def _judge(posed: Posed, problem: AttentionProblem, found: Preimages, least_power: float) -> tuple[Status, str]:
    """RECOVERED for one certified pre-image beside which there is none, proved or well searched.

    It is the input only if the output is what the layer computed: where V is square, every output has a pre-image.
    """
    looked = f"{found.num_converged} of {found.num_starts} starts converged"
    if len(found) > 1:
        return Status.PARTIAL, (
            f"{len(found)} distinct exact pre-images found ({looked}): the output does not tell which was the input"
        )
    if posed.rounding > COARSE:
        return Status.PARTIAL, (
            f"one pre-image found, but the output was rounded to {posed.rounding:.0e} of its largest entry: inputs "
            "near this one give the same output"
        )
    if not found.preimages[0].certified:
        return Status.PARTIAL, "one pre-image found, too ill-conditioned to prove that it is exact and isolated"
    if found.unseen:
        return Status.PARTIAL, (
            "one pre-image found, but a row of the output is an earlier token up to rounding: its own token may be any "
            "that attends to itself too little to be seen"
        )
    is_wide = posed.V.shape[1] > posed.V.shape[0]
    premise = "" if found.normed else f"; {_WIDE_PREMISE if is_wide else _PREMISE}"
    if found.proved_complete:
        return Status.RECOVERED, f"the only pre-image (proved by enumeration){premise}"
    if posed.norms is not None:
        if found.symmetric:
            return Status.PARTIAL, (
                "one pre-image with the known norms found, but its output lacks rank or has rows that are alike, so a "
                "symmetry of the layer may give another one with the same norms"
            )
        if found.budget_ended:
            return Status.PARTIAL, "one pre-image with the known norms found; the budget ended before the search did"
        if found.num_starts < FEWEST_STARTS:
            return Status.PARTIAL, (
                f"one pre-image with the known norms found; {found.num_starts} starts are too few to look for another"
            )
        error = norm_error(found.X, posed.norms)
        return Status.RECOVERED, (
            f"locally unique (Newton–Kantorovich), and its {len(posed.Y)} rows have the known norms to {error:.0e}, "
            f"equations that another input meets by coincidence alone; {found.num_starts} starts led to no other; that "
            "there is none is not proved"
        )
    local = "locally unique (Newton–Kantorovich), no other pre-image found"
    if not found.definite:
        return Status.PARTIAL, f"{local}; {looked}; sym(W) is indefinite, so others may well exist"
    if found.budget_ended:
        return Status.PARTIAL, f"{local}; the budget ended before the search did"
    if found.degree != 1:
        return Status.PARTIAL, f"{local}; its orientation is not 1, so at least two others exist"
    if not (problem.is_exact and posed.has_full_rank):
        return Status.PARTIAL, f"{local}; the output lacks rank, so inputs outside its row space may exist"
    if found.num_starts < FEWEST_STARTS or found.num_converged < least_power * found.num_starts:
        return Status.PARTIAL, f"{local}; {looked}, too few to speak of uniqueness"
    return Status.RECOVERED, (
        f"locally unique (Newton–Kantorovich), of degree 1 (sym(W) ≻ 0), and the only one to which starts led "
        f"({looked}); uniqueness is searched, not proved{premise}"
    )


def _nothing(status: Status, reason: str, run: Run, found: Preimages | None = None) -> Recovery[Preimages]:
    cost = run.cost()
    return Recovery(Preimages() if found is None else found, status, reason, Certificate.none(reason), cost, USED)
