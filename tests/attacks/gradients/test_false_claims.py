"""What used to be claimed falsely: a certain text that is not in the batch, or a whole that is not the whole."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from tests.models.families import build
from tests.sampling import sample
from tests.tiny_models import bert_config, gpt2_config, llama_sizes, random_model, word_tokenizer
from tests.wide_models import as_counter, certain, found, wide_model
from torch import Tensor
from torch.nn import functional

from unmask.attacks.recover import recover_text
from unmask.defences import keep_largest, secure_aggregate
from unmask.evidence import GradientEvidence
from unmask.models import Model, adapt
from unmask.protocols import observe_fedavg, observe_gradients
from unmask.recovery import Aim, RecoveredTexts, Recovery, Status

# What an attack on a decoder can use; the whole update of SmolLM2 is 540 MB.
ENDS_OF_SMOLLM2 = ["layers.0.", "layers.15.self_attn", "layers.29.mlp.down_proj"]
SURE = "it's great escapist fun that recreates a place and time that will never happen again ."
Text = Sequence[int]


def assert_nothing_false(recovery: Recovery[RecoveredTexts], texts: Sequence[Text], also: Text = ()) -> None:
    """Certain texts are in the batch, as often as said; classes of texts hold one; a whole is the whole."""
    batch = as_counter(texts)
    assert certain(recovery) <= batch, recovery.reason
    for text in recovery.value.texts:
        if text.ambiguities:
            assert any(text.covers(true) for true in batch), (text, recovery.reason)
    if recovery.status is Status.RECOVERED:
        assert found(recovery) == certain(recovery) == batch, recovery.reason
    if recovery.certificate.holds:
        assert recovery.value.token_set <= {*also, *(token for text in texts for token in text)}


def encoded(model: Model, lines: Sequence[str]) -> list[tuple[int, ...]]:
    return [tuple(model.encode(line)) for line in lines]


def all_covered(recovery: Recovery[RecoveredTexts], texts: Sequence[Text]) -> bool:
    """Whether every text of the batch is in what was recovered, as itself or as one of a class."""
    return all(any(text.covers(true) for text in recovery.value.texts) for true in texts)


@pytest.fixture(scope="module")
def small_llama() -> Model:
    """Width 128, three blocks, vocabulary 500."""
    return wide_model("llama", 128, vocab=500)


# ---- continuations that the model is sure of


@pytest.mark.slow
def test_a_text_does_not_end_where_the_model_is_sure_of_what_follows(smollm2):
    """A text cut before a token that the model is sure of ('recreat|es') used to be a second, certain text."""
    lines = [SURE, "The biopsy was positive."]
    recovery = recover_text(observe_gradients(smollm2, lines, parameters=ENDS_OF_SMOLLM2), smollm2)
    texts = encoded(smollm2, lines)
    assert_nothing_false(recovery, texts)
    assert len(recovery.value.texts) == 2
    assert recovery.status is Status.RECOVERED, recovery.reason


# ---- local training


def test_local_steps_are_read(minilm):
    """Four local steps used to end with 'as many tokens as the width' and no text, though the texts can be read."""
    lines = ["Her biopsy came back positive.", "The spare key is under the pot."]
    evidence = observe_fedavg(minilm, lines, task="classification", local_steps=4, learning_rate=1e-3)
    recovery = recover_text(evidence, minilm)
    texts = encoded(minilm, lines)
    assert_nothing_false(recovery, texts)
    assert "as many tokens as the width" not in recovery.reason
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert certain(recovery) == as_counter(texts)


# ---- runs of a leading token


@pytest.mark.slow
def test_run_lengths_are_not_traded_between_texts(smollm2):
    """'111 Main' and '1111 people' used to be certain, though run lengths can be traded between texts."""
    lines = ["111 Main Street", "1111 people came", "11 Main", "11111 people"]
    recovery = recover_text(observe_gradients(smollm2, lines, parameters=ENDS_OF_SMOLLM2), smollm2)
    assert_nothing_false(recovery, encoded(smollm2, lines))


def test_random_runs_in_rotary_models(small_llama):
    """One in seventeen random batches with runs, last token or mean, used to hold a false certain text."""
    generator = torch.Generator().manual_seed(0)
    for number in range(12):
        texts = []
        for _ in range(3):
            words = torch.randint(3, 9, (4,), generator=generator).tolist()
            run = int(torch.randint(1, 5, (), generator=generator))
            texts.append([*[words[0]] * run, *words[1:]][: int(torch.randint(2, 7, (), generator=generator))])
        options = {"task": ("classification", "next_token")[number % 2]}
        if options["task"] == "classification":
            options["pooling"] = ("last", "mean")[number // 2 % 2]
        assert_nothing_false(recover_text(observe_gradients(small_llama, texts, **options), small_llama), texts)


def test_a_run_before_another_ending_is_no_text_of_its_own(small_llama):
    """'39 39 7' used to be two texts, '39 39' and '39 7', where masked labels leave ends open."""
    texts = [[37, 37], [39, 39, 7]]
    evidence = replace(observe_gradients(small_llama, texts), num_texts=None, all_tokens_predicted=None)
    recovery = recover_text(evidence, small_llama)
    assert_nothing_false(recovery, texts)
    assert all_covered(recovery, texts)
    assert sum(bool(text.ambiguities) for text in recovery.value.texts) == len(texts)


def test_no_text_is_made_up_to_fit_the_rank(small_llama):
    """(122×6, 463), which is nowhere in the batch, used to be certain: a true first token had been dropped."""
    texts = [[122, 463, 463, 463, 148]] * 2 + [[198, 198, 122, 148, 198, 417, 417], [417, 463, 198]]
    recovery = recover_text(observe_gradients(small_llama, texts, task="classification"), small_llama)
    assert_nothing_false(recovery, texts)


def test_a_batch_of_runs_of_two_tokens_ends_with_a_result(small_llama):
    """The verdict on this batch used to crash: no prefix of a text had a distance of its own."""
    texts = [[54, 54, 69], [54, 54, 54, 54], [54, 54, 54, 69, 54, 69], [54, 54, 69]]
    recovery = recover_text(observe_gradients(small_llama, texts, task="classification"), small_llama)
    assert_nothing_false(recovery, texts)


# ---- tokens with equal embeddings


@pytest.fixture(scope="module")
def equal_tokens() -> Model:
    """Tokens 20, 21 and 22 have one embedding; the output layer tells them apart."""
    model = wide_model("llama", 128, vocab=500)
    with torch.no_grad():
        model.parameter(model.token_embedding)[[21, 22]] = model.parameter(model.token_embedding)[20].clone()
    return model


def test_equal_tokens_are_one_class(equal_tokens):
    """Of tokens with equal embeddings the wrong one used to be certain, and all of them in the bag."""
    for task in ("next_token", "classification"):
        for texts in ([[5, 21, 99, 7], [400, 3, 8]], [[21, 5, 99], [400, 3, 8]], [[5, 99, 22], [22, 3, 20]]):
            for keep in (None, ["layers."]):
                evidence = observe_gradients(equal_tokens, texts, task=task, parameters=keep)
                recovery = recover_text(evidence, equal_tokens)
                assert_nothing_false(recovery, texts)
                assert all_covered(recovery, texts) or keep is None, (task, texts, recovery.reason)
                plain = {tuple(text) for text in texts if not {20, 21, 22} & set(text)}
                assert {text.tokens for text in recovery.value.certain} >= plain or keep is None


@pytest.mark.slow
def test_one_text_with_an_equal_token_does_not_hide_the_batch(smollm2):
    """'<file_sep>' shares its embedding with others: one such text used to hide all ordinary ones."""
    lines = ["The biopsy was positive.", "The spare key lies under the pot.", "<file_sep>def f(x): return x"]
    recovery = recover_text(observe_gradients(smollm2, lines, parameters=ENDS_OF_SMOLLM2), smollm2)
    texts = encoded(smollm2, lines)
    assert_nothing_false(recovery, texts)
    assert {text.tokens for text in recovery.value.certain} >= set(texts[:2])
    assert all_covered(recovery, texts)


# ---- masked labels


def masked_update(model: Model, texts: Sequence[Text], masked: Sequence[set[int]]) -> GradientEvidence:
    """Next-token training that ignores the labels at `masked` positions of each text, as chat training does."""
    length = max(map(len, texts))
    tokens = torch.stack([functional.pad(torch.tensor(text), (0, length - len(text))) for text in texts])
    labels = torch.stack([functional.pad(torch.tensor(text), (0, length - len(text)), value=-100) for text in texts])
    for row, places in zip(labels, masked, strict=True):
        row[list(places)] = -100
    mask = torch.stack([functional.pad(torch.ones(len(text)), (0, length - len(text))) for text in texts]).long()
    parameters = dict(model.named_parameters())
    logits = model.hf(input_ids=tokens, attention_mask=mask).logits[:, :-1]
    loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    shared = {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}
    return GradientEvidence.of(model, shared, task="next_token", num_texts=len(texts), num_clients=1)


MASKS: dict[str, list[set[int]]] = {
    "one label": [{3}, set()],
    "a span": [{2, 3, 4}, set()],
    "the tail": [{5, 6}, {3, 4}],
    "the prompt": [{1, 2}, {1}],
    "nothing": [set(), set()],
}


@pytest.mark.parametrize("name", MASKS)
def test_a_masked_label_does_not_end_a_text(small_llama, name):
    """A masked label used to end a text there, certain and false; a masked tail cut every text, RECOVERED."""
    texts = [[5, 17, 99, 18, 250, 7, 301], [400, 3, 8, 21, 22]]
    recovery = recover_text(masked_update(small_llama, texts, MASKS[name]), small_llama)
    assert_nothing_false(recovery, texts)
    assert not recovery.value.certain  # nobody said that every token was predicted
    assert all_covered(recovery, texts), recovery.reason


def test_stating_that_every_token_is_predicted_makes_texts_certain(small_llama):
    texts = [[5, 17, 99, 18, 250, 7, 301], [400, 3, 8, 21, 22]]
    evidence = masked_update(small_llama, texts, MASKS["nothing"])
    recovery = recover_text(replace(evidence, all_tokens_predicted=True), small_llama)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert found(recovery) == certain(recovery) == as_counter(texts)


# ---- directions and weights that nothing explains


@pytest.mark.slow
def test_nothing_is_certain_while_the_rank_is_unexplained(smollm2):
    """'ha ha' used to be certain of nine 'ha', with one of two directions explained."""
    lines = ["ha ha ha ha ha ha ha ha ha"]
    recovery = recover_text(observe_gradients(smollm2, lines, parameters=ENDS_OF_SMOLLM2), smollm2)
    assert_nothing_false(recovery, encoded(smollm2, lines))


def test_repeated_words_of_a_rotary_model_with_biases():
    """A Qwen2 batch with repeated words used to give certain and false texts, '16 of 20 directions'."""
    sizes: dict[str, Any] = llama_sizes(hidden_size=128, intermediate_size=256, tie_word_embeddings=True)
    model = adapt(random_model(transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**sizes)))
    generator = torch.Generator().manual_seed(1)
    for task in ("next_token", "classification") * 4:
        lengths = torch.randint(3, 9, (3,), generator=generator).tolist()
        texts = [torch.randint(3, 6, (length,), generator=generator).tolist() for length in lengths]
        assert_nothing_false(recover_text(observe_gradients(model, texts, task=task), model), texts)


def test_weights_of_micro_batches_are_no_counts(small_llama):
    """A sum of two means, over 5 and 10 labels, used to be RECOVERED with one text twice."""
    batches = [[[5, 17, 99, 18, 250, 7]], [[400, 3, 8, 21, 22, 23], [60, 61, 62, 63, 64, 65]]]
    parts = [observe_gradients(small_llama, texts) for texts in batches]
    total = {name: sum(part.gradients[name] for part in parts) for name in parts[0].gradients}
    texts = [text for batch in batches for text in batch]
    for known in ({"num_clients": None}, {"num_clients": 2}, {"num_clients": None, "num_texts": None}):
        evidence = replace(parts[0], gradients=total, **{"num_texts": 3, **known})
        recovery = recover_text(evidence, small_llama)
        assert_nothing_false(recovery, texts)
        assert all(text.count == 1 for text in recovery.value.texts)
        assert {text.tokens for text in recovery.value.certain} == {tuple(text) for text in texts}


@pytest.mark.parametrize(
    ("num_labels", "copies", "num_texts", "status"),
    [
        ((3, 5, 6, 5, 5), 1, None, Status.PARTIAL),
        ((3, 5, 6, 5, 5), 1, 5, Status.RECOVERED),
        ((1, 3), 2, 4, Status.PARTIAL),
    ],
)
def test_weights_of_texts_in_a_mean_of_their_own_means_are_no_counts(
    small_llama, num_labels, copies, num_texts, status
):
    """Texts that occur once used to occur 'at least' 5 to 10 times, and two texts twice were RECOVERED as 1 and 3."""
    rng = random.Random(0)
    texts = [rng.sample(range(5, 499), 1 + number) for number in num_labels]
    parts = [observe_gradients(small_llama, [text]) for text in texts]
    mean = {name: sum(part.gradients[name] for part in parts) / len(parts) for name in parts[0].gradients}
    evidence = replace(parts[0], gradients=mean, num_texts=num_texts)
    assert evidence.num_clients == 1
    recovery = recover_text(evidence, small_llama)
    assert_nothing_false(recovery, texts * copies)
    assert recovery.status is status, recovery.reason
    assert {text.tokens for text in recovery.value.certain} == set(map(tuple, texts))


def test_a_scaled_update_invents_no_label_that_the_model_is_sure_of():
    """Clipping by 5/6 looks like one hidden label more among six: it used to be appended, and called certain."""
    model = sure_model()
    text = (38, 46, 8, 4, 48, 26)
    whole = observe_gradients(model, [text])
    assert recover_text(whole, model).status is Status.RECOVERED
    scaled = replace(whole, gradients={name: 5 / 6 * gradient for name, gradient in whole.gradients.items()})
    recovery = recover_text(scaled, model)
    assert recovery.status is Status.PARTIAL
    assert not recovery.value.certain
    assert all(found.covers(text) for found in recovery.value.texts)


def test_a_last_token_under_the_tolerance_of_local_training_is_not_lost():
    """The model was sure of the last token: its trace is below the tolerance, but one label less is a tenth less."""
    config = transformers.LlamaConfig(**llama_sizes(hidden_size=64, num_hidden_layers=2, vocab_size=60))
    hf = random_model(transformers.LlamaForCausalLM, config, seed=4)
    with torch.no_grad():
        hf.model.norm.weight *= 40
    model = adapt(hf)
    text = (37, 3, 57, 48, 57, 17, 13, 6, 13, 4, 10)
    recovery = recover_text(observe_fedavg(model, [text], local_steps=1, learning_rate=0.01), model)
    assert {found.tokens for found in recovery.value.certain} <= {text}
    assert recovery.value.texts[0].covers(text)


# ---- tasks that nobody stated


@pytest.mark.slow
def test_labels_of_several_clients_are_no_counts():
    """One label of three predictions weighs as much as two of six: it used to make a text occur twice."""
    model = adapt(random_model(transformers.BertForMaskedLM, bert_config()), word_tokenizer())
    batches = [[(1, 39, 150, 21, 70, 35, 2)], [(1, 131, 199, 120, 125, 171, 102, 2), (1, 58, 29, 129, 12, 104, 115, 2)]]
    texts = [text for batch in batches for text in batch]
    for seed in range(6):
        clients = [
            observe_gradients(model, batch, task="masked_token", seed=2 * seed + number, mask_share=0.2)
            for number, batch in enumerate(batches)
        ]
        recovery = recover_text(secure_aggregate(clients), model)
        assert_nothing_false(recovery, texts, also=range(model.vocab_size))  # masking puts random words in
        assert all(text.count == 1 for text in recovery.value.texts)


@pytest.mark.parametrize("known", [{}, {"num_texts": 2}])
def test_a_head_beside_a_language_model_is_no_classifier(tiny_gpt2, known):
    """An auxiliary 'score.weight' used to make last tokens, which are only labels, go missing from certain texts."""
    texts = [(17, 23, 99, 41, 7, 300, 12, 55), (44, 23, 8, 19, 120, 77)]
    tensors = {name: g for name, g in observe_gradients(tiny_gpt2, texts).gradients.items() if "wte" not in name}
    evidence = GradientEvidence.of(tiny_gpt2, {**tensors, "score.weight": torch.ones(1, 64)}, **known)
    assert evidence.task is None
    assert_nothing_false(recover_text(evidence, tiny_gpt2), texts)


@pytest.mark.parametrize("labelled", [(range(7), range(5)), ((3, 7), (3, 5)), ((3, 7), (5,))])
def test_labels_of_tokens_tell_no_ends(labelled):
    """Token classification: what follows the last label leaves no trace, and inner labels are no ends."""
    hf = random_model(transformers.GPT2ForTokenClassification, gpt2_config(num_labels=3))
    texts = [(17, 23, 99, 41, 7, 300, 12, 55), (44, 23, 8, 19, 120, 77)]
    for text, places in zip(texts, labelled, strict=True):
        tokens = torch.tensor([text])
        labels = torch.full_like(tokens, -100)
        labels[0, list(places)] = 1
        hf(input_ids=tokens, labels=labels).loss.backward()
    model = adapt(hf)
    gradients = {name: parameter.grad for name, parameter in hf.named_parameters()}
    for known in ({}, {"num_texts": 2}):
        recovery = recover_text(GradientEvidence.of(model, gradients, **known), model)
        assert_nothing_false(recovery, texts)
        assert not recovery.value.certain


def test_masked_words_are_seen_without_the_task():
    """A classifier's head beside a masked-token update used to make texts with [MASK] in them certain."""
    model = adapt(random_model(transformers.BertModel, bert_config()), word_tokenizer())
    texts = [(1, 17, 23, 99, 41, 7, 2), (1, 44, 23, 8, 19, 120, 77, 2)]
    for seed in range(3):
        seen = observe_gradients(model, texts, task="masked_token", seed=seed, mask_share=0.3)
        kept = {name: g for name, g in seen.gradients.items() if "embeddings" not in name}
        evidence = GradientEvidence.of(model, {**kept, "classifier.weight": torch.ones(2, model.width)}, num_texts=2)
        assert_nothing_false(recover_text(evidence, model), texts, also=range(model.vocab_size))


