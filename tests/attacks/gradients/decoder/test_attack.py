"""Exact texts from a decoder's update, for the nasty things that a real batch holds, and honest where they are not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from tests.sampling import in_turn, sample
from tests.wide_models import as_counter, certain, found, random_texts, wide_model

from unmask.attacks.gradients.decoder.attack import DecoderAttack
from unmask.attacks.gradients.sites import prefix_sites
from unmask.attacks.recover import recover_text
from unmask.defences import secure_aggregate
from unmask.errors import EvidenceError, InputError
from unmask.evidence import AttentionEvidence, GradientEvidence
from unmask.models import Model, adapt
from unmask.protocols import observe_gradients
from unmask.recovery import RecoveredTexts, Recovery, Status

ROTARY = ("tiny_llama", "tiny_qwen2", "tiny_mistral")  # grouped queries; biases and a tied head; wide heads
DECODERS = ("tiny_gpt2", *ROTARY)
WIDE = ("wide_gpt2", "wide_llama")
TASKS = ("next_token", "classification")
SIDES = ("right", "left")

A, B, C = [5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49, 50, 51]
T, U, X = 7, 8, 9


@pytest.fixture
def decoder(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def wide_gpt2() -> Model:
    return wide_model("gpt2", 128)


@pytest.fixture(scope="module")
def wide_llama() -> Model:
    return wide_model("llama", 128)


each_decoder = pytest.mark.parametrize("decoder", DECODERS, indirect=True)
each_rotary = pytest.mark.parametrize("decoder", ROTARY, indirect=True)
each_task = pytest.mark.parametrize("task", TASKS)


def attack(model: Model, texts: Sequence[list[int]], **options: Any) -> Recovery[RecoveredTexts]:
    return recover_text(observe_gradients(model, list(texts), **options), model)


def assert_exact(recovery: Recovery[RecoveredTexts], texts: Sequence[list[int]]) -> None:
    """The whole batch, every text certain, every count right."""
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert found(recovery) == certain(recovery) == as_counter(texts)
    assert recovery.certificate.holds


def assert_nothing_false(recovery: Recovery[RecoveredTexts], texts: Sequence[list[int]]) -> None:
    """Less than the batch may be recovered, but nothing certain is wrong, in its tokens or in its count."""
    assert certain(recovery) <= as_counter(texts), recovery.reason
    if recovery.status is Status.RECOVERED:
        assert found(recovery) == as_counter(texts), recovery.reason


def without(evidence: GradientEvidence, *names: str) -> GradientEvidence:
    kept = {name: g for name, g in evidence.gradients.items() if not any(part in name for part in names)}
    assert len(kept) < len(evidence.gradients)
    return replace(evidence, gradients=kept)


# ---- what a real batch holds


BATCHES = {
    "one text": [A],
    "different lengths": [A, B, C],
    "a text that is a prefix of another": [C, C[:3], B],
    "a chain of prefixes": [C, C[:6], C[:4], C[:2]],
    "a common beginning": [[11, 12, 13, 14], [11, 12, 15, 16], [11, 17, 18, 19]],
    "a prompt with four answers": [[11, 12, 13, 14, last] for last in (21, 22, 23, 24)],
    "the same words in another order": [[11, 12, 13, 14], [14, 13, 12, 11], [12, 14, 11, 13]],
    "repeated tokens": [[5, 17, 5, 17], [8, 9, 9], [21, 22, 22, 21]],
    "a start token that all share": [[1, 17, 99, 17], [1, 3, 8], [1, 17, 45, 46, 47]],
    "a repeated start token": [[1, 1, 99, 17], [1, 3, 8], [1, 17, 45, 46, 47]],
    "the padding token as a word": [[499, 0, 17, 2], [0, 499, 3]],
    "the last tokens of the vocabulary": [[498, 499, 498], [499, 497, 499, 498]],
}


# Every batch on two decoders, with the tasks and the sides in turn; the rest is slow.
WAYS = list(product(TASKS, SIDES))
PAIRS = [
    (decoder, *WAYS[(row + column) % 4], batch)
    for column, batch in enumerate(BATCHES)
    for row, decoder in enumerate(("tiny_gpt2", ROTARY[column % 3]))
]


@sample("decoder, task, side, batch", product(DECODERS, TASKS, SIDES, BATCHES), PAIRS)
def test_a_batch_is_recovered_exactly(decoder, task, side, batch, request):
    decoder, texts = request.getfixturevalue(decoder), BATCHES[batch]
    recovery = attack(decoder, texts, task=task, padding_side=side)
    if task == "next_token" and side == "left":
        # The last padding position predicts a first token and may leave a direction that no text explains.
        assert found(recovery) == certain(recovery) == as_counter(texts)
    else:
        assert_exact(recovery, texts)


@sample("name, side", product(DECODERS, SIDES), in_turn(DECODERS, SIDES))
def test_next_token_training_tells_how_often_a_text_occurs(name, side, request):
    decoder, texts = request.getfixturevalue(name), [A, A, B, A, C, C]
    recovery = attack(decoder, texts, padding_side=side)
    assert found(recovery) == certain(recovery) == as_counter(texts)


@sample("name, num_texts", product(DECODERS, [6, 8, 12]), in_turn(DECODERS, [6, 8, 12]))
def test_a_prompt_with_many_answers_yields_nothing_false(name, num_texts, request):
    decoder = request.getfixturevalue(name)
    texts = [[11, 12, 13, 14, last] for last in range(100, 100 + num_texts)]
    assert_nothing_false(attack(decoder, texts), texts)


@each_decoder
def test_in_classification_a_text_that_occurs_twice_leaves_one_trace(decoder):
    texts = [A, A, B]
    recovery = attack(decoder, texts, task="classification")
    assert recovery.status is Status.PARTIAL
    assert certain(recovery) == as_counter([A, B])
    assert "2 of 3" in recovery.reason


@each_decoder
def test_in_classification_nothing_is_whole_while_the_number_of_texts_is_not_known(decoder):
    """Twice the same text cannot be told from once: the mean loss, and so the gradient, may be the same."""
    texts = [A, A, B]
    evidence = replace(observe_gradients(decoder, texts, task="classification"), num_texts=None)
    assert_nothing_false(recover_text(evidence, decoder), texts)


@each_decoder
def test_a_text_of_one_token_has_nothing_to_predict_and_leaves_no_trace(decoder):
    texts = [[T], A, B]
    recovery = attack(decoder, texts)
    assert recovery.status is Status.PARTIAL
    assert certain(recovery) == as_counter([A, B])


@each_task
def test_one_token_repeated_is_plain_where_positions_are_learned(tiny_gpt2, task):
    texts = [[T] * 6, [U, U], [X, X, X, T]]
    assert_exact(attack(tiny_gpt2, texts, task=task), texts)


def test_texts_of_one_token_are_certain_where_positions_are_learned(tiny_gpt2):
    texts = [[T], [U], C]
    assert_exact(attack(tiny_gpt2, texts, task="classification"), texts)
    alone = attack(tiny_gpt2, [[T], [U]], task="classification")
    assert certain(alone) == as_counter([[T], [U]])


# ---- a rotary model and a text that repeats its first token: 't', 't t', 't t t' … have one row at every layer


@each_rotary
def test_a_text_of_one_token_is_not_certain_in_a_rotary_model(decoder):
    recovery = attack(decoder, [[T], A], task="classification")
    assert recovery.status is Status.PARTIAL
    assert certain(recovery) == as_counter([A])
    assert [text.tokens for text in recovery.value.texts if not text.certain] == [(T,)]


REPEATED = [[[T], [U]], [[T, T], [U]], [[T, T, T], [U, U]]]


@sample("name, texts", product(ROTARY, REPEATED), list(zip(ROTARY, REPEATED, strict=True)))
def test_texts_of_one_repeated_token_are_never_certain_in_classification(name, texts, request):
    decoder = request.getfixturevalue(name)
    assert not attack(decoder, texts, task="classification").value.certain


@each_task
@each_rotary
def test_a_repeated_first_token_is_counted_by_what_follows(decoder, task):
    texts = [[T, T, T, X, 10], A]
    assert_exact(attack(decoder, texts, task=task), texts)


@each_rotary
def test_a_text_that_is_one_token_twice_is_read_from_its_label(decoder):
    texts = [[T, T], A]
    recovery = attack(decoder, texts)
    assert found(recovery) == as_counter(texts)
    assert_nothing_false(recovery, texts)


REPETITIONS = {
    "three times": [[T, T, T], A],
    "four times": [[T, T, T, T], A],
    "three times, alone": [[T, T, T]],
    "nine times, alone": [[T] * 9],
    "twice, twice": [[T, T], [T, T]],
    "twice, and as a beginning": [[T, T], [T, T, T, X]],
    "two continuations": [[T, T, U], [T, T, X]],
    "different depths": [[T, T, T, X, 10], [T, X, 11]],
    "a label that could stand at any depth": [[T, U], [T, T, X, 10]],
    "longer than the search is patient": [[T] * 12 + [X, 10], A],
    "twice, thrice": [[T, T], [T, T, T], A],
}


REPETITION_WAYS = list(product(ROTARY, TASKS))


@sample("batch, way", product(REPETITIONS, REPETITION_WAYS), in_turn(REPETITIONS, REPETITION_WAYS, times=2))
def test_where_repetitions_are_ambiguous_nothing_certain_is_false(batch, way, request):
    decoder, texts = request.getfixturevalue(way[0]), REPETITIONS[batch]
    assert_nothing_false(attack(decoder, texts, task=way[1]), texts)


@each_rotary
def test_mean_pooling_does_not_make_a_repetition_certain(decoder):
    texts = [[T, T, T], [U, X]]
    assert_nothing_false(attack(decoder, texts, task="classification", pooling="mean"), texts)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_word_said_fifteen_times(family):
    """Rows of the output projection that mix two words fill one dimension a head and one more; then all pass there.

    Learned positions tell the words apart; without them the early layers do not, and nothing is claimed.
    """
    model = wide_model(family, 128)
    texts = [[T, *[U] * 15, X], [11, 12, 13]]
    recovery = attack(model, texts)
    assert_nothing_false(recovery, texts)
    if model.learned_positions:
        assert found(recovery) == as_counter(texts), recovery.reason
    else:
        assert recovery.status is Status.PARTIAL


# ---- sizes


@sample("family, num_texts", product(WIDE, [1, 2, 3, 5, 8, 12, 16, 20, 24]), list(product(WIDE, [1, 5, 24])))
def test_one_to_twenty_four_texts(family, num_texts, request):
    model = request.getfixturevalue(family)
    rng = random.Random(num_texts)
    texts = [[rng.randrange(model.vocab_size) for _ in range(rng.randint(2, 6))] for _ in range(num_texts)]
    texts = [text for text in texts if text[0] != text[1]]
    assert_exact(attack(model, texts), texts)


@sample("family, task", product(["gpt2", "llama"], TASKS), [("gpt2", "next_token")])
def test_a_long_text(family, task):
    rng = random.Random(0)
    model = wide_model(family, 192)
    texts = [[rng.randrange(model.vocab_size) for _ in range(130)], [3, 4, 5, 6]]
    assert_exact(attack(model, texts, task=task), texts)


def test_a_text_that_fills_every_position(tiny_gpt2, wide_gpt2):
    rng = random.Random(1)
    texts = [[rng.randrange(500) for _ in range(60)]]
    # 59 prefixes and a width of 64: no room for the padding of a second text.
    assert_nothing_false(attack(tiny_gpt2, texts), texts)
    model = wide_model("gpt2", 128, length=64)
    texts = [[rng.randrange(model.vocab_size) for _ in range(64)]]
    assert_exact(attack(model, texts), texts)


@pytest.mark.slow
@sample("task", TASKS, ["next_token"])
def test_the_width_of_gpt2(task):
    model = wide_model("gpt2", 768, vocab=5000, num_heads=12, length=64)
    texts = random_texts(random.Random(2), 200, 5000)
    assert_exact(attack(model, texts, task=task), texts)


# Drawn as Zipf's law has it: common words stand at many positions, so that sums of token and position nearly collide.
COMMON_WORDS = [
    [1513, 467, 66, 63, 647, 33, 22, 15, 9, 3, 137, 25, 78, 3, 16, 4, 4, 9, 546, 22, 23, 107, 7],
    [5, 13],
    [1092, 1176, 130, 7, 12, 187, 1437, 227, 14, 106, 255, 145, 1620, 7, 1102, 332, 136, 18, 50, 414, 6, 11],
    [635, 18, 208, 271, 93, 671, 912, 1476, 78, 5, 8],
    [1284, 239, 383, 45, 21, 128, 20, 619],
    [258, 3, 1733, 466, 120, 9, 1031, 1469, 4, 365, 602, 152, 206, 31, 1125, 1606, 20, 447, 28],
    [1010, 29, 115, 42, 7, 28, 59],
    [153, 10, 19, 72, 1473],
]


@pytest.mark.parametrize("family", WIDE)
def test_words_that_return_at_many_positions(family, request):
    """97 tokens at a width of 128."""
    assert_exact(attack(request.getfixturevalue(family), COMMON_WORDS), COMMON_WORDS)


def run_random_batches(num_batches: int, seed: int) -> list[str]:
    """Batches of every size below 0.9·d, with the task and the padding drawn too; what was not exact."""
    rng = random.Random(seed)
    kinds, wide = list(product(("gpt2", "llama"), (128, 192))), cache(wide_model)
    faults = []
    for number in range(num_batches):
        model, task = wide(*rng.choice(kinds)), rng.choice(TASKS)
        # Left padding predicts in next-token training, see test_a_batch_is_recovered_exactly.
        side = rng.choice(SIDES) if task == "classification" else "right"
        texts = random_texts(rng, rng.uniform(0.05, 0.9) * model.width, model.vocab_size)
        if not texts:
            continue
        unique = [list(text) for text in as_counter(texts)]  # of classification, twice is as once
        recovery = attack(model, unique, task=task, padding_side=side)
        if recovery.status is not Status.RECOVERED or certain(recovery) != as_counter(unique):
            what = f"{model.family} {model.width}, {task}, {side}, {len(unique)} texts, {sum(map(len, unique))} tokens"
            faults.append(f"batch {number}: {what}: {recovery.status.name}, {recovery.reason}")
    return faults


def test_three_random_batches_are_all_exact():
    assert not run_random_batches(3, seed=0)


@pytest.mark.slow
def test_a_hundred_random_batches_are_all_exact():
    assert not run_random_batches(100, seed=1)


# ---- partial updates


def names_of(model: Model, *parts: str) -> list[str]:
    """Names of block 0's parameters: 'qkv' the inputs of attention, 'out' its output projection."""
    llama = {"qkv": ["layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj"]}
    llama["out"] = ["layers.0.self_attn.o_proj"]
    gpt2 = {"qkv": ["h.0.attn.c_attn"], "out": ["h.0.attn.c_proj"]}
    table = gpt2 if model.family == "gpt2" else llama
    return [f"{name}.weight" for part in parts for name in table[part]]


