"""DAGER as published, on small random models: what it finds, what it must miss, and what it may claim."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
)

from unmask.attacks.baselines.dager import Dager, FrameTokens, _products, _without_used
from unmask.attacks.baselines.dager_spans import query_layers, span_distance, take_spans
from unmask.attacks.run import silent
from unmask.evidence.gradients import GradientEvidence
from unmask.models import Model, Role, adapt
from unmask.protocols import observe_gradients
from unmask.recovery import Status

VOCAB, START, END = 500, 1, 2
SIZES = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 32}
# 0.1 instead of 0.02: attention, and its gradients, are then about as strong as in trained models.
INIT = {"vocab_size": VOCAB, "initializer_range": 0.1}
NO_FRAME = {"bos_token_id": None, "eos_token_id": None}


def gpt2(seed: int = 0, head: bool = False) -> Model:
    torch.manual_seed(seed)
    config = GPT2Config(n_embd=96, n_layer=3, n_head=4, n_positions=32, **NO_FRAME, **INIT)
    return adapt((GPT2LMHeadModel if head else GPT2Model)(config).eval())


def llama(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return adapt(LlamaModel(LlamaConfig(intermediate_size=192, num_key_value_heads=2, **SIZES, **INIT)).eval())


def bert(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return adapt(BertModel(BertConfig(intermediate_size=192, **SIZES, **INIT)).eval())


def distinct_words(num_texts: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Texts without repeated words."""
    words = iter((torch.randperm(VOCAB - 10, generator=torch.Generator().manual_seed(seed)) + 10).tolist())
    return [list(itertools.islice(words, lengths[i % len(lengths)])) for i in range(num_texts)]


def framed(texts: list[list[int]]) -> list[list[int]]:
    return [[START, *text, END] for text in texts]


GPT2_ATTACK = Dager()
LLAMA_ATTACK = Dager(start_token=START)
BERT_ATTACK = Dager(start_token=START, end_tokens=(END,))


def family(name: str, num_texts: int, seed: int = 0) -> tuple[Model, list[list[int]], Dager]:
    # Encoders: two lengths, see test_end_tokens_at_two_positions… for what a third one does.
    texts = distinct_words(num_texts, (6, 9, 4, 7) if name != "bert" else (5, 3), seed)
    match name:
        case "gpt2":
            return gpt2(seed), texts, GPT2_ATTACK
        case "llama":
            return llama(seed), [[START, *text] for text in texts], LLAMA_ATTACK
        case _:
            return bert(seed), framed(texts), BERT_ATTACK


def classify(model: Model, texts: list[list[int]]) -> GradientEvidence:
    return observe_gradients(model, texts, task="classification")


def found(recovery) -> set[tuple[int, ...]]:
    """The texts that passed; best-effort guesses lie beyond the tolerance."""
    return {text.tokens for text in recovery.value.texts if text.residual <= recovery.certificate.tolerance}


def guesses(recovery) -> set[tuple[int, ...]]:
    return {text.tokens for text in recovery.value.texts} - found(recovery)


def as_set(texts: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(text) for text in texts}


# ---- what it finds