def sure_model() -> Model:
    """A small GPT-2 with a head so sharp that it is sure of nearly every next token."""
    config = gpt2_config(n_embd=48, n_layer=2, vocab_size=60, bos_token_id=59, eos_token_id=59, pad_token_id=59)
    hf = random_model(transformers.GPT2LMHeadModel, config, seed=3)
    with torch.no_grad():
        hf.transformer.ln_f.weight *= 40
    return adapt(hf)


# ---- what the client says of itself is not so


@pytest.mark.parametrize("seed", range(3))
def test_a_language_model_that_is_called_a_classifier(small_llama, seed):
    """The last label of a next-token text leaves no row; as a classification the texts seemed to end before it."""
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(5, 498, (size,), generator=generator).tolist() for size in (3, 5, 6)]
    gradients = observe_gradients(small_llama, texts, task="next_token").gradients
    stated = GradientEvidence.of(small_llama, gradients, task="classification", num_texts=len(texts))
    recovery = recover_text(stated, small_llama)
    assert_nothing_false(recovery, texts)
    assert recovery.status is Status.PARTIAL


@pytest.mark.parametrize("num_texts", [None, 2])
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("model", ["small_llama", "tiny_gpt2"])
def test_whatever_pooling_is_stated_beside_it(model, pooling, num_texts, request):
    """With an output layer of its own, and with one that is tied to the embedding: every prefix was a certain text."""
    model, texts = request.getfixturevalue(model), [(471, 312, 245, 323), (36, 313, 9, 468, 431, 243)]
    said = {"task": "classification", "pooling": pooling, "num_texts": num_texts}
    recovery = recover_text(GradientEvidence.of(model, observe_gradients(model, texts).gradients, **said), model)
    assert_nothing_false(recovery, texts)
    assert "learned to predict tokens: read as a language model" in recovery.reason
    assert all_covered(recovery, texts)


