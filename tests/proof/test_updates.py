"""Is an update that of these texts? The right ones are certain on each ground, and nearly right ones never are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from tests.sampling import in_turn, sample

from unmask.attacks.gradients.decoder.attack import DecoderAttack
from unmask.attacks.gradients.decoder.endings import TextEnding
from unmask.attacks.gradients.noisy.corrections import is_unstable
from unmask.defences import parse_defence
from unmask.evidence import GradientEvidence
from unmask.models import Model
from unmask.proof.updates import UpdateProof, is_coarse
from unmask.proof.verdicts import Decision, Ground, ProposedText, Verdict
from unmask.protocols import observe_fedavg, observe_gradients
from unmask.recovery import Aim, AmbiguityKind, Status

A, B, C = (5, 17, 99, 17, 250), (400, 3, 8), (44, 45, 46, 47, 48, 49)
TEXTS = (A, B, C)
MADE_UP = (300, 301, 302, 303)
Texts = Sequence[tuple[int, ...]]


def proposed(texts: Texts) -> list[ProposedText]:
    """Each different text once, with its count."""
    return [ProposedText(tuple(text), count) for text, count in Counter(map(tuple, texts)).items()]


def judge(evidence: GradientEvidence, model: Model, texts: Texts) -> Verdict:
    return UpdateProof(evidence, model).judge(proposed(texts))


def decided(verdict: Verdict, decision: Decision) -> set[tuple[int, ...]]:
    return {text.text.tokens for text in verdict.texts if text.decision is decision}


def certain(verdict: Verdict) -> set[tuple[int, ...]]:
    return decided(verdict, Decision.CERTAIN)


def counts(verdict: Verdict) -> dict[tuple[int, ...], int]:
    return {text.text.tokens: text.count for text in verdict.texts}


def scaled(evidence: GradientEvidence, factor: float) -> GradientEvidence:
    return evidence.with_tensors({name: factor * gradient for name, gradient in evidence.gradients.items()})


def with_equal_embeddings(model: Model, token: int, other: int) -> Model:
    """A copy of a model in which two tokens have one embedding."""
    copied = model.to()
    with torch.no_grad():
        rows = copied.parameter(copied.token_embedding)
        rows[other] = rows[token]
    return copied


@pytest.fixture(params=["tiny_gpt2", "tiny_llama"])
def decoder(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


# ---- the client, run again


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_client_proves_its_own_texts_whatever_side_it_pads(decoder, side):
    verdict = judge(observe_gradients(decoder, TEXTS, padding_side=side), decoder, TEXTS)
    assert verdict.ground is Ground.CLIENT
    assert certain(verdict) == set(TEXTS)
    assert verdict.is_whole
    assert verdict.agreement is not None
    assert all(text.misfit <= verdict.tolerance for text in verdict.texts)
    assert verdict.num_passes >= len(TEXTS)


def test_a_client_that_trained_one_step_is_run_again(decoder):
    verdict = judge(observe_fedavg(decoder, TEXTS, learning_rate=1e-2), decoder, TEXTS)
    assert verdict.ground is Ground.CLIENT
    assert verdict.is_whole


def test_no_text_is_no_verdict(tiny_gpt2):
    proof = UpdateProof(observe_gradients(tiny_gpt2, TEXTS), tiny_gpt2)
    for nothing in ([], [ProposedText(())]):
        verdict = proof.judge(nothing)
        assert (verdict.ground, verdict.texts, verdict.num_passes) == (Ground.NONE, (), 0)
        assert not verdict.is_whole


def test_one_factor_is_said(decoder):
    verdict = judge(scaled(observe_gradients(decoder, TEXTS), 0.3), decoder, TEXTS)
    assert verdict.ground is Ground.SCALED_CLIENT
    assert verdict.agreement is not None
    assert verdict.agreement.scale == pytest.approx(0.3, rel=1e-3)
    assert verdict.is_whole  # three texts were stated, and there are three


def test_a_wrong_token_is_never_certain(decoder):
    evidence = observe_gradients(decoder, TEXTS)
    for place in (0, 3):
        wrong = (*C[:place], 60, *C[place + 1 :])
        assert wrong not in certain(judge(evidence, decoder, [A, B, wrong])), place


def test_the_gradients_of_another_step_are_not_those_of_the_texts(tiny_gpt2):
    """Entries of each tensor in another order."""
    evidence = observe_gradients(tiny_gpt2, TEXTS)
    draw = torch.Generator().manual_seed(0)
    shuffled = evidence.with_tensors(
        {
            name: gradient.flatten()[torch.randperm(gradient.numel(), generator=draw)].view_as(gradient)
            for name, gradient in evidence.gradients.items()
        }
    )
    verdict = judge(shuffled, tiny_gpt2, TEXTS)
    assert verdict.ground is Ground.NONE
    assert not certain(verdict)
    assert verdict.problems


# ---- counts


def test_counts_are_replayed_too(decoder):
    evidence = observe_gradients(decoder, [A, A, B])
    verdict = judge(evidence, decoder, [A, A, B])
    assert verdict.ground is Ground.CLIENT
    assert verdict.is_whole
    assert counts(verdict) == {A: 2, B: 1}
    for wrong in ([A, B], [A, B, B]):  # the rows are right and the counts are not
        verdict = judge(evidence, decoder, wrong)
        assert verdict.ground is Ground.ARRIVALS
        assert certain(verdict) == {A, B}
        assert not verdict.is_whole
        assert counts(verdict) == {A: 1, B: 1}


def test_counts_of_several_clients_are_open(tiny_gpt2):
    evidence = observe_gradients(tiny_gpt2, [A, A, A, B])
    for number, count in ((1, 3), (2, 1), (None, 1)):
        verdict = judge(replace(evidence, num_clients=number), tiny_gpt2, [A, A, A, B])
        assert certain(verdict) == {A, B}
        assert counts(verdict) == {A: count, B: 1}
        assert verdict.is_whole is (number == 1)


def test_counts_of_a_mean_of_means_are_one_of_two(tiny_gpt2):
    """Three labels once and one label three times weigh alike in a mean of each text's own mean."""
    short, long = (400, 3), (5, 17, 99, 250)
    own = [observe_gradients(tiny_gpt2, [text]) for text in (short, short, long, long)]
    mean = {name: sum(part.gradients[name] for part in own) / len(own) for name in own[0].gradients}
    evidence = replace(own[0], gradients=mean, num_texts=4)
    proof = UpdateProof(evidence, tiny_gpt2)
    verdict = proof.judge([ProposedText(short, 3), ProposedText(long, 1)])  # the client's plain mean over tokens
    assert verdict.ground is Ground.CLIENT
    assert certain(verdict) == {short, long}
    assert counts(verdict) == {short: 1, long: 1}
    assert not verdict.is_whole
    assert {p.kind for text in verdict.texts for p in text.points} == {AmbiguityKind.COUNT}


