"""Adapters against transformers' own forward, layer by layer, and gradients as (d_in, d_out) for every role."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tests.models.parity import (
    FLOAT32_PARITY,
    FLOAT64_PARITY,
    precise,
    random_batch,
    states_of_transformers,
    worst_error,
)
from tests.sampling import sample
from tests.tiny_models import TINY, VOCAB, bert_config, gpt2_config, random_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor

from unmask.errors import InputError
from unmask.models import Model, Role, adapt, load_model
from unmask.protocols import observe_gradients, observe_lora
from unmask.protocols.lora import observe_lora_again

GATED = ("llama", "qwen2", "mistral")
BLOCK_ROLES = list(Role)


@pytest.fixture(scope="module", params=TINY)
def precise_tiny(request: pytest.FixtureRequest) -> Model:
    return precise(request.getfixturevalue(request.param))


# Parity of the forward pass


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_parity_in_float64(precise_tiny, padding_side):
    assert worst_error(precise_tiny, *random_batch(precise_tiny, padding_side)) < FLOAT64_PARITY


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_parity_in_float32(tiny, padding_side):
    assert worst_error(tiny, *random_batch(tiny, padding_side)) < FLOAT32_PARITY


def test_parity_can_fail(precise_tiny):
    """The check sees a weight of the last block that is off by a thousandth."""
    other = precise_tiny.to()
    layer = other.linear(Role.MLP_OUT, other.num_blocks - 1)
    other.parameter(layer.parameter).data *= 1.001
    tokens, mask = random_batch(other, "right")
    _, theirs = states_of_transformers(precise_tiny, tokens, mask)
    ours = other.final_norm(other.hidden_states(tokens, mask)[-1])
    assert (ours - theirs)[mask].abs().max() > 1e3 * FLOAT64_PARITY


def test_parity_with_positions_that_start_after_the_padding(precise_tiny):
    """What `generate` does for left-padded texts; BERT and GPT-2 take positions too."""
    tokens, mask = random_batch(precise_tiny, "left")
    positions = (mask.long().cumsum(1) - 1).clamp_min(0)
    assert worst_error(precise_tiny, tokens, mask, positions) < FLOAT64_PARITY


@sample("name", ["smollm2", "minilm"], ["minilm"])
def test_parity_on_real_weights(name, request):
    model = request.getfixturevalue(name)
    tokens, mask = real_batch(model)
    assert worst_error(model, tokens, mask) < FLOAT32_PARITY
    twin = precise(model)
    assert worst_error(twin, tokens, mask) < FLOAT64_PARITY


def real_batch(model: Model) -> tuple[Tensor, Tensor]:
    sentences = [
        "The patient was discharged on Friday with a new prescription.",
        "Transfer it today, please.",
    ]
    texts = [torch.tensor(model.encode(sentence)) for sentence in sentences]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(text)) for text in texts], batch_first=True).bool()
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=model.pad_token), mask


def test_fewer_blocks_give_the_first_states(tiny):
    tokens, mask = random_batch(tiny, "right")
    whole, part = tiny.hidden_states(tokens, mask), tiny.hidden_states(tokens, mask, num_blocks=2)
    assert len(part) == 3
    assert all(torch.equal(a, b) for a, b in zip(part, whole, strict=False))


def test_a_mask_of_ones_is_the_default(tiny):
    tokens, _ = random_batch(tiny, "right")
    expected = tiny.hidden_states(tokens, torch.ones_like(tokens, dtype=torch.bool))[-1]
    assert torch.equal(tiny.hidden_states(tokens)[-1], expected)


def test_rows_need_no_batch(precise_tiny):
    """(n,) tokens give what (batch, length) tokens give, row by row."""
    tokens, _ = random_batch(precise_tiny, "right")
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    batched = precise_tiny.first_input(tokens, positions)
    flat = precise_tiny.first_input(tokens.flatten(), positions.flatten())
    assert torch.allclose(flat, batched.flatten(0, 1), rtol=FLOAT64_PARITY)
    for ours, expected in zip(
        precise_tiny.queries_keys_values(0, flat, positions.flatten()),
        precise_tiny.queries_keys_values(0, batched, positions),
        strict=True,
    ):
        assert torch.allclose(ours, expected.flatten(0, 1), rtol=FLOAT64_PARITY, atol=FLOAT64_PARITY)


# Linear layers: what they see, what they hold, and how their gradients lie


class Tap:
    """The input and output of one linear module during a forward pass, with the output's gradient after backward."""

    def __init__(self, module: torch.nn.Module) -> None:
        module.register_forward_hook(self._keep)

    def _keep(self, module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        self.inputs, self.output = inputs[0], output


@pytest.fixture(scope="module")
def tapped(precise_tiny: Model) -> SimpleNamespace:
    """One forward and backward pass with a tap on every linear layer of every block."""
    model = precise_tiny.to()
    layers = {(role, block): model.linear(role, block) for role in BLOCK_ROLES for block in range(model.num_blocks)}
    layers = {key: layer for key, layer in layers.items() if layer is not None}
    names = {layer.parameter.removesuffix(".weight") for layer in layers.values()}
    taps = {name: Tap(model.body.get_submodule(name)) for name in names}
    tokens, mask = random_batch(model, "right")
    states = model.body(input_ids=tokens, attention_mask=mask.long(), use_cache=False).last_hidden_state
    weights = torch.randn(states.shape, dtype=states.dtype, generator=torch.Generator().manual_seed(0))
    (states * weights).sum().backward()
    return SimpleNamespace(model=model, layers=layers, taps=taps, tokens=tokens, mask=mask)


def test_every_role_is_there_but_for_gates(precise_tiny):
    gated = precise_tiny.family in GATED
    for role in BLOCK_ROLES:
        assert (precise_tiny.linear(role, 0) is None) == (role is Role.MLP_GATE and not gated)
        assert (precise_tiny.weight(role, 0) is None) == (role is Role.MLP_GATE and not gated)


def test_weights_as_d_in_d_out_reproduce_the_modules_product(tapped):
    for (role, block), layer in tapped.layers.items():
        module_name = layer.parameter.removesuffix(".weight")
        tap, module = tapped.taps[module_name], tapped.model.body.get_submodule(module_name)
        columns = slice(None) if layer.columns is None else list(layer.columns)
        bias = 0 if module.bias is None else module.bias[columns]
        product = tap.inputs @ tapped.model.weight(role, block) + bias
        assert torch.allclose(product, tap.output[..., columns], atol=FLOAT64_PARITY), (role, block)


def test_gradients_are_inputs_transposed_times_output_gradients(tapped):
    """G = Xᵀ·∂L/∂Y over all rows of the batch, for every role of every block."""
    for (role, block), layer in tapped.layers.items():
        tap = tapped.taps[layer.parameter.removesuffix(".weight")]
        columns = slice(None) if layer.columns is None else list(layer.columns)
        expected = tap.inputs.flatten(0, 1).T @ tap.output.grad.flatten(0, 1)[:, columns]
        gradient = layer.orient(tapped.model.parameter(layer.parameter).grad)
        assert gradient.shape == tapped.model.weight(role, block).shape
        scale = float(expected.detach().abs().max())
        assert scale > 0, (role, block)
        assert torch.allclose(gradient, expected, atol=FLOAT64_PARITY * scale), (role, block)


def test_the_adapter_knows_what_every_layer_sees(tapped):
    model, mask = tapped.model, tapped.mask
    theirs = {name: tap.inputs for name, tap in tapped.taps.items()}  # the adapter calls the same modules again
    positions = torch.arange(tapped.tokens.shape[1]).expand_as(tapped.tokens)
    states = model.hidden_states(tapped.tokens, mask)
    for block in range(model.num_blocks):
        mixed = model.mixed_values(block, states[block], positions, mask)
        attended = model.after_attention(block, states[block], mixed)
        hidden = model.mlp_hidden(block, attended)
        assert torch.allclose(model.after_mlp(block, attended, hidden), states[block + 1], atol=FLOAT64_PARITY)
        rows = model.attention_input(block, states[block])
        seen = dict.fromkeys((Role.QUERY, Role.KEY, Role.VALUE), rows)
        seen |= {Role.ATTENTION_OUT: mixed, Role.MLP_OUT: hidden}
        seen |= dict.fromkeys((Role.MLP_IN, Role.MLP_GATE), model.mlp_input(block, attended))
        for role in BLOCK_ROLES:
            if (layer := tapped.layers.get((role, block))) is not None:
                inputs = theirs[layer.module]
                assert torch.allclose(seen[role][mask], inputs[mask], atol=FLOAT64_PARITY), (role, block)


# Sizes


@pytest.mark.parametrize(
    ("name", "num_key_value_heads", "head_width"),
    [
        ("tiny_gpt2", 4, 16),
        ("tiny_llama", 2, 16),
        ("tiny_qwen2", 2, 16),
        ("tiny_mistral", 2, 24),
        ("tiny_bert", 4, 16),
    ],
)
def test_sizes(name, num_key_value_heads, head_width, request):
    model = request.getfixturevalue(name)
    assert (model.width, model.num_blocks, model.num_heads, model.vocab_size) == (64, 3, 4, VOCAB)
    assert model.num_key_value_heads == num_key_value_heads
    assert model.head_width == head_width
    assert model.max_positions == 64
    assert model.weight(Role.KEY, 0).shape == (64, num_key_value_heads * head_width)
    assert model.weight(Role.ATTENTION_OUT, 0).shape == (4 * head_width, 64)
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", TINY)
def test_causality(name, request):
    """Changing the last token changes earlier rows exactly where the family attends in both directions."""
    model = request.getfixturevalue(name)
    tokens, _ = random_batch(model, "right", lengths=(6,))
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % VOCAB
    before, after = model.hidden_states(tokens)[-1][0, :-1], model.hidden_states(changed)[-1][0, :-1]
    assert torch.equal(before, after) == model.causal


# First inputs of the whole vocabulary


def test_projected_first_inputs_equal_the_slow_way(precise_tiny):
    matrix = torch.randn(64, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = [0, 7, 63, 7]
    fast = list(precise_tiny.project_first_inputs(matrix, positions))
    assert len(fast) == 4
    for projected, position in zip(fast, positions, strict=True):
        slow = torch.stack(
            [precise_tiny.first_input(torch.tensor(t), torch.tensor(position)) @ matrix for t in range(VOCAB)]
        )
        assert projected.shape == (VOCAB, 5)
        assert torch.allclose(projected, slow, atol=FLOAT64_PARITY)


def test_projected_first_inputs_in_the_models_own_precision(tiny):
    matrix = torch.randn(64, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (fast,) = tiny.project_first_inputs(matrix, range(3, 4))
    (slow,) = Model.project_first_inputs(tiny, matrix, [3])
    assert fast.dtype == torch.float32
    # Sums of 64 products of order 1 in float32, divided by a variance that is itself a difference of such sums.
    assert torch.allclose(fast, slow, atol=1e-4)


# Fingerprints


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_fingerprint_is_the_same_in_every_precision(tiny, dtype):
    assert tiny.to(dtype=dtype).fingerprint() == tiny.fingerprint()


def test_the_fingerprint_changes_with_every_parameter(tiny):
    """One sampled weight of each parameter of the body is moved; the first weight is always in the sample.

    The limit of sampling: about 64 weights a parameter are hashed, so a change of a single other one is not seen.
    """
    model = tiny.to()
    seen = {model.fingerprint()}
    body = dict(model.body.named_parameters())
    for parameter in body.values():
        parameter.data.view(-1)[0] += 1.0
        seen.add(model.fingerprint())
    assert len(seen) == len(body) + 1


def test_the_fingerprint_sees_a_step_of_training(tiny_gpt2):
    model = tiny_gpt2.to()
    for parameter in model.body.parameters():
        parameter.data *= 1.01  # more than bfloat16's half unit of 0.4 %
    assert model.fingerprint() != tiny_gpt2.fingerprint()


def test_the_fingerprint_ignores_what_bfloat16_rounds_away(tiny_gpt2):
    """Why it is the same in every precision; the price is that changes of 1e-6 are not seen."""
    model = tiny_gpt2.to(dtype=torch.bfloat16).to(dtype=torch.float32)
    model.parameter("wte.weight").data.view(-1)[0] *= 1 + 1e-6
    assert model.fingerprint() == tiny_gpt2.fingerprint()


def test_the_fingerprint_tells_families_and_shapes_apart(tiny_gpt2, tiny_llama, tiny_qwen2, tiny_mistral, tiny_bert):
    models = (tiny_gpt2, tiny_llama, tiny_qwen2, tiny_mistral, tiny_bert)
    assert len({model.fingerprint() for model in models}) == 5


@pytest.mark.parametrize(
    ("make_config", "language_model", "classifier"),
    [
        (gpt2_config, "GPT2LMHeadModel", "GPT2ForSequenceClassification"),
        (gpt2_config, "GPT2LMHeadModel", "GPT2Model"),
        (bert_config, "BertForMaskedLM", "BertForSequenceClassification"),
        (bert_config, "BertForMaskedLM", "BertModel"),
    ],
)
def test_the_fingerprint_is_the_bodys(make_config, language_model, classifier):
    """Evidence from a classifier fits a language model of the same body; BERT's pooler is part of a head."""
    speaks = adapt(random_model(getattr(transformers, language_model), make_config()))
    decides = adapt(random_model(getattr(transformers, classifier), make_config(), seed=1))
    decides.body.load_state_dict(speaks.body.state_dict(), strict=False)
    assert decides.fingerprint() == speaks.fingerprint()


# Names of parameters


@pytest.mark.parametrize(
    ("head", "own"),
    [
        ("GPT2Model", None),
        ("GPT2LMHeadModel", None),  # its output layer is tied to the embedding
        ("GPT2ForSequenceClassification", "score.weight"),
    ],
)
def test_canonical_names_are_those_of_the_body(head, own):
    model = adapt(getattr(transformers, head)(gpt2_config()))
    names = {name for name, _ in model.named_parameters()}
    body = {name for name, _ in transformers.GPT2Model(gpt2_config()).named_parameters()}
    assert names == body | ({own} if own else set())


def test_every_canonical_name_finds_its_parameter(tiny):
    for name, parameter in tiny.named_parameters():
        assert tiny.parameter(name) is parameter
    for name, parameter in tiny.hf.named_parameters():
        assert tiny.parameter(tiny.canonical_name(name)) is parameter


def test_canonical_names_may_be_given_already(tiny):
    for name, _ in tiny.named_parameters():
        assert tiny.canonical_name(name) == name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny_gpt2", "wte.weight"),
        ("tiny_llama", "lm_head.weight"),
        ("tiny_qwen2", "embed_tokens.weight"),
        ("tiny_bert", "embeddings.word_embeddings.weight"),
    ],
)
def test_the_output_layer_has_a_name(name, expected, request):
    model = request.getfixturevalue(name)
    assert model.unembedding_name == expected
    assert model.unembedding is model.parameter(expected)
    assert model.unembedding.shape == (VOCAB, 64)


def test_a_bare_model_has_no_output_layer():
    model = adapt(transformers.GPT2Model(gpt2_config()))
    assert model.unembedding is None
    assert model.unembedding_name is None


def test_embeddings_are_named(tiny):
    assert tiny.parameter(tiny.token_embedding).shape == (VOCAB, 64)
    assert (tiny.position_embedding is not None) == tiny.learned_positions
    if tiny.position_embedding is not None:
        assert tiny.parameter(tiny.position_embedding).shape == (64, 64)


# Text


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    words = Tokenizer(WordLevel({"<unk>": 0, "<s>": 1, "<pad>": 2, "hello": 3, "there": 4}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", pad_token="<pad>"
    )


def test_a_tokenizer_brings_text_and_special_tokens(tiny_gpt2, tokenizer):
    model = load_model(tiny_gpt2.hf, tokenizer=tokenizer)
    assert model.hf is tiny_gpt2.hf  # used as it is, not copied
    assert model.special_tokens == {0, 1, 2}
    assert model.encode("hello there") == [3, 4]
    assert model.decode((3, 4)) == "hello there"


def test_special_tokens_that_frame_no_text_are_data(tiny_gpt2, tokenizer):
    assert adapt(tiny_gpt2.hf, tokenizer).decode([1, 3]).split() == ["<s>", "hello"]


def test_without_a_tokenizer_tokens_are_numbers(tiny_gpt2):
    assert tiny_gpt2.special_tokens == frozenset()
    assert tiny_gpt2.decode([5, 7]) == "5 7"
    with pytest.raises(InputError, match=r"without a tokenizer.*load_model\(model, tokenizer=…\)"):
        tiny_gpt2.encode("hello")


@pytest.mark.parametrize(
    ("of_tokenizer", "of_config", "expected"),
    [
        ({"pad_token_id": 7, "eos_token_id": 8}, {"pad_token_id": 9}, 7),
        ({"pad_token_id": None, "eos_token_id": 8}, {"pad_token_id": 9}, 8),
        ({}, {"pad_token_id": 9, "eos_token_id": 10}, 9),
        ({}, {"pad_token_id": None, "eos_token_id": 10}, 10),
        ({}, {"pad_token_id": None, "eos_token_id": [10, 11]}, 0),  # Llama 3 has several ends
        ({"pad_token_id": 0}, {"pad_token_id": 9}, 0),  # 0 is a token, not 'none'
    ],
)
def test_the_pad_token(tiny_gpt2, of_tokenizer, of_config, expected):
    model = adapt(tiny_gpt2.hf, SimpleNamespace(**of_tokenizer))
    model.config = SimpleNamespace(**of_config)
    assert model.pad_token == expected


def test_real_tokenizers_know_their_special_tokens(minilm):
    cls, *_, sep = minilm.encode("hello there")
    assert {cls, sep, minilm.pad_token} <= minilm.special_tokens
    assert minilm.decode(minilm.encode("hello there")) == "hello there"


# Copies and loading


def test_to_leaves_the_original_alone(tiny):
    before = {name: parameter.clone() for name, parameter in tiny.named_parameters()}
    twin = tiny.to(dtype=torch.bfloat16)
    assert (twin.dtype, tiny.dtype) == (torch.bfloat16, torch.float32)
    assert type(twin) is type(tiny)
    copy = tiny.to()
    for name, parameter in copy.named_parameters():
        parameter.data += 1
        assert torch.equal(tiny.parameter(name), before[name])


def test_to_keeps_tied_weights_tied(tiny_gpt2):
    twin = tiny_gpt2.to(dtype=torch.float64)
    assert twin.unembedding is twin.parameter("wte.weight")


def test_factors_in_the_weights_give_what_adapters_beside_them_give(tiny_llama, tiny_gpt2):
    """Of a layer that stores its weights as nn.Linear does, and of one that stores them the other way round."""
    for model in (tiny_llama, tiny_gpt2):
        evidence = observe_lora(model, [[5, 6, 7, 8]], rank=4, steps=2, earlier_texts=[[60, 61, 62]])
        merged = model.with_factors(evidence.adapters, evidence.adapter_scale)
        again = observe_lora_again(evidence, model, [[9, 10, 11]])
        layer = model.linear(Role.QUERY, 0)
        whole = observe_gradients(merged, [[9, 10, 11]]).gradients[layer.parameter]
        whole = whole if layer.stored_transposed else whole.T
        down, up = (f"{layer.module}.lora_{factor}.weight" for factor in "AB")
        by_chain_rule = evidence.adapter_scale * evidence.adapters[up].T @ whole
        torch.testing.assert_close(again.gradients[down], by_chain_rule, rtol=1e-3, atol=1e-6)
        assert not torch.equal(merged.parameter(layer.parameter), model.parameter(layer.parameter))


def test_factors_of_a_tied_head_leave_the_embedding_alone(tiny_gpt2):
    draw = torch.Generator().manual_seed(0)
    sizes = {"lm_head.lora_A.weight": (2, tiny_gpt2.width), "lm_head.lora_B.weight": (tiny_gpt2.vocab_size, 2)}
    factors = {name: torch.randn(size, generator=draw) for name, size in sizes.items()}
    merged = tiny_gpt2.with_factors(factors, {"lm_head": 3.0})
    change = 3.0 * factors["lm_head.lora_B.weight"] @ factors["lm_head.lora_A.weight"]
    torch.testing.assert_close(merged.unembedding, tiny_gpt2.unembedding + change)
    assert torch.equal(merged.parameter("wte.weight"), tiny_gpt2.parameter("wte.weight"))
