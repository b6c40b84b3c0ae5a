"""Tokens by the direction of a tied embedding's rows: most of them under every optimiser, none where there are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from tests.tiny_models import VOCAB, WIDTH, bert_config, gpt2_config, llama_sizes, random_model, word_tokenizer
from torch import Tensor
from torch.nn.functional import normalize

from unmask import recover_text
from unmask.attacks.gradients.bag_of_words.attack import BagOfWordsAttack
from unmask.attacks.gradients.bag_of_words.candidates import find_candidates
from unmask.attacks.gradients.bag_of_words.tied_rows import (
    EmbeddingRows,
    OwnTexts,
    SharedDirection,
    TiedTokens,
    find_shared_direction,
    find_tied_tokens,
    is_tied,
    judge_rows,
    read_rows,
    write_own_texts,
)
from unmask.defences import parse_defence, secure_aggregate
from unmask.evidence import GradientEvidence
from unmask.models import Model, adapt
from unmask.protocols import observe_fedavg, observe_gradients
from unmask.recovery import Status

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49]]
WORDS = {token for text in TEXTS for token in text}
LABELS = {token for text in TEXTS for token in text[1:]}
SENTENCES = ["The biopsy was positive.", "Please wire 48,200 euros before Friday noon.", "She lives in Graz now."]


@pytest.fixture(scope="module")
def shifted() -> Model:
    """A tied GPT-2 whose final states share a direction, as those of trained models do: the final norm's shift."""
    hf = random_model(transformers.GPT2LMHeadModel, gpt2_config())
    with torch.no_grad():
        hf.transformer.ln_f.bias += 2 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    return adapt(hf)


@pytest.fixture(scope="module")
def shared(shifted: Model) -> dict[bool, SharedDirection]:
    """The direction of the states, and that of their signs."""
    own = write_own_texts(shifted, torch.Generator().manual_seed(0))
    found = {is_adaptive: find_shared_direction(own, is_adaptive) for is_adaptive in (False, True)}
    assert found[False] is not None
    assert found[True] is not None
    return found


def find(evidence: GradientEvidence, model: Model) -> TiedTokens:
    return find_tied_tokens(evidence, model)


def tokens(found: TiedTokens) -> set[int]:
    return set(found.tokens.tolist())


# The identity


def test_rows_of_absent_tokens_are_combinations_of_final_states_with_weights_of_no_less_than_zero(shifted):
    """And those of labels have minus one more: against the output layer's gradient in closed form."""
    evidence = observe_gradients(shifted, TEXTS[:1])
    text = torch.tensor(TEXTS[:1])
    with torch.no_grad():
        stream = shifted.hidden_states(text)[-1][0, :-1]
        head = shifted.token_head
        assert head is not None
        weights = head.logits(stream).softmax(-1)
        weights[range(len(stream)), text[0, 1:]] -= 1
        rows = weights.T @ head.features(stream) / len(stream)
    absent = torch.tensor(sorted(set(range(VOCAB)) - set(TEXTS[0])))
    # Float32's rounding of sums over 64 entries.
    assert torch.allclose(evidence.gradients[shifted.token_embedding][absent], rows[absent], atol=1e-6)


# What is found


@pytest.mark.parametrize(
    "defence",
    ["noise:sigma=0", "noise:sigma=1e-2", "laplace:sigma=1e-2", "int8", "bf16", "topk:share=0.1", "clip:norm=0.1"],
)
def test_labels_of_one_gradient(shifted, defence):
    sent = parse_defence(defence)(observe_gradients(shifted, TEXTS), torch.Generator().manual_seed(0))
    found = find(sent, shifted)
    assert tokens(found) <= WORDS, found.reason
    assert len(tokens(found)) >= 0.7 * len(LABELS), found.reason
    assert 0 < found.expected_false <= 0.01


def test_noise_that_the_protocol_states_is_used(shifted):
    sent = parse_defence("noise:sigma=1e-2")(observe_gradients(shifted, TEXTS), torch.Generator().manual_seed(0))
    stated, unknown = find(replace(sent, noise_std=1e-2), shifted), find(sent, shifted)
    assert tokens(unknown) <= tokens(stated) <= WORDS
    understated = find(replace(sent, noise_std=1e-4), shifted)
    assert tokens(understated) == tokens(unknown)


@pytest.mark.parametrize(
    ("optimizer", "learning_rate", "num_steps", "weight_decay"),
    [("sgd", 1e-2, 1, 0.1), ("sgd", 1e-2, 4, 0.0), ("adamw", 5e-5, 1, 0.0), ("adamw", 5e-5, 4, 0.1)],
)
def test_labels_of_weight_deltas(shifted, optimizer, learning_rate, num_steps, weight_decay):
    evidence = observe_fedavg(
        shifted,
        TEXTS,
        optimizer=optimizer,
        learning_rate=learning_rate,
        local_steps=num_steps,
        weight_decay=weight_decay,
    )
    found = find(evidence, shifted)
    assert tokens(found) <= WORDS, found.reason
    assert len(tokens(found)) >= 0.7 * len(LABELS), found.reason
    blind = replace(evidence, weight_decay=None, learning_rate=None, optimizer=None, num_steps=None)
    assert tokens(find(blind, shifted)) <= WORDS