def test_an_unknown_number_of_texts_leaves_counts_open(tiny_gpt2):
    verdict = judge(replace(observe_gradients(tiny_gpt2, TEXTS), num_texts=None), tiny_gpt2, TEXTS)
    assert certain(verdict) == set(TEXTS)
    assert not verdict.is_whole
    assert {p.kind for text in verdict.texts for p in text.points} == {AmbiguityKind.COUNT}


def test_texts_of_one_token_may_be_the_rest(tiny_gpt2):
    """'A A B B' may be 'A B' with two texts of one token, which have no label and leave no trace."""
    evidence = observe_gradients(tiny_gpt2, [A, A, B, B])
    verdict = judge(evidence, tiny_gpt2, [A, A, B, B])
    assert verdict.ground is Ground.CLIENT
    assert certain(verdict) == {A, B}
    assert counts(verdict) == {A: 1, B: 1}
    assert not verdict.is_whole


def test_more_texts_than_were_stated_are_never_certain(decoder):
    evidence = replace(observe_gradients(decoder, TEXTS), num_texts=2)
    verdict = judge(evidence, decoder, TEXTS)
    assert not certain(verdict)
    assert any("too many" in problem for problem in verdict.problems)


def test_fewer_texts_than_were_stated_are_not_the_whole(decoder):
    verdict = judge(replace(observe_gradients(decoder, TEXTS), num_texts=4), decoder, TEXTS)
    assert certain(verdict) == set(TEXTS)
    assert not verdict.is_whole