@each_decoder
def test_with_block_0_alone_last_tokens_are_missing(decoder):
    texts = [A, B, C]
    evidence = observe_gradients(decoder, texts).only(*names_of(decoder, "qkv", "out"))
    recovery = recover_text(evidence, decoder)
    assert recovery.status is Status.PARTIAL
    assert "last tokens are missing" in recovery.reason
    assert found(recovery) == as_counter([text[:-1] for text in texts])
    assert not recovery.value.certain
    assert set(recovery.used) == set(evidence.gradients)


@each_decoder
def test_with_block_0_alone_a_classified_text_is_whole_unless_it_ends_inside_another(decoder):
    evidence = observe_gradients(decoder, [A, A[:3], B], task="classification")
    recovery = recover_text(evidence.only(*names_of(decoder, "qkv", "out")), decoder)
    assert recovery.status is Status.PARTIAL
    assert certain(recovery) == as_counter([A, B])
    assert "ends inside longer texts cannot be seen" in recovery.reason


def assert_checked_at(name: str, evidence: GradientEvidence, model: Model, recovery: Recovery[RecoveredTexts]) -> None:
    """Prefixes were tested at this layer, whose gradient stands before those that only the replay needs."""
    site = next(iter(prefix_sites(evidence, model)))
    assert site.name == name
    assert set(site.parameters) <= set(recovery.used[:6])  # behind three that tell the tokens


