"""An encoder's texts as a recovery: proven where all states agree and those of other texts clearly do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from unmask.attacks.outputs.prompts.claim import refuse_states
from unmask.attacks.outputs.prompts.encoder_claim import EncoderText, claim_encoder_prompts
from unmask.attacks.run import Run
from unmask.protocols import observe_hidden
from unmask.recovery import AmbiguityKind, Status

SURE = EncoderText(torch.tensor([5, 17, 9]), torch.full((3,), 1e-6), torch.full((3,), 1e-4), 0.5, 20)
GUESS = replace(SURE, tokens=torch.tensor([5, 18]), distances=torch.tensor([1e-6, 0.3]), tolerances=SURE.tolerances[:2])
TWIN = replace(SURE, equals={1: (17, 40)})


def claim(model, *texts):
    return claim_encoder_prompts(texts, model, Run())


@pytest.mark.parametrize("rejected", [None, 1e-4, 2.9e-4])
def test_another_text_that_comes_near_or_was_not_tried_leaves_no_proof(rejected):
    text = replace(SURE, rejected=rejected)
    assert not text.proven
    assert text.certain_tokens == frozenset()


def test_one_state_that_disagrees_leaves_no_proof():
    assert SURE.proven
    assert SURE.certain
    assert not GUESS.proven


def test_statuses(tiny_bert):
    assert claim(tiny_bert, SURE, SURE).status is Status.RECOVERED
    assert claim(tiny_bert, SURE, GUESS).status is Status.PARTIAL
    assert claim(tiny_bert, TWIN).status is Status.PARTIAL  # its other tokens are certain
    alone = replace(TWIN, tokens=torch.tensor([17]), distances=SURE.distances[:1], equals={0: (17, 40)})
    assert claim(tiny_bert, replace(alone, tolerances=SURE.tolerances[:1])).status is Status.NOT_IDENTIFIABLE
    assert claim(tiny_bert, GUESS).status is Status.NOTHING_FOUND
    assert not claim(tiny_bert, GUESS).certificate.holds


def test_only_what_is_proven_supports_the_bag(tiny_bert):
    recovery = claim(tiny_bert, GUESS, TWIN, SURE)
    assert [text.certain for text in recovery.value.texts] == [True, False, False]
    assert recovery.value.token_set == {5, 17, 9}
    assert recovery.value.token_classes == ((17, 40),)
    assert recovery.value.texts[1].ambiguities[0].kind is AmbiguityKind.EQUAL_TOKENS
    assert recovery.value.texts[2].ambiguities == ()
    assert recovery.cost.forward_passes == 60
    assert recovery.certificate.rejected == 0.5
    assert "when recomputed: 1 of 3" in recovery.reason
    assert "1 of 2 states agree" in recovery.reason


def test_a_decoder_is_refused(tiny_gpt2):
    recovery = refuse_states(Run(), observe_hidden(tiny_gpt2, [[5, 17]], layer=1), tiny_gpt2, "bidirectional")
    assert recovery.status is Status.NOT_APPLICABLE
    assert "causal" in recovery.reason
