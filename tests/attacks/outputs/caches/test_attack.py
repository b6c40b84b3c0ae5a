"""Prompts from cached keys and values: exact with whatever is seen, open where it does not tell, silent on noise."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product

import pytest
import torch
import transformers
from tests.contracts.models import stranger
from tests.models.families import DECODERS, build
from tests.sampling import in_turn, sample
from tests.tiny_models import llama_sizes, random_model

import unmask
from unmask.attacks.outputs.caches.attack import CacheAttack
from unmask.errors import InputError
from unmask.evidence import CacheEvidence
from unmask.models import Model, adapt
from unmask.protocols import observe_cache, observe_hidden
from unmask.recovery import Status

TEXTS = [(5, 17, 99, 17, 250), (400, 3, 8, 21), (44, 45, 46, 47, 48, 49)]
SMALL = ("tiny_gpt2", "tiny_llama")
EACH = list(product(SMALL, ("both", "keys", "values")))  # in turn with layers


@pytest.fixture(params=SMALL)
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def certain(recovery) -> set[tuple[int, ...]]:
    return {text.tokens for text in recovery.value.certain}


@sample("each, layer", product(EACH, [0, 2]), in_turn(EACH, [2, 0]))
def test_every_prompt_is_read(each, layer, request):
    """Of block 0 no text is certain: its rows may be of several."""
    model, parts = request.getfixturevalue(each[0]), each[1]
    recovery = CacheAttack()(observe_cache(model, TEXTS, layer=layer, parts=parts), model)
    assert recovery.status is (Status.RECOVERED if layer else Status.PARTIAL), recovery.reason
    assert certain(recovery) == (set(TEXTS) if layer else set())
    assert {text.tokens for text in recovery.value.texts} == set(TEXTS)
    assert recovery.value.token_set == {token for text in TEXTS for token in text}
    assert recovery.used == (("keys", "values") if parts == "both" else (parts,))


@pytest.mark.parametrize("layer", [0, 1])
def test_a_token_whose_row_is_zero_is_read_too(tiny_llama, layer):
    """As transformers makes the row of the padding token: its keys and values are zero in block 0."""
    hf = copy.deepcopy(tiny_llama.hf)
    hf.get_input_embeddings().weight.data[17] = 0
    model = adapt(hf)
    evidence = observe_cache(model, TEXTS, layer=layer)
    assert layer or not evidence.keys[0, 1].any()
    read = CacheAttack()(evidence, model).value
    states = unmask.recover_text(observe_hidden(model, TEXTS, layer=layer), model).value
    for found, held in ((read, set(TEXTS[1:])), (states, set(TEXTS))):
        assert {text.tokens for text in (found.certain if layer else found.texts)} >= held


@sample("storage", ["bfloat16", "float8_e4m3fn", "int8"], ["float8_e4m3fn", "int8"])
def test_coarse_storage_protects_nothing(tiny_llama, storage):
    recovery = CacheAttack()(observe_cache(tiny_llama, TEXTS, layer=2, dtype=storage), tiny_llama)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert certain(recovery) == set(TEXTS)


@sample("each, layer", product(EACH, [0, 1]), in_turn(EACH, [0, 1]))
def test_rows_of_two_texts_are_no_text(each, layer, request):
    """Spliced caches used to be RECOVERED, certain and wrong, keys with their positions too."""
    model, parts = request.getfixturevalue(each[0]), each[1]
    evidence = observe_cache(model, [text[:4] for text in TEXTS], layer=layer, parts=parts)
    spliced = {name: part.clone() for name, part in evidence.parts.items()}
    for name, part in evidence.parts.items():
        spliced[name][0, 2:] = part[1, 2:]
    recovery = CacheAttack()(replace(evidence, **spliced), model)
    assert recovery.status is not Status.RECOVERED
    assert certain(recovery) == ({text[:4] for text in TEXTS[1:]} if layer else set())
    assert recovery.value.token_set <= {token for text in TEXTS for token in text[:4]}
    assert layer or "are of one text" in recovery.reason or "order and positions" in recovery.reason


def test_one_head_of_two_is_enough(tiny_llama):
    recovery = CacheAttack()(observe_cache(tiny_llama, TEXTS, layer=1, heads=[1]), tiny_llama)
    assert certain(recovery) == set(TEXTS)


@pytest.mark.parametrize("levels", [3, 1])
def test_what_is_too_coarse_is_open_and_never_false(tiny_llama, levels):
    """One head's values, 16 numbers on a few levels: three are just enough; with one, nothing may be certain."""
    evidence = observe_cache(tiny_llama, [text[:4] for text in TEXTS[:2]], layer=1, heads=[0], parts="values")
    scale = evidence.values.abs().amax(3, keepdim=True) / levels
    coarse = replace(evidence, values=torch.nan_to_num((evidence.values / scale).round() * scale))
    recovery = CacheAttack()(coarse, tiny_llama)
    assert certain(recovery) <= {text[:4] for text in TEXTS}
    assert (recovery.status is Status.RECOVERED) <= (levels == 3)
    assert recovery.value.token_set <= {token for text in TEXTS for token in text}


