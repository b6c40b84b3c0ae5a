"""What is handed over of tokens: those that were found, with the numbers of the test that found them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from unmask.attacks.claims import claim_nothing
from unmask.attacks.gradients.bag_of_words.candidates import BagOfWords, find_candidates
from unmask.attacks.gradients.bag_of_words.token_filter import Candidates
from unmask.attacks.run import Run
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.proof.conclusions import NO_ORDER, Searched, TokenProof, conclude_tokens
from unmask.recovery import Aim, RecoveredText, RecoveredTexts, Recovery, searches_of


def read_tokens(
    run: Run, evidence: GradientEvidence, model: Model, num_probes: int, min_gap_decades: float
) -> tuple[Candidates, tuple[str, ...]] | Recovery[RecoveredTexts]:
    """The tokens of a batch and the tensors that tell them; or, where no more can be read, what is claimed."""
    run.progress("reading the bag of words", 0, 1)
    bag = find_candidates(evidence, model, num_probes, min_gap_decades, run.generator)
    if bag.candidates is None or bag.expected_false is not None:
        return claim_bag(run, bag)
    return bag.candidates, bag.used


def claim_bag(
    run: Run, bag: BagOfWords, guesses: tuple[RecoveredText, ...] = (), why: str = NO_ORDER, *, stopped: bool = False
) -> Recovery[RecoveredTexts]:
    """Nothing, tokens that a test chose, or tokens. Guesses at texts claim nothing.

    `why`: why the order of the tokens is not known; `stopped`: whether the search for one did not come to its end.
    """
    if bag.candidates is None:
        nothing = claim_nothing(run, bag.status, bag.reason, bag.used, searches_of(Aim.TOKENS))
        return replace(nothing, value=RecoveredTexts(guesses))
    return claim_tokens(run, bag.candidates, bag.used, why, guesses, bag.expected_false, bag.details, stopped=stopped)


def claim_tokens(
    run: Run,
    candidates: Candidates,
    used: Sequence[str],
    why: str,
    guesses: tuple[RecoveredText, ...] = (),
    expected_false: float | None = None,
    details: Mapping[str, float] | None = None,
    *,
    stopped: bool = False,
) -> Recovery[RecoveredTexts]:
    """The tokens are known, their order is not."""
    cost = run.cost(candidates=candidates.num_tested)
    found = token_proof(candidates, expected_false, details)
    return conclude_tokens(Searched(cost, tuple(used), found, guesses=guesses, stopped=stopped), why)


def token_proof(
    candidates: Candidates, expected_false: float | None = None, details: Mapping[str, float] | None = None
) -> TokenProof:
    """Candidates as tokens that occur."""
    gap = candidates.gap
    return TokenProof(
        candidates.tokens,
        candidates.classes if expected_false is None else (),
        gap.accepted,
        gap.threshold,
        gap.rejected,
        {"token_gap_decades": gap.decades} if details is None else details,
        expected_false,
    )