def test_counts_beyond_the_stated_number_are_said(tiny_gpt2):
    evidence = replace(observe_gradients(tiny_gpt2, [A, A, B]), num_texts=2)
    verdict = judge(evidence, tiny_gpt2, [A, A, B])
    assert not verdict.is_whole
    assert any("3 texts" in problem and "2 were stated" in problem for problem in verdict.problems)


# ---- rows of the texts


def test_a_client_that_cannot_be_run_again_leaves_the_rows(decoder):
    """A sum of losses with weights of their own."""
    parts = [observe_gradients(decoder, [text]) for text in TEXTS]
    weights = (1.0, 0.4, 2.5)
    total = {
        name: sum(weight * part.gradients[name] for weight, part in zip(weights, parts, strict=True))
        for name in parts[0].gradients
    }
    verdict = judge(replace(parts[0], gradients=total, num_texts=3, num_clients=3), decoder, TEXTS)
    assert verdict.ground is Ground.ARRIVALS
    assert certain(verdict) == set(TEXTS)
    assert verdict.is_whole
    assert counts(verdict) == {A: 1, B: 1, C: 1}


def test_a_wrong_last_token_is_not_proven_by_the_rows_before_it(decoder):
    wrong = (*C[:-1], 60)
    verdict = judge(observe_gradients(decoder, TEXTS), decoder, [A, B, wrong])
    assert verdict.ground is Ground.ARRIVALS
    assert certain(verdict) == {A, B}


def test_a_text_cut_by_a_token_has_too_few_rows(decoder):
    verdict = judge(observe_gradients(decoder, TEXTS), decoder, [A, B, C[:-1]])
    assert verdict.ground is not Ground.ARRIVALS
    assert C[:-1] not in certain(verdict)


def test_prefixes_beside_the_texts_keep_the_batch_open(tiny_gpt2):
    evidence = observe_gradients(tiny_gpt2, TEXTS)
    verdict = UpdateProof(evidence, tiny_gpt2).judge(proposed([A, B]), beside=[(0, C[:-1])])
    assert verdict.ground is Ground.ARRIVALS
    assert certain(verdict) == {A, B}
    assert not verdict.is_whole
    assert any("other texts" in problem for problem in verdict.problems)


# ---- spans while texts are missing


def test_with_a_text_missing_spans_of_later_blocks_prove_the_others(decoder):
    verdict = judge(observe_gradients(decoder, TEXTS), decoder, [A, B])
    assert verdict.ground is Ground.DEEP_SPANS
    assert certain(verdict) == {A, B}
    assert not verdict.is_whole
    assert verdict.problems
    assert verdict.rejected is not None
    assert verdict.rejected > verdict.tolerance


def test_of_texts_that_are_missing_and_made_up_the_made_up_one_is_refuted(decoder):
    verdict = judge(observe_gradients(decoder, TEXTS), decoder, [A, B, MADE_UP])
    assert verdict.ground is Ground.DEEP_SPANS
    assert certain(verdict) == {A, B}
    assert decided(verdict, Decision.REFUTED) == {MADE_UP}


def test_with_a_text_missing_a_wrong_last_token_is_not_certain(decoder):
    verdict = judge(observe_gradients(decoder, TEXTS), decoder, [A, (*B[:-1], 60)])
    assert certain(verdict) == {A}
    cut = judge(observe_gradients(decoder, TEXTS), decoder, [A, C[:-1]])
    assert certain(cut) == {A}


def test_texts_of_nothing_are_undecided(decoder):
    verdict = judge(observe_gradients(decoder, TEXTS), decoder, [(300, 301, 302), (303, 304)])
    assert verdict.ground is Ground.NONE
    assert decided(verdict, Decision.UNDECIDED) == {(300, 301, 302), (303, 304)}


# ---- equal tokens


def test_the_row_of_its_own_tells_which_of_equal_tokens_it_is(tiny_qwen2):
    """Equal embeddings, tied to the output layer: only the rows of their own gradients tell, and they do."""
    model = with_equal_embeddings(tiny_qwen2, 40, 41)
    true, shown = (5, 17, 41, 250), (5, 17, 40, 250)
    verdict = judge(observe_gradients(model, [true, B]), model, [shown, B])
    assert verdict.ground is Ground.CLIENT
    assert certain(verdict) == {true, B}
    assert verdict.is_whole


