"""Tokens from the first attention module's output: exact in every decoder, and silent on noise."""

from __future__ import annotations

import pytest
import torch
from tests.sampling import sample

from unmask.attacks.outputs.block_step import BlockStep
from unmask.attacks.outputs.first_attention.attack import FirstAttentionAttack, value_tables
from unmask.evidence import HiddenEvidence, Site
from unmask.models import Model
from unmask.models.linear import Role
from unmask.models.output_projection import OutputProjection
from unmask.recovery import RecoveredTexts, Recovery, Status

DECODERS = ("tiny_gpt2", "tiny_llama", "tiny_qwen2", "tiny_mistral")  # the last has more mixed values than outputs
TEXT = [5, 17, 99, 17, 250, 3, 8, 8, 8, 44, 5, 400]
ATTACK = FirstAttentionAttack()
LETTER = (
    "The spare key lies under the pot beside the old green door, and the code of the alarm is 4711; please do not "
    "tell anybody about it, in particular not the neighbours, who have been asking for the key every day since they "
    "moved in last summer."
)


@pytest.fixture
def decoder(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


each_decoder = pytest.mark.parametrize("decoder", DECODERS, indirect=True)


@torch.no_grad()
def observed(
    model: Model, texts: list[list[int]], dtype: torch.dtype = torch.float32, side: str = "right"
) -> HiddenEvidence:
    """What the attention module of block 0 adds to the stream, for padded texts."""
    client = model.to(dtype=torch.float64) if dtype is torch.float64 else model
    length = max(map(len, texts))
    tokens, mask = torch.zeros(len(texts), length, dtype=torch.long), torch.zeros(len(texts), length, dtype=torch.bool)
    for index, text in enumerate(texts):
        begin = length - len(text) if side == "left" else 0
        tokens[index, begin : begin + len(text)] = torch.tensor(text)
        mask[index, begin : begin + len(text)] = True
    positions = torch.arange(length).expand_as(tokens)
    stream = client.embed(tokens, positions)
    output = client.after_attention(0, torch.zeros_like(stream), client.mixed_values(0, stream, positions, mask)).added
    return HiddenEvidence((output * mask[..., None]).to(dtype), mask, 0, model.fingerprint(), Site.ATTENTION)


def tokens_of(recovery: Recovery[RecoveredTexts]) -> set[tuple[int, ...]]:
    return {text.tokens for text in recovery.value.certain}


def assert_exact(recovery: Recovery[RecoveredTexts], *texts: list[int]) -> None:
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert recovery.certificate.holds
    assert tokens_of(recovery) == {tuple(text) for text in texts}


@each_decoder
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_exact_tokens_with_repetitions(decoder, dtype):
    assert_exact(ATTACK(observed(decoder, [TEXT], dtype), decoder), TEXT)


@each_decoder
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side(decoder, side):
    texts = [TEXT[:7], [44, 45, 46], TEXT]
    assert_exact(ATTACK(observed(decoder, texts, side=side), decoder), *texts)


@each_decoder
def test_texts_longer_than_a_head_is_wide(decoder):
    """No span is left to test then; every token is sent through the module."""
    text = torch.randperm(400, generator=torch.Generator().manual_seed(3))[: decoder.head_width + 6].tolist()
    assert_exact(ATTACK(observed(decoder, [text]), decoder), text)


@pytest.mark.parametrize("decoder", ["tiny_gpt2", "tiny_llama", "tiny_qwen2"], indirect=True)
def test_span_test_names_a_new_token_alone(decoder):
    """The theorem: modulo known values, the new token's value is parallel to what is seen; no forward pass is run."""
    model = decoder.to(dtype=torch.float64)
    text = [5, 17, 99, 250, 3, 8, 44, 400]
    rows = observed(decoder, [text], torch.float64).states[0]
    mixed = OutputProjection.of(model, 0).invert(rows)
    step = BlockStep.first(model, 0)
    with torch.no_grad():
        for position, (token, table) in enumerate(zip(text, value_tables(model, range(len(text))), strict=True)):
            step = BlockStep(model, 0, position, step.prefix)
            ranked = table.ranking(mixed[position], step.prefix.values)
            assert int(ranked[0]) == token
            attended = step.attend(model.embed(torch.tensor([token]), torch.tensor([position])))
            step = step.following(attended.keys, attended.values)


@each_decoder
def test_noise_is_not_recovered(decoder):
    evidence = observed(decoder, [TEXT])
    noise = torch.randn(evidence.states.shape, generator=torch.Generator().manual_seed(0))
    noise = noise * evidence.states.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
    recovery = ATTACK(HiddenEvidence(noise, evidence.mask, 0, decoder.fingerprint(), Site.ATTENTION), decoder)
    assert recovery.status is Status.NOTHING_FOUND
    assert not recovery.certificate.holds


@each_decoder
def test_what_comes_before_noise_is_kept(decoder):
    evidence = observed(decoder, [TEXT])
    states = evidence.states.clone()
    states[:, 4:] = states[:, 4:].flip(-1)
    recovery = ATTACK(HiddenEvidence(states, evidence.mask, 0, decoder.fingerprint(), Site.ATTENTION), decoder)
    assert recovery.status is Status.PARTIAL
    (text,) = recovery.value.texts
    assert text.tokens == tuple(TEXT[:4])
    assert not text.certain


def test_tokens_that_are_equal_are_not_told_apart(tiny_llama):
    model = tiny_llama.to()
    with torch.no_grad():
        weights = model.parameter(model.token_embedding)
        weights[300] = weights[17]
    recovery = ATTACK(observed(model, [[5, 17, 99]]), model)
    assert recovery.status is Status.PARTIAL
    assert not recovery.value.certain


@sample("dtype, length", [(torch.float64, 16), (torch.float32, 56)], [(torch.float64, 16)])
def test_real_weights(low_smollm2, dtype, length):
    tokens = low_smollm2.encode(LETTER)[:length]
    assert len(tokens) == length
    recovery = ATTACK(observed(low_smollm2, [tokens], dtype), low_smollm2)
    assert_exact(recovery, tokens)
    assert recovery.certificate.residual < 16 * torch.finfo(dtype).eps  # rounding of the client's own pass


def test_real_weights_in_bfloat16(low_smollm2):
    """What is called certain is right, whatever share that is."""
    tokens = low_smollm2.encode(LETTER)[:10]
    recovery = ATTACK(observed(low_smollm2, [tokens], torch.bfloat16), low_smollm2)
    (text,) = recovery.value.texts
    num_certain = int(recovery.certificate.details["certain_tokens"])
    assert num_certain > 5
    assert text.tokens[:num_certain] == tuple(tokens[:num_certain])


@pytest.mark.slow
def test_noise_on_real_weights(low_smollm2):
    evidence = observed(low_smollm2, [low_smollm2.encode(LETTER)[:4]])
    shuffled = evidence.states.flip(-1)
    recovery = ATTACK(
        HiddenEvidence(shuffled, evidence.mask, 0, low_smollm2.fingerprint(), Site.ATTENTION), low_smollm2
    )
    assert recovery.status is Status.NOTHING_FOUND


def test_rows_that_read_one_earlier_token_alone_leave_their_own_open(tiny_llama):
    """Attention so sharp that many second tokens see only the first: their rows are then the same."""
    model = tiny_llama.to()
    with torch.no_grad():
        model.weight(Role.QUERY, 0).mul_(30)
    rows = observed(model, [[11, token] for token in range(model.vocab_size)]).states
    hidden = torch.isclose(rows[:, 1], rows[:, 0], rtol=1e-4).all(1).nonzero()[:, 0].tolist()
    texts = [[11, token] for token in hidden if token != 11]
    recovery = ATTACK(observed(model, texts), model)
    assert len(texts) > 3
    assert not recovery.value.certain
    assert_exact(ATTACK(observed(model, [[5, 17, 99, 5]]), model), [5, 17, 99, 5])


def test_a_neighbour_of_the_right_token_is_not_called_certain(tiny_llama):
    """The adversary's model lacks the right token and has one close to it: its error is no rounding."""
    model = tiny_llama.to()
    with torch.no_grad():
        weights = model.parameter(model.token_embedding)
        noise = torch.randn(weights.shape[1], generator=torch.Generator().manual_seed(0))
        weights[300] = weights[17] + 0.02 * weights[17].norm() * noise / noise.norm()
        evidence = observed(model, [[5, 17, 99]])
        weights[17] = weights[18]
    recovery = ATTACK(evidence, model)
    assert not any(text.certain for text in recovery.value.texts)