@sample("name, task", product(DECODERS, TASKS), in_turn(DECODERS, TASKS))
def test_without_the_output_projection_the_mlp_input_checks(name, task, request):
    decoder, texts = request.getfixturevalue(name), [A, B, C]
    evidence = without(observe_gradients(decoder, texts, task=task), *names_of(decoder, "out"))
    recovery = recover_text(evidence, decoder)
    assert_exact(recovery, texts)
    assert_checked_at("MLP input of block 0", evidence, decoder, recovery)


@sample("name, task", product(DECODERS, TASKS), in_turn(DECODERS, TASKS))
def test_without_block_0_but_its_tokens_block_1_checks(name, task, request):
    decoder, texts = request.getfixturevalue(name), [A, B, C]
    evidence = observe_gradients(decoder, texts, task=task)
    prefix = "h.0." if decoder.family == "gpt2" else "layers.0."
    kept = {name: g for name, g in evidence.gradients.items() if prefix not in name}
    kept |= {name: evidence.gradients[name] for name in names_of(decoder, "qkv")}
    evidence = replace(evidence, gradients=kept)
    recovery = recover_text(evidence, decoder)
    assert_exact(recovery, texts)
    assert_checked_at("attention input of block 1", evidence, decoder, recovery)


@each_decoder
def test_without_queries_keys_and_values_the_embedding_tells_the_tokens(decoder):
    texts = [A, B, C]
    evidence = without(observe_gradients(decoder, texts, task="classification"), *names_of(decoder, "qkv"))
    recovery = recover_text(evidence, decoder)
    assert_exact(recovery, texts)
    assert decoder.token_embedding in recovery.used


