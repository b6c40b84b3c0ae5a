"""What a search works on: distances of texts to the spans, sizes, and every reason why there is nothing to search."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tests.attacks.gradients.encoder_batches import (
    BATCH,
    END,
    FRAME,
    IN_SPAN,
    OUT_OF_SPAN,
    START,
    as_places,
    candidates_of,
    classified,
    classified_pairs,
    pair_kinds,
    problem_of,
)
from tests.contracts.models import stranger
from tests.reference.layer_inputs import layer_inputs

from unmask.attacks.gradients.encoder.problem import Problem, is_full, set_up
from unmask.defences import parse_defence
from unmask.evidence import GradientEvidence
from unmask.models import Model

NUM_ROWS = sum(map(len, BATCH))
PAIRS = [(START, 17, 99, END, 250, END), (START, 400, 3, END, 21, 33, END)]
SELF, OUTPUT, DOWN = "layer.0.attention.self", "layer.0.attention.output.dense", "layer.0.output.dense"


@pytest.fixture(scope="module")
def problem(tiny_bert) -> Problem:
    return problem_of(tiny_bert, classified(tiny_bert))


@torch.no_grad()
def why_not(model: Model, evidence: GradientEvidence, frame: tuple[int, int] | None = FRAME) -> str:
    """The reason, with the bag of words of the whole update."""
    reason = set_up(evidence, model, candidates_of(model, evidence), frame)
    assert isinstance(reason, str)
    return reason


# ---- what is set up


@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize("keep", [None, ["encoder.layer.0."]], ids=["all", "block 0"])
def test_sizes_are_those_of_the_batch(tiny_bert, pooling, keep):
    problem = problem_of(tiny_bert, classified(tiny_bert, pooling=pooling, parameters=keep))
    assert problem.rank == NUM_ROWS
    assert problem.places.num_positions == max(map(len, BATCH))
    assert set(problem.places.tokens.tolist()) == {token for text in BATCH for token in text}
    assert problem.places.frame.end_type == 0
    assert [site.name for site in problem.sites] == ["output projection of block 0", "down projection of block 0"]


def test_the_precise_model_is_the_same_in_float64(tiny_bert, problem):
    assert problem.model is tiny_bert
    assert problem.precise.dtype is torch.float64
    for name in (tiny_bert.token_embedding, "encoder.layer.0.attention.self.query.weight"):
        assert torch.equal(problem.precise.parameter(name), tiny_bert.parameter(name).double())


def test_later_blocks_are_not_copied(tiny_bert, problem):
    with pytest.raises(AttributeError):
        problem.precise.parameter(f"encoder.layer.{tiny_bert.num_blocks - 1}.output.dense.weight")


@pytest.mark.parametrize(("keep", "names"), [(OUTPUT, ["output projection"]), (DOWN, ["down projection"])])
def test_one_layer_that_tells_is_enough(tiny_bert, keep, names):
    problem = problem_of(tiny_bert, classified(tiny_bert, parameters=[SELF, keep]))
    assert [site.name.removesuffix(" of block 0") for site in problem.sites] == names
    assert problem.rank == NUM_ROWS


def test_tokens_beside_the_batchs_are_not_needed(tiny_bert):
    """A bag with tokens that do not occur makes the search larger, and no text of the batch impossible."""
    evidence = classified(tiny_bert)
    candidates = candidates_of(tiny_bert, evidence)
    more = torch.tensor(sorted(candidates.tokens | {300, 301, 302}))
    wider = replace(candidates, by_position=dict.fromkeys(candidates.by_position, more))
    with torch.no_grad():
        problem = set_up(evidence, tiny_bert, wider, FRAME)
        assert isinstance(problem, Problem)
        assert problem.places.num_positions == max(map(len, BATCH))
        assert problem.distance(as_places(problem.places, BATCH[0])) < IN_SPAN


# ---- distances


@pytest.mark.parametrize("text", BATCH)
@torch.no_grad()
def test_texts_of_the_batch_lie_in_the_spans(problem, text):
    assert problem.distance(as_places(problem.places, text)) < IN_SPAN


@torch.no_grad()
def test_no_other_text_does(problem):
    rng = random.Random(0)
    words = sorted({token for text in BATCH for token in text} - {START, END})
    for _ in range(50):
        text = (START, *rng.choices(words, k=rng.randrange(6)), END)
        if text not in BATCH:
            assert problem.distance(as_places(problem.places, text)) > OUT_OF_SPAN


@torch.no_grad()
def test_one_wrong_token_or_a_missing_end_is_seen(problem):
    for text in BATCH:
        for position in range(1, len(text) - 1):
            wrong = (*text[:position], 44 if text[position] != 44 else 3, *text[position + 1 :])
            assert problem.distance(as_places(problem.places, wrong)) > OUT_OF_SPAN
        assert problem.distance(as_places(problem.places, text[:-1])) > OUT_OF_SPAN


@torch.no_grad()
def test_the_distance_is_that_of_the_worst_row_at_the_worst_layer(tiny_bert, problem):
    wrong = (START, 17, 99, 3, 17, END)
    precise = tiny_bert.to(dtype=torch.float64)
    slow = [
        float(site.span.distance(layer_inputs(precise, torch.tensor([wrong]), site.parameters[0])[0]).max())
        for site in problem.sites
    ]
    assert problem.distance(as_places(problem.places, wrong)) == pytest.approx(max(slow), rel=1e-9)


# ---- few digits and noise


@torch.no_grad()
@pytest.mark.parametrize("keep", [None, ["encoder.layer.0."]], ids=["all", "block 0"])
def test_few_digits_leave_texts_as_far_as_they_blur_them(tiny_bert, keep):
    clean = classified(tiny_bert, parameters=keep)
    evidence = parse_defence("bf16")(clean, torch.Generator().manual_seed(0))
    problem = set_up(evidence, tiny_bert, candidates_of(tiny_bert, clean), FRAME, noisy=True)
    assert isinstance(problem, Problem)
    assert problem.is_noisy
    assert problem.mlp is not None
    assert problem.places.num_positions == max(map(len, BATCH))
    for text in BATCH:
        assert problem.distance(as_places(problem.places, text)) < 2
        wrong = (text[0], 60 if text[1] != 60 else 44, *text[2:])
        assert problem.distance(as_places(problem.places, wrong)) > 4


# ---- pairs


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_pairs_are_seen_by_their_types(tiny_bert, pooling):
    problem = problem_of(tiny_bert, classified_pairs(tiny_bert, PAIRS, pooling))
    assert problem.places.frame.end_type == 1
    assert problem.places.num_positions == 7
    for text in PAIRS:
        assert problem.distance(as_places(problem.places, text, pair_kinds(text))) < IN_SPAN
        assert problem.distance(as_places(problem.places, text)) > OUT_OF_SPAN  # the same tokens as one text


# ---- reasons


def test_without_a_tokenizer_the_frame_must_be_given(tiny_bert):
    assert "[CLS]" in why_not(tiny_bert, classified(tiny_bert), frame=None)


def test_the_frame_of_the_tokenizer_is_taken(minilm):
    texts = [minilm.encode("The biopsy was positive.")]
    evidence = classified(minilm, texts, parameters=["encoder.layer.0."])
    with torch.no_grad():
        problem = set_up(evidence, minilm, candidates_of(minilm, evidence), None)
    assert isinstance(problem, Problem)
    assert (problem.places.frame.first, problem.places.frame.last) == minilm.frame_tokens


def test_a_frame_that_does_not_occur_is_named(tiny_bert):
    assert "(300, 2)" in why_not(tiny_bert, classified(tiny_bert), frame=(300, END))


def test_a_decoder_is_no_encoder(tiny_gpt2):
    assert why_not(tiny_gpt2, classified(tiny_gpt2))


def test_without_queries_keys_and_values_no_token_has_a_place(tiny_bert):
    reason = why_not(tiny_bert, classified(tiny_bert, parameters=["embeddings.", OUTPUT, DOWN]))
    assert "queries, keys or values" in reason


def test_without_a_layer_behind_attention_there_is_no_order(tiny_bert):
    reason = why_not(tiny_bert, classified(tiny_bert, parameters=["embeddings.", SELF]))
    assert "holds neither" in reason


def test_full_spans_are_told_with_their_ranks(tiny_bert):
    """Ninety rows: more than the output projection's 64 and the down projection's 96 directions leave room for."""
    rng = random.Random(0)
    texts = [(START, *(rng.randrange(10, 500) for _ in range(8)), END) for _ in range(10)]
    reason = why_not(tiny_bert, classified(tiny_bert, texts, parameters=["embeddings.", SELF, OUTPUT]))
    assert "full" in reason
    assert "64" in reason


# ---- spans that hold no token


@pytest.mark.parametrize("seed", [0, 3])
def test_gradients_of_other_weights_give_a_reason(tiny_bert, seed):
    """Embedding rows show the true tokens, but none of their vectors lies in the span: no position is filled."""
    evidence = classified(stranger(tiny_bert, seed))
    assert why_not(tiny_bert, replace(evidence, model_fingerprint=tiny_bert.fingerprint()))


def test_dropout_gives_a_reason(tiny_bert):
    """A client that trains with dropout: first inputs have holes, so no token's vector lies in the span."""
    assert why_not(tiny_bert, classified(tiny_bert, train_mode=True))


def test_texts_of_one_token_give_a_reason(tiny_bert):
    """No text can end: the longest has one position."""
    assert why_not(tiny_bert, classified(tiny_bert, [(START,), (END,)]))


def test_noise_fills_the_spans_and_a_clean_update_does_not(tiny_bert):
    evidence = classified(tiny_bert)
    assert not is_full(evidence, tiny_bert)
    assert is_full(parse_defence("noise:sigma=1e-3")(evidence, torch.Generator().manual_seed(0)), tiny_bert)
    assert not is_full(classified(tiny_bert, parameters=["embeddings."]), tiny_bert)  # there is none