KEPT = ["", "embeddings", "no embeddings"]


@sample(
    "kept, seed", product(KEPT, [1, 2, 3]), list(zip(KEPT, [1, 2, 3], strict=True))
)  # with 0, a token was exchanged for another one, which the model did read
def test_masked_token_training_that_is_called_a_classification(kept, seed):
    """[MASK] was a certain token of a certain text, and rows of a tied output layer were tokens."""
    tokenizer = word_tokenizer()
    model = adapt(
        random_model(transformers.BertForMaskedLM, bert_config(hidden_size=48, num_hidden_layers=2), seed), tokenizer
    )
    texts = [(1, 398, 77, 200, 2)]
    evidence = observe_gradients(model, texts, task="masked_token", seed=seed)
    gradients = {
        n: g for n, g in evidence.gradients.items() if ("embeddings" in n) != (kept == "no embeddings") or not kept
    }
    stated = GradientEvidence.of(model, gradients, task="classification", num_texts=1)
    recovery = recover_text(stated, model)
    assert_nothing_false(recovery, texts, also=(tokenizer.mask_token_id,))
    assert "learned to predict tokens" in recovery.reason


@sample("seed, sigma", product(range(4), [1e-5, 3e-5]), [(0, 1e-5), (1, 3e-5)])
def test_noise_does_not_hide_the_wrong_statement(seed, sigma):
    sizes = llama_sizes(hidden_size=48, num_hidden_layers=2, tie_word_embeddings=True)
    model = adapt(random_model(transformers.LlamaForCausalLM, transformers.LlamaConfig(**sizes), 1))
    texts = [(88, 464, 470, 200), (286, 144, 199, 439, 377), (88, 464)]
    generator = torch.Generator().manual_seed(seed)
    clean = observe_gradients(model, texts).gradients
    noisy = {n: g + sigma * torch.randn(g.shape, generator=generator) for n, g in clean.items()}
    stated = GradientEvidence.of(model, noisy, task="classification", pooling="last")
    assert certain(recover_text(stated, model)) <= as_counter(texts)