@each_decoder
def test_queries_keys_and_values_alone_give_the_bag_of_words(decoder):
    texts = [A, B, C]
    evidence = observe_gradients(decoder, texts).only(*names_of(decoder, "qkv"))
    recovery = recover_text(evidence, decoder)
    assert recovery.status is Status.PARTIAL
    assert not recovery.value.texts
    assert recovery.value.token_set == {token for text in texts for token in text[:-1]}
    assert "order" in recovery.reason


@each_task
@each_decoder
def test_an_update_with_nothing_useful_says_what_is_missing(decoder, task):
    evidence = observe_gradients(decoder, [A, B], task=task).only("norm", "ln_")
    recovery = recover_text(evidence, decoder)
    assert recovery.status is Status.MISSING_EVIDENCE
    assert decoder.token_embedding in recovery.reason
    assert not recovery.value.token_set
    assert not recovery.certificate.holds


def test_a_tied_embedding_tells_no_text_in_next_token_training(tiny_gpt2, tiny_qwen2, tiny_llama):
    """The output layer moves every row; only the untied embedding of Llama shows all tokens.

    The final states of this GPT-2 share a direction, the shift of its final norm, so that some labels are seen.
    """
    for model, tied in ((tiny_gpt2, True), (tiny_qwen2, True), (tiny_llama, False)):
        texts = [A, B, C]
        recovery = attack(model, texts)
        assert_exact(recovery, texts)
        assert (model.token_embedding == recovery.used[0]) is not tied  # what the bag rests on comes first
        blind = recover_text(without(observe_gradients(model, texts), *names_of(model, "qkv")), model)
        some = Status.PARTIAL if model is tiny_gpt2 else Status.MISSING_EVIDENCE
        assert blind.status is (some if tied else Status.RECOVERED)
        assert blind.value.token_set <= {token for text in texts for token in text}


