"""What is said of verdicts: each status, certificate and search from verdicts that are made by hand."""

from __future__ import annotations

import pytest

from unmask.models import Model
from unmask.proof.agreement import Agreement
from unmask.proof.conclusions import (
    MOST_EXPECTED_FALSE,
    Searched,
    TokenProof,
    conclude_nothing,
    conclude_texts,
    conclude_tokens,
)
from unmask.proof.verdicts import Decision, Ground, ProposedText, TextVerdict, Verdict
from unmask.recovery import Aim, Ambiguity, AmbiguityKind, Cost, RecoveredText, RecoveredTexts, Recovery, Status

A, B = (5, 6, 7, 11), (8, 9, 12)
TOKENS = TokenProof(frozenset({5, 6, 7, 8, 9}), residual=1e-6, tolerance=1e-3, rejected=1e-1)
WHOLE = [ground for ground in Ground if ground.is_whole]
AGREES = Agreement(3e-7, 3e-7, 1.0, 5e-5, "some.weight", 7)
OPEN = Ambiguity(AmbiguityKind.OPEN_END, "the text may continue after its last token: why")
COUNT = Ambiguity(AmbiguityKind.COUNT, "it may occur more often: why")


def said(
    tokens: tuple[int, ...],
    decision: Decision = Decision.CERTAIN,
    misfit: float = 1e-7,
    points: tuple[Ambiguity, ...] = (),
    count: int = 1,
    why: str = "",
) -> TextVerdict:
    return TextVerdict(ProposedText(tokens, count), decision, misfit, points, count, why)


def verdict(*texts: TextVerdict, ground: Ground = Ground.CLIENT, **options: object) -> Verdict:
    return Verdict(ground, texts or (said(A), said(B, misfit=2e-7)), 5e-5, agreement=AGREES, **options)


def searched(**options: object) -> Searched:
    return Searched(Cost(1.0, 540, 2), ("some.weight",), **({"tokens": TOKENS} | options))


def conclude(model: Model, *texts: TextVerdict, found: Searched | None = None, **options) -> Recovery[RecoveredTexts]:
    return conclude_texts(verdict(*texts, **options), model, found or searched())


def certain(recovery: Recovery[RecoveredTexts]) -> set[tuple[int, ...]]:
    return {text.tokens for text in recovery.value.certain}


# ---- texts


@pytest.mark.parametrize("ground", WHOLE)
def test_certain_texts_without_problems_are_the_whole(tiny_gpt2, ground):
    recovery = conclude(tiny_gpt2, ground=ground)
    assert recovery.status is Status.RECOVERED
    assert sorted(recovery.value.expand()) == [A, B]
    assert certain(recovery) == {A, B}
    assert recovery.value.token_set == {*A, *B}  # also last tokens, which no span shows
    assert recovery.certificate.holds
    assert recovery.certificate.claim == ground.value
    assert recovery.certificate.residual == 2e-7  # the worst of what is certain
    assert recovery.certificate.tolerance == 5e-5
    assert recovery.certificate.details["replayed_tensors"] == 7
    assert recovery.looked_for == {Aim.TOKENS, Aim.TEXTS}
    assert recovery.cost == Cost(1.0, 540, 2)
    assert recovery.used == ("some.weight",)


def test_tokens_of_no_text_are_left_out_of_a_whole_batch(tiny_gpt2):
    """Padding leaves a trace as well."""
    found = searched(tokens=TokenProof(frozenset({5, 99}), ((20, 21),)))
    recovery = conclude(tiny_gpt2, found=found)
    assert recovery.value.token_set == {*A, *B}
    assert not recovery.value.token_classes
    part = conclude(tiny_gpt2, found=found, problems=("a text is missing",))
    assert part.value.token_set == {99, *A, *B}
    assert part.value.token_classes == ((20, 21),)


@pytest.mark.parametrize("decision", [Decision.UNDECIDED, Decision.REFUTED, Decision.ONE_OF_THESE])
@pytest.mark.parametrize("ground", list(Ground))
def test_what_is_not_certain_never_becomes_certain(tiny_gpt2, decision, ground):
    points = (OPEN,) if decision is Decision.ONE_OF_THESE else ()
    other = said(B, decision, 0.0, points, why="why")  # small misfits do not make it so
    recovery = conclude(tiny_gpt2, said(A), other, ground=ground)
    assert recovery.status is Status.PARTIAL
    assert certain(recovery) == {A}
    alone = conclude(tiny_gpt2, other, ground=ground)
    assert alone.status is Status.PARTIAL
    assert not alone.value.certain
    assert not alone.certificate.holds


