"""Which proof a decoder's texts have: the client itself, a factor of it, the rows alone, later spans, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.attacks.gradients.decoder.test_endings import forest_of

from unmask.attacks.gradients.decoder.confirm import (
    Confirmation,
    Proof,
    arrivals_of,
    confirm_classification,
    confirm_next_token,
    forest_rows,
    is_coarse,
)
from unmask.attacks.gradients.decoder.endings import TextEnding
from unmask.defences import parse_defence
from unmask.evidence import GradientEvidence
from unmask.models import Model
from unmask.proof.arrivals import Arrivals
from unmask.protocols import observe_fedavg, observe_gradients

A, B, C = (5, 17, 99, 17, 250), (400, 3, 8), (44, 45, 46, 47, 48, 49)
TEXTS = [A, B, C]
Texts = Sequence[tuple[int, ...]]


def ends(texts: Texts, **options: bool) -> list[TextEnding]:
    return [TextEnding((0, text), 1, 1e-6, **options) for text in texts]


def confirm(
    evidence: GradientEvidence, model: Model, texts: Texts, endings: list[TextEnding] | None = None
) -> Confirmation:
    forest = forest_of([text[:-1] for text in texts])
    return confirm_next_token(evidence, evidence, model, forest, endings or ends(texts), {})


@pytest.fixture(params=["tiny_gpt2", "tiny_llama"])
def decoder(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def test_the_client_confirms_its_own_texts(decoder):
    for side in ("right", "left"):
        found = confirm(observe_gradients(decoder, TEXTS, padding_side=side), decoder, TEXTS)
        assert found.proof is Proof.CLIENT
        assert found.agreement is not None
        assert found.agreement.holds
        assert not found.refuted
        assert not found.open_ends
        assert found.num_passes >= len(TEXTS)


def test_counts_are_replayed_too(decoder):
    evidence = observe_gradients(decoder, [A, A, B])
    right = [TextEnding((0, A), 2, 1e-6), TextEnding((0, B), 1, 1e-6)]
    assert confirm(evidence, decoder, [A, B], right).proof is Proof.CLIENT
    # The rows are right and the counts are not.
    wrong = confirm(evidence, decoder, [A, B])
    assert wrong.proof is Proof.ARRIVALS


def test_one_factor_is_said(decoder):
    evidence = observe_gradients(decoder, TEXTS)
    scaled = replace(evidence, gradients={name: 0.3 * g for name, g in evidence.gradients.items()})
    found = confirm(scaled, decoder, TEXTS)
    assert found.proof is Proof.SCALED_CLIENT
    assert found.agreement is not None
    assert found.agreement.scale == pytest.approx(0.3, rel=1e-3)


def test_a_wrong_last_token_leaves_the_rows_as_the_proof(decoder):
    """Rows end before the last label, so they agree; the client does not."""
    found = confirm(observe_gradients(decoder, TEXTS), decoder, TEXTS, ends([A, B, (*C[:-1], 60)]))
    assert found.proof is Proof.ARRIVALS


def test_a_missing_text_leaves_spans_of_later_blocks(decoder):
    found = confirm(observe_gradients(decoder, TEXTS), decoder, TEXTS[:2])
    assert found.proof is Proof.DEEP_SPANS
    assert not found.refuted


def test_of_texts_that_are_missing_and_made_up_the_made_up_one_is_refuted(decoder):
    made_up = (300, 301, 302, 303)
    found = confirm(observe_gradients(decoder, TEXTS), decoder, [A, B, made_up])
    assert found.proof is Proof.DEEP_SPANS
    assert found.refuted == {(0, made_up)}


def test_texts_of_nothing_have_no_proof(decoder):
    found = confirm(observe_gradients(decoder, TEXTS), decoder, [(300, 301, 302), (303, 304)])
    assert found.proof is Proof.NONE


def test_which_of_equal_tokens_is_meant_is_tried(tiny_llama):
    model = tiny_llama.to()
    with torch.no_grad():
        model.parameter(model.token_embedding)[18] = model.parameter(model.token_embedding)[17].clone()
    true, shown = (18, 99, 250), (17, 99, 250)  # a first token is no label: only its embedding's row tells
    evidence = observe_gradients(model, [true, B])
    forest = forest_of([shown[:-1], B[:-1]])
    found = confirm_next_token(evidence, evidence, model, forest, ends([shown, B]), {17: (17, 18)})
    assert found.proof is Proof.CLIENT
    assert found.tells_equal_tokens
    assert {ending.node[1] for ending in found.endings} == {true, B}


# ---- classification


def test_the_rounding_of_weights_is_not_few_digits(tiny_gpt2):
    """Small steps leave a few levels of the weights' own rounding, which the replay has too; int8 does not."""
    small = observe_fedavg(tiny_gpt2, TEXTS, local_steps=2, learning_rate=1e-5)
    assert not is_coarse(small, tiny_gpt2)
    coarse = parse_defence("int8")(small, torch.Generator().manual_seed(0))
    assert is_coarse(coarse, tiny_gpt2)


def classify(evidence: GradientEvidence, model: Model, texts: Texts, arrivals: Arrivals | None = None) -> Confirmation:
    forest = forest_of(texts)
    return confirm_classification(
        evidence, model, forest, ends(texts), arrivals or arrivals_of(evidence, model, forest)[1]
    )


def test_rows_confirm_classified_texts_whatever_the_labels(decoder):
    for options in ({"labels": [0, 1, 1]}, {"num_labels": 5, "labels": [4, 2, 0]}, {"pooling": "mean"}):
        found = classify(observe_gradients(decoder, TEXTS, task="classification", **options), decoder, TEXTS)
        assert found.proof is Proof.ARRIVALS
        assert not found.refuted


def test_with_a_classified_text_missing_the_last_block_tells_ends(decoder):
    evidence = observe_gradients(decoder, TEXTS, task="classification")
    found = classify(evidence, decoder, TEXTS[:2])
    assert found.proof is Proof.DEEP_SPANS
    assert not found.refuted
    cut = classify(evidence, decoder, [A[:3], B])
    assert cut.refuted == {(0, A[:3])}
    # Whoever does not know that the head reads the last token claims nothing.
    unknown = classify(replace(evidence, pooling=None), decoder, TEXTS[:2])
    assert unknown.proof is Proof.NONE


def test_every_prefix_has_one_row_and_repetitions_have_none(tiny_gpt2, tiny_llama):
    leaves = [(0, (5, 6, 7)), (0, (5, 6, 8)), (0, (4, 4, 9))]
    for model, runs in ((tiny_gpt2, 1), (tiny_llama, 0)):
        texts, nodes, rows = forest_rows(model, leaves)
        assert [text.tokens for text in texts] == [tokens for _, tokens in leaves]
        assert len(nodes) == len(set(nodes)) == len(rows) == 6 + runs
        for (_, tokens), (index, place) in zip(nodes, rows.tolist(), strict=True):
            assert leaves[index][1][: place + 1] == tokens