def test_which_of_equal_first_tokens_is_meant_is_tried(tiny_llama):
    model = with_equal_embeddings(tiny_llama, 17, 18)
    true, shown = (18, 99, 250), (17, 99, 250)  # a first token is no label: only its embedding's row tells
    whole = observe_gradients(model, [true, B])
    verdict = judge(whole, model, [shown, B])
    assert verdict.ground is Ground.CLIENT
    assert certain(verdict) == {true, B}
    hidden = whole.with_tensors({name: g for name, g in whole.gradients.items() if name != model.token_embedding})
    for text in (shown, true):
        verdict = judge(hidden, model, [text, B])
        assert certain(verdict) == {B}
        (point,) = (point for each in verdict.texts for point in each.points)
        assert (point.kind, point.position, point.tokens) == (AmbiguityKind.EQUAL_TOKENS, 0, (17, 18))


# ---- memory


@pytest.mark.parametrize("client", ["one step", "bf16"])
def test_a_client_that_memory_is_too_small_for_is_not_called_another_one(tiny_gpt2, monkeypatch, client):
    """It was not looked at, which the reason and the searches say."""
    evidence = observe_fedavg(tiny_gpt2, TEXTS[:2], learning_rate=1e-3)
    if client == "bf16":
        evidence = parse_defence("bf16")(observe_gradients(tiny_gpt2, TEXTS[:2]), torch.Generator().manual_seed(1))
    control = DecoderAttack()(evidence, tiny_gpt2)
    assert control.status is Status.RECOVERED
    monkeypatch.setenv("UNMASK_MEMORY_GB", "1e-6")
    found = DecoderAttack()(evidence, tiny_gpt2)
    assert found.status is Status.PARTIAL
    assert "running this client again takes" in found.reason
    assert "as stated" not in found.reason
    assert Aim.TEXTS in control.looked_for
    assert Aim.TEXTS not in found.looked_for


def test_a_client_that_states_too_many_steps_is_not_run(tiny_gpt2):
    evidence = replace(observe_fedavg(tiny_gpt2, TEXTS, local_steps=2, learning_rate=1e-3), num_steps=10**6)
    verdict = judge(evidence, tiny_gpt2, TEXTS)
    assert not certain(verdict)
    assert any("1,000,000 local steps" in problem for problem in verdict.problems)


# ---- classification


def classified(model: Model, texts: Texts = TEXTS, **options) -> GradientEvidence:
    return observe_gradients(model, texts, task="classification", **options)


@pytest.mark.parametrize(
    "options",
    [{"labels": [0, 1, 1]}, {"num_labels": 5, "labels": [4, 2, 0]}, {"pooling": "mean"}],
)
def test_rows_prove_classified_texts_whatever_the_labels(decoder, options):
    verdict = judge(classified(decoder, **options), decoder, TEXTS)
    assert verdict.ground is Ground.ARRIVALS
    assert certain(verdict) == set(TEXTS)
    assert verdict.is_whole


def test_a_classified_text_at_which_nothing_arrives_is_not_certain(decoder):
    verdict = judge(classified(decoder), decoder, [*TEXTS, A[:3]])
    assert A[:3] not in certain(verdict)
    open_number = replace(classified(decoder), num_texts=None)
    verdict = judge(open_number, decoder, [*TEXTS, A[:3]])
    assert decided(verdict, Decision.UNDECIDED) == {A[:3]}
    assert certain(verdict) == set(TEXTS)


def test_classified_texts_of_a_mean_that_may_end_inside_are_not_the_whole(decoder):
    """Where every position has gradient, a text inside a longer one is not seen: the number of texts must be right."""
    texts = [*TEXTS, C[:3]]
    verdict = judge(classified(decoder, texts, pooling="mean"), decoder, TEXTS)
    assert verdict.ground is Ground.ARRIVALS
    assert certain(verdict) == set(TEXTS)
    assert not verdict.is_whole


def test_with_a_classified_text_missing_the_last_block_tells_ends(decoder):
    evidence = classified(decoder)
    verdict = judge(evidence, decoder, [A, B])
    assert verdict.ground is Ground.DEEP_SPANS
    assert certain(verdict) == {A, B}
    assert not verdict.is_whole
    assert certain(judge(evidence, decoder, [A[:3], B])) == {B}
    # Whoever does not know that the head reads the last token claims nothing.
    assert not certain(judge(replace(evidence, pooling=None), decoder, [A, B]))


