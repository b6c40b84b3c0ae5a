"""Texts from adapters alone: exact beyond the rank, with duplicates and texts that begin others; else no claim."""

from collections import Counter
from dataclasses import replace
from itertools import product

import torch
from tests.sampling import in_turn, sample

from unmask import recover_text
from unmask.attacks.gradients.lora.attack import LoraAttack, reads_adapters_alone
from unmask.protocols import observe_gradients, observe_lora
from unmask.recovery import Status

EARLIER = [[60, 61, 62, 63], [70, 71, 72]]
FIRST, LONGER, SHARED = (5, 17, 99, 17, 250, 8, 30), (400, 3, 8, 21, 11, 12), (400, 3, 8, 9)
BATCHES = {
    "one text": [FIRST],
    "texts that share a start": [FIRST, LONGER, SHARED],
    "one text twice": [FIRST, LONGER, FIRST],
    "a text that another one begins with": [LONGER, LONGER[:4], FIRST],
    "both": [LONGER, LONGER[:4], FIRST, LONGER[:4], SHARED],
}


def observe(model, texts, **options):
    return observe_lora(model, [list(text) for text in texts], steps=2, earlier_texts=EARLIER, **options)


@sample("batch, rank", product(BATCHES, [4, 8]), in_turn(BATCHES, [4, 8]))
def test_every_text_is_recovered(tiny_llama, batch, rank):
    recovery = recover_text(observe(tiny_llama, BATCHES[batch], rank=rank), tiny_llama)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert Counter(recovery.value.expand()) == Counter(BATCHES[batch])
    assert recovery.certificate.residual < 1e-5
    assert all("lora" in name for name in recovery.used)


MODELS = "tiny_llama", "tiny_qwen2", "tiny_mistral"
TARGETS = (
    ("query", "key", "value"),
    ("query", "key", "value", "attention_out"),
    ("query", "key", "value", "attention_out", "mlp_in", "mlp_gate", "mlp_out"),
    ("value", "mlp_out"),
)


@sample("name, targets", product(MODELS, TARGETS), in_turn(MODELS, TARGETS))
def test_whatever_tells_labels_is_used(name, targets, request):
    model = request.getfixturevalue(name)
    recovery = recover_text(observe(model, [FIRST, SHARED], targets=targets), model)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert Counter(recovery.value.expand()) == Counter([FIRST, SHARED])


def test_without_labels_texts_are_guesses_without_their_last_token(tiny_llama):
    recovery = recover_text(observe(tiny_llama, [FIRST], targets=("value",)), tiny_llama)
    assert recovery.status is Status.PARTIAL
    assert "tells labels" in recovery.reason
    assert not recovery.value.certain
    assert [text.tokens for text in recovery.value.texts] == [FIRST[:-1]]


def test_one_block_alone_gives_tokens(tiny_llama):
    recovery = recover_text(observe(tiny_llama, [FIRST]).only("layers.0."), tiny_llama)
    assert recovery.status is Status.PARTIAL
    assert "later blocks" in recovery.reason
    assert recovery.value.token_set == set(FIRST[:-1])


def test_a_text_of_two_tokens_is_never_wrong(tiny_llama):
    """Queries of a first token move nothing, so its label is not read where only they tell labels."""
    recovery = recover_text(observe(tiny_llama, [FIRST, (7, 9)]), tiny_llama)
    assert all(text.tokens in (FIRST, (7, 9)) for text in recovery.value.certain)
    assert recovery.value.token_set == {*FIRST[:-1], 7}


def test_adapters_without_their_factors_b_give_tokens(tiny_llama):
    evidence = observe(tiny_llama, [FIRST])
    downs = {name: factor for name, factor in evidence.adapters.items() if ".lora_A." in name}
    recovery = recover_text(replace(evidence, adapters=downs), tiny_llama)
    assert recovery.status is Status.PARTIAL
    assert "factors B" in recovery.reason
    assert recovery.value.token_set == set(FIRST[:-1])


def test_classification_gives_tokens(tiny_llama):
    recovery = recover_text(observe(tiny_llama, [FIRST], task="classification"), tiny_llama)
    assert recovery.status is Status.PARTIAL
    assert recovery.value.token_set == set(FIRST)
    assert not recovery.value.certain


@sample("seed", range(3), [0])
def test_gradients_at_other_adapters_prove_nothing(tiny_llama, seed):
    """Negative control: the server believes in adapters that the client did not have."""
    evidence = observe(tiny_llama, [SHARED])
    draw = torch.Generator().manual_seed(seed)
    others = {name: a + 0.1 * a.std() * torch.randn(a.shape, generator=draw) for name, a in evidence.adapters.items()}
    recovery = recover_text(replace(evidence, adapters=others), tiny_llama)
    assert recovery.status is not Status.RECOVERED
    assert not recovery.value.certain


def test_dropout_leaves_nothing_that_is_certain(tiny_llama):
    evidence = observe(tiny_llama, [FIRST, SHARED], dropout=0.1, train_mode=True)
    recovery = recover_text(evidence, tiny_llama)
    assert not recovery.value.certain
    assert recovery.value.token_set <= {*FIRST, *SHARED}


def test_the_model_is_left_as_it_was(tiny_llama):
    before = {name: weights.clone() for name, weights in tiny_llama.named_parameters()}
    LoraAttack()(observe(tiny_llama, [FIRST]), tiny_llama)
    assert all(torch.equal(before[name], weights) for name, weights in tiny_llama.named_parameters())


def test_it_is_the_usual_attack_on_adapters_alone(tiny_llama):
    assert reads_adapters_alone(observe(tiny_llama, [FIRST]), tiny_llama)
    whole = observe_gradients(tiny_llama, [list(FIRST)])
    assert not reads_adapters_alone(whole, tiny_llama)


def test_real_weights(low_smollm2):
    model = low_smollm2
    texts = [tuple(model.encode(text)) for text in ("Room four is free after noon.", "Call Dana about the keys.")]
    earlier = [model.encode("The ferry leaves at six.")]
    evidence = observe_lora(model, [list(text) for text in texts], rank=4, steps=2, earlier_texts=earlier)
    recovery = recover_text(evidence, model)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert Counter(recovery.value.expand()) == Counter(texts)


def test_more_tokens_than_texts_are_read_from_give_the_bag(tiny_llama):
    draw = torch.Generator().manual_seed(0)
    texts = torch.randperm(400, generator=draw)[:36].reshape(4, 9).tolist()
    recovery = recover_text(observe(tiny_llama, texts, rank=16, targets=("query", "key", "value")), tiny_llama)
    assert recovery.status is Status.PARTIAL
    assert "distinct tokens" in recovery.reason
    assert recovery.value.token_set == {token for text in texts for token in text[:-1]}