def test_refuted_texts_are_left_out_and_undecided_ones_are_shown(tiny_gpt2):
    recovery = conclude(tiny_gpt2, said(A, Decision.REFUTED, 0.5), said(B, Decision.UNDECIDED, 0.1, why="no labels"))
    assert [text.tokens for text in recovery.value.texts] == [B]
    assert "no labels" in recovery.reason
    assert "left out" in recovery.reason


def test_the_certain_ones_come_first(tiny_gpt2):
    recovery = conclude(tiny_gpt2, said(A, Decision.UNDECIDED, 0.0, why="why"), said(B, misfit=1e-5))
    assert [text.tokens for text in recovery.value.texts] == [B, A]


def test_problems_of_the_batch_make_it_a_part(tiny_gpt2):
    recovery = conclude(tiny_gpt2, problems=("found 2 of 3 texts",))
    assert recovery.status is Status.PARTIAL
    assert "found 2 of 3 texts" in recovery.reason
    assert certain(recovery) == {A, B}
    assert recovery.certificate.holds


def test_classes_are_shown_with_the_text(tiny_gpt2):
    recovery = conclude(tiny_gpt2, said(A, Decision.ONE_OF_THESE, points=(OPEN,)), said(B, points=(COUNT,)))
    shown = {text.tokens: text for text in recovery.value.texts}
    assert shown[A].covers((*A, 60))
    assert not shown[B].covers((*B, 60))
    assert shown[B].certain
    assert OPEN.reason in recovery.reason


def test_counts_are_handed_on(tiny_gpt2):
    recovery = conclude(tiny_gpt2, said(A, count=3), said(B))
    assert len(recovery.value.expand()) == 4
    assert "all 4 texts" in recovery.reason


def test_no_text_is_nothing_certain(tiny_gpt2):
    recovery = conclude_texts(Verdict(Ground.NONE, ()), tiny_gpt2, searched())
    assert recovery.status is Status.PARTIAL
    assert not recovery.value.texts
    assert not recovery.certificate.holds


# ---- what was looked for


def test_texts_were_looked_for_only_if_nothing_is_left_open(tiny_gpt2):
    assert Aim.TEXTS in conclude(tiny_gpt2).looked_for
    undecided = said(B, Decision.UNDECIDED, why="why")
    for recovery in (
        conclude(tiny_gpt2, said(A), undecided),
        conclude(tiny_gpt2, ground=Ground.DEEP_SPANS, problems=("a text is missing",)),
        conclude(tiny_gpt2, found=searched(stopped=True)),
        conclude(tiny_gpt2, found=searched(is_cut=True)),
    ):
        assert Aim.TEXTS not in recovery.looked_for


def test_a_budget_that_ended_the_search_is_said(tiny_gpt2):
    cut = conclude(tiny_gpt2, found=searched(is_cut=True), problems=("a text is missing",))
    assert cut.status is Status.BUDGET_EXHAUSTED
    assert certain(cut) == {A, B}
    assert not cut.looked_for
    assert conclude(tiny_gpt2, found=searched(is_cut=True)).status is Status.RECOVERED  # it was just enough


# ---- tokens and nothing


def test_tokens_claim_no_order():
    guess = RecoveredText(A, "", False, 0.3)
    recovery = conclude_tokens(searched(guesses=(guess,)), "nobody knows the order")
    assert recovery.status is Status.PARTIAL
    assert recovery.value.token_set == TOKENS.tokens
    assert recovery.value.texts == (guess,)
    assert not recovery.value.certain
    assert recovery.certificate.holds
    assert recovery.reason.endswith("nobody knows the order")
    assert recovery.looked_for == {Aim.TOKENS}


def test_tokens_that_a_test_chose_may_be_false():
    tokens = TokenProof(frozenset({5, 6}), expected_false=0.1)
    recovery = conclude_tokens(searched(tokens=tokens))
    assert recovery.certificate.holds
    assert recovery.certificate.residual == 0.1
    assert MOST_EXPECTED_FALSE <= recovery.certificate.tolerance <= MOST_EXPECTED_FALSE + 0.1
    assert recovery.certificate.unit == "tokens"
    many = conclude_tokens(searched(tokens=TokenProof(frozenset({5, 6}), expected_false=2.0)))
    assert not many.certificate.holds


def test_nothing_is_nothing():
    recovery = conclude_nothing(Cost(), Status.MISSING_EVIDENCE, "no tensors")
    assert (recovery.status, recovery.reason, recovery.value) == (
        Status.MISSING_EVIDENCE,
        "no tensors",
        RecoveredTexts(),
    )
    assert not recovery.certificate.holds
    assert not recovery.looked_for
