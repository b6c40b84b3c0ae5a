"""Real weights, invented texts: what a server recovers from a client's update, to the last token."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

import unmask
from unmask.audit.cases.data import INVENTED_TEXTS as TEXTS
from unmask.recovery import Status

# What an attack on a decoder can use; the whole update of SmolLM2 would be 540 MB on disk.
ENDS_OF_SMOLLM2 = ["layers.0.", "layers.29.mlp.down_proj"]


def test_a_decoder_gives_up_its_texts_exactly(smollm2, tmp_path: Path):
    texts = TEXTS[:4]
    path = tmp_path / "update.safetensors"
    unmask.observe_gradients(smollm2, texts, parameters=ENDS_OF_SMOLLM2).save(path)

    recovery = unmask.recover_text(unmask.load_evidence(path), smollm2)

    assert recovery.status is Status.RECOVERED, recovery.reason
    assert Counter(recovery.value.expand()) == Counter(tuple(smollm2.encode(text)) for text in texts)
    assert {text.text for text in recovery.value.texts} == set(texts)  # the full stop at the end is only a label
    assert all(text.certain and text.count == 1 for text in recovery.value.texts)
    assert recovery.certificate.holds
    # Accepted rows are at rounding level, refused ones are not: two decades would already be no accident.
    assert recovery.certificate.details["gap_decades"] > 2
    score = unmask.score_texts(recovery.value.expand(), [smollm2.encode(text) for text in texts], smollm2.decode)
    assert score.exact_rate == score.rouge1 == score.rouge2 == 1.0
    assert score.num_false == 0


@pytest.mark.slow
def test_a_decoder_gives_up_texts_that_it_classifies(smollm2):
    texts = TEXTS[8:12]
    evidence = unmask.observe_gradients(smollm2, texts, task="classification", parameters=ENDS_OF_SMOLLM2)
    recovery = unmask.recover_text(evidence, smollm2)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert {text.text for text in recovery.value.certain} == set(texts)


@pytest.mark.slow
def test_an_encoder_gives_up_eight_texts_exactly_without_its_embedding(minilm, one_thread):
    """A client that freezes its embeddings: block 0's gradients tell every token, and where it stands."""
    texts = TEXTS[:8]
    evidence = unmask.observe_gradients(minilm, texts, task="classification", parameters=["encoder."])
    recovery = unmask.recover_text(evidence, minilm)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert Counter(recovery.value.expand()) == Counter(tuple(minilm.encode(text)) for text in texts)
    assert recovery.value.token_set == {token for text in texts for token in minilm.encode(text)}
    assert all(text.certain for text in recovery.value.texts)
    assert recovery.certificate.holds
    assert recovery.certificate.details["gap_decades"] > 2
    assert set(recovery.used) == set(evidence.gradients)  # a replay rests on every tensor


def test_an_encoder_gives_up_its_words_with_its_embedding(minilm):
    """Rows of the embedding tell the words of all sixteen texts; their order, the embedding alone does not."""
    texts = TEXTS
    evidence = unmask.observe_gradients(minilm, texts, task="classification", parameters=["embeddings."])
    recovery = unmask.recover_text(evidence, minilm)
    assert recovery.status is Status.PARTIAL
    assert recovery.value.token_set == {token for text in texts for token in minilm.encode(text)}
    assert recovery.used[0] == "embeddings.word_embeddings.weight"


def test_an_encoder_gives_up_pairs_of_texts(minilm, one_thread):
    """Question and answer: token types tell the two parts, and which answer belongs to which question."""
    pairs = [("Did the biopsy show anything?", "Yes, it was positive."), ("Where is the spare key?", "Under the pot.")]
    evidence = unmask.observe_gradients(minilm, pairs, task="classification")
    recovery = unmask.recover_text(evidence, minilm)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert Counter(recovery.value.expand()) == Counter(tuple(minilm.encode_pair(*pair)[0]) for pair in pairs)
    assert all(text.certain for text in recovery.value.texts)
    assert recovery.certificate.holds


def test_an_encoder_gives_up_the_words_that_were_masked(minilm, one_thread):
    """The client's own inputs do not hold them: they are read off the gradient that arrives at the last block."""
    texts = ["The biopsy was positive, and the treatment starts on Monday.", "The spare key lies under the flower pot."]
    evidence = unmask.observe_gradients(minilm, texts, task="masked_token", mask_share=0.3)
    recovery = unmask.recover_text(evidence, minilm)
    originals = [tuple(minilm.encode(text)) for text in texts]
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert {token for text in originals for token in text} == recovery.value.token_set
    assert Counter(recovery.value.expand()) == Counter(originals)
    assert all(text.certain for text in recovery.value.texts)


@pytest.mark.slow
def test_an_encoder_gives_up_texts_that_are_nearly_the_same(minilm, one_thread):
    """Equal words at equal positions, a text of one word and one that comes twice; in bfloat16 the words alone."""
    texts = ["The doctor said it is bad.", "The doctor said it is late.", "The nurse said it is late.", "Cancer"]
    repeated = [*texts, texts[0]]
    recovery = unmask.recover_text(unmask.observe_gradients(minilm, repeated, task="classification"), minilm)
    assert {text.tokens for text in recovery.value.certain} == {tuple(minilm.encode(text)) for text in texts}
    assert recovery.status is Status.PARTIAL
    assert "found 4 of 5 texts; the rest are missing or are copies" in recovery.reason

    evidence = unmask.observe_gradients(minilm.to(dtype=torch.bfloat16), repeated, task="classification")
    coarse = unmask.recover_text(evidence, minilm)
    assert coarse.status is Status.PARTIAL
    assert coarse.value.token_set == {token for text in texts for token in minilm.encode(text)}
    assert not coarse.value.certain


def test_words_said_over_and_over(smollm2):
    """Two different tokens fill few directions of every early layer: not exact, and never claimed to be (docs)."""
    texts = ["no" + " no" * 14 + ".", "The biopsy was positive."]
    evidence = unmask.observe_gradients(smollm2, texts, parameters=[*ENDS_OF_SMOLLM2, "layers.1.self_attn"])
    recovery = unmask.recover_text(evidence, smollm2)
    assert recovery.status is unmask.Status.PARTIAL
    assert {text.text for text in recovery.value.certain} <= set(texts)
    assert recovery.value.token_set == {token for text in texts for token in smollm2.encode(text)[:-1]}
