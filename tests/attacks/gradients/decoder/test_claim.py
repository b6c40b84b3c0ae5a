"""What may be claimed: each status from the findings that lead to it, made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from unmask.attacks.gradients.bag_of_words.token_filter import Candidates
from unmask.attacks.gradients.decoder.claim import SearchResult, claim_texts
from unmask.attacks.gradients.decoder.confirm import Confirmation, Proof
from unmask.attacks.gradients.decoder.endings import TextEnding
from unmask.attacks.gradients.decoder.prefix_search import Forest
from unmask.attacks.run import Run
from unmask.evidence import GradientEvidence, Task
from unmask.linalg.gap import Gap
from unmask.models import Model
from unmask.proof.agreement import Agreement
from unmask.recovery import AmbiguityKind, RecoveredTexts, Recovery, Status

CLEAR = Gap(1e-6, 1e-1)
A, B = (5, 6, 7), (8, 9)  # what the spans show; the texts go on by one label


def forest(*branches: tuple[int, ...], gap: Gap = CLEAR, **options: Any) -> Forest:
    nodes = {(0, branch[:length]): 1e-7 * length for branch in branches for length in range(1, len(branch) + 1)}
    return Forest(nodes, [(0, branch) for branch in branches], gap, 40, **options)


AGREES = Agreement(3e-7, 3e-7, 1.0, 5e-5, "some.weight", 7)
DISAGREES = Agreement(0.3, 0.4, 0.8, 5e-5, "some.weight", 7)
ENDINGS = [TextEnding((0, (*A, 11)), 1, 1e-5), TextEnding((0, (*B, 12)), 1, 1e-5)]


def confirmed(proof: Proof = Proof.CLIENT, endings: list[TextEnding] = ENDINGS, **options: Any) -> Confirmation:
    """What a replay said; it agrees where the proof says so."""
    agrees = proof in (Proof.CLIENT, Proof.SCALED_CLIENT, Proof.ARRIVALS)
    return Confirmation(proof, list(endings), AGREES if agrees else DISAGREES, **options)


def findings(model: Model, **changes: Any) -> SearchResult:
    """A search that found two texts, explains all five directions, and whose replay agrees."""
    candidates = Candidates({-1: torch.tensor([5, 6, 7, 8, 9])}, CLEAR, 500)
    whole = SearchResult(
        model, candidates, "check site", 5, forest(A, B), confirmed(), ("some.weight",), 1.0, labelled=True
    )
    return replace(whole, **changes)


def evidence(task: Task = Task.NEXT_TOKEN, num_texts: int | None = 2, **known: Any) -> GradientEvidence:
    stated = {"all_tokens_predicted": True, "num_clients": 1} | known
    return GradientEvidence({"some.weight": torch.ones(1)}, "0" * 32, task, num_texts, **stated)


def judge(model: Model, seen: GradientEvidence | None = None, **changes: Any) -> Recovery[RecoveredTexts]:
    return claim_texts(Run(), seen or evidence(), findings(model, **changes))


def kinds(recovery: Recovery[RecoveredTexts]) -> set[AmbiguityKind]:
    return {point.kind for text in recovery.value.texts for point in text.ambiguities}


def test_everything_explained_is_recovered(tiny_gpt2):
    for proof in (Proof.CLIENT, Proof.SCALED_CLIENT, Proof.ARRIVALS):
        recovery = judge(tiny_gpt2, confirmation=confirmed(proof))
        assert recovery.status is Status.RECOVERED
        assert sorted(recovery.value.expand()) == [(*A, 11), (*B, 12)]
        assert all(text.certain and not text.ambiguities for text in recovery.value.texts)
        assert recovery.value.token_set == {5, 6, 7, 8, 9, 11, 12}  # last tokens, which no span shows, are labels
        assert recovery.certificate.holds
        assert recovery.certificate.residual == 3e-7  # what the replay leaves
        assert recovery.certificate.tolerance == 5e-5
        assert recovery.certificate.rejected is None
        assert recovery.certificate.claim == proof.value
        assert recovery.certificate.details["span_distance"] == pytest.approx(3e-7)  # three tokens long
        assert recovery.certificate.details["replayed_tensors"] == 7
        assert recovery.cost.candidates == 540
        assert recovery.cost.forward_passes == 2
        assert recovery.used == ("some.weight",)


def test_without_a_replay_nothing_is_certain(tiny_gpt2):
    recovery = judge(tiny_gpt2, confirmation=confirmed(Proof.NONE))
    assert recovery.status is Status.PARTIAL
    assert not recovery.value.certain
    assert not recovery.certificate.holds
    assert recovery.certificate.claim == Proof.NONE.value


def test_texts_in_later_spans_are_certain_but_not_the_whole(tiny_gpt2):
    refuted = frozenset({ENDINGS[0].node})
    recovery = judge(tiny_gpt2, confirmation=confirmed(Proof.DEEP_SPANS, refuted=refuted))
    assert recovery.status is Status.PARTIAL
    assert [text.tokens for text in recovery.value.certain] == [(*B, 12)]
    assert recovery.certificate.holds
    assert recovery.certificate.residual == pytest.approx(2e-7)  # of the certain text alone
    assert recovery.certificate.rejected == 1e-1


def test_labels_that_may_be_masked_leave_the_end_open(tiny_gpt2):
    for stated in (None, False):
        recovery = judge(tiny_gpt2, evidence(all_tokens_predicted=stated))
        assert recovery.status is Status.PARTIAL
        assert not recovery.value.certain
        assert kinds(recovery) == {AmbiguityKind.OPEN_END}
        assert "all_tokens_predicted=True" in recovery.reason
    masked = judge(tiny_gpt2, confirmation=confirmed(Proof.ARRIVALS), has_masked_labels=True)
    assert not masked.value.certain
    assert kinds(masked) == {AmbiguityKind.OPEN_END}


def test_a_next_token_that_the_model_is_sure_of_leaves_the_end_open(tiny_gpt2):
    open_ends = frozenset({ENDINGS[0].node})
    recovery = judge(tiny_gpt2, confirmation=confirmed(Proof.SCALED_CLIENT, open_ends=open_ends))
    assert recovery.status is Status.PARTIAL
    assert [text.tokens for text in recovery.value.certain] == [(*B, 12)]
    assert "sure of the next token" in recovery.reason


def test_counts_are_claimed_only_of_one_clients_plain_mean(tiny_gpt2):
    twice = [replace(ENDINGS[0], count=3), ENDINGS[1]]
    for num_clients, count in ((1, 3), (2, 1), (None, 1)):
        seen = evidence(num_texts=4, num_clients=num_clients)
        recovery = judge(tiny_gpt2, seen, confirmation=confirmed(endings=twice))
        assert [text.count for text in recovery.value.texts if text.tokens == (*A, 11)] == [count]
        assert (recovery.status is Status.RECOVERED) is (num_clients == 1)
        assert {text.tokens for text in recovery.value.certain} == {(*A, 11), (*B, 12)}


def test_an_overflow_makes_nothing_certain(tiny_gpt2):
    recovery = judge(tiny_gpt2, forest=forest(A, B, overflow=True), confirmation=confirmed(Proof.DEEP_SPANS))
    assert recovery.status is Status.PARTIAL
    assert not recovery.value.certain
    assert not recovery.certificate.holds
    assert "rank 5" in recovery.reason


def test_a_narrow_gap_makes_nothing_certain(tiny_gpt2):
    narrow = forest(A, B, gap=Gap(1e-3, 5e-3))
    recovery = judge(tiny_gpt2, forest=narrow, confirmation=confirmed(Proof.DEEP_SPANS))
    assert recovery.status is Status.PARTIAL
    assert not recovery.value.certain
    assert not recovery.certificate.holds
    assert "0.7 decades" in recovery.reason


@pytest.mark.parametrize("rank", [4, 6])
def test_directions_that_are_not_explained_are_not_the_whole(tiny_gpt2, rank):
    recovery = judge(tiny_gpt2, rank=rank, confirmation=confirmed(Proof.DEEP_SPANS))
    assert recovery.status is Status.PARTIAL
    assert f"explain 5 of the gradient's {rank} directions" in recovery.reason


def test_rows_that_are_as_many_as_the_rank_are_no_proof(tiny_gpt2):
    recovery = judge(tiny_gpt2, confirmation=confirmed(Proof.DEEP_SPANS))
    assert recovery.status is Status.PARTIAL
    assert "no replay of them explains the whole update" in recovery.reason
    assert "another client sent it than was run again (in float32; the rest as stated" in recovery.reason


def test_an_ending_that_goes_on_is_not_certain(tiny_gpt2):
    """A label behind a leaf ends the text only if its own row is not in the span: here one is."""
    doubtful = frozenset({(0, (*A, 11))})
    recovery = judge(tiny_gpt2, doubtful=doubtful, confirmation=confirmed(Proof.ARRIVALS))
    assert recovery.status is Status.PARTIAL
    assert [text.tokens for text in recovery.value.certain] == [(*B, 12)]


def test_a_last_token_that_explains_too_little_is_not_certain(tiny_gpt2):
    endings = [TextEnding((0, (*A, 11)), 1, 0.4), TextEnding((0, (*B, 12)), 1, 1e-5)]
    recovery = judge(tiny_gpt2, confirmation=confirmed(Proof.ARRIVALS, endings))
    assert recovery.status is Status.PARTIAL
    assert [text.tokens for text in recovery.value.certain] == [(*B, 12)]
    assert recovery.value.texts[0].certain  # the certain ones first
    assert recovery.certificate.holds


AT_LEAVES = [TextEnding((0, A), 1, 0.0), TextEnding((0, B), 1, 0.0)]


def test_without_endings_next_token_texts_lack_their_last_token(tiny_gpt2):
    recovery = judge(tiny_gpt2, has_ends=False, confirmation=confirmed(Proof.DEEP_SPANS, AT_LEAVES))
    assert recovery.status is Status.PARTIAL
    assert {text.tokens for text in recovery.value.texts} == {A, B}
    assert not recovery.value.certain
    assert not recovery.certificate.holds
    assert "last tokens are missing" in recovery.reason


def test_without_endings_classified_branches_are_certain_but_not_the_whole(tiny_gpt2):
    seen = evidence(Task.CLASSIFICATION, 3, head=torch.ones(2, tiny_gpt2.width))
    recovery = judge(tiny_gpt2, seen, labelled=False, has_ends=False, confirmation=confirmed(Proof.ARRIVALS, AT_LEAVES))
    assert recovery.status is Status.PARTIAL
    assert {text.tokens for text in recovery.value.certain} == {A, B}
    assert "ends inside longer texts" in recovery.reason


def test_how_often_a_single_token_is_repeated_is_open_in_a_rotary_model(tiny_llama, tiny_gpt2):
    for model, is_certain in ((tiny_llama, False), (tiny_gpt2, True)):
        endings = [AT_LEAVES[0], TextEnding((0, (9,)), 1, 0.0, has_open_run=not is_certain)]
        recovery = judge(
            model,
            evidence(Task.CLASSIFICATION, head=torch.ones(2, model.width)),
            labelled=False,
            forest=forest(A, (9,)),
            confirmation=confirmed(Proof.ARRIVALS, endings),
        )
        certain = {text.tokens for text in recovery.value.certain}
        assert certain == ({A, (9,)} if is_certain else {A})
        assert (AmbiguityKind.LEADING_RUN in kinds(recovery)) is not is_certain


@pytest.mark.parametrize("num_texts", [1, 3])
def test_another_number_of_texts_is_not_the_whole(tiny_gpt2, num_texts):
    recovery = judge(tiny_gpt2, evidence(num_texts=num_texts))
    assert recovery.status is Status.PARTIAL
    expected = "found 2 of 3 texts" if num_texts == 3 else "the batch holds 1 text, so these are too many"
    assert expected in recovery.reason
    assert bool(recovery.value.certain) is (num_texts == 3)


def test_an_unknown_number_of_texts_is_not_the_whole(tiny_gpt2):
    recovery = judge(tiny_gpt2, evidence(num_texts=None))
    assert recovery.status is Status.PARTIAL
    assert {text.tokens for text in recovery.value.certain} == {(*A, 11), (*B, 12)}
    assert kinds(recovery) == {AmbiguityKind.COUNT}


def test_a_count_is_a_number_of_texts(tiny_gpt2):
    endings = [TextEnding((0, (*A, 11)), 3, 1e-5), TextEnding((0, (*B, 12)), 1, 1e-5)]
    recovery = judge(tiny_gpt2, evidence(num_texts=4), confirmation=confirmed(endings=endings))
    assert recovery.status is Status.RECOVERED
    assert len(recovery.value.expand()) == 4


def test_repetitions_of_a_rotary_model_have_no_direction_of_their_own(tiny_llama, tiny_gpt2):
    repeated = (5, 5, 5, 7)  # one row for 5, 5 5 and 5 5 5, one for the whole
    endings = [TextEnding((0, (*repeated, 11)), 1, 1e-5), TextEnding((0, (*B, 12)), 1, 1e-5)]
    for model, rank in ((tiny_llama, 4), (tiny_gpt2, 6)):
        recovery = judge(model, forest=forest(repeated, B), confirmation=confirmed(endings=endings), rank=rank)
        assert recovery.status is Status.RECOVERED, recovery.reason
        assert recovery.certificate.details["explained_rank"] == rank


def test_too_many_steps_for_a_replay_are_named(tiny_gpt2):
    seen = evidence(update="delta", num_steps=10**6)
    recovery = judge(tiny_gpt2, seen, confirmation=Confirmation(Proof.NONE, ENDINGS))
    assert not recovery.value.certain
    assert "1,000,000 local steps, and a replay runs 1,000 at most" in recovery.reason


def test_what_is_as_near_as_what_is_accepted_is_no_gap(tiny_gpt2):
    """'A gap of only -0.1 decades' had been the reason."""
    recovery = judge(
        tiny_gpt2, forest=forest(A, B, gap=Gap(1e-3, 8e-4)), confirmation=Confirmation(Proof.NONE, ENDINGS)
    )
    assert "are as small for what is refused as for what is accepted" in recovery.reason


def test_rows_of_texts_that_are_not_listed_leave_the_batch_open(tiny_gpt2):
    """Arrivals explain the update with rows of a third text, which no label makes a text of."""
    third = forest(A, B, (20, 21, 22))
    found = judge(tiny_gpt2, forest=third, rank=8, confirmation=confirmed(Proof.ARRIVALS))
    assert found.status is Status.PARTIAL
    assert "3 prefixes of other texts" in found.reason
    assert judge(tiny_gpt2, confirmation=confirmed(Proof.ARRIVALS)).status is Status.RECOVERED


def test_counts_beyond_the_stated_number_of_texts_are_open(tiny_gpt2):
    """The replay needs A twice, and two texts are stated: one of the two is wrong, and it is said."""
    twice = [replace(ENDINGS[0], count=2), ENDINGS[1]]
    found = judge(tiny_gpt2, confirmation=confirmed(endings=twice))
    assert found.status is Status.PARTIAL
    assert "for 3 texts, but 2 were stated" in found.reason
    both = [replace(ending, count=2) for ending in ENDINGS]  # a mean does not tell this from once each
    assert judge(tiny_gpt2, confirmation=confirmed(endings=both)).status is Status.RECOVERED
