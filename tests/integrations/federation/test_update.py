"""Names, kept tensors and differences of arrays, for every family."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from tests.tiny_models import TINY, bert_config, random_model, word_tokenizer

from unmask.attacks.recover import recover_text
from unmask.errors import EvidenceError
from unmask.integrations.federation.update import (
    is_same,
    needed_names,
    own_names,
    place_weights,
    read_update,
    sent_dtype,
    sent_factors,
)
from unmask.models import adapt
from unmask.protocols import observe_gradients

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49]]


class Held:
    """An array as Flower's older clients send one: without shape and type."""

    def __init__(self, values):
        self._values = np.asarray(values)

    def numpy(self):
        return self._values.copy()


def held(state):
    return {name: Held(tensor.numpy()) for name, tensor in state.items()}


@pytest.fixture(scope="module")
def classifier():
    return random_model(transformers.BertForSequenceClassification, bert_config(num_labels=2), seed=1)


@pytest.fixture(scope="module")
def body():
    return adapt(random_model(transformers.BertModel, bert_config()))


@pytest.mark.parametrize("around", ["", "module.", "_orig_mod.net."])
def test_a_classifier_is_read_by_the_body_alone(classifier, body, around):
    names = own_names(body, [around + name for name in classifier.state_dict()])
    assert set(names.values()) == {name for name, _ in body.named_parameters()}
    assert names[f"{around}bert.embeddings.word_embeddings.weight"] == body.token_embedding
    assert not [name for name in names if "classifier" in name]


def test_a_whole_model_is_read_with_its_head(tiny):
    names = own_names(tiny, tiny.hf.state_dict())
    assert set(names.values()) == {name for name, _ in tiny.named_parameters()}


def test_a_head_that_looks_like_a_part_of_the_body_is_left_out(body):
    names = own_names(body, [*(f"bert.{name}" for name, _ in body.named_parameters()), "head.pooler.dense.weight"])
    assert "head.pooler.dense.weight" not in names
    assert names["bert.pooler.dense.weight"] == "pooler.dense.weight"


def test_lora_factors_are_read_under_the_names_of_peft(body):
    name = "base_model.model.bert.encoder.layer.0.attention.self.query.lora_A.default.weight"
    own = "encoder.layer.0.attention.self.query.lora_A.weight"
    assert own_names(body, [name]) == {name: own}
    factor = Held(np.ones((4, 64), dtype=np.float32))
    assert list(sent_factors(body, {name: factor})) == [own]
    assert torch.equal(
        read_update(body, {name: factor}, {name: Held(3 * factor.numpy())})[own], torch.full((4, 64), 2.0)
    )
    assert not place_weights(body, {name: factor})


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("task", ["classification", "next_token"])
def test_what_is_kept_is_all_that_the_attacks_read(request, family, task):
    model, texts = request.getfixturevalue(family), TEXTS
    if not model.causal:  # its texts need a frame
        model, texts = adapt(model.hf, word_tokenizer()), ["w17 w99 w17 w250", "w400 w30 w8"]
        task = "masked_token" if task == "next_token" else task
    evidence = observe_gradients(model, texts, task=task)
    kept = {name: tensor for name, tensor in evidence.gradients.items() if name in needed_names(model)}
    assert len(kept) < len(evidence.gradients) / 2
    whole, part = (recover_text(seen, model) for seen in (evidence, replace(evidence, gradients=kept)))
    assert whole.status.conclusive
    # A replay compares whatever there is, so more tensors are used of the whole update; the result is the same.
    claimed = [[replace(text, residual=0.0) for text in found.value.texts] for found in (part, whole)]
    assert sorted(claimed[0], key=str) == sorted(claimed[1], key=str)
    assert (part.value.token_set, part.status) == (whole.value.token_set, whole.status)
    assert set(part.used) <= set(kept)


def test_weights_that_were_sent_replace_those_of_the_model(classifier, body):
    twin = body.to()
    sent = held(classifier.state_dict())
    assert place_weights(twin, sent)
    assert not place_weights(twin, sent)
    assert twin.fingerprint() == adapt(classifier).fingerprint() != body.fingerprint()


def test_arrays_of_another_model_are_refused_and_change_nothing(body, tiny_llama):
    twin = body.to()
    with pytest.raises(EvidenceError, match="the model that the federation trains"):
        place_weights(twin, held(tiny_llama.hf.state_dict()))
    wider = random_model(transformers.BertModel, bert_config(vocab_size=501))
    with pytest.raises(EvidenceError, match=r"'embeddings.word_embeddings.weight' has the shape \(501, 64\)"):
        place_weights(twin, held(wider.state_dict()))
    assert twin.fingerprint() == body.fingerprint()


def test_an_update_is_new_minus_old_of_what_is_kept(classifier, body):
    before = classifier.state_dict()
    after = {name: tensor + 1 for name, tensor in before.items()}
    update = read_update(body, held(before), held(after))
    assert set(update) == needed_names(body) | {"classifier.weight"}  # the head tells what was trained
    name = body.token_embedding
    assert torch.equal(update[name], after[f"bert.{name}"] - before[f"bert.{name}"])
    assert set(read_update(body, held(before), held(after), keep=["pooler"])) == {
        "pooler.dense.weight",
        "pooler.dense.bias",
    }
    sent_as_is = read_update(body, held(before), held(after), shares="delta")
    assert torch.equal(sent_as_is[name], after[f"bert.{name}"])


def test_half_precision_is_subtracted_in_float32(body):
    name = body.token_embedding
    old = torch.full((500, 64), 1.0).half()
    new = old + 2.0**-10
    update = read_update(body, held({name: old}), held({name: new}))
    assert torch.equal(update[name], torch.full((500, 64), 2.0**-10))
    assert sent_dtype(held({name: old})) is torch.float16
    assert sent_dtype({}) is sent_dtype(held({name: old.float()})) is torch.float32


def test_a_flattened_reply_is_refused(body):
    name = body.token_embedding
    old = torch.zeros(500, 64)
    with pytest.raises(EvidenceError, match="flattens or packs"):
        read_update(body, held({name: old}), held({name: old.flatten()}))


def test_an_array_that_was_not_sent_has_no_difference(body):
    name = body.token_embedding
    old = held({name: torch.zeros(500, 64)})
    more = held({name: torch.ones(500, 64), body.position_embedding: torch.ones(64, 64)})
    assert set(read_update(body, old, more)) == {name}


def test_a_client_that_did_nothing_is_told_from_one_that_trained_its_head(classifier):
    state = classifier.state_dict()
    assert is_same(held(state), held(state))
    assert not is_same(held(state), held({**state, "classifier.bias": torch.ones(2)}))
    assert not is_same(held(state), held({name: state[name] for name in list(state)[1:]}))
