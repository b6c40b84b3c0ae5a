"""What may be claimed of tokens: all of them, or those that stand out of noise and rounding; never their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unmask.attacks.claims import claim_nothing
from unmask.attacks.gradients.bag_of_words.candidates import BagOfWords, find_candidates
from unmask.attacks.gradients.bag_of_words.token_filter import Candidates
from unmask.attacks.run import Run
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.recovery import Aim, Certificate, RecoveredText, RecoveredTexts, Recovery, Status, searches_of
from unmask.wording import count_noun

# One half by the decoys of the span, 1e-9 for each row of the embedding, 0.01 by all rows of a tied one, and 0.01 by
# differences of weights after one step; and one of a hundred tokens after several steps of AdamW.
MOST_EXPECTED_FALSE, MOST_FALSE_SHARE = 0.53, 0.01
NO_ORDER = "no replay confirms an order of them"
_TOKENS = searches_of(Aim.TOKENS)  # every token of the vocabulary was tested; an order was not, or is not confirmed


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
    run: Run, bag: BagOfWords, guesses: tuple[RecoveredText, ...] = (), why: str = NO_ORDER
) -> Recovery[RecoveredTexts]:
    """What a bag of words claims: nothing, tokens that a test chose, or tokens. Guesses at texts claim nothing.

    `why`: why the order of the tokens is not known.
    """
    if bag.candidates is None:
        nothing = claim_nothing(run, bag.status, bag.reason, bag.used, _TOKENS)
        return replace(nothing, value=RecoveredTexts(guesses))
    if bag.expected_false is not None:
        return claim_noisy_tokens(run, bag, guesses, why)
    return claim_tokens(run, bag.candidates, bag.used, why, guesses)


def claim_noisy_tokens(
    run: Run, bag: BagOfWords, guesses: tuple[RecoveredText, ...] = (), why: str = NO_ORDER
) -> Recovery[RecoveredTexts]:
    """Tokens that a statistical test chose: a part of the batch, a stated number of false ones, no texts."""
    assert bag.candidates is not None  # only a bag with tokens has expected false ones
    assert bag.expected_false is not None
    certificate = Certificate(
        claim="on average, at most the stated number of the listed tokens is false",
        residual=bag.expected_false,
        tolerance=MOST_EXPECTED_FALSE + MOST_FALSE_SHARE * len(bag.candidates.tokens),
        details={"expected_false": bag.expected_false, **bag.details},
        unit="tokens",
    )
    tokens = bag.candidates.tokens
    reason = (
        f"{count_noun(len(tokens), 'token')} {'is' if len(tokens) == 1 else 'are'} clearly above rounding and noise "
        f"(expected false ones: {bag.expected_false:.2g}); there may be more tokens, and {why}"
    )
    cost = run.cost(candidates=bag.candidates.num_tested)
    return Recovery(RecoveredTexts(guesses, tokens), Status.PARTIAL, reason, certificate, cost, bag.used, _TOKENS)


def claim_tokens(
    run: Run,
    candidates: Candidates,
    used: Sequence[str],
    reason: str,
    guesses: tuple[RecoveredText, ...] = (),
) -> Recovery[RecoveredTexts]:
    """The tokens are known, their order is not; guesses at texts claim nothing.

    Nothing follows about texts: the order was never tried, or it was and nothing confirms that it could be found.
    """
    certificate = Certificate(
        claim="every token listed occurs: block 0's gradients hold its vector or need it, or its embedding moved",
        residual=candidates.gap.accepted,
        tolerance=candidates.gap.threshold,
        rejected=candidates.gap.rejected,
        details={"token_gap_decades": candidates.gap.decades},
    )
    cost = run.cost(candidates=candidates.num_tested)
    reason = (
        f"the bag of words ({count_noun(len(candidates.tokens), 'token')}) was recovered, the texts were not: {reason}"
    )
    value = RecoveredTexts(guesses, candidates.tokens, candidates.classes)
    return Recovery(value, Status.PARTIAL, reason, certificate, cost, tuple(used), _TOKENS)
