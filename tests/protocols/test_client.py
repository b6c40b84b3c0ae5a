"""A training client: losses that are transformers', one text at a time or together, on a copy of the model."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from unmask.errors import InputError
from unmask.evidence import Task
from unmask.protocols.batch import make_batch
from unmask.protocols.client import Client, Losses, fix_seed, usual_task
from unmask.protocols.fedsgd import next_token_loss, observe_gradients

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49, 50, 51]]
LABELS = [1, 0, 1]
# The same products in float32, in another order.
FLOAT32_PARITY = 1e-6


# Losses


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_mean_over_targets_is_transformers_loss(tiny, side):
    if not tiny.causal:
        pytest.skip("an encoder has no next-token loss")
    client = Client(tiny, TEXTS, padding_side=side)
    losses = client(client.batch(client.rows), client.rows)
    expected = next_token_loss(tiny, make_batch(tiny, TEXTS, padding_side=side))
    assert losses.counts.tolist() == ([4, 2, 7] if side == "right" else [5, 3, 7])
    assert losses.mean().item() == pytest.approx(expected.item(), rel=FLOAT32_PARITY)


def test_the_loss_over_a_large_vocabulary_is_transformers(smollm2):
    """49,152 classes: summed over another axis than the last, torch's softmax is off by 2e-5 in float32."""
    client = Client(smollm2, ["The patient was discharged on Friday."])
    batch = client.batch([0])
    with torch.no_grad():
        ours, theirs = client(batch, [0]).mean(), next_token_loss(smollm2, batch)
    assert float(ours) == pytest.approx(float(theirs), rel=FLOAT32_PARITY)


@pytest.mark.parametrize("task", ["next_token", "classification"])
def test_no_texts_loss_depends_on_the_others(tiny_llama, task):
    client = Client(tiny_llama, TEXTS, task=task, labels=LABELS)
    together = client(client.batch(client.rows), client.rows).of_each_text()
    alone = [client(client.batch([row]), [row]).of_each_text()[0] for row in client.rows]
    assert torch.allclose(together, torch.stack(alone), rtol=1e-5)


def test_a_text_without_targets_has_loss_zero():
    losses = Losses(torch.tensor([0.0, 3.0]), torch.tensor([0, 2]))
    assert losses.of_each_text().tolist() == [0.0, 1.5]
    assert float(losses.mean()) == 1.5


def test_rows_have_their_own_labels(tiny_bert):
    client = Client(tiny_bert, TEXTS, task="classification", labels=[0, 0, 1])
    batch = client.batch([2, 0])
    states = tiny_bert.body(input_ids=batch.tokens, attention_mask=batch.mask.long()).last_hidden_state
    expected = functional.cross_entropy(client.fresh_head(states[:, 0]), torch.tensor([1, 0]), reduction="none")
    assert torch.allclose(client(batch, [2, 0]).totals, expected, rtol=1e-5)


# The copy, the texts and the head


def test_a_client_has_a_copy(tiny_gpt2):
    client = Client(tiny_gpt2, TEXTS)
    client.model.parameter("wte.weight").data += 1
    assert not torch.equal(client.model.parameter("wte.weight"), tiny_gpt2.parameter("wte.weight"))


def test_batches_are_padded_to_their_own_longest_text(tiny_gpt2):
    client = Client(tiny_gpt2, TEXTS, padding_side="left", max_length=4)
    batch, expected = client.batch([1, 0]), make_batch(tiny_gpt2, [TEXTS[1], TEXTS[0][:4]], padding_side="left")
    assert torch.equal(batch.tokens, expected.tokens)
    assert torch.equal(batch.mask, expected.mask)


def test_only_a_fresh_head_stands_beside_the_model(tiny_gpt2):
    assert Client(tiny_gpt2, TEXTS).task is Task.NEXT_TOKEN
    model_alone = {name for name, _ in Client(tiny_gpt2, TEXTS).named_parameters()}
    with_head = {name for name, _ in Client(tiny_gpt2, TEXTS, task="classification").named_parameters()}
    assert with_head - model_alone == {"fresh_head.weight"}
    assert not any("head" in name for name in Client(tiny_gpt2, TEXTS, task="classification").shared_parameters(None))