# ---- few digits and noise

FIRST, SECOND, THIRD = (5, 17, 99, 17, 250, 8, 30), (400, 3, 8, 21, 11, 12), (400, 3, 8, 9)
RIGHT = (FIRST, SECOND, THIRD)
WRONG = {
    "last token": ((*FIRST[:-1], 31), SECOND, THIRD),
    "one token short": (FIRST[:-1], SECOND, THIRD),
    "one token more": ((*FIRST, 30), SECOND, THIRD),
    "two swapped": ((17, 5, *FIRST[2:]), SECOND, THIRD),
    "a text missing": (FIRST, SECOND),
    "a text twice": (FIRST, SECOND, THIRD, THIRD),
    "a text too many": (*RIGHT, (5, 17)),
}
DEFENCES = {
    "bf16": Ground.ROUNDED_CLIENT,
    "fp8": Ground.ROUNDED_CLIENT,
    "int8": Ground.ROUNDED_CLIENT,
    "topk:share=0.5": Ground.ROUNDED_CLIENT,
    "random:share=0.5": Ground.ROUNDED_CLIENT,
    "noise:sigma=1e-5": Ground.NOISY_CLIENT,
    "noise:sigma=1e-3": Ground.NOISY_CLIENT,
}


@pytest.fixture(scope="module")
def blurred(tiny_llama: Model):
    """A proof for each defence, made once."""
    clean, made = observe_gradients(tiny_llama, RIGHT), {}

    def proof_of(defence: str) -> UpdateProof:
        if defence not in made:
            sent = parse_defence(defence)(clean, torch.Generator().manual_seed(1))
            made[defence] = UpdateProof(sent, tiny_llama)
        return made[defence]

    return proof_of


@pytest.mark.parametrize("defence", DEFENCES)
def test_the_right_texts_in_any_order_agree_up_to_what_was_lost(blurred, defence):
    verdict = blurred(defence).judge_blurred(proposed(RIGHT[::-1]))
    assert verdict.ground is DEFENCES[defence]
    assert certain(verdict) == set(RIGHT)
    assert verdict.is_whole


@sample("defence, wrong", product(DEFENCES, WRONG), in_turn(DEFENCES, WRONG))
def test_nearly_right_texts_are_never_certain_up_to_what_was_lost(blurred, defence, wrong):
    verdict = blurred(defence).judge_blurred(proposed(WRONG[wrong]))
    assert verdict.ground is Ground.NONE
    assert not certain(verdict)
    assert not verdict.is_whole


def test_an_exact_judgement_refuses_few_digits(blurred):
    for defence in ("bf16", "int8", "topk:share=0.5"):
        proof = blurred(defence)
        assert proof.is_coarse
        assert not certain(proof.judge(proposed(RIGHT)))


def test_an_update_that_lost_nothing_is_the_clients_own(tiny_llama):
    verdict = UpdateProof(observe_gradients(tiny_llama, RIGHT), tiny_llama).judge_blurred(proposed(RIGHT))
    assert verdict.ground is Ground.CLIENT
    assert verdict.is_whole


def test_the_rounding_of_weights_is_not_few_digits(tiny_gpt2):
    """Small steps leave a few levels of the weights' own rounding, which the replay has too; int8 does not."""
    small = observe_fedavg(tiny_gpt2, TEXTS, local_steps=2, learning_rate=1e-5)
    assert not is_coarse(small, tiny_gpt2)
    assert is_coarse(parse_defence("int8")(small, torch.Generator().manual_seed(0)), tiny_gpt2)


@pytest.mark.parametrize(("rate", "diverges"), [(1e-3, False), (30.0, True)])
def test_local_training_that_diverges_proves_nothing(tiny_llama, rate, diverges):
    texts = sorted(RIGHT)
    evidence = observe_fedavg(tiny_llama, RIGHT, local_steps=12, learning_rate=rate)
    proof = UpdateProof(evidence, tiny_llama)
    assert is_unstable(proof, [TextEnding((0, text), 1, 0.0) for text in texts]) is diverges
    verdict = proof.judge_blurred(proposed(texts))
    assert (verdict.ground is Ground.CLIENT) is not diverges
    assert certain(verdict) == (set() if diverges else set(RIGHT))
