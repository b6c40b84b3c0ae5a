"""Where tokens stand: what arrives at tokens and positions against autograd, and shares of batches that tell."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.attacks.gradients.encoder_batches import BATCH, END, START, Texts, classified, classified_pairs, pair_kinds
from torch import Tensor

from unmask.attacks.gradients.encoder.attention_shares import _arriving, position_shares, type_shares
from unmask.evidence import GradientEvidence
from unmask.models import Model

# Every token stands at one place, but for the frame, which stands at the same two positions of every text.
ONCE = [(START, 17, 99, 250, END), (START, 400, 3, 8, END), (START, 44, 45, 46, END)]
# Texts of different lengths: END stands at several positions, and its gradients are no combination of one another's.
LENGTHS = [(START, 17, 99, 250, END), (START, 400, 3, 8, 21, END), (START, 5, 60, END)]
PARTS = ("query", "key", "value")


def words(texts: Texts) -> Tensor:
    return torch.tensor(sorted({token for text in texts for token in text}))


def shares_of(model: Model, texts: Texts, evidence: GradientEvidence) -> dict[int, Tensor]:
    """Shares by token."""
    tokens = words(texts)
    shares = position_shares(evidence, model.to(dtype=torch.float64), tokens, max(map(len, texts)))
    return dict(zip(tokens.tolist(), shares.T, strict=True))


def only_places(texts: Texts) -> dict[int, int]:
    """Token → position, of the tokens that occur once."""
    counts = Counter(token for text in texts for token in text)
    return {token: p for text in texts for p, token in enumerate(text) if counts[token] == 1}


@contextmanager
def arriving_gradients(model: Model) -> Iterator[dict[str, Tensor]]:
    """Gradients at the outputs of block 0's queries, keys and values, while a client runs its model."""
    seen: dict[str, Tensor] = {}

    def watch(part: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Tensor) -> None:
            output.register_hook(lambda gradient: seen.update({part: gradient}))

        return hook

    attention = model.body.encoder.layer[0].attention.self
    handles = [getattr(attention, part).register_forward_hook(watch(part)) for part in PARTS]
    yield seen
    for handle in handles:
        handle.remove()


