"""BERT: token types, the norm behind each sum, and the head for masked tokens."""

from __future__ import annotations

import torch
import transformers
from tests.models.parity import FLOAT32_PARITY, FLOAT64_PARITY, precise, random_batch, states_of_transformers
from tests.tiny_models import VOCAB, bert_config, random_model

from unmask.models import adapt


def test_token_types_of_bert(tiny_bert):
    tokens, mask = random_batch(tiny_bert, "right")
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    for token_type in (0, 1):
        theirs, _ = states_of_transformers(tiny_bert, tokens, mask, token_type_ids=torch.full_like(tokens, token_type))
        ours = tiny_bert.embed(tokens, positions, torch.full_like(tokens, token_type))
        # Two sums in another order, then a norm: float32.
        assert torch.allclose(ours, theirs[0], atol=FLOAT32_PARITY)


def test_the_head_is_that_of_transformers(tiny_bert):
    model = precise(tiny_bert)
    tokens, mask = random_batch(model, "right")
    with torch.no_grad():
        theirs = model.hf(input_ids=tokens, attention_mask=mask.long()).logits
        ours = model.token_head.logits(model.hidden_states(tokens, mask)[-1])
    assert torch.allclose(ours[mask], theirs[mask], atol=FLOAT64_PARITY)


def test_without_a_head_the_embeddings_predict():
    model = adapt(random_model(transformers.BertModel, bert_config()))
    assert model.unembedding is None
    rows = torch.eye(model.width)
    torch.testing.assert_close(model.token_head.logits(rows), model.parameter(model.token_embedding).T)
    assert model.token_head.logits(rows).shape == (model.width, VOCAB)


def test_a_sum_is_what_its_norm_sees(tiny_bert):
    model = precise(tiny_bert)
    tokens, mask = random_batch(model, "right")
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        states = model.hidden_states(tokens, mask)
        last = model.num_blocks - 1
        mixed = model.mixed_values(last, states[last], positions, mask)
        attended = model.after_attention(last, states[last], mixed)
        sums = model.mlp_sum(last, attended, model.mlp_hidden(last, attended))
    assert torch.allclose(model.after_last_sum(sums)[mask], states[-1][mask], atol=FLOAT64_PARITY)
    assert not torch.allclose(sums[mask], states[-1][mask], atol=1e-2)
