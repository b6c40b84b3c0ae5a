"""Prompts that were read, as a recovery: each status, what the certificate rests on, and the sentences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unmask.attacks.outputs.prompts.claim import claim_prompts, refuse_states
from unmask.attacks.outputs.prompts.reader import ReadText, ReadToken
from unmask.attacks.run import Run
from unmask.evidence import Site
from unmask.protocols import observe_hidden
from unmask.recovery import Aim, AmbiguityKind, Status

SURE = ReadToken(5, True, 1e-6, 1e-4, 0.5)
DOUBTFUL = ReadToken(17, False, 0.2, 1e-4, 0.21)
TWIN = ReadToken(40, True, 1e-6, 1e-4, 0.4, equals=(40, 41))


def text_of(*tokens: ReadToken, length: int | None = None, noise: float = 0.0) -> ReadText:
    return ReadText(tokens, len(tokens) if length is None else length, noise, 10 * len(tokens), 1)


@pytest.fixture
def claim(tiny_gpt2):
    return lambda *texts: claim_prompts(texts, tiny_gpt2, ("states",), Run())


def test_all_certain_texts_are_recovered(claim):
    recovery = claim(text_of(SURE, replace(SURE, token=9)), text_of(SURE))
    assert recovery.status is Status.RECOVERED
    assert [text.tokens for text in recovery.value.texts] == [(5, 9), (5,)]
    assert recovery.value.token_set == {5, 9}
    assert recovery.certificate.holds
    assert recovery.certificate.rejected == 0.5
    assert recovery.cost.candidates == 30


def test_certain_texts_come_first_and_a_part_is_partial(claim):
    recovery = claim(text_of(SURE, DOUBTFUL), replace(text_of(SURE, length=3), stopped=1), text_of(SURE))
    assert recovery.status is Status.PARTIAL
    assert [text.certain for text in recovery.value.texts] == [True, False, False]
    assert recovery.value.token_set == {5}
    assert "texts read to the end: 1 of 3;" in recovery.reason
    assert "stopped after 1 of 3 tokens" in recovery.reason
    assert "for 1 token the closest" in recovery.reason


def test_a_class_of_equal_tokens_is_an_ambiguity_and_no_token(claim):
    recovery = claim(text_of(SURE, TWIN))
    (text,) = recovery.value.texts
    assert (recovery.status, text.certain) == (Status.PARTIAL, False)
    assert [(one.kind, one.position, one.tokens) for one in text.ambiguities] == [
        (AmbiguityKind.EQUAL_TOKENS, 1, (40, 41))
    ]
    assert recovery.value.token_classes == ((40, 41),)
    assert claim(text_of(TWIN)).status is Status.NOT_IDENTIFIABLE


def test_a_part_of_a_text_is_no_text_and_its_tokens_are_certain(claim):
    page = replace(text_of(SURE, TWIN), first_position=4, is_open=True)
    recovery = claim(page, text_of(SURE))
    whole, part = recovery.value.texts
    assert recovery.status is Status.PARTIAL
    assert (whole.certain, part.certain) == (True, False)
    assert [one.kind for one in part.ambiguities] == [AmbiguityKind.OPEN_BEGINNING, AmbiguityKind.EQUAL_TOKENS]
    assert "for 1 text: it is seen from position 4 on, and not what comes before" in recovery.reason
    (alone,) = claim(replace(page, tokens=(SURE, DOUBTFUL))).value.texts
    assert not alone.ambiguities  # what is in doubt stands for no class


def test_a_known_beginning_before_a_page_is_part_of_the_text(claim):
    recovery = claim(replace(text_of(SURE, TWIN), before=(7, 8), given=(9,), length=3, first_position=2))
    (text,) = recovery.value.texts
    assert (text.tokens, text.num_given) == ((7, 8, 9, 5, 40), 3)
    assert [one.position for one in text.ambiguities] == [4]


def test_an_order_that_nothing_proves_is_the_dumps(claim):
    recovery = claim(replace(text_of(SURE), is_placed=False))
    assert "order and positions of the tokens are taken from the dump" in recovery.reason
    assert "are not proven" in recovery.certificate.claim
    assert "dump" not in claim(text_of(SURE)).reason


def test_rows_that_nothing_binds_are_no_text(claim):
    recovery = claim(replace(text_of(SURE), why_unbound="rows stand alone"))
    assert recovery.status is Status.PARTIAL
    assert not recovery.value.certain
    assert recovery.value.token_set == {5}
    assert "That they are of one text is taken from the dump" in recovery.certificate.claim
    assert recovery.looked_for == {Aim.TOKENS, Aim.TEXTS}


def test_equal_tokens_of_rows_that_nothing_binds_have_not_been_looked_for_as_texts(claim):
    assert claim(replace(text_of(SURE, TWIN), why_unbound="rows stand alone")).looked_for == {Aim.TOKENS}
    assert claim(text_of(SURE, TWIN)).looked_for == {Aim.TOKENS, Aim.TEXTS}


def test_what_is_no_noise_names_what_may_be_another_one(claim):
    recovery = claim(replace(text_of(DOUBTFUL, noise=0.2), is_mismatch=True))
    assert recovery.status is Status.NOTHING_FOUND
    assert "the position, the layer or the model may be wrong" in recovery.reason
    assert "noisy" not in recovery.reason


def test_nothing_certain_claims_nothing(claim):
    recovery = claim(text_of(DOUBTFUL, noise=0.7))
    assert recovery.status is Status.NOTHING_FOUND
    assert not recovery.certificate.holds
    assert "beyond which nothing can be claimed" in recovery.reason
    assert claim(text_of(length=4)).value.texts == ()


def test_states_of_another_site_are_refused(tiny_gpt2):
    evidence = observe_hidden(tiny_gpt2, [[5, 17]], layer=0, site="attention")
    recovery = refuse_states(Run(), evidence, tiny_gpt2, "causal")
    assert recovery.status is Status.NOT_APPLICABLE
    assert not recovery.looked_for
    assert Site.ATTENTION.value in recovery.reason