def test_sums_of_clients(shifted):
    found = find(secure_aggregate([observe_gradients(shifted, [text]) for text in TEXTS]), shifted)
    assert tokens(found) <= WORDS
    assert len(tokens(found)) >= 0.7 * len(LABELS)


def test_padding_is_the_only_other_token_that_has_labels(shifted):
    """A client that pads on the left and forgets to mask: every text begins with labels of padding."""
    pad = VOCAB - 1
    longest = max(map(len, TEXTS))
    padded = [[pad] * (longest - len(text)) + text for text in TEXTS]
    found = find(observe_gradients(shifted, padded), shifted)
    assert tokens(found) <= WORDS | {pad}
    assert tokens(find(observe_gradients(shifted, TEXTS, padding_side="left"), shifted)) <= WORDS | {pad}


# The direction


def test_random_states_share_no_direction(tiny_gpt2, tiny_qwen2):
    """Fewer states than dimensions always have one; that of other texts is another."""
    for shape in ((8, 64, WIDTH), (8, 16, 2048)):
        states = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        assert find_shared_direction(OwnTexts(states, torch.ones(*shape[:2], 1)), is_adaptive=False) is None
    encoder = adapt(random_model(transformers.BertForMaskedLM, bert_config()), word_tokenizer())
    for model, task in ((tiny_gpt2, "next_token"), (tiny_qwen2, "next_token"), (encoder, "masked_token")):
        found = find(observe_gradients(model, TEXTS, task=task), model)
        assert tokens(found) <= WORDS | {model.pad_token, model.mask_token}


def test_the_direction_has_a_part_of_every_state(shifted, shared):
    own = write_own_texts(shifted, torch.Generator().manual_seed(5))
    assert bool((own.states @ shared[False].vector > 0).all())


def test_the_limit_is_the_lowest_row_of_a_token_that_is_no_label(shifted):
    """Rows of texts that the direction was not made of, as an adaptive optimiser leaves them."""
    own = write_own_texts(shifted, torch.Generator().manual_seed(0))
    for is_adaptive in (False, True):
        found = find_shared_direction(own, is_adaptive)
        assert found is not None
        assert -1 < found.lowest_cosine <= 0
    text = own.states[1]
    rows = torch.einsum("nv,nd->vd", own.chances[1].double(), text) / len(text)
    torch.testing.assert_close(own.absent_rows(1).double(), rows, rtol=1e-4, atol=1e-7)


def test_models_that_scale_embeddings_and_bound_logits_give_no_false_token():
    sizes = llama_sizes(head_dim=16, query_pre_attn_scalar=16, tie_word_embeddings=True)
    model = adapt(random_model(transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**sizes)))
    for optimizer in ("sgd", "adamw"):
        evidence = observe_fedavg(model, TEXTS, optimizer=optimizer)
        assert tokens(find(evidence, model)) <= WORDS | {model.pad_token}


def test_an_output_layer_of_its_own_and_missing_rows_are_left_alone(tiny_llama, shifted):
    assert not is_tied(tiny_llama)
    assert is_tied(shifted)
    assert not tokens(find(observe_gradients(tiny_llama, TEXTS), tiny_llama))
    assert not tokens(find(observe_gradients(shifted, TEXTS).only("attn"), shifted))
    classified = replace(observe_gradients(shifted, TEXTS, task="classification"), task=None)
    assert not tokens(find(classified, shifted))


# Negative controls


def draw_noise(generator: torch.Generator, rows: Tensor) -> Tensor:
    return torch.randn(rows.shape, generator=generator, dtype=rows.dtype)


def draw_signs(generator: torch.Generator, rows: Tensor) -> Tensor:
    return draw_noise(generator, rows).sign()


def shuffle_columns(generator: torch.Generator, rows: Tensor) -> Tensor:
    return rows[:, torch.randperm(rows.shape[1], generator=generator)]


def turn_columns(generator: torch.Generator, rows: Tensor) -> Tensor:
    """As an update of other weights, whose states lie elsewhere."""
    turn, _ = torch.linalg.qr(torch.randn(rows.shape[1], rows.shape[1], generator=generator, dtype=rows.dtype))
    return rows @ turn