def test_a_page_of_the_first_block_is_a_part_and_says_so(model):
    evidence = observe_cache(model, TEXTS, layer=0, first_position=2, num_positions=3)
    recovery = CacheAttack()(evidence, model)
    assert recovery.status is Status.PARTIAL
    assert {text.tokens for text in recovery.value.texts} == {text[2:5] for text in TEXTS}
    assert recovery.value.token_set == {token for text in TEXTS for token in text[2:5]}  # they are certain still
    assert recovery.certificate.holds
    assert "seen from position 2 on, and not what comes before" in recovery.reason
    for text in recovery.value.texts:
        assert not text.certain
        assert not text.ambiguities  # a class of texts would be claimed to hold one of the batch


def test_nothing_of_the_first_block_tests_a_beginning_that_was_not_seen(model):
    evidence = replace(observe_cache(model, TEXTS, layer=0, first_position=2), known_beginning=(9, 9))
    recovery = CacheAttack()(evidence, model)
    assert recovery.status is Status.PARTIAL
    assert {text.tokens for text in recovery.value.texts} == {(9, 9, *text[2:]) for text in TEXTS}
    assert {text.num_given for text in recovery.value.texts} == {2}
    assert not recovery.value.certain
    assert "the known beginning could not be tested" in recovery.reason


@pytest.mark.parametrize("parts", ["values", "both"])
def test_values_of_rotary_models_do_not_prove_an_order(tiny_llama, parts):
    """Whatever is done to their columns, they agree: so it is said that the order is the dump's."""
    evidence = observe_cache(tiny_llama, TEXTS[:1], layer=0, parts=parts)
    order = torch.tensor([2, 0, 1, 4, 3])
    shuffled = replace(evidence, **{name: part[:, order] for name, part in evidence.parts.items()})
    for each in (evidence, shuffled):
        recovery = CacheAttack()(each, tiny_llama)
        assert ("order and positions of the tokens are taken from the dump" in recovery.reason) is (parts == "values")
        assert ("order and positions" in recovery.certificate.claim) is (parts == "values")
        assert not recovery.value.certain
    assert ("read to the end: 1 of 1" in recovery.reason) is (parts == "values")  # keys tell that they were shuffled


def test_a_page_of_a_deeper_block_is_guessed_and_nothing_is_claimed(model):
    recovery = CacheAttack()(observe_cache(model, TEXTS, layer=2, first_position=2), model)
    assert recovery.status is Status.NOTHING_FOUND
    assert not recovery.looked_for  # nothing confirms it
    assert not recovery.certificate.holds
    assert not recovery.value.token_set
    assert "guesses" in recovery.reason
    assert [len(text.tokens) for text in recovery.value.texts] == [len(text) - 2 for text in TEXTS]


def test_a_known_beginning_opens_the_page(model):
    texts = [(7, 9, *text[:3]) for text in TEXTS]
    evidence = observe_cache(model, texts, layer=2, first_position=2)
    recovery = CacheAttack()(replace(evidence, known_beginning=(7, 9)), model)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert certain(recovery) == set(texts)
    assert {text.num_given for text in recovery.value.texts} == {2}
    guessed = CacheAttack()(evidence, model)
    for wrong, why in (
        ((7,), "ends before the first row"),
        ((9, 7), "probably does not start with the known beginning"),
    ):
        missed = CacheAttack()(replace(evidence, known_beginning=wrong), model)
        assert missed.status is Status.NOTHING_FOUND
        assert not missed.value.token_set
        assert why in missed.reason
        assert [text.tokens for text in missed.value.texts] == [text.tokens for text in guessed.value.texts]


@sample("name", ["GPTNeoX", "Bloom", "Falcon with ALiBi", "OPT", "Gemma2", "Phi"], ["GPTNeoX", "Bloom", "Gemma2"])
def test_other_positions_and_heads(name):
    """Partial rotary, ALiBi, one key head for all, learned positions, capped scores."""
    model = adapt(build(name))
    texts = [[token % model.vocab_size for token in text] for text in TEXTS]
    recovery = CacheAttack()(observe_cache(model, texts, layer=model.num_blocks - 1), model)
    assert recovery.status is Status.RECOVERED, recovery.reason


def test_a_compressed_cache_is_refused():
    model = adapt(build("DeepseekV3"))
    recovery = CacheAttack()(observe_cache(model, [[5, 6, 7]], layer=1), model)
    assert recovery.status is Status.NOT_APPLICABLE
    assert "compressed" in recovery.reason


def test_encoders_keep_no_cache(tiny_bert):
    evidence = CacheEvidence(torch.zeros(1, 2, 4, 16), None, torch.ones(1, 2).bool(), 0, (0, 1, 2, 3), "model")
    assert CacheAttack()(evidence, tiny_bert).status is Status.NOT_APPLICABLE