@pytest.mark.parametrize("num_texts", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_every_text_is_recovered_exactly(name, num_texts):
    model, texts, attack = family(name, num_texts)
    recovery = attack(classify(model, texts), model)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert found(recovery) == as_set(texts)
    assert all(text.certain for text in recovery.value.texts)
    assert recovery.certificate.holds
    assert recovery.certificate.residual < 1e-4  # τ₂ is 1e-3, float32 gives 1e-6 to 1e-5
    assert recovery.cost.candidates > VOCAB
    words = {token for text in texts for token in text}
    # A decoder's start token is known, not found.
    assert recovery.value.token_set == words - ({START} if name == "llama" else set())


@torch.no_grad()
def test_theorem_5_1_the_query_gradients_span_the_rows_of_the_batch():
    model, texts, attack = family("bert", 3)
    evidence = classify(model, texts)
    spans = spans_of(attack, evidence, model)
    assert spans.rank == sum(map(len, texts))
    for text in texts:
        rows = model.first_input(torch.tensor(text), torch.arange(len(text)))
        assert float(span_distance(rows, spans.first).max()) < 1e-5
    full = np.linalg.svd(spans.second_gradient.double().numpy())[0][:, : spans.rank]
    projector = spans.second.double().numpy() @ spans.second.double().numpy().T
    assert np.abs(projector - full @ full.T).max() < 1e-4  # float32, randomised


@torch.no_grad()
def test_theorem_5_2_no_other_token_lies_in_the_span():
    model = bert()
    texts = framed(distinct_words(3, (5,)))
    basis = spans_of(BERT_ATTACK, classify(model, texts), model).first
    everyone = torch.arange(VOCAB)
    for position, here in enumerate(zip(*texts, strict=True)):
        distances = span_distance(model.first_input(everyone, torch.full_like(everyone, position)), basis)
        others = torch.tensor([token for token in range(VOCAB) if token not in here])
        assert float(distances[list(here)].max()) < 1e-5
        assert float(distances[others].min()) > 1e-2


@torch.no_grad()
def test_end_tokens_at_two_positions_let_the_tokens_of_one_pass_at_the_other():
    """(w + p) + (end + q) − (end + p) = w + q: no precision removes it, so Algorithm 1's sets are supersets."""
    model = bert()
    texts = framed(distinct_words(2, (3, 5)))
    basis = spans_of(BERT_ATTACK, classify(model, texts), model).first
    word, short, long = texts[1][4], 4, 6
    assert (texts[0][short], texts[1][long]) == (END, END)
    assert float(span_distance(model.first_input(torch.tensor([word]), torch.tensor([long])), basis)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_algorithm_1_gives_the_tokens_of_every_position_and_stops_behind_the_longest_text(name):
    model, texts, attack = family(name, 4)
    evidence = classify(model, texts)
    frame = FrameTokens(attack.start_token, attack.end_tokens or ())
    sets = attack.token_sets(model, spans_of(attack, evidence, model).first, frame, silent)
    longest = max(map(len, texts))
    assert len(sets.sets) == longest
    assert sets.num_tested == VOCAB * (longest + 1)
    for position in range(longest):
        expected = {text[position] for text in texts if position < len(text)} - {END}
        tokens = set(sets.at(position).tolist())
        assert tokens == expected if name == "gpt2" else tokens >= expected  # see the test above
    assert len(sets.at(longest)) == 0
    lengths = sorted({len(text) - 1 for text in texts}) if name == "bert" else []
    assert [position for position, _ in sets.ends] == lengths


@torch.no_grad()
def test_algorithm_1_has_one_set_where_positions_are_rotary():
    model, texts, attack = family("llama", 4)
    spans = spans_of(attack, classify(model, texts), model)
    sets = attack.token_sets(model, spans.first, FrameTokens(START, ()), silent)
    assert sets.everywhere
    assert set(sets.at(0).tolist()) == set(sets.at(17).tolist()) == {t for text in texts for t in text[1:]}


def test_algorithm_2_separates_texts_that_share_a_beginning_and_words():
    model = gpt2()
    a, b, c, d, e, f = distinct_words(1, (6,))[0]
    texts = [[a, b, c, d, e], [a, b, d, c], [a, c, b], [f, a, e, e, b]]
    recovery = GPT2_ATTACK(classify(model, texts), model)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert found(recovery) == as_set(texts)
    # Rows are counted once for each distinct prefix: [a], [a b] are shared.
    assert recovery.certificate.details["explained_rank"] == sum(map(len, texts)) - 3


def test_algorithm_2_is_the_same_in_batches_of_any_size():
    model, texts, attack = family("llama", 3)
    evidence = classify(model, texts)
    small, large = (replace(attack, batch_size=size)(evidence, model) for size in (7, 10_000))
    assert found(small) == found(large) == as_set(texts)
    assert small.cost.candidates == large.cost.candidates


def test_algorithm_3_finds_texts_of_equal_and_of_different_lengths():
    texts = framed(distinct_words(4, (4, 6, 4, 6)))
    model = bert()
    recovery = BERT_ATTACK(classify(model, texts), model)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert found(recovery) == as_set(texts)


def test_algorithm_3_removes_the_tokens_of_texts_that_were_found():
    assert _without_used([[1], [5, 6], [7], [8, 9]], [(1, 5, 7, 2)], start=1) == [[1], [6], [7], [8, 9]]
    texts = framed(distinct_words(2, (3, 6)))
    model = bert()
    recovery = BERT_ATTACK(classify(model, texts), model)
    # 2³ products of the short text; then one token is left at its positions, and one beyond them.
    tested = VOCAB * (max(map(len, texts)) + 1)
    assert recovery.cost.candidates == tested + 2**3 + 1


def test_algorithm_3_claims_less_where_the_number_of_texts_is_not_known():
    texts = framed(distinct_words(2, (4, 4)))
    model = bert()
    evidence = replace(classify(model, texts), num_texts=None)
    recovery = BERT_ATTACK(evidence, model)
    assert found(recovery) == as_set(texts)
    assert recovery.status is Status.PARTIAL
    assert "number of texts is not known" in recovery.reason


def test_start_and_end_tokens_come_from_the_tokenizer():
    class Framing:
        eos_token_id, sep_token_id = None, END

        def __call__(self, text, **options):
            return {"input_ids": [START, END]}

        def decode(self, tokens, skip_special_tokens):
            return " ".join(f"w{token}" for token in tokens)

    model, texts, _ = family("bert", 2)
    model.tokenizer = Framing()
    recovery = Dager()(classify(model, texts), model)
    assert recovery.status is Status.RECOVERED
    assert recovery.value.texts[0].text.startswith(f"w{START} ")


# ---- what it must miss


def test_a_text_that_is_a_prefix_of_another_is_missed():
    model = gpt2()
    (text,) = distinct_words(1, (6,))
    recovery = GPT2_ATTACK(classify(model, [text, text[:3]]), model)
    assert found(recovery) == {tuple(text)}
    assert recovery.status is Status.PARTIAL
    assert "prefixes" in recovery.reason


def test_a_text_that_occurs_twice_is_found_once():
    model = gpt2()
    (text,) = distinct_words(1, (6,))
    recovery = GPT2_ATTACK(classify(model, [text, text]), model)
    assert found(recovery) == {tuple(text)}
    assert recovery.status is Status.PARTIAL


def test_a_text_of_one_token_is_missed():
    model = gpt2()
    texts = distinct_words(2, (6, 1))
    recovery = GPT2_ATTACK(classify(model, texts), model)
    assert found(recovery) == {tuple(texts[0])}
    assert recovery.status is Status.PARTIAL


def test_the_last_token_of_a_next_token_text_is_missed_and_no_text_is_called_whole():
    model = gpt2(head=True)
    texts = distinct_words(3, (6, 8))
    recovery = GPT2_ATTACK(observe_gradients(model, texts, task="next_token"), model)
    assert found(recovery) == {tuple(text[:-1]) for text in texts}
    assert recovery.status is Status.PARTIAL
    assert not recovery.value.certain


@torch.no_grad()
def test_first_tokens_are_not_in_the_span_of_query_gradients_alone():
    """Softmax over one score has no gradient. GPT-2's joint parameter holds them; a Llama's start must be known."""
    model, texts, _ = family("gpt2", 3)
    evidence = classify(model, texts)
    joint = spans_of(GPT2_ATTACK, evidence, model)
    query = evidence.linear(model, Role.QUERY, 0)
    assert query is not None
    alone = torch.linalg.svd(query)[0][:, : int(torch.linalg.matrix_rank(query))]
    firsts = torch.tensor([text[0] for text in texts])
    rows = model.first_input(firsts, torch.zeros_like(firsts))
    assert float(span_distance(rows, joint.first).max()) < 1e-5
    assert float(span_distance(rows, alone).min()) > 0.1

    model, texts, _ = family("llama", 3)
    recovery = Dager()(classify(model, texts), model)
    assert not found(recovery)
    assert recovery.status is Status.PARTIAL
    assert recovery.value.token_set == {token for text in texts for token in text[1:]}


# ---- what it may claim


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("rank", [None, 20])
def test_noise_of_the_same_norm_yields_nothing(name, rank):
    model, texts, attack = family(name, 2)
    evidence = classify(model, texts)
    generator = torch.Generator().manual_seed(5)

    def noise(gradient):
        if gradient.ndim < 2 or rank is None:
            fresh = torch.randn(gradient.shape, generator=generator)
        else:
            left = torch.randn(gradient.shape[0], rank, generator=generator)
            fresh = left @ torch.randn(rank, gradient.shape[1], generator=generator)
        return fresh * (gradient.norm() / fresh.norm())

    noisy = replace(evidence, gradients={key: noise(value) for key, value in evidence.gradients.items()})
    recovery = attack(noisy, model)
    assert recovery.status is (Status.NOT_IDENTIFIABLE if rank is None else Status.NOTHING_FOUND)
    assert not recovery.value.texts
    assert not recovery.certificate.holds


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_another_models_weights_yield_nothing(name):
    model, texts, attack = family(name, 2)
    other, _, _ = family(name, 2, seed=9)
    recovery = attack(classify(model, texts), other)
    assert recovery.status is Status.NOTHING_FOUND
    assert not recovery.value.texts


def test_block_1_of_another_batch_gives_the_bag_of_words_at_most():
    model, texts, attack = family("gpt2", 2)
    evidence, other = classify(model, texts), classify(model, distinct_words(2, (6, 9), seed=3))
    mixed = {**evidence.gradients, "h.1.attn.c_attn.weight": other.gradients["h.1.attn.c_attn.weight"]}
    recovery = attack(replace(evidence, gradients=mixed), model)
    assert not found(recovery)
    assert not recovery.value.certain
    assert recovery.status is Status.PARTIAL
    assert recovery.value.token_set == {token for text in texts for token in text}
    assert recovery.certificate.holds
    assert "block 0" in recovery.certificate.claim


@pytest.mark.parametrize("missing", ["h.0.attn.c_attn", "h.1.attn.c_attn"])
def test_missing_query_gradients_are_named(missing):
    model, texts, attack = family("gpt2", 1)
    evidence = classify(model, texts)
    kept = {name: g for name, g in evidence.gradients.items() if missing not in name}
    recovery = attack(replace(evidence, gradients=kept), model)
    assert recovery.status is Status.MISSING_EVIDENCE
    assert "blocks 0 and 1" in recovery.reason


def test_zero_gradients_yield_nothing():
    model, texts, attack = family("gpt2", 1)
    evidence = classify(model, texts)
    zero = {name: torch.zeros_like(g) for name, g in evidence.gradients.items()}
    recovery = attack(replace(evidence, gradients=zero), model)
    assert recovery.status is Status.NOTHING_FOUND
    assert "zero" in recovery.reason


def test_query_gradients_are_all_that_it_needs():
    model, texts, attack = family("bert", 2)
    recovery = attack(classify(model, texts).only("self.query.weight"), model)
    assert recovery.status is Status.RECOVERED
    assert recovery.used == tuple(f"encoder.layer.{i}.attention.self.query.weight" for i in range(3))


def test_more_tokens_than_the_width_are_not_identifiable():
    model = gpt2()
    texts = distinct_words(8, (14,))
    recovery = GPT2_ATTACK(classify(model, texts), model)
    # GPT-2's rows have mean zero as long as its LayerNorm has no bias, so they fill 95 of 96 dimensions.
    assert recovery.status is Status.NOT_IDENTIFIABLE
    assert "95" in recovery.reason
    assert "cut at 76" in recovery.reason


def test_the_papers_cut_is_tried_where_the_rank_fills_the_width():
    """b̃ = min(b, d − 20): the attack goes on with the strongest directions and does not refuse."""
    model, texts, attack = family("bert", 2)
    evidence = classify(model, texts)
    generator = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(g.shape, generator=generator) for name, g in evidence.gradients.items()}
    noisy = replace(evidence, gradients={name: g + 1e-5 * noise[name] for name, g in evidence.gradients.items()})
    spans = spans_of(attack, noisy, model)
    assert spans.rank == 96
    assert spans.second.shape[1] == 76
    strict, loose = (replace(attack, token_tolerance=tolerance)(noisy, model) for tolerance in (1e-5, 1e-2))
    assert strict.status is Status.NOT_IDENTIFIABLE
    assert loose.value.token_set >= {token for text in texts for token in text}
    assert loose.status is not Status.RECOVERED
    assert not loose.value.certain


def test_a_rank_below_the_width_that_the_cut_spoils_is_not_said_to_fill_it():
    model = gpt2()
    texts = distinct_words(9, (9,))
    evidence = classify(model, texts)
    assert spans_of(GPT2_ATTACK, evidence, model).rank == 81
    at_the_papers_cut = GPT2_ATTACK(evidence, model)
    assert at_the_papers_cut.status is Status.NOTHING_FOUND
    assert "81, was cut at 76" in at_the_papers_cut.reason
    whole = replace(GPT2_ATTACK, rank_margin=5)(evidence, model)
    assert whole.status is Status.RECOVERED, whole.reason
    assert found(whole) == as_set(texts)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_best_effort_returns_the_nearest_where_nothing_passes(name):
    model, texts, attack = family(name, 4)
    evidence = classify(model, texts)
    strict = replace(attack, sequence_tolerance=1e-12)  # below what float32 leaves: every sequence fails
    recovery = strict(evidence, model)
    assert {text.tokens for text in recovery.value.texts} == as_set(texts)
    assert not recovery.value.certain
    assert recovery.status is Status.PARTIAL
    assert "4 more are guesses" in recovery.reason
    assert not replace(strict, best_effort=False)(evidence, model).value.texts


def test_best_effort_fills_up_what_is_missing_and_no_more():
    model, texts, attack = family("gpt2", 3)
    evidence = classify(model, [*texts, texts[0][:2]])  # a prefix of another text is never found
    recovery = attack(evidence, model)
    assert found(recovery) == as_set(texts)
    assert len(guesses(recovery)) == 1
    assert recovery.status is Status.PARTIAL
    assert all(not text.certain for text in recovery.value.texts if text.tokens in guesses(recovery))
    unknown = attack(replace(evidence, num_texts=None), model)
    assert not guesses(unknown)


def test_an_encoder_without_end_tokens_is_not_applicable():
    model, texts, _ = family("bert", 1)
    recovery = Dager()(classify(model, texts), model)
    assert recovery.status is Status.NOT_APPLICABLE
    assert "end_tokens" in recovery.reason


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_the_budget_ends_the_search(name):
    model, texts, attack = family(name, 4)
    recovery = replace(attack, max_products=20)(classify(model, texts), model)
    assert recovery.status is Status.BUDGET_EXHAUSTED
    assert not recovery.value.certain


def test_it_is_deterministic_and_leaves_evidence_model_and_random_state_alone():
    model, texts, attack = family("gpt2", 2)
    evidence = classify(model, texts)
    before = {name: gradient.clone() for name, gradient in evidence.gradients.items()}
    fingerprint, state = model.fingerprint(), torch.random.get_rng_state()
    first, second = attack(evidence, model), attack(evidence, model)
    assert first.value == second.value
    assert first.certificate == second.certificate
    assert all(torch.equal(before[name], gradient) for name, gradient in evidence.gradients.items())
    assert model.fingerprint() == fingerprint
    assert torch.equal(torch.random.get_rng_state(), state)


# ---- parts, against slow and obvious ones


def test_span_distance_is_the_least_squares_residual():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 12, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(12, 4, generator=generator, dtype=torch.float64))[0]
    unit = rows / rows.norm(dim=1, keepdim=True)
    residual = unit.T - basis @ torch.linalg.lstsq(basis, unit.T).solution
    torch.testing.assert_close(span_distance(rows, basis), residual.norm(dim=0))


def test_products_are_those_of_itertools_and_a_sample_where_they_are_too_many():
    choices = [[1], [2, 3, 4], [5, 6], [7, 8]]
    whole = torch.cat(list(_products(choices, 13, 5, torch.Generator())))
    assert [tuple(row) for row in whole.tolist()] == list(itertools.product(*choices))
    sample = torch.cat(list(_products(choices, 10, 4, torch.Generator().manual_seed(0))))
    assert len(sample) == 10
    assert {tuple(row) for row in sample.tolist()} < set(itertools.product(*choices))
    assert not list(_products([[1], []], 10, 4, torch.Generator()))


def spans_of(attack: Dager, evidence: GradientEvidence, model: Model):
    layers = [layer for layer in query_layers(evidence, model) if layer is not None]
    return take_spans(evidence, layers, rank_margin=attack.rank_margin, rank_tolerance=None, seed=attack.seed)
