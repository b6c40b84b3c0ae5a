"""Is an encoder's update that of these texts? By what arrives, by the client with labels that fit, or by spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import transformers
from tests.attacks.gradients.encoder_batches import BATCH, END, START, classified, classified_pairs, pair_kinds
from tests.tiny_models import bert_config, random_model, word_tokenizer

from unmask.defences import parse_defence
from unmask.evidence import GradientEvidence
from unmask.models import Model, adapt
from unmask.proof.encoder_updates import EncoderProof, given
from unmask.proof.verdicts import Decision, EncoderText, Ground, Verdict
from unmask.protocols import observe_fedavg, observe_gradients
from unmask.protocols.batch import make_batch
from unmask.protocols.masking import mask_tokens
from unmask.recovery import AmbiguityKind

# Words of the batch in another order.
MADE_UP = (START, 400, 99, 250, END)
Texts = Sequence[tuple[int, ...]]


def proposed(texts: Texts) -> list[EncoderText]:
    return [EncoderText(tuple(text)) for text in texts]


def judge(evidence: GradientEvidence, model: Model, texts: Texts, **options: bool) -> Verdict:
    return EncoderProof(evidence, model).judge(proposed(texts), **options)


def decided(verdict: Verdict, decision: Decision) -> set[tuple[int, ...]]:
    return {text.text.tokens for text in verdict.texts if text.decision is decision}


def certain(verdict: Verdict) -> set[tuple[int, ...]]:
    return decided(verdict, Decision.CERTAIN)


def test_no_text_is_no_verdict(tiny_bert):
    verdict = judge(classified(tiny_bert), tiny_bert, [])
    assert (verdict.ground, verdict.texts) == (Ground.NONE, ())
    assert not verdict.is_whole


# ---- what arrives


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_the_right_texts_explain_the_update(tiny_bert, pooling):
    evidence = classified(tiny_bert, pooling=pooling)
    for known in (pooling, None):
        verdict = judge(replace(evidence, pooling=known), tiny_bert, BATCH)
        assert verdict.ground is Ground.ARRIVALS
        assert verdict.agreement is not None
        assert verdict.agreement.holds
        assert certain(verdict) == set(BATCH)
        assert verdict.is_whole
        assert verdict.num_passes > 0


def test_a_text_that_was_classified_by_its_last_token(tiny_bert):
    verdict = judge(classified(tiny_bert, pooling="last"), tiny_bert, BATCH)
    assert verdict.ground is Ground.ARRIVALS
    assert certain(verdict) == set(BATCH)


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_a_wrong_token_is_never_certain(tiny_bert, pooling):
    evidence = classified(tiny_bert, pooling=pooling)
    for wrong in ((START, 5, 17, 61, END), (START, 17, 5, 60, END), (START, 5, 17, 60, 60, END)):
        verdict = judge(evidence, tiny_bert, [*BATCH[:2], wrong])
        assert wrong not in certain(verdict)
        assert not verdict.is_whole


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_a_text_at_which_nothing_arrives_is_not_certain(tiny_bert, pooling):
    evidence = classified(tiny_bert, pooling=pooling)
    unknown = judge(replace(evidence, num_texts=None), tiny_bert, [*BATCH, MADE_UP])
    assert unknown.ground is Ground.ARRIVALS
    assert decided(unknown, Decision.UNDECIDED) == {MADE_UP}
    assert certain(unknown) == set(BATCH)
    stated = judge(evidence, tiny_bert, [*BATCH, MADE_UP])
    assert MADE_UP not in certain(stated)


def test_block_0_alone_is_enough_for_arrivals(tiny_bert):
    evidence = classified(tiny_bert, parameters=["layer.0."])
    assert judge(evidence, tiny_bert, BATCH).ground is Ground.ARRIVALS
    missing = judge(evidence, tiny_bert, BATCH[:2])  # no later block that could tell
    assert missing.ground is Ground.NONE
    assert not certain(missing)


def test_pairs_are_run_with_their_types(tiny_bert):
    pairs = [(START, 17, 99, END, 250, END), (START, 400, 3, 8, END, 21, 33, END)]
    evidence = classified_pairs(tiny_bert, pairs)
    proof = EncoderProof(evidence, tiny_bert)
    right = [EncoderText(pair, pair_kinds(pair)) for pair in pairs]
    assert [given(text).types for text in right] == [pair_kinds(pair) for pair in pairs]
    verdict = proof.judge(right)
    assert verdict.ground is Ground.ARRIVALS
    assert certain(verdict) == set(pairs)
    assert not certain(proof.judge(proposed(pairs)))  # without types they are other texts


# ---- how many


def test_an_unknown_number_of_texts_leaves_counts_open(tiny_bert):
    verdict = judge(replace(classified(tiny_bert), num_texts=None), tiny_bert, BATCH)
    assert certain(verdict) == set(BATCH)
    assert not verdict.is_whole
    assert {point.kind for text in verdict.texts for point in text.points} == {AmbiguityKind.COUNT}


def test_more_texts_than_were_stated_are_never_certain(tiny_bert):
    evidence = replace(classified(tiny_bert), num_texts=2)
    verdict = judge(evidence, tiny_bert, BATCH)
    assert not certain(verdict)
    assert any("too many" in problem for problem in verdict.problems)


def test_a_text_that_occurs_twice_is_certain_once(tiny_bert):
    """Its weight does not say whether it occurs twice: labels have weights of their own."""
    verdict = judge(classified(tiny_bert, [*BATCH, BATCH[0]]), tiny_bert, BATCH)
    assert certain(verdict) == set(BATCH)
    assert all(text.count == 1 for text in verdict.texts)
    assert not verdict.is_whole


# ---- equal tokens


def test_equal_tokens_are_one_class_unless_their_own_rows_were_sent(tiny_bert):
    model = tiny_bert.to()
    with torch.no_grad():
        rows = model.parameter(model.token_embedding)
        rows[61] = rows[60]
    wrong = (START, 5, 17, 61, END)
    whole = classified(model)
    hidden = whole.with_tensors({n: g for n, g in whole.gradients.items() if n != model.token_embedding})
    assert certain(judge(whole, model, BATCH)) == set(BATCH)
    assert wrong not in certain(judge(whole, model, [*BATCH[:2], wrong]))
    for third in (BATCH[2], wrong):
        verdict = judge(hidden, model, [*BATCH[:2], third])
        assert decided(verdict, Decision.ONE_OF_THESE) == {third}
        (point,) = (point for text in verdict.texts for point in text.points)
        assert (point.kind, point.position, set(point.tokens)) == (AmbiguityKind.EQUAL_TOKENS, 3, {60, 61})
        assert certain(verdict) == set(BATCH[:2])


# ---- spans of later blocks


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_with_a_text_missing_later_spans_prove_the_others(tiny_bert, pooling):
    verdict = judge(classified(tiny_bert, pooling=pooling), tiny_bert, [*BATCH[:2], MADE_UP])
    assert verdict.ground is Ground.DEEP_SPANS
    assert decided(verdict, Decision.UNDECIDED) == {MADE_UP}
    assert certain(verdict) == set(BATCH[:2])
    assert not verdict.is_whole
    assert verdict.agreement is not None
    assert not verdict.agreement.holds


def test_texts_that_are_not_there_are_undecided(tiny_bert):
    verdict = judge(classified(tiny_bert), tiny_bert, [MADE_UP])
    assert verdict.ground is Ground.NONE
    assert decided(verdict, Decision.UNDECIDED) == {MADE_UP}


# ---- masked tokens


def test_words_that_may_be_masked_keep_texts_open():
    """Masked-token training: what the model was given explains the update, and is not the text."""
    model = adapt(random_model(transformers.BertForMaskedLM, bert_config()), word_tokenizer())
    evidence = observe_gradients(model, BATCH, task="masked_token", mask_share=0.2, seed=3)
    batch, _ = mask_tokens(model, make_batch(model, BATCH), 0.2, torch.Generator().manual_seed(3))
    given = [tuple(row[: len(text)]) for row, text in zip(batch.tokens.tolist(), BATCH, strict=True)]
    assert set(given) != set(BATCH)
    verdict = judge(replace(evidence, task=None), model, given)
    assert verdict.ground is Ground.ARRIVALS
    assert decided(verdict, Decision.UNDECIDED) == set(given)
    assert "masked" in verdict.texts[0].why


def test_a_text_is_told_by_what_it_had_been(tiny_bert):
    """The proof is on what the model was given; the original is what is said."""
    evidence = replace(classified(tiny_bert), task=None)
    original = (START, 5, 17, 60, END)
    given = [EncoderText(text, original=text, num_labels=1) for text in BATCH[:2]]
    clear = EncoderText(BATCH[2], original=original, num_labels=1)
    doubtful = replace(clear, unexplained=0.5)
    proof = EncoderProof(evidence, tiny_bert)
    assert certain(proof.judge([*given, clear], is_masked=True)) == set(BATCH)
    assert certain(proof.judge([*given, doubtful], is_masked=True)) == set(BATCH[:2])


# ---- few digits and noise: the client is run again


@torch.no_grad()
@pytest.mark.parametrize(
    ("defence", "ground"), [("bf16", Ground.ROUNDED_CLIENT), ("noise:sigma=1e-6", Ground.NOISY_CLIENT)]
)
def test_under_noise_the_client_is_run_again(tiny_bert, defence, ground):
    clean = classified(tiny_bert, labels=[1, 0, 1], num_labels=2)
    evidence = parse_defence(defence)(clean, torch.Generator().manual_seed(0))
    verdict = judge(evidence, tiny_bert, BATCH, blurred=True)
    assert verdict.ground is ground
    assert verdict.is_whole
    for wrong in ([*BATCH[:2], MADE_UP], BATCH[:2], [*BATCH, MADE_UP], [*BATCH[:2], (START, 5, 17, 61, END)]):
        verdict = judge(evidence, tiny_bert, wrong, blurred=True)
        assert verdict.ground is Ground.NONE
        assert not certain(verdict)


def test_an_exact_judgement_refuses_few_digits(tiny_bert):
    evidence = parse_defence("bf16")(classified(tiny_bert), torch.Generator().manual_seed(0))
    assert not certain(judge(evidence, tiny_bert, BATCH))


# ---- local training: the client is run again


def trained(model: Model, texts: Texts = BATCH, **options: object) -> GradientEvidence:
    settings = {"local_steps": 4, "learning_rate": 1e-3, "labels": [1, 0, 1]} | options
    return observe_fedavg(model, texts, task="classification", **settings)


@pytest.mark.parametrize("steps", [1, 4])
def test_local_steps_are_proven_with_the_labels_that_fit(tiny_bert, steps):
    for labels in ([1, 0, 1], [0, 0, 0]):
        verdict = judge(trained(tiny_bert, local_steps=steps, labels=labels), tiny_bert, BATCH)
        assert verdict.ground is Ground.CLIENT, verdict.agreement
        assert certain(verdict) == set(BATCH)
        assert verdict.is_whole


def test_other_texts_of_a_trained_client_are_not_proven(tiny_bert):
    evidence = trained(tiny_bert)
    for texts in (BATCH[:2], [*BATCH, MADE_UP], [*BATCH[:2], MADE_UP]):
        verdict = judge(evidence, tiny_bert, texts)
        assert verdict.ground is Ground.NONE
        assert decided(verdict, Decision.UNDECIDED) == set(texts)


def test_what_cannot_be_run_again_is_not_proven(tiny_bert):
    evidence = trained(tiny_bert)
    for change in ({"noise_std": 1e-3}, {"local_batch_size": 2}):
        verdict = judge(replace(evidence, **change), tiny_bert, BATCH)
        assert verdict.ground is Ground.NONE
        assert not certain(verdict)


def test_a_client_that_memory_is_too_small_for_is_not_called_another_one(tiny_bert, monkeypatch):
    evidence = trained(tiny_bert)
    assert not judge(evidence, tiny_bert, BATCH).stopped
    monkeypatch.setenv("UNMASK_MEMORY_GB", "1e-6")
    verdict = judge(evidence, tiny_bert, BATCH)
    assert "it was not done" in verdict.stopped
    assert verdict.ground is Ground.NONE
    assert not certain(verdict)
    assert not any("another client" in problem for problem in verdict.problems)


def test_the_model_is_left_alone(tiny_bert):
    before = {name: p.detach().clone() for name, p in tiny_bert.named_parameters()}
    with torch.no_grad():
        judge(trained(tiny_bert), tiny_bert, BATCH)
        judge(classified(tiny_bert), tiny_bert, BATCH)
    assert all(torch.equal(before[name], p) and p.requires_grad for name, p in tiny_bert.named_parameters())


def test_a_text_of_which_the_model_is_sure_is_not_proven_by_the_client(tiny_bert):
    """It was classified without loss: any other text in its place leaves the same, up to rounding."""
    head = torch.randn(2, tiny_bert.width, generator=torch.Generator().manual_seed(0))
    texts = [*BATCH, MADE_UP]
    with torch.no_grad():
        firsts = [tiny_bert.body(input_ids=torch.tensor([text])).last_hidden_state[0, 0] for text in texts]
    sure = [int((first @ head.T).argmax()) for first in firsts]
    evidence = trained(tiny_bert, local_steps=1, head=head, labels=[1 - sure[0], *sure[1:3]])
    verdict = judge(evidence, tiny_bert, [*BATCH[:2], MADE_UP])
    assert verdict.ground is Ground.CLIENT
    assert MADE_UP not in certain(verdict)