@sample("family, side", product(["gpt2", "llama"], ["right", "left"]), [("gpt2", "right"), ("llama", "left")])
def test_classifiers_of_transformers_do_not_read_padding_tokens_at_the_end(family, side):
    """A text may end in the very token that is also padding, as GPT-2's often do."""
    if family == "gpt2":
        hf_class, config = transformers.GPT2ForSequenceClassification, gpt2_config()
    else:
        hf_class, config = transformers.LlamaForSequenceClassification, transformers.LlamaConfig(**llama_sizes())
    model = adapt(random_model(hf_class, config, 3))
    padding = model.unread_end
    assert padding == model.hf.config.pad_token_id
    texts = [(5, 6, 7, padding), (8, 9, 10, 11, 12, padding), (30, 31)]
    evidence = observe_gradients(model, texts, task="classification", labels=[0, 1, 1], padding_side=side)
    bare = getattr(transformers, {"gpt2": "GPT2Model", "llama": "LlamaModel"}[family])(config).eval()
    bare.load_state_dict(model.body.state_dict())
    sent = {n: g for n, g in evidence.gradients.items() if "score" not in n}
    as_bare = GradientEvidence.of(adapt(bare), sent, task="classification", pooling="last", num_texts=3)
    with_head = replace(evidence, head=model.hf.score.weight.detach())
    for seen, loaded in ((evidence, model), (with_head, model), (as_bare, adapt(bare))):
        recovery = recover_text(seen, loaded)
        assert_nothing_false(recovery, texts)
        assert all_covered(recovery, texts)
        assert f"takes token {padding} at the end of a text for padding" in recovery.reason


