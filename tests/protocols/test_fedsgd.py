"""FedSGD: gradients against an obvious computation, one text at a time; modes and randomness left as they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from tests.tiny_models import VOCAB, bert_config, gpt2_config, llama_sizes, random_model
from torch import Tensor
from torch.nn import functional

import unmask
from unmask.errors import InputError
from unmask.evidence import Task, Update
from unmask.models import Model, adapt
from unmask.protocols import observe_gradients
from unmask.protocols.batch import make_batch

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49, 50, 51]]
LABELS = [1, 0, 1]
CAUSAL = ("tiny_gpt2", "tiny_llama", "tiny_qwen2", "tiny_mistral")

# Padded and unpadded sums in float32, in another order: 6e-8 each, over a few hundred terms and three blocks.
FLOAT32_PARITY = 1e-5
# transformers casts logits of every precision to float32 before the loss, so its gradients carry 6e-8 in float64 too.
FLOAT32_LOSS = 1e-6
# Where the loss is ours it stays in float64; rotary tables and norms are rounded to float32, but alike on both sides.
FLOAT64_PARITY = 1e-10


def worst_error(evidence: Any, expected: dict[str, Tensor]) -> float:
    """The largest relative error, in norm, of any parameter's gradient; both must hold the same parameters."""
    assert set(evidence.gradients) == set(expected)
    largest = max(float(gradient.norm()) for gradient in expected.values())
    # A gradient that is zero in exact arithmetic (of key biases) is rounding, so it is measured against the largest.
    return max(
        float((evidence.gradients[name] - gradient).norm() / max(float(gradient.norm()), 1e-3 * largest))
        for name, gradient in expected.items()
    )


def gradients_of(model: Model, loss: Tensor) -> dict[str, Tensor]:
    """By backward() on a copy, under canonical names; parameters that the loss does not see are left out."""
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def obvious_next_token(model: Model, texts: list[list[int]], offsets: list[int] | None = None) -> dict[str, Tensor]:
    """−log p(next token) of every text by itself, no padding, no mask; the mean over all targets."""
    model = model.to()
    total, num_targets = torch.zeros((), dtype=model.dtype), 0
    for text, offset in zip(texts, offsets or [0] * len(texts), strict=True):
        tokens = torch.tensor([text])
        logits = model.hf(input_ids=tokens, position_ids=torch.arange(len(text))[None] + offset).logits[0]
        for position in range(len(text) - 1):
            total = total - logits[position].log_softmax(-1)[text[position + 1]]
            num_targets += 1
    return gradients_of(model, total / num_targets)


def obvious_classification(
    model: Model,
    texts: list[list[int]],
    head: Tensor,
    pooling: str,
    labels: list[int],
    offsets: list[int] | None = None,
) -> dict[str, Tensor]:
    """−log p(label) of every text by itself, from a linear head on its pooled last states; the mean over texts."""
    model = model.to()
    losses = []
    for text, label, offset in zip(texts, labels, offsets or [0] * len(texts), strict=True):
        positions = torch.arange(len(text))[None] + offset
        states = model.body(input_ids=torch.tensor([text]), position_ids=positions).last_hidden_state[0]
        pooled = {"last": states[-1], "first": states[0], "mean": states.mean(0)}[pooling]
        losses.append(-(pooled @ head).log_softmax(-1)[label])
    return gradients_of(model, torch.stack(losses).mean())


def offsets_of(texts: list[list[int]], padding_side: str) -> list[int]:
    """Where each text starts: positions count from the padding on, as in transformers' forward."""
    longest = max(map(len, texts))
    return [longest - len(text) if padding_side == "left" else 0 for text in texts]


def fresh_head(model: Model, num_labels: int, seed: int = 0) -> Tensor:
    """The head of a model that has none: the first draw of the seed when labels are given."""
    noise = torch.randn(model.width, num_labels, generator=torch.Generator().manual_seed(seed))
    return 0.02 * noise.to(model.dtype)


# Next-token training


@pytest.mark.parametrize("name", CAUSAL)
def test_next_token_gradients_are_the_mean_over_targets(name, request):
    model = request.getfixturevalue(name)
    evidence = observe_gradients(model, TEXTS)
    assert worst_error(evidence, obvious_next_token(model, TEXTS)) < FLOAT32_PARITY


@pytest.mark.parametrize("name", CAUSAL)
def test_next_token_gradients_in_float64(name, request):
    model = request.getfixturevalue(name).to(dtype=torch.float64)
    evidence = observe_gradients(model, TEXTS)
    assert all(gradient.dtype == torch.float64 for gradient in evidence.gradients.values())
    assert evidence.compute_dtype == torch.float64
    assert worst_error(evidence, obvious_next_token(model, TEXTS)) < FLOAT32_LOSS


