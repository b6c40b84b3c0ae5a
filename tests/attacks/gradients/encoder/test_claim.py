"""What may be claimed of an encoder's texts: each status from the findings that lead to it, made by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unmask.attacks.gradients.bag_of_words.token_filter import Candidates
from unmask.attacks.gradients.decoder.confirm import Proof
from unmask.attacks.gradients.encoder.claim import EncoderResult, claim_encoder_texts
from unmask.attacks.gradients.encoder.confirm import EncoderConfirmation
from unmask.attacks.gradients.encoder.masked_tokens import Original
from unmask.attacks.run import Run
from unmask.evidence import GradientEvidence, Task
from unmask.linalg.gap import Gap
from unmask.proof.agreement import Agreement
from unmask.recovery import RecoveredTexts, Recovery, Status

# Places of this search are tokens: what `tokens_of` gives back is what it was given.
A, B, C = (1, 5, 6, 7, 2), (1, 8, 9, 2), (1, 11, 12, 13, 2)
NEAR_A = (1, 5, 6, 9, 2)
MADE_TO_BE_REFUSED = float("inf")


@dataclass
class Search:
    """A search that found two texts, explains all nine directions and refused their runner-up."""

    model: Any
    found: dict[tuple[int, ...], float] = field(default_factory=lambda: {A: 1e-6, B: 1e-7})
    refused: dict[tuple[int, ...], tuple[float, float]] = field(
        default_factory=lambda: {NEAR_A: (MADE_TO_BE_REFUSED, 0.1)}
    )
    rank: int = 9
    shows_all_rows: bool = True
    is_done: bool = True
    is_out_of_budget: bool = False
    random_distance: float = 0.5
    drifts: bool = False

    @property
    def problem(self) -> Any:
        sites = [SimpleNamespace(name="output projection of block 0"), SimpleNamespace(name="check site")]
        places = SimpleNamespace(tokens_of=tuple)
        return SimpleNamespace(model=self.model, rank=self.rank, sites=sites, places=places, drifts=self.drifts)

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.found))

    @property
    def is_complete(self) -> bool:
        return self.num_rows == self.rank and self.shows_all_rows

    @property
    def nearest_refused(self) -> float:
        return min((distance for _, distance in self.refused.values()), default=self.random_distance)


def evidence(num_texts: int | None = 2) -> GradientEvidence:
    return GradientEvidence({"some.weight": torch.ones(1)}, "0" * 32, Task.CLASSIFICATION, num_texts)


AGREES = EncoderConfirmation(Proof.ARRIVALS, Agreement(3e-7, 3e-7, 1.0, 5e-5, "some.weight", 7))
# No replay explains the update; the texts' rows lie in the spans of later blocks.
DEEP = EncoderConfirmation(Proof.DEEP_SPANS, Agreement(0.3, 0.4, 0.8, 5e-5, "some.weight", 7))
NOTHING = EncoderConfirmation(Proof.NONE)


def judge(
    model: Any, num_texts: int | None = 2, confirmation: EncoderConfirmation = AGREES, **changes: Any
) -> Recovery[RecoveredTexts]:
    candidates = Candidates({0: torch.tensor([1, 2, 5, 6, 7, 8, 9])}, Gap(1e-6, 1e-1), 500)
    findings = EncoderResult(Search(model, **changes), candidates, 1.0, ("some.weight",), confirmation)
    return claim_encoder_texts(Run(), evidence(num_texts), findings)


def test_everything_explained_is_recovered(tiny_bert):
    recovery = judge(tiny_bert)
    assert recovery.status is Status.RECOVERED
    assert recovery.value.expand() == [B, A]  # the nearest first
    assert all(text.certain for text in recovery.value.texts)
    assert recovery.value.token_set == {1, 2, 5, 6, 7, 8, 9}
    assert recovery.certificate.holds
    assert recovery.certificate.residual == 3e-7  # what the replay leaves
    assert recovery.certificate.tolerance == 5e-5
    assert recovery.certificate.rejected is None
    assert recovery.certificate.claim == Proof.ARRIVALS.value
    assert recovery.certificate.details["rank"] == recovery.certificate.details["explained_rank"] == 9
    assert recovery.certificate.details["gap_decades"] == pytest.approx(5)
    assert recovery.cost.candidates == 500 + 1 + 2
    assert recovery.used == ("some.weight",)
    assert recovery.reason == f"all 2 texts: {Proof.ARRIVALS.value}"


def test_words_that_masks_hid_are_in_the_bag_of_a_whole_batch(tiny_bert):
    """The bag holds what the model saw; of a whole batch it used to lack the labels, and to hold masks."""
    originals = {A: Original((*A[:-2], 50, A[-1]), 1, 0.0, 1), B: Original(B, 1, 0.0, 1)}
    candidates = Candidates({0: torch.tensor([1, 2, 5, 6, 7, 8, 9])}, Gap(1e-6, 1e-1), 500)
    result = EncoderResult(Search(tiny_bert), candidates, 1.0, ("some.weight",), AGREES, originals)
    recovery = claim_encoder_texts(Run(), evidence(), result)
    assert recovery.status is Status.RECOVERED
    assert recovery.value.token_set == {token for text in recovery.value.texts for token in text.tokens}
    assert 50 in recovery.value.token_set


def test_without_a_replay_spans_of_later_blocks_make_texts_certain_but_not_the_whole(tiny_bert):
    recovery = judge(tiny_bert, confirmation=DEEP)
    assert recovery.status is Status.PARTIAL
    assert {text.tokens for text in recovery.value.certain} == {A, B}
    assert recovery.certificate.claim == Proof.DEEP_SPANS.value
    assert recovery.certificate.residual == 1e-6  # the worst of all texts
    assert recovery.certificate.rejected == 0.1
    assert recovery.certificate.residual < recovery.certificate.tolerance < recovery.certificate.rejected
    assert "no replay of them explains the whole update" in recovery.reason
    assert "another client sent it than was run again (in float32; the rest as stated" in recovery.reason


def test_without_any_proof_nothing_is_certain(tiny_bert):
    recovery = judge(tiny_bert, confirmation=NOTHING)
    assert recovery.status is Status.PARTIAL
    assert {text.tokens for text in recovery.value.texts} == {A, B}
    assert not recovery.value.certain
    assert not recovery.certificate.holds


def test_a_text_at_which_nothing_arrives_is_not_certain(tiny_bert):
    recovery = judge(tiny_bert, confirmation=replace(AGREES, refuted=frozenset({A})))
    assert recovery.status is Status.PARTIAL
    assert [text.tokens for text in recovery.value.certain] == [B]


def test_texts_are_shown_as_the_tokenizer_shows_them(tiny_bert):
    assert {text.text for text in judge(tiny_bert).value.texts} == {"1 5 6 7 2", "1 8 9 2"}


def test_a_narrow_gap_makes_nothing_certain(tiny_bert):
    recovery = judge(tiny_bert, confirmation=DEEP, refused={NEAR_A: (MADE_TO_BE_REFUSED, 5e-6)})
    assert recovery.status is Status.PARTIAL
    assert {text.tokens for text in recovery.value.texts} == {A, B}
    assert not recovery.value.certain
    assert not recovery.certificate.holds
    assert "0.7 decades" in recovery.reason


def test_the_least_gap_is_the_callers(tiny_bert):
    candidates = Candidates({0: torch.tensor([1, 2])}, Gap(1e-6, 1e-1), 500)
    for decades, certain in ((4.9, True), (5.1, False)):
        findings = EncoderResult(Search(tiny_bert), candidates, decades, (), DEEP)
        recovery = claim_encoder_texts(Run(), evidence(), findings)
        assert bool(recovery.value.certain) == certain


def test_without_a_refused_text_random_ones_set_the_gap(tiny_bert):
    recovery = judge(tiny_bert, confirmation=DEEP, refused={})
    assert {text.tokens for text in recovery.value.certain} == {A, B}
    assert recovery.certificate.rejected == 0.5


# ---- parts


def test_directions_that_are_not_explained_are_not_the_whole(tiny_bert):
    recovery = judge(tiny_bert, rank=12, confirmation=DEEP)
    assert recovery.status is Status.PARTIAL
    assert "9 of the gradient's 12 directions" in recovery.reason
    assert "a text is missing" in recovery.reason
    assert {text.tokens for text in recovery.value.certain} == {A, B}  # what was found stays certain
    assert recovery.certificate.holds


def test_an_unknown_number_of_texts_is_not_the_whole(tiny_bert):
    recovery = judge(tiny_bert, num_texts=None)
    assert recovery.status is Status.PARTIAL
    assert {text.tokens for text in recovery.value.certain} == {A, B}
    assert "one copy and ten copies look identical" in recovery.reason


@pytest.mark.parametrize("num_texts", [1, 3])
def test_another_number_of_texts_is_not_the_whole(tiny_bert, num_texts):
    recovery = judge(tiny_bert, num_texts=num_texts)
    assert recovery.status is Status.PARTIAL
    assert f"found 2 of {num_texts} text" in recovery.reason
    assert bool(recovery.value.certain) is (num_texts == 3)  # more texts than there are: none is certain


def test_as_many_certain_texts_as_there_are_is_the_whole(tiny_bert):
    """A rank at the end of what its shape allows may hide rows, but not a third text of two."""
    assert judge(tiny_bert, shows_all_rows=False).status is Status.RECOVERED


def test_a_budget_that_ended_the_search(tiny_bert):
    recovery = judge(tiny_bert, confirmation=DEEP, found={A: 1e-6}, is_done=False, is_out_of_budget=True)
    assert recovery.status is Status.BUDGET_EXHAUSTED
    assert [text.tokens for text in recovery.value.certain] == [A]
    assert "5 of the gradient's 9 directions" in recovery.reason


def test_a_budget_that_was_just_enough(tiny_bert):
    assert judge(tiny_bert, is_out_of_budget=True).status is Status.RECOVERED


# ---- nothing found


def test_no_text_is_a_bag_of_words(tiny_bert):
    recovery = judge(tiny_bert, found={}, is_done=False)
    assert recovery.status is Status.PARTIAL
    assert not recovery.value.certain
    assert recovery.value.token_set == {1, 2, 5, 6, 7, 8, 9}
    assert recovery.certificate.holds  # of the tokens: the claim says so
    assert "token" in recovery.certificate.claim
    assert "bag of words" in recovery.reason


def test_no_text_within_the_budget_is_a_bag_of_words_that_says_so(tiny_bert):
    recovery = judge(tiny_bert, found={}, is_done=False, is_out_of_budget=True)
    assert not recovery.value.certain
    assert "budget" in recovery.reason


# ---- how often a text occurs


def test_a_number_of_copies_is_never_certain_without_evidence(tiny_bert):
    """One text explains every direction of two texts' gradient. The other may repeat it, or have left no trace: a text
    that the model classifies without loss has no gradient. So two copies are no certain claim."""
    recovery = judge(tiny_bert, found={A: 1e-6}, rank=5)
    assert recovery.status is not Status.RECOVERED
    assert [text.tokens for text in recovery.value.certain] == [A]
    assert sum(text.count for text in recovery.value.certain) == 1


def test_a_single_text_is_one_text(tiny_bert):
    recovery = judge(tiny_bert, num_texts=1, found={A: 1e-6}, rank=5)
    assert recovery.status is Status.RECOVERED
    assert recovery.value.expand() == [A]


# ---- guesses


def test_the_best_refused_texts_are_shown_as_guesses(tiny_bert):
    refused = {C: (0.3, 0.2), (1, 21, 22, 2): (0.2, 0.3), NEAR_A: (MADE_TO_BE_REFUSED, 0.1)}
    recovery = judge(tiny_bert, num_texts=3, confirmation=DEEP, rank=13, refused=refused, is_done=False)
    assert [text.tokens for text in recovery.value.texts] == [B, A, (1, 21, 22, 2)]  # one is missing: the cheapest
    assert [text.certain for text in recovery.value.texts] == [True, True, False]
    assert recovery.status is Status.PARTIAL
    assert "2 of 3" in recovery.reason  # a guess does not count as found


def test_guesses_alike_are_shown_once(tiny_bert):
    """More than 0.7 of the tokens in common: three of four are, three of five are not."""
    refused = {(1, 8, 10, 2): (0.1, 0.2), C: (0.2, 0.2), (1, 11, 12, 14, 2): (0.3, 0.2), (1, 30, 31, 32, 2): (0.4, 0.2)}
    recovery = judge(tiny_bert, num_texts=6, confirmation=DEEP, rank=30, refused=refused, is_done=False)
    guesses = [text.tokens for text in recovery.value.texts if not text.certain]
    assert guesses == [C, (1, 30, 31, 32, 2)]


def test_nothing_is_guessed_beside_a_complete_batch(tiny_bert):
    recovery = judge(tiny_bert, num_texts=4, refused={C: (0.3, 0.2)})
    assert [text.tokens for text in recovery.value.texts] == [B, A]


def test_texts_made_to_be_refused_are_no_guesses(tiny_bert):
    recovery = judge(tiny_bert, num_texts=4, confirmation=DEEP, rank=20, is_done=False)
    assert [text.tokens for text in recovery.value.texts] == [B, A]


def test_guesses_of_a_search_that_found_nothing(tiny_bert):
    recovery = judge(tiny_bert, found={}, refused={C: (0.3, 0.2)}, is_done=False)
    assert [text.tokens for text in recovery.value.texts] == [C]
    assert not recovery.value.certain