@sample("family, seed", product(["gpt2", "llama"], range(3)), [("gpt2", 0), ("llama", 1)])
def test_a_client_that_predicts_its_padding(family, seed):
    """labels=input_ids on a padded batch: what follows the shorter texts is padding, and no part of them."""
    model = wide_model(family, 128, vocab=500)
    generator = torch.Generator().manual_seed(seed)
    texts = [tuple(torch.randint(5, 498, (size,), generator=generator).tolist()) for size in (4, 6, 3)]
    ids = torch.full((3, 6), model.pad_token)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
    loss = model.hf(input_ids=ids, attention_mask=mask, labels=ids).loss
    names, parameters = zip(*model.hf.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True))
    known = {name: g.detach() for name, g in gradients.items() if g is not None}
    stated = GradientEvidence.of(model, known, num_texts=3, all_tokens_predicted=True)
    recovery = recover_text(stated, model)
    assert certain(recovery) <= as_counter(texts), recovery.reason


@sample("seed", range(3), [0])
def test_labels_of_a_teacher_are_not_read_as_many_labels(seed):
    """Distillation sends every probability: nearly as many labels as dimensions explain that, or anything."""
    model, teacher = (
        adapt(random_model(transformers.GPT2LMHeadModel, gpt2_config(n_embd=32, n_layer=2), one))
        for one in (seed, seed + 100)
    )
    texts = [(471, 312, 245, 323), (36, 313, 9, 468, 431, 243)]
    gradients: dict[str, Tensor] = {}
    for text in texts:
        ids = torch.tensor([text])
        wanted = teacher.hf(input_ids=ids).logits.softmax(-1).detach()
        loss = functional.cross_entropy(model.hf(input_ids=ids).logits[0], wanted[0])
        names, parameters = zip(*model.hf.named_parameters(), strict=True)
        for name, gradient in zip(names, torch.autograd.grad(loss, parameters), strict=True):
            gradients[name] = gradients.get(name, torch.zeros(())) + gradient.detach()
    assert_nothing_false(recover_text(GradientEvidence.of(model, gradients), model), texts)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_packed_texts_whose_positions_start_anew(family):
    """The first token of the next text is a label of this one, and no end of it."""
    model = wide_model(family, 128, vocab=500)
    texts = [(303, 461, 469, 116), (212, 475, 406, 429, 160), (393, 460, 220)]
    tokens = torch.tensor([[token for text in texts for token in text]])
    positions = torch.tensor([[place for text in texts for place in range(len(text))]])
    loss = model.hf(input_ids=tokens, position_ids=positions, labels=tokens).loss
    names, parameters = zip(*model.hf.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True))
    known = {name: g.detach() for name, g in gradients.items() if g is not None}
    said = {"task": "next_token", "all_tokens_predicted": True, "num_clients": 1}
    assert_nothing_false(recover_text(GradientEvidence.of(model, known, **said), model), texts)