def spoiled(evidence: CacheEvidence, model: Model) -> dict[str, CacheEvidence]:
    generator = torch.Generator().manual_seed(3)
    noise = {name: torch.randn(part.shape, generator=generator) for name, part in evidence.parts.items()}
    order = torch.tensor([1, 2, 3, 0])
    foreign = observe_cache(stranger(model, seed=3), [text[:4] for text in TEXTS[:2]], layer=evidence.layer)
    return {
        "noise": replace(evidence, **noise),
        "positions": replace(evidence, **{name: part[:, order] for name, part in evidence.parts.items()}),
        "weights": replace(foreign, model_fingerprint=evidence.model_fingerprint),
        "cloak": unmask.defend_states(evidence, unmask.parse_defence("cloak"), generator),
    }


@sample(
    "name, storage", product(("tiny_gpt2", "tiny_llama"), (None, "int8")), [("tiny_gpt2", None), ("tiny_llama", "int8")]
)
def test_caches_that_say_nothing_yield_nothing(name, storage, request):
    model = request.getfixturevalue(name)
    evidence = observe_cache(model, [text[:4] for text in TEXTS[:2]], layer=1, dtype=storage)
    for control, other in spoiled(evidence, model).items():
        recovery = CacheAttack()(other, model)
        assert recovery.status is not Status.RECOVERED, control
        assert not recovery.value.certain, control
        assert not recovery.value.token_set, control


def test_keys_of_another_position_are_no_noise(tiny_llama):
    """Off by one, the closest tokens are the right ones, and what they leave is a rotation."""
    recovery = CacheAttack()(replace(observe_cache(tiny_llama, TEXTS, layer=0), first_position=1), tiny_llama)
    assert recovery.status is Status.NOTHING_FOUND, recovery.reason
    assert not recovery.value.token_set
    assert "the position, the layer or the model may be wrong" in recovery.reason


def test_noise_is_still_read_through(tiny_llama):
    noise = unmask.parse_defence("noise:sigma=0.1,relative=true")
    evidence = unmask.defend_states(observe_cache(tiny_llama, TEXTS, layer=0), noise, torch.Generator().manual_seed(0))
    recovery = CacheAttack()(evidence, tiny_llama)
    assert recovery.status is Status.PARTIAL, recovery.reason
    assert {text.tokens for text in recovery.value.texts} == set(TEXTS)
    assert recovery.value.token_set == {token for text in TEXTS for token in text}


@pytest.mark.slow
def test_smollm2_at_another_position_is_not_certain(smollm2):
    text = "Please wire 900 euros to Marta before Friday noon."
    evidence = observe_cache(smollm2, [text], layer=0)
    recovery = unmask.recover_text(replace(evidence, first_position=1), smollm2)
    assert recovery.status is Status.NOTHING_FOUND, recovery.reason
    assert not recovery.value.token_set
    assert [read.text for read in recovery.value.texts] == [text]  # as a best effort
    assert "may be wrong" in recovery.reason


def test_a_service_in_bfloat16_is_read(tiny_llama):
    coarse = tiny_llama.to(dtype=torch.bfloat16)
    recovery = unmask.recover_text(observe_cache(coarse, TEXTS, layer=1), tiny_llama)
    assert certain(recovery) <= set(TEXTS)
    assert {text.tokens for text in recovery.value.texts} == set(TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_smollm2_gives_its_prompts_away(smollm2, storage):
    texts = [
        "The meeting was moved to Friday, and nobody told me why.",
        "Her password is correct horse battery staple.",
    ]
    for layer in (0, 15):
        recovery = unmask.recover_text(observe_cache(smollm2, texts, layer=layer, dtype=storage), smollm2)
        assert recovery.status is (Status.RECOVERED if layer else Status.PARTIAL), recovery.reason
        assert {text.text for text in recovery.value.texts} == set(texts)


# No attention in block 0, compressed caches; a window that has moved on is refused when it is observed.
NOT_READ = frozenset({"DeepseekV3", "MiniCPM3", "Qwen3Next"})


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_every_family_gives_its_prompts_away(name):
    model = adapt(build(name))
    texts = [[token % model.vocab_size for token in text] for text in TEXTS]
    windowed = name in ("Gemma3 with a window", "GptOss")  # its first block sees less than the texts
    refused = []
    for layer, storage in ((0, None), (model.num_blocks - 1, None), (model.num_blocks - 1, "int8")):
        try:
            evidence = observe_cache(model, texts, layer=layer, dtype=storage)
        except InputError:
            refused.append(layer)
            continue
        status = CacheAttack()(evidence, model).status
        read = Status.RECOVERED if layer and not windowed else Status.PARTIAL  # of block 0 no text is certain
        assert status is (Status.NOT_APPLICABLE if name in NOT_READ else read), (layer, storage)
    assert refused == ([0] if windowed or name == "Qwen3Next" else [])


@pytest.mark.parametrize("parts", ["keys", "values"])
def test_one_head_of_four_numbers_whose_tokens_might_agree_by_chance(parts):
    """Every token is tested, and there is no rounding to weigh them by."""
    narrow = transformers.LlamaConfig(**llama_sizes(hidden_size=16))
    model = adapt(random_model(transformers.LlamaForCausalLM, narrow))
    evidence = observe_cache(model, [(5, 17, 99)], layer=1, parts=parts, heads=[0])
    assert [text.tokens for text in CacheAttack()(evidence, model).value.certain] == [(5, 17, 99)]