def test_what_is_shared_can_be_chosen_by_name(tiny_gpt2):
    client = Client(tiny_gpt2, TEXTS)
    assert set(client.shared_parameters(["wte", "ln_f.bias"])) == {"wte.weight", "ln_f.bias"}
    with pytest.raises(InputError, match="no trainable parameter"):
        client.shared_parameters(["nothing"])
    with pytest.raises(InputError, match="put it into a list"):
        client.shared_parameters("wte")


def test_the_global_generator_is_as_it_was_afterwards():
    state = torch.random.get_rng_state()
    with torch.no_grad(), fix_seed(3):
        first = torch.rand(2)
        assert torch.is_grad_enabled()
    with fix_seed(3):
        assert torch.equal(torch.rand(2), first)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_fresh_head_is_not_drawn_from_the_global_generator(tiny_bert):
    state = torch.random.get_rng_state()
    first, second = (Client(tiny_bert, TEXTS, task="classification", seed=3) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.fresh_head.weight, second.fresh_head.weight)
    assert first.fresh_head.weight.std().item() == pytest.approx(0.02, rel=0.3)  # 128 numbers: within 5 deviations


def test_labels_and_head_are_those_of_observe_gradients(tiny_bert):
    """One client step with neither labels nor head given: the same seed draws the same of both."""
    model = tiny_bert.to(dtype=torch.float64)
    client = Client(model, TEXTS, task="classification", seed=5)
    loss = client(client.batch(client.rows), client.rows).mean()
    expected = observe_gradients(model, TEXTS, task="classification", seed=5).gradients
    name = "encoder.layer.0.output.dense.weight"
    (ours,) = torch.autograd.grad(loss, [client.model.parameter(name)])
    torch.testing.assert_close(ours, expected[name])


@pytest.mark.parametrize("num_labels", [0, 1])
def test_one_label_is_refused(tiny_bert, num_labels):
    """The cross-entropy of a single class is zero whatever the text: there would be no update."""
    with pytest.raises(InputError, match=f"at least two labels, got {num_labels}"):
        Client(tiny_bert, TEXTS, task="classification", num_labels=num_labels)


# Pairs and masked tokens

PAIRS = [([1, 17, 99, 2], [250, 2]), ([1, 400, 2], [3, 8, 44, 2]), [1, 5, 6, 2]]


def test_pairs_stay_pairs_in_every_batch(tiny_bert):
    client = Client(tiny_bert, PAIRS, task="classification", labels=[0, 1, 1])
    for rows in ([0, 1, 2], [2, 0], [1], [2]):
        batch, expected = client.batch(rows), make_batch(tiny_bert, [PAIRS[row] for row in rows])
        assert torch.equal(batch.tokens, expected.tokens)
        assert (batch.types is None) == (expected.types is None)
        assert batch.types is None or torch.equal(batch.types, expected.types)


def test_losses_of_pairs_see_their_types(tiny_bert):
    client = Client(tiny_bert, PAIRS, task="classification", labels=[0, 1, 1])
    batch = client.batch([0, 1])
    states = tiny_bert.body(**batch.inputs).last_hidden_state
    expected = functional.cross_entropy(client.fresh_head(states[:, 0]), torch.tensor([0, 1]), reduction="none")
    assert torch.allclose(client(batch, [0, 1]).totals, expected, rtol=1e-5)


def test_of_a_pair_that_is_cut_the_longer_part_is_cut_first(tiny_bert):
    """As transformers cuts it; both parts stay."""
    for max_length, expected in ((5, ([1, 17, 99], [250, 2])), (3, ([1, 17], [250]))):
        client = Client(tiny_bert, PAIRS[:1], task="classification", max_length=max_length)
        assert client.sequences == [expected]


def test_masked_token_training_is_refused(tiny_bert):
    with pytest.raises(InputError, match="do not support task='masked_token' yet"):
        Client(tiny_bert, TEXTS, task="masked_token")


def test_the_usual_task_is_what_a_model_can_be_trained_for(tiny_gpt2, tiny_bert):
    assert usual_task(tiny_gpt2) is Task.NEXT_TOKEN
    assert usual_task(tiny_bert) is Task.CLASSIFICATION