# ---- who did not confirm has not looked


@pytest.mark.parametrize("steps", [2, 3])
def test_local_steps_of_a_decoder_hold_no_gate_over_texts(small_llama, steps):
    texts = [(303, 461, 469, 116), (212, 475, 406, 429, 160)]
    evidence = observe_fedavg(small_llama, texts, task="next_token", local_steps=steps, learning_rate=0.05)
    recovery = recover_text(evidence, small_llama)
    assert_nothing_false(recovery, texts)
    assert recovery.status is Status.RECOVERED or Aim.TEXTS not in recovery.looked_for


@sample("share", [0.001, 0.01, 0.1], [0.001, 0.01])
def test_pruned_updates_hold_no_gate_over_texts(small_llama, share):
    texts = [(303, 461, 469, 116), (212, 475, 406, 429, 160)]
    sent = keep_largest(observe_gradients(small_llama, texts, task="next_token"), share)
    recovery = recover_text(sent, small_llama)
    assert_nothing_false(recovery, texts)
    assert Aim.TEXTS not in recovery.looked_for


def test_masked_words_of_a_model_with_a_classifiers_head():
    """The embedding is the output layer of masked-token training: most rows that pruning leaves are no words."""
    classifier = random_model(transformers.BertForSequenceClassification, bert_config(vocab_size=60))
    model = adapt(classifier, word_tokenizer())
    text = (1, 8, 24, 59, 11, 19, 29, 29, 21, 2)
    sent = keep_largest(observe_gradients(model, [text], task="masked_token"), 0.05)
    recovery = recover_text(replace(sent, task=None), model)
    assert recovery.value.token_set <= {*text, model.mask_token}


