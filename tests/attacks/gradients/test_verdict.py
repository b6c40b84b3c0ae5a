"""What may be claimed: each status from the findings that lead to it, made by hand."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from unmask.attacks.gradients.endings import Ending
from unmask.attacks.gradients.prefix_search import Forest
from unmask.attacks.gradients.sites import Site
from unmask.attacks.gradients.token_filter import Candidates
from unmask.attacks.gradients.verdict import Findings, bag_of_words, verdict
from unmask.attacks.no_result import no_result
from unmask.evidence import GradientEvidence, Task
from unmask.linalg.gap import Gap
from unmask.linalg.subspace import Span
from unmask.models import Model
from unmask.recovery import Aim, RecoveredTexts, Recovery, Status

CLEAR = Gap(1e-6, 1e-1)
A, B = (5, 6, 7), (8, 9)  # what the spans show; the texts go on by one label


def span(rank: int, width: int = 16) -> Span:
    return Span(torch.eye(width, dtype=torch.float64)[:, :rank], torch.ones(width), width, 5.0, 1e-8)


def forest(*branches: tuple[int, ...], gap: Gap = CLEAR, **options: Any) -> Forest:
    nodes = {(0, branch[:length]): 1e-7 * length for branch in branches for length in range(1, len(branch) + 1)}
    return Forest(nodes, [(0, branch) for branch in branches], gap, 40, **options)


def findings(model: Model, **changes: Any) -> Findings:
    """A search that found two texts, explains all five directions, and reads their last tokens well."""
    endings = [Ending((0, (*A, 11)), 1, 1e-5), Ending((0, (*B, 12)), 1, 1e-5)]
    site = Site("check site", span(5), lambda model, states, mixed: mixed, ("some.weight",))
    candidates = Candidates({-1: torch.tensor([5, 6, 7, 8, 9])}, CLEAR, 500)
    whole = Findings(model, candidates, site, forest(A, B), endings, ("some.weight",), 1.0)
    return replace(whole, **changes)


def evidence(task: Task = Task.NEXT_TOKEN, num_texts: int | None = 2) -> GradientEvidence:
    return GradientEvidence({"some.weight": torch.ones(1)}, "0" * 32, task, num_texts)


def judge(model: Model, seen: GradientEvidence | None = None, **changes: Any) -> Recovery[RecoveredTexts]:
    return verdict(seen or evidence(), findings(model, **changes), time.perf_counter())


def test_everything_explained_is_recovered(tiny_gpt2):
    recovery = judge(tiny_gpt2)
    assert recovery.status is Status.RECOVERED
    assert sorted(recovery.value.expanded()) == [(*A, 11), (*B, 12)]
    assert all(text.certain for text in recovery.value.texts)
    assert recovery.value.token_set == {5, 6, 7, 8, 9}
    assert recovery.certificate.holds
    assert recovery.certificate.residual == pytest.approx(3e-7)  # the worst prefix, three tokens long
    assert "check site" in recovery.certificate.claim
    assert recovery.cost.candidates == 540
    assert recovery.cost.forward_passes == 2
    assert recovery.used == ("some.weight",)


def test_an_overflow_makes_nothing_certain(tiny_gpt2):
    recovery = judge(tiny_gpt2, forest=forest(A, B, overflow=True))
    assert recovery.status is Status.PARTIAL
    assert not recovery.value.certain
    assert not recovery.certificate.holds
    assert "rank 5" in recovery.reason


def test_a_narrow_gap_makes_nothing_certain(tiny_gpt2):
    recovery = judge(tiny_gpt2, forest=forest(A, B, gap=Gap(1e-3, 5e-3)))
    assert recovery.status is Status.PARTIAL
    assert not recovery.value.certain
    assert not recovery.certificate.holds
    assert "0.7 decades" in recovery.reason


@pytest.mark.parametrize("rank", [4, 6])
def test_directions_that_are_not_explained_are_not_the_whole(tiny_gpt2, rank):
    site = replace(findings(tiny_gpt2).site, span=span(rank))
    recovery = judge(tiny_gpt2, site=site)
    assert recovery.status is Status.PARTIAL
    assert f"5 of {rank} directions" in recovery.reason


def test_an_ending_that_goes_on_is_not_certain(tiny_gpt2):
    """A label behind a leaf ends the text only if its own row is not in the span: here one is."""
    recovery = judge(tiny_gpt2, doubtful=frozenset({(0, (*A, 11))}))
    assert recovery.status is Status.PARTIAL
    assert [text.tokens for text in recovery.value.certain] == [(*B, 12)]


def test_a_direction_that_is_left_over_is_not_the_whole(tiny_gpt2):
    recovery = judge(tiny_gpt2, site=replace(findings(tiny_gpt2).site, span=span(8)))
    assert recovery.status is Status.PARTIAL
    assert "explain 5 of 8 directions" in recovery.reason


def test_a_last_token_that_explains_too_little_is_not_certain(tiny_gpt2):
    endings = [Ending((0, (*A, 11)), 1, 0.4), Ending((0, (*B, 12)), 1, 1e-5)]
    recovery = judge(tiny_gpt2, endings=endings)
    assert recovery.status is Status.PARTIAL
    assert [text.tokens for text in recovery.value.certain] == [(*B, 12)]
    assert recovery.value.texts[0].certain  # the certain ones first
    assert recovery.certificate.holds


def test_without_endings_next_token_texts_lack_their_last_token(tiny_gpt2):
    recovery = judge(tiny_gpt2, endings=None)
    assert recovery.status is Status.PARTIAL
    assert {text.tokens for text in recovery.value.texts} == {A, B}
    assert not recovery.value.certain
    assert not recovery.certificate.holds
    assert "last tokens are missing" in recovery.reason


def test_without_endings_classified_branches_are_certain_but_not_the_whole(tiny_gpt2):
    recovery = judge(tiny_gpt2, evidence(Task.CLASSIFICATION), endings=None)
    assert recovery.status is Status.PARTIAL
    assert {text.tokens for text in recovery.value.certain} == {A, B}
    assert "ends inside longer texts" in recovery.reason


def test_without_endings_a_single_token_of_a_rotary_model_is_not_certain(tiny_llama, tiny_gpt2):
    for model, is_certain in ((tiny_llama, False), (tiny_gpt2, True)):
        site = replace(findings(model).site, span=span(4))
        recovery = judge(model, evidence(Task.CLASSIFICATION), endings=None, forest=forest(A, (9,)), site=site)
        certain = {text.tokens for text in recovery.value.certain}
        assert certain == ({A, (9,)} if is_certain else {A})


@pytest.mark.parametrize("num_texts", [1, 3])
def test_another_number_of_texts_is_not_the_whole(tiny_gpt2, num_texts):
    recovery = judge(tiny_gpt2, evidence(num_texts=num_texts))
    assert recovery.status is Status.PARTIAL
    assert f"2 of {num_texts} texts" in recovery.reason


def test_a_count_is_a_number_of_texts(tiny_gpt2):
    endings = [Ending((0, (*A, 11)), 3, 1e-5), Ending((0, (*B, 12)), 1, 1e-5)]
    recovery = judge(tiny_gpt2, evidence(num_texts=4), endings=endings)
    assert recovery.status is Status.RECOVERED
    assert len(recovery.value.expanded()) == 4


def test_repetitions_of_a_rotary_model_have_no_direction_of_their_own(tiny_llama, tiny_gpt2):
    repeated = (5, 5, 5, 7)  # one row for 5, 5 5 and 5 5 5, one for the whole
    endings = [Ending((0, (*repeated, 11)), 1, 1e-5), Ending((0, (*B, 12)), 1, 1e-5)]
    for model, rank in ((tiny_llama, 4), (tiny_gpt2, 6)):
        site = replace(findings(model).site, span=span(rank))
        recovery = judge(model, forest=forest(repeated, B), endings=endings, site=site)
        assert recovery.status is Status.RECOVERED, recovery.reason
        assert recovery.certificate.details["explained_rank"] == rank


def test_a_bag_of_words_is_partial_and_says_why(tiny_gpt2):
    candidates = Candidates({-1: torch.tensor([3, 4])}, CLEAR, 500)
    recovery = bag_of_words(candidates, ["some.weight"], "nobody knows the order", time.perf_counter())
    assert recovery.status is Status.PARTIAL
    assert recovery.value == RecoveredTexts((), frozenset({3, 4}))
    assert recovery.reason.endswith("nobody knows the order")
    assert "2 tokens" in recovery.reason
    assert recovery.certificate.holds
    assert recovery.used == ("some.weight",)
    assert recovery.looked_for == {Aim.TOKENS}  # the order was never tried


def test_a_search_that_ran_has_looked_for_texts(tiny_gpt2):
    candidates = Candidates({-1: torch.tensor([3, 4])}, CLEAR, 500)
    recovery = bag_of_words(candidates, [], "no prefix passed", time.perf_counter(), searched=True)
    assert recovery.looked_for == {Aim.TOKENS, Aim.TEXTS}


@pytest.mark.parametrize("status", [s for s in Status if not s.conclusive], ids=lambda s: s.name)
def test_no_result_claims_nothing(status):
    recovery = no_result(status, "because", [], time.perf_counter())
    assert recovery.status is status
    assert recovery.reason == "because"
    assert recovery.value == RecoveredTexts()
    assert not recovery.certificate.holds
    assert recovery.cost.seconds > 0
    assert bool(recovery.looked_for) == (status is Status.NOTHING_FOUND)