@torch.no_grad()
@pytest.mark.parametrize("texts", [ONCE, LENGTHS, BATCH], ids=["once", "lengths", "repeated"])
def test_what_arrives_at_tokens_and_positions_is_what_autograd_says(tiny_bert, texts):
    """D_t = Σ ∂(t, p)/σ over a token's places, D_p over a position's, each layer's gradient scaled to norm 1."""
    model = tiny_bert.to(dtype=torch.float64)
    with arriving_gradients(model) as arriving:
        evidence = classified(model, texts)
    gradients = {part: evidence.gradients[f"encoder.layer.0.attention.self.{part}.weight"] for part in PARTS}
    stacked = torch.cat([arriving[part] / gradients[part].norm() for part in PARTS], dim=-1)
    norm = model.body.embeddings.LayerNorm
    by_token, by_position = defaultdict(list), defaultdict(list)
    for text, rows in zip(texts, stacked, strict=True):
        parts = model.body.embeddings
        kind = parts.token_type_embeddings.weight[0]
        sums = parts.word_embeddings.weight[list(text)] + parts.position_embeddings.weight[: len(text)] + kind
        deviations = (sums.var(1, correction=0) + norm.eps).sqrt()
        for position, token in enumerate(text):
            by_token[token].append(rows[position] / deviations[position])
            by_position[position].append(rows[position] / deviations[position])
    tokens, length = words(texts), max(map(len, texts))
    at_tokens, at_positions = _arriving(evidence, model, tokens, length)[:2]
    expected_tokens = torch.stack([sum(by_token[token]) for token in tokens.tolist()])
    expected_positions = torch.stack([sum(by_position[position]) for position in range(length)])
    # Least squares with the condition of random embeddings, about 1e2, in float64.
    torch.testing.assert_close(at_tokens, expected_tokens, atol=1e-10, rtol=1e-8)
    torch.testing.assert_close(at_positions, expected_positions, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("texts", [ONCE, LENGTHS, BATCH], ids=["once", "lengths", "repeated"])
@pytest.mark.parametrize("keep", [None, ["encoder."], ["self.value"]], ids=["all", "encoder", "values"])
def test_the_shares_of_a_token_are_parts_of_one(tiny_bert, texts, keep):
    for share in shares_of(tiny_bert, texts, classified(tiny_bert, texts, parameters=keep)).values():
        assert float(share.min()) >= 0
        assert float(share.sum()) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize("keep", [None, ["encoder."], ["self.value"]], ids=["all", "encoder", "values"])
def test_tokens_that_occur_once_stand_where_they_stand(tiny_bert, pooling, keep):
    shares = shares_of(tiny_bert, ONCE, classified(tiny_bert, ONCE, pooling=pooling, parameters=keep))
    for token, position in {**only_places(ONCE), START: 0, END: 4}.items():
        assert float(shares[token][position]) > 0.99  # exact but for float32 gradients and 300 iterations


@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize("texts", [LENGTHS, BATCH], ids=["lengths", "repeated"])
def test_beside_repeated_tokens_shares_are_a_hint(tiny_bert, pooling, texts):
    """Repeated tokens are no combination of what arrives at positions, and disturb the shares of all others."""
    shares = shares_of(tiny_bert, texts, classified(tiny_bert, texts, pooling=pooling))
    places = only_places(texts)
    num_right = sum(int(shares[token].argmax()) == position for token, position in places.items())
    assert num_right >= 2 / 3 * len(places)
    assert float(shares[START][0]) > 0.8


def test_on_real_weights_every_token_that_occurs_once_is_placed(minilm):
    lines = ["The spare key lies under the blue pot.", "Her biopsy came back positive on Monday."]
    texts = [minilm.encode(line) for line in lines]
    shares = shares_of(minilm, texts, classified(minilm, texts, parameters=["layer.0.attention.self"]))
    for token, position in only_places(texts).items():
        assert int(shares[token].argmax()) == position
        assert float(shares[token][position]) > 0.6  # 0.75 at the least; the full stops and [SEP]s take the rest


def test_a_position_filled_by_one_token_alone_belongs_to_it(tiny_bert):
    """Both texts begin with START: no matter what follows, its gradient arrives at position 0."""
    shares = shares_of(tiny_bert, ONCE[:2], classified(tiny_bert, ONCE[:2]))
    assert float(shares[START][0]) > 0.99
    assert all(float(share[0]) < 0.01 for token, share in shares.items() if token != START)


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_the_size_of_the_update_does_not_matter(tiny_bert, factor):
    evidence = classified(tiny_bert)
    scaled = replace(evidence, gradients={name: factor * g for name, g in evidence.gradients.items()})
    before, after = (shares_of(tiny_bert, BATCH, one) for one in (evidence, scaled))
    for token, share in before.items():
        torch.testing.assert_close(share, after[token], atol=1e-4, rtol=0)  # float32, divided by its norm


def test_a_tied_output_layer_does_not_disturb(tiny_bert):
    """Masked-language training moves every row of a tied embedding: its rows say nothing of places then."""
    evidence = classified(tiny_bert, ONCE)
    noise = torch.randn(tiny_bert.vocab_size, tiny_bert.width, generator=torch.Generator().manual_seed(0))
    everywhere = {**evidence.gradients, tiny_bert.token_embedding: noise}
    shares = shares_of(tiny_bert, ONCE, replace(evidence, gradients=everywhere))
    for token, position in only_places(ONCE).items():
        assert float(shares[token][position]) > 0.99


def test_rows_that_noise_moves_a_little_still_tell(tiny_bert):
    evidence = classified(tiny_bert, ONCE)
    rows = evidence.gradients[tiny_bert.token_embedding]
    noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
    size = float(rows.norm(dim=1)[words(ONCE)].median()) / tiny_bert.width**0.5
    blurred = {**evidence.gradients, tiny_bert.token_embedding: rows + 0.01 * size * noise}
    model = tiny_bert.to(dtype=torch.float64)
    noisy, plain = (
        position_shares(replace(evidence, gradients=blurred), model, words(ONCE), max(map(len, ONCE)), most)
        for most in (0.2, 0.0)
    )
    assert not torch.equal(noisy, plain)  # without a bound on noise, rows are left out
    for token, position in only_places(ONCE).items():
        assert float(noisy[position, words(ONCE).tolist().index(token)]) > 0.9


def test_types_of_pairs(tiny_bert):
    texts = [(START, 17, 99, END, 250, END), (START, 400, 3, END, 21, END)]
    tokens = words(texts)
    model = tiny_bert.to(dtype=torch.float64)
    shares = type_shares(classified_pairs(tiny_bert, texts), model, tokens, 6)
    assert shares.shape == (2, len(tokens))
    torch.testing.assert_close(shares.sum(0), torch.ones(len(tokens)).double())
    by_token = dict(zip(tokens.tolist(), shares.T, strict=True))
    for text in texts:
        for token, kind in zip(text, pair_kinds(text), strict=True):
            if token != END:  # END has both types
                assert int(by_token[token].argmax()) == kind


@pytest.mark.parametrize("frozen", ["embeddings.", "word_embeddings", "position_embeddings"])
def test_embeddings_that_a_client_keeps_fixed_send_zeros(tiny_bert, frozen):
    """A whole state dict after one step: what was not trained is there, and exactly zero."""
    evidence = classified(tiny_bert, ONCE)
    zeroed = {name: g * 0 if frozen in name else g for name, g in evidence.gradients.items()}
    shares = shares_of(tiny_bert, ONCE, replace(evidence, gradients=zeroed))
    for token, position in only_places(ONCE).items():
        assert float(shares[token][position]) > 0.99
