"""What predicts tokens: every family's head against transformers' own logits."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.tiny_models import bert_config, random_model

from unmask.models import adapt
from unmask.models.linear import TokenHead

# The same products in float32, summed in another order.
FLOAT32_PARITY = 1e-5
TOKENS = torch.tensor([[5, 17, 99, 250], [400, 3, 8, 44]])


@torch.no_grad()
def test_logits_are_those_of_transformers(tiny):
    ours = tiny.token_head.logits(tiny.hidden_states(TOKENS)[-1])
    theirs = tiny.hf(input_ids=TOKENS).logits
    assert float((ours - theirs).norm() / theirs.norm()) < FLOAT32_PARITY


@torch.no_grad()
def test_an_encoder_without_a_head_has_its_token_embeddings():
    model = adapt(random_model(transformers.BertModel, bert_config()))
    states = model.hidden_states(TOKENS)[-1]
    assert torch.equal(model.token_head.logits(states), states @ model.parameter(model.token_embedding).T)


def test_a_decoder_without_a_head_has_none(tiny_gpt2):
    assert adapt(tiny_gpt2.hf.base_model).token_head is None


def test_a_bias_is_added_to_all_rows():
    head = TokenHead(lambda rows: 2 * rows, torch.eye(2), torch.tensor([0.0, 5.0]))
    assert head.logits(torch.tensor([[1.0, 1.0], [0.0, 3.0]])).tolist() == [[2.0, 7.0], [0.0, 11.0]]


@pytest.mark.parametrize("hf_class", [transformers.BertModel, transformers.BertForSequenceClassification])
def test_a_head_changes_neither_names_nor_the_fingerprint(hf_class, tiny_bert):
    """A masked-language model, a classifier and a bare body with the same weights are one model."""
    body = random_model(hf_class, bert_config())
    body.base_model.load_state_dict(tiny_bert.body.state_dict(), strict=False)
    other = adapt(body)
    assert other.fingerprint() == tiny_bert.fingerprint()
    names = {name for name, _ in tiny_bert.named_parameters() if not name.startswith("cls.")}
    assert names <= {name for name, _ in other.named_parameters()}
    assert tiny_bert.unembedding_name == tiny_bert.token_embedding