@pytest.mark.parametrize("num_draws", [50, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("destroy", [draw_noise, draw_signs, shuffle_columns, turn_columns])
def test_destroyed_updates_claim_nothing(
    shifted, shared, destroy: Callable[[torch.Generator, Tensor], Tensor], is_adaptive, num_draws
):
    evidence = observe_fedavg(shifted, TEXTS, optimizer="adamw" if is_adaptive else "sgd")
    rows = read_rows(evidence, shifted)
    assert len(judge_rows(rows, shared[is_adaptive], is_adaptive).tokens)  # before it is destroyed
    generator = torch.Generator().manual_seed(0)
    claimed = 0
    for _ in range(num_draws):
        fake = EmbeddingRows(destroy(generator, rows.values), rows.variance, rows.decay, is_noise_stated=False)
        claimed += len(judge_rows(fake, shared[is_adaptive], is_adaptive).tokens)
    assert claimed == 0


def test_a_narrow_embedding_of_few_rows_needs_more_than_a_fixed_cosine():
    """Of 100 random rows of width 96, two are below a cosine of −0.2 by chance."""
    generator = torch.Generator().manual_seed(0)
    shared = SharedDirection(normalize(torch.randn(96, generator=generator, dtype=torch.double), dim=0), 0.3, 0.0)
    values = torch.randn(1000, 100, 96, generator=generator, dtype=torch.double)
    rows = [EmbeddingRows(v, torch.full_like(v, 1e-12), torch.zeros_like(v[:1]), is_noise_stated=False) for v in values]
    assert sum(bool(len(judge_rows(r, shared, is_adaptive=True).tokens)) for r in rows) <= 15  # 10 = 1000 × 0.01


def test_an_update_of_other_weights_claims_nothing(shifted):
    hf = random_model(transformers.GPT2LMHeadModel, gpt2_config(), seed=7)
    with torch.no_grad():
        hf.transformer.ln_f.bias += 2 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(8))
    other = observe_gradients(adapt(hf), TEXTS)
    assert not tokens(find(replace(other, model_fingerprint=shifted.fingerprint()), shifted))


# The bag of words


def test_the_bag_joins_rows_and_span(shifted):
    sent = parse_defence("noise:sigma=0.05,relative=true")(
        observe_gradients(shifted, TEXTS), torch.Generator().manual_seed(0)
    )
    bag = find_candidates(sent, shifted, 32, 1.0, torch.Generator().manual_seed(0))
    assert bag.candidates is not None, bag.reason
    assert tokens(find(sent, shifted)) <= bag.candidates.tokens <= WORDS
    assert shifted.token_embedding in bag.used
    assert bag.expected_false is not None
    assert 0.01 <= bag.expected_false <= 0.52


def test_exact_candidates_stay_as_they_are(shifted):
    bag = find_candidates(observe_gradients(shifted, TEXTS), shifted, 32, 1.0, torch.Generator().manual_seed(0))
    assert bag.expected_false is None
    assert shifted.token_embedding not in bag.used


def test_an_adaptive_optimiser_leaves_tokens(shifted):
    recovery = BagOfWordsAttack()(observe_fedavg(shifted, TEXTS, optimizer="adamw"), shifted)
    assert recovery.status is Status.PARTIAL
    assert recovery.used == (shifted.token_embedding,)
    assert recovery.value.token_set <= WORDS
    assert len(recovery.value.token_set) >= 0.7 * len(LABELS)
    assert not recovery.value.certain


# Real weights


@pytest.fixture(scope="module")
def sent_words(smollm2: Model) -> set[int]:
    return {token for text in SENTENCES for token in smollm2.encode(text)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"optimizer": "adamw", "weight_decay": 0.01}, 0.8),
        ({"optimizer": "adamw", "local_steps": 4}, 0.8),
        ({"optimizer": "sgd", "local_steps": 4, "learning_rate": 1e-3}, 0.8),
    ],
)
def test_weight_deltas_of_real_weights(smollm2, sent_words, options, least):
    found = find(observe_fedavg(smollm2, SENTENCES, parameters=["embed_tokens"], **options), smollm2)
    assert tokens(found) <= sent_words
    assert len(tokens(found)) >= least * len(sent_words)


@pytest.mark.slow
def test_a_noisy_gradient_of_real_weights(smollm2, sent_words):
    evidence = observe_gradients(smollm2, SENTENCES, parameters=["embed_tokens"])
    for defence, least in (("noise:sigma=1e-2", 0.7), ("int8", 0.7), ("noise:sigma=10", 0)):
        found = find(parse_defence(defence)(evidence, torch.Generator().manual_seed(0)), smollm2)
        assert tokens(found) <= sent_words
        assert len(tokens(found)) >= least * len(sent_words)
        assert bool(tokens(found)) == (least > 0)


@pytest.mark.slow
def test_the_whole_attack_names_tokens_of_an_adamw_client(smollm2, sent_words):
    recovery = recover_text(observe_fedavg(smollm2, SENTENCES, optimizer="adamw"), smollm2)
    assert recovery.status is Status.PARTIAL
    assert recovery.value.token_set <= sent_words
    assert len(recovery.value.token_set) >= 0.8 * len(sent_words)
    assert not recovery.value.certain