@each_decoder
def test_zero_gradients_yield_nothing(decoder):
    evidence = observe_gradients(decoder, [A, B])
    zero = {name: torch.zeros_like(gradient) for name, gradient in evidence.gradients.items()}
    recovery = recover_text(replace(evidence, gradients=zero), decoder)
    assert recovery.status in (Status.NOTHING_FOUND, Status.MISSING_EVIDENCE)
    assert not recovery.value.token_set


# ---- more tokens than the width


@sample("name, task", product(DECODERS, TASKS), [("tiny_gpt2", TASKS[0]), *product(DECODERS[1:], TASKS[1:])])
def test_a_saturated_span_gives_no_false_certainty(name, task, request):
    decoder, rng = request.getfixturevalue(name), random.Random(4)
    texts = [[rng.randrange(3, 500) for _ in range(12)] for _ in range(8)]  # 96 tokens, width 64
    recovery = attack(decoder, texts, task=task)
    assert_nothing_false(recovery, texts)


@sample(
    "name, task",
    product(DECODERS, TASKS),
    [*((name, "classification") for name in DECODERS[:3]), ("tiny_gpt2", "next_token")],
)
def test_a_span_with_one_free_direction_gives_no_false_certainty(name, task, request):
    """The hardest case for a rank test: 63 rows in 64 dimensions."""
    decoder, rng = request.getfixturevalue(name), random.Random(5)
    num_tokens = decoder.width - 1 + (task == "next_token")
    texts = [[rng.randrange(3, 500) for _ in range(num_tokens // 2)] for _ in range(2)]
    assert_nothing_false(attack(decoder, texts, task=task), texts)


# ---- precisions


@sample(
    "family, task, seed",
    product(WIDE, TASKS, range(6, 9)),
    [("wide_gpt2", "classification", 6)],
)
def test_a_client_in_bfloat16_gives_its_words_and_no_false_text(family, task, seed, request):
    model = request.getfixturevalue(family)
    texts = random_texts(random.Random(seed), 30, model.vocab_size, longest=9)
    evidence = observe_gradients(model.to(dtype=torch.bfloat16), texts, task=task)
    assert evidence.compute_dtype is torch.bfloat16
    recovery = recover_text(evidence, model)
    assert_nothing_false(recovery, texts)
    seen = {token for text in texts for token in (text[:-1] if task == "next_token" else text)}
    everything = {token for text in texts for token in text}
    if recovery.status.conclusive:
        words = recovery.value.token_set
        # bfloat16 keeps 8 bits: a word whose gradient is 2⁻⁸ of the largest may drown, one in twenty at most.
        assert len(words & everything) >= 0.95 * len(words)
        assert len(words & seen) >= 0.95 * len(seen)


@sample("family, task", product(WIDE, TASKS), [("wide_gpt2", "next_token"), ("wide_llama", "classification")])
def test_a_client_in_float64(family, task, request):
    model = request.getfixturevalue(family)
    texts = random_texts(random.Random(7), 90, model.vocab_size)
    evidence = observe_gradients(model.to(dtype=torch.float64), texts, task=task)
    assert_exact(recover_text(evidence, model), texts)


def test_gradients_that_were_rounded_on_the_way_yield_nothing_false(wide_gpt2):
    """Quantised for the transport: the client ran in float32, its update arrives in 16 bits."""
    texts = random_texts(random.Random(8), 20, wide_gpt2.vocab_size, longest=9)
    evidence = observe_gradients(wide_gpt2, texts)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = {name: g.to(dtype).float() for name, g in evidence.gradients.items()}
        assert_nothing_false(recover_text(replace(evidence, gradients=rounded), wide_gpt2), texts)


# ---- callers' mistakes


def test_nan_is_refused_before_any_attack(tiny_gpt2):
    evidence = observe_gradients(tiny_gpt2, [A])
    broken = dict(evidence.gradients)
    broken["h.1.ln_1.weight"] = torch.full((64,), float("nan"))
    with pytest.raises(EvidenceError, match=r"h\.1\.ln_1\.weight.*64 of 64"):
        replace(evidence, gradients=broken)


def test_evidence_of_another_model_is_refused(tiny_gpt2, tiny_llama):
    evidence = observe_gradients(tiny_gpt2, [A])
    with pytest.raises(EvidenceError, match="fingerprint"):
        recover_text(evidence, tiny_llama)
    other = tiny_gpt2.to()
    with torch.no_grad():
        other.parameter("wte.weight").add_(0.1)
    with pytest.raises(EvidenceError, match="fingerprint"):
        recover_text(evidence, other)


def test_one_attention_layer_is_refused_by_name(tiny_gpt2):
    layer = AttentionEvidence(W=torch.eye(4), V=torch.eye(4), output=torch.ones(3, 4))
    with pytest.raises(InputError, match=r"AttentionEvidence.*recover_inputs"):
        recover_text(layer, tiny_gpt2)  # type: ignore[arg-type]


def test_a_body_without_a_language_head_is_attacked_too(tiny_gpt2):
    """Evidence of a classifier, and the bare transformer as the adversary's model."""
    texts = [A, B, C]
    evidence = observe_gradients(tiny_gpt2, texts, task="classification")
    assert_exact(recover_text(evidence, adapt(tiny_gpt2.hf.transformer)), texts)


@sample("name", DECODERS, ["tiny_gpt2", "tiny_llama"])
def test_an_unknown_task_yields_nothing_false(name, request):
    decoder, texts = request.getfixturevalue(name), [A, B, C]
    for task in TASKS:
        evidence = replace(observe_gradients(decoder, texts, task=task), task=None)
        recovery = recover_text(evidence, decoder)
        assert_nothing_false(recovery, texts)
        # `expanded` writes each text as often as it is said to occur.
        assert sum(text.count for text in recovery.value.texts) < 1000


# ---- settings


def test_a_small_memory_budget_changes_nothing_but_the_chunks(wide_llama):
    texts = random_texts(random.Random(9), 60, wide_llama.vocab_size)
    evidence = observe_gradients(wide_llama, texts)
    small, large = (DecoderAttack(memory_budget_bytes=size)(evidence, wide_llama) for size in (2**16, 2**30))
    assert found(small) == found(large) == as_counter(texts)
    assert small.status is large.status


@pytest.mark.parametrize("num_probes", [4, 16, 64])
@pytest.mark.parametrize("seed", [0, 1])
def test_probes_and_seeds_do_not_change_what_is_found(tiny_llama, num_probes, seed):
    texts = [A, B, C]
    assert_exact(
        DecoderAttack(num_probes=num_probes, seed=seed)(observe_gradients(tiny_llama, texts), tiny_llama), texts
    )


def test_a_gap_that_nobody_reaches_makes_nothing_certain(tiny_llama):
    texts = [A, B]
    recovery = DecoderAttack(min_gap_decades=20.0)(observe_gradients(tiny_llama, texts), tiny_llama)
    assert not recovery.value.certain
    assert recovery.status is not Status.RECOVERED


def test_progress_is_reported_in_words(tiny_gpt2):
    stages: list[str] = []
    DecoderAttack()(observe_gradients(tiny_gpt2, [A]), tiny_gpt2, lambda stage, done, total: stages.append(stage))
    assert stages[0] == "reading the bag of words"
    assert "growing prefixes" in stages
    assert stages[-2:] == ["reading endings", "running the client again"]


# ---- an update that contradicts itself


def test_a_later_block_of_another_batch_confirms_nothing(tiny_llama):
    """Block 0 says one thing and block 1 another: nothing is certain any more."""
    evidence = observe_gradients(tiny_llama, [[11, 12, 13, 14], [21, 22, 23]])
    other = observe_gradients(tiny_llama, [[31, 32, 33, 34], [41, 42, 43]])
    swapped = {
        name: other.gradients[name] if "layers.1.self_attn" in name else g for name, g in evidence.gradients.items()
    }
    recovery = recover_text(replace(evidence, gradients=swapped), tiny_llama)
    assert recovery.status is not Status.RECOVERED
    assert not recovery.value.certain


def test_a_sum_of_clients_of_different_size_repeats_nothing(tiny_llama):
    """Each client's loss is a mean over its own tokens: weights of 3 to 4 are no repetitions."""
    clients = [[[5, 17, 99, 3]], [[400, 8, 44, 250, 21]]]
    total = secure_aggregate([observe_gradients(tiny_llama, texts) for texts in clients])
    recovery = DecoderAttack()(total, tiny_llama)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert {(text.tokens, text.count) for text in recovery.value.certain} == {
        (tuple(text), 1) for texts in clients for text in texts
    }


def test_a_replayed_client_needs_no_check_of_the_models_parts(tiny_llama, monkeypatch):
    def fails(length: int) -> str:
        return f"texts of {length} tokens differ"

    monkeypatch.setattr(tiny_llama, "problem_at", fails)
    evidence = observe_gradients(tiny_llama, [A, B, C])
    assert DecoderAttack()(evidence, tiny_llama).status is Status.RECOVERED
    classified = DecoderAttack()(observe_gradients(tiny_llama, [A, B, C], task="classification"), tiny_llama)
    assert classified.status is Status.PARTIAL
    assert not classified.value.certain
    assert "tokens differ" in classified.reason