def test_padding_in_front_of_a_text_is_no_text():
    """GPT-Neo's padding sees itself alone, as a first token does, and predicts the text behind it."""
    model = adapt(build("GPTNeo"))
    texts = [(202, 3), (219, 139, 3), (219, 48, 3), (139, 3)]
    evidence = replace(observe_gradients(model, texts, padding_side="left"), num_texts=None)
    certain = {text.tokens for text in recover_text(evidence, model).value.certain}
    assert certain <= set(texts)


def test_padding_that_leaves_a_trace_is_no_token_of_the_texts():
    model = adapt(build("Bloom"))
    texts = [(11, 12, 13, 14, 15), (21, 22, 23), (41, 42)]
    recovery = recover_text(observe_gradients(model, texts, padding_side="left"), model)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert recovery.value.token_set <= {token for text in texts for token in text}


@pytest.fixture(scope="module")
def sure_llama() -> Model:
    """One block, and an output layer of large rows that are the embedding's."""
    sizes = llama_sizes(num_hidden_layers=1, tie_word_embeddings=True, vocab_size=60)
    hf = random_model(transformers.LlamaForCausalLM, transformers.LlamaConfig(**sizes))
    with torch.no_grad():
        hf.model.embed_tokens.weight *= 3
    return adapt(hf)


@pytest.mark.parametrize("length", [2, 5])
def test_local_steps_do_not_tell_how_long_a_text_of_one_token_is(sure_llama, length):
    """Every label is the same behind the same row, so the client sends one update for all lengths."""
    text = (7,) * length
    recovery = recover_text(observe_fedavg(sure_llama, [text], local_steps=4, learning_rate=0.01), sure_llama)
    assert_nothing_false(recovery, [text])
    assert recovery.status is Status.PARTIAL
    assert all_covered(recovery, [text])


@pytest.mark.parametrize("token", [19, 25])
def test_no_labels_are_read_off_what_weights_moved_by_in_several_steps(sure_llama, token):
    """A change of weights points against the gradient, where a token of which the model is sure seems the label."""
    sent = observe_fedavg(sure_llama, [(token, token)], local_steps=4, learning_rate=0.01).only("self_attn")
    assert_nothing_false(recover_text(sent, sure_llama), [(token, token)])