def test_the_check_can_fail(tiny_gpt2):
    """A mean over texts instead of targets is seen."""
    expected = obvious_next_token(tiny_gpt2, TEXTS)
    parts = [obvious_next_token(tiny_gpt2, [text]) for text in TEXTS]
    wrong = {name: sum(part[name] for part in parts) / len(parts) for name in expected}
    assert worst_error(observe_gradients(tiny_gpt2, TEXTS), wrong) > 1e-2


@pytest.mark.parametrize("name", CAUSAL)
def test_next_token_gradients_with_padding_on_the_left(name, request):
    """Only labels of padding are masked, as clients of transformers do it: the last padding predicts a first token."""
    model = request.getfixturevalue(name)
    evidence = observe_gradients(model, TEXTS, padding_side="left")
    twin, batch = model.to(), make_batch(model, TEXTS, padding_side="left")
    logits = twin.hf(input_ids=batch.tokens, attention_mask=batch.mask.long()).logits
    scored = logits[:, :-1].log_softmax(-1).gather(2, batch.tokens[:, 1:, None])[..., 0]
    expected = gradients_of(twin, -scored[batch.mask[:, 1:]].mean())
    assert worst_error(evidence, expected) < FLOAT32_PARITY


def test_one_text_alone(tiny_llama):
    evidence = observe_gradients(tiny_llama, TEXTS[:1])
    assert worst_error(evidence, obvious_next_token(tiny_llama, TEXTS[:1])) < FLOAT32_PARITY


def test_a_text_of_one_token_beside_others_has_no_target(tiny_llama):
    evidence = observe_gradients(tiny_llama, [[7], *TEXTS])
    assert worst_error(evidence, obvious_next_token(tiny_llama, TEXTS)) < FLOAT32_PARITY


def test_padding_leaves_no_trace(tiny_llama):
    """The embedding's rows move exactly for tokens that something was predicted from, whatever fills the batch."""
    rows = observe_gradients(tiny_llama, TEXTS).gradients["embed_tokens.weight"]
    moved = set(rows.abs().sum(1).nonzero()[:, 0].tolist())
    assert moved == {token for text in TEXTS for token in text[:-1]}
    other = tiny_llama.to()
    other.config.pad_token_id = 77
    assert other.pad_token == 77
    expected = observe_gradients(tiny_llama, TEXTS)
    assert worst_error(observe_gradients(other, TEXTS), expected.gradients) == 0


def test_what_is_said_about_the_update(tiny_gpt2):
    evidence = observe_gradients(tiny_gpt2, TEXTS)
    assert evidence.task is Task.NEXT_TOKEN
    assert evidence.update is Update.GRADIENT
    assert evidence.num_texts == 3
    assert evidence.compute_dtype == torch.float32
    assert evidence.model_fingerprint == tiny_gpt2.fingerprint()
    evidence.check(tiny_gpt2)
    assert unmask.observe_gradients is observe_gradients


def test_tied_weights_are_sent_once(tiny_gpt2, tiny_llama):
    tied, untied = observe_gradients(tiny_gpt2, TEXTS), observe_gradients(tiny_llama, TEXTS)
    assert "lm_head.weight" not in tied.gradients
    assert "lm_head.weight" in untied.gradients


def test_max_length_cuts_the_texts(tiny_gpt2):
    evidence = observe_gradients(tiny_gpt2, TEXTS, max_length=3)
    cut = observe_gradients(tiny_gpt2, [text[:3] for text in TEXTS])
    assert worst_error(evidence, cut.gradients) == 0


@pytest.mark.parametrize("name", ["tiny_gpt2", "tiny_llama"])
def test_bfloat16(name, request):
    """A client in bfloat16 sends bfloat16 gradients, and its model is still known by its fingerprint."""
    model = request.getfixturevalue(name)
    evidence = observe_gradients(model.to(dtype=torch.bfloat16), TEXTS)
    assert all(gradient.dtype == torch.bfloat16 for gradient in evidence.gradients.values())
    assert evidence.compute_dtype == torch.bfloat16
    evidence.check(model)
    precise = observe_gradients(model.to(dtype=torch.bfloat16).to(dtype=torch.float32), TEXTS)
    # bfloat16 rounds every activation by 0.4 %; three blocks and a backward pass accumulate some dozens of roundings.
    assert worst_error(evidence, precise.gradients) < 0.3


# Classification


@pytest.mark.parametrize("name", [*CAUSAL, "tiny_bert"])
@pytest.mark.parametrize("pooling", [None, "last", "first", "mean"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_classification_with_a_fresh_head(name, pooling, side, request):
    model = request.getfixturevalue(name).to(dtype=torch.float64)
    if model.causal and pooling == "first":
        with pytest.raises(InputError, match="knows only the first token"):
            observe_gradients(model, TEXTS, task=Task.CLASSIFICATION, pooling=pooling)
        return
    evidence = observe_gradients(
        model, TEXTS, task=Task.CLASSIFICATION, labels=LABELS, pooling=pooling, padding_side=side
    )
    expected_pooling = pooling or ("last" if model.causal else "first")
    expected = obvious_classification(
        model, TEXTS, fresh_head(model, 2), expected_pooling, LABELS, offsets_of(TEXTS, side)
    )
    assert evidence.task is Task.CLASSIFICATION
    assert worst_error(evidence, expected) < FLOAT64_PARITY


def test_labels_of_several_classes(tiny_gpt2):
    model = tiny_gpt2.to(dtype=torch.float64)
    evidence = observe_gradients(model, TEXTS, task="classification", labels=[4, 0, 2], num_labels=5, seed=3)
    head = fresh_head(model, 5, seed=3)
    expected = obvious_classification(model, TEXTS, head, "last", [4, 0, 2])
    assert worst_error(evidence, expected) < FLOAT64_PARITY


def test_labels_are_drawn_by_the_seed_when_not_given(tiny_bert):
    first, again, other = (observe_gradients(tiny_bert, TEXTS, task="classification", seed=seed) for seed in (0, 0, 1))
    assert worst_error(first, again.gradients) == 0
    assert worst_error(first, other.gradients) > 1e-2


def classifier(family: str, num_labels: int = 3) -> Model:
    """A float64 model with a classification head of its own."""
    if family == "bert":
        hf_class, config = transformers.BertForSequenceClassification, bert_config(num_labels=num_labels)
    elif family == "gpt2":
        hf_class, config = transformers.GPT2ForSequenceClassification, gpt2_config(num_labels=num_labels)
    else:
        hf_class = transformers.LlamaForSequenceClassification
        config = transformers.LlamaConfig(**llama_sizes(num_labels=num_labels))
    return adapt(random_model(hf_class, config)).to(dtype=torch.float64)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_classification_with_the_models_own_head(family, side):
    """As transformers computes it from labels, on a batch that was padded by hand."""
    model = classifier(family)
    labels = [2, 0, 1]
    evidence = observe_gradients(model, TEXTS, task="classification", labels=labels, padding_side=side)
    twin = model.to()
    longest = max(map(len, TEXTS))
    rows, mask = [], []
    for text in TEXTS:
        filler = [0 if family != "gpt2" else VOCAB - 1] * (longest - len(text))
        rows.append(text + filler if side == "right" else filler + text)
        real, unreal = [1] * len(text), [0] * len(filler)
        mask.append(real + unreal if side == "right" else unreal + real)
    output = twin.hf(input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask), labels=torch.tensor(labels))
    expected = gradients_of(twin, output.loss)
    assert worst_error(evidence, expected) < FLOAT64_PARITY
    assert any("score" in name or "classifier" in name for name in evidence.gradients)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_the_models_own_head_one_text_at_a_time(family):
    model = classifier(family)
    evidence = observe_gradients(model, TEXTS, task="classification", labels=LABELS)
    twin = model.to()
    logits = torch.cat([twin.hf(input_ids=torch.tensor([text])).logits for text in TEXTS])
    expected = gradients_of(twin, functional.cross_entropy(logits, torch.tensor(LABELS)))
    assert worst_error(evidence, expected) < FLOAT64_PARITY


def test_the_labels_of_a_head_of_its_own_may_use_all_of_its_classes():
    """Three classes of the head, though `num_labels` was left at 2."""
    model = classifier("gpt2", num_labels=3)
    seen = {
        float(observe_gradients(model, TEXTS[:1], task="classification", seed=seed).gradients["score.weight"][2].norm())
        for seed in range(12)
    }
    # A class that is drawn sometimes has gradients (p − 1)·h and p·h; one that is never drawn has p·h alone.
    assert len(seen) == 2


# Modes and randomness


def test_evaluation_mode_is_deterministic(tiny_gpt2):
    first = observe_gradients(tiny_gpt2, TEXTS)
    torch.rand(3)  # whatever the global generator does meanwhile
    assert worst_error(observe_gradients(tiny_gpt2, TEXTS, seed=5), first.gradients) == 0


def test_training_mode_has_dropout_and_follows_the_seed(tiny_gpt2):
    plain = observe_gradients(tiny_gpt2, TEXTS)
    first = observe_gradients(tiny_gpt2, TEXTS, train_mode=True, seed=1)
    torch.rand(3)
    again = observe_gradients(tiny_gpt2, TEXTS, train_mode=True, seed=1)
    other = observe_gradients(tiny_gpt2, TEXTS, train_mode=True, seed=2)
    assert worst_error(first, again.gradients) == 0
    # Dropout of 10 % at a dozen places changes gradients by tens of per cent.
    assert worst_error(first, plain.gradients) > 1e-2
    assert worst_error(first, other.gradients) > 1e-2


@pytest.mark.parametrize("options", [{}, {"train_mode": True}, {"task": "classification"}])
def test_the_global_generator_is_left_alone(tiny_gpt2, options):
    state = torch.random.get_rng_state()
    observe_gradients(tiny_gpt2, TEXTS, **options)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("was_training", [False, True])
@pytest.mark.parametrize("train_mode", [False, True])
def test_the_models_mode_is_restored(tiny_gpt2, was_training, train_mode):
    model = tiny_gpt2.to()
    model.hf.train(was_training)
    observe_gradients(model, TEXTS, train_mode=train_mode)
    assert all(module.training == was_training for module in model.hf.modules())


def test_the_models_mode_is_restored_after_an_error(tiny_gpt2):
    model = tiny_gpt2.to()
    state = torch.random.get_rng_state()
    with pytest.raises(InputError):
        observe_gradients(model, TEXTS, train_mode=True, parameters=["no such name"])
    assert not model.hf.training
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_modes_of_parts_are_restored(tiny_gpt2):
    """A client that freezes a part keeps it in evaluation mode while the rest trains."""
    model = tiny_gpt2.to()
    model.hf.train()
    model.body.h[0].eval()
    before = {name: module.training for name, module in model.hf.named_modules()}
    observe_gradients(model, TEXTS)
    assert {name: module.training for name, module in model.hf.named_modules()} == before


def test_the_model_is_left_alone(tiny_gpt2):
    model = tiny_gpt2.to()
    before = copy.deepcopy(model.hf.state_dict())
    observe_gradients(model, TEXTS, train_mode=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.hf.state_dict().items())
    assert all(parameter.grad is None for parameter in model.hf.parameters())


def test_gradients_are_computed_even_where_they_are_switched_off(tiny_gpt2):
    with torch.no_grad():
        evidence = observe_gradients(tiny_gpt2, TEXTS)
    assert worst_error(evidence, observe_gradients(tiny_gpt2, TEXTS).gradients) == 0
    assert not any(gradient.requires_grad for gradient in evidence.gradients.values())


# Parts of the update


def test_the_filter_keeps_names_that_contain_a_pattern(tiny_gpt2):
    whole = observe_gradients(tiny_gpt2, TEXTS)
    part = observe_gradients(tiny_gpt2, TEXTS, parameters=["h.0.attn", "ln_f"])
    assert set(part.gradients) == {name for name in whole.gradients if "h.0.attn" in name or "ln_f" in name}
    assert len(part.gradients) == 6
    assert all(torch.equal(gradient, whole.gradients[name]) for name, gradient in part.gradients.items())


def test_a_filter_that_keeps_nothing_is_refused(tiny_gpt2):
    with pytest.raises(InputError, match=r"no trainable parameter .* one of \['attention'\]"):
        observe_gradients(tiny_gpt2, TEXTS, parameters=["attention"])


def test_one_pattern_instead_of_a_list_is_refused(tiny_gpt2):
    """A string is a sequence of letters, and every name contains one of them."""
    with pytest.raises(InputError):
        observe_gradients(tiny_gpt2, TEXTS, parameters="h.0.attn")


def test_frozen_parameters_are_not_sent(tiny_gpt2):
    model = tiny_gpt2.to()
    model.parameter("wte.weight").requires_grad_(False)
    names = set(observe_gradients(model, TEXTS).gradients)
    assert names == {name for name, _ in model.named_parameters()} - {"wte.weight"}


def test_parameters_that_the_loss_does_not_see_are_not_sent(tiny_bert):
    """A language head is no part of a classification loss."""
    names = set(observe_gradients(tiny_bert, TEXTS, task="classification").gradients)
    assert not any(name.startswith("cls.") for name in names)
    assert any(name.startswith("encoder.layer.2") for name in names)


# Callers' mistakes


@pytest.mark.parametrize("task", ["translation", "", 3])
def test_an_unknown_task_is_refused(tiny_gpt2, task):
    with pytest.raises(InputError, match="task must be one of 'next_token', 'classification', 'masked_token', got"):
        observe_gradients(tiny_gpt2, TEXTS, task=task)


def test_an_unknown_pooling_is_refused(tiny_gpt2):
    with pytest.raises(InputError, match="pooling must be one of last, first, mean, got 'max'"):
        observe_gradients(tiny_gpt2, TEXTS, task="classification", pooling="max")


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_an_unknown_pooling_is_refused_whatever_the_head(family):
    with pytest.raises(InputError, match="pooling"):
        observe_gradients(classifier(family), TEXTS, task="classification", pooling="max")


@pytest.mark.parametrize("labels", [[], [1], [0, 1, 0, 1]])
def test_a_wrong_number_of_labels_is_refused(tiny_gpt2, labels):
    with pytest.raises(InputError, match=f"there are 3 texts but {len(labels)} labels"):
        observe_gradients(tiny_gpt2, TEXTS, task="classification", labels=labels)


@pytest.mark.parametrize("labels", [[0, 1, 2], [0, -1, 1], [-100, -100, -100]])
def test_labels_out_of_range_are_refused(tiny_gpt2, labels):
    with pytest.raises(InputError, match="label"):
        observe_gradients(tiny_gpt2, TEXTS, task="classification", labels=labels, num_labels=2)


def test_an_empty_batch_is_refused(tiny_gpt2):
    with pytest.raises(InputError, match="the batch is empty"):
        observe_gradients(tiny_gpt2, [])


def test_texts_with_nothing_to_predict_are_refused(tiny_gpt2):
    with pytest.raises(InputError, match="at least two tokens"):
        observe_gradients(tiny_gpt2, [[4], [7]])


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_next_token_training_without_a_language_head_is_refused(family):
    with pytest.raises(
        InputError, match=rf"a causal model with a language head, and this {family} model is not one.*classification"
    ):
        observe_gradients(classifier(family), TEXTS, task="next_token")


def test_next_token_training_of_an_encoder_is_refused(tiny_bert):
    """Its masked-language loss does not shift labels: every token would be predicted from itself."""
    with pytest.raises(InputError):
        observe_gradients(tiny_bert, TEXTS, task="next_token")


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_models_without_a_language_head_are_trained_for_classification_unless_said(family):
    assert observe_gradients(classifier(family), TEXTS).task is Task.CLASSIFICATION


def test_decoders_are_trained_for_the_next_token_unless_said(tiny_gpt2):
    assert observe_gradients(tiny_gpt2, TEXTS).task is Task.NEXT_TOKEN


# Pairs

PAIRS = [([1, 17, 99, 2], [250, 2]), ([1, 400, 2], [3, 8, 44, 2])]


def rows_of_pairs() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, types and mask, padded by hand."""
    tokens = torch.tensor([[1, 17, 99, 2, 250, 2, 0], [1, 400, 2, 3, 8, 44, 2]])
    types = torch.tensor([[0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1]])
    return tokens, types, torch.tensor([[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]])


def test_pairs_with_the_models_own_head():
    model = classifier("bert")
    evidence = observe_gradients(model, PAIRS, task="classification", labels=[2, 0])
    twin = model.to()
    tokens, types, mask = rows_of_pairs()
    output = twin.hf(input_ids=tokens, token_type_ids=types, attention_mask=mask, labels=torch.tensor([2, 0]))
    assert worst_error(evidence, gradients_of(twin, output.loss)) < FLOAT64_PARITY


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_pairs_with_a_fresh_head(tiny_bert, pooling):
    model = tiny_bert.to(dtype=torch.float64)
    evidence = observe_gradients(model, PAIRS, task="classification", labels=[1, 0], pooling=pooling)
    twin = model.to()
    tokens, types, mask = rows_of_pairs()
    states = twin.body(input_ids=tokens, token_type_ids=types, attention_mask=mask).last_hidden_state
    pooled = states[:, 0] if pooling == "first" else torch.stack([states[0, :6].mean(0), states[1].mean(0)])
    loss = functional.cross_entropy(pooled @ fresh_head(model, 2), torch.tensor([1, 0]))
    assert worst_error(evidence, gradients_of(twin, loss)) < FLOAT64_PARITY


def test_types_matter(tiny_bert):
    """The same tokens as single texts are another update."""
    options = {"task": "classification", "labels": [1, 0]}
    pairs = observe_gradients(tiny_bert, PAIRS, **options)
    singles = observe_gradients(tiny_bert, [[*first, *second] for first, second in PAIRS], **options)
    assert worst_error(pairs, dict(singles.gradients)) > 1e-2
