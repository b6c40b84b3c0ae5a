"""Low-rank adapters: tokens beyond the rank, what B = 0 leaves of them, and controls that must stay silent."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from tests.sampling import in_turn, sample

from unmask import recover_text
from unmask.attacks.gradients.bag_of_words.lora_tokens import find_lora_tokens
from unmask.protocols import observe_lora
from unmask.recovery import Status

SHORT = [[5, 17, 99, 250]]
EARLIER = [[60, 61, 62], [70, 71, 72, 73]]
LONG = [[5, 17, 99, 250, 8, 11, 30, 31], [400, 3, 9, 21, 77, 78]]
TEXTS = (
    "The meeting with Hannah was moved to Thursday because of the strike.",
    "Please send forty litres of white paint to the old harbour office.",
    "Her brother sold two goats, a tractor and seven barrels of cider.",
    "Nobody told the driver that bridge three stays closed until March.",
)
TASKS = {"tiny_gpt2": "next_token", "tiny_llama": "next_token", "tiny_bert": "classification"}


def held(texts, task):
    return {token for text in texts for token in (text[:-1] if task == "next_token" else text)}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("steps", [0, 1])
def test_fewer_inputs_than_the_rank_are_told_exactly(name, steps, request):
    model, task = request.getfixturevalue(name), TASKS[name]
    evidence = observe_lora(model, SHORT, task=task, rank=8, steps=steps, earlier_texts=[[60, 61, 62]])
    found = find_lora_tokens(evidence, model)
    assert found.candidates is not None
    assert found.candidates.tokens == held(SHORT, task)
    assert found.candidates.gap.decades > 1
    assert all("lora_A" in name if steps else "lora_B" in name for name in found.used)


@sample("name, rank", product(TASKS, [2, 4]), in_turn(TASKS, [2, 4]))
def test_more_inputs_than_the_rank_are_told_once_adapters_are_trained(name, rank, request):
    model, task = request.getfixturevalue(name), TASKS[name]
    found = find_lora_tokens(observe_lora(model, LONG, task=task, rank=rank, steps=2, earlier_texts=EARLIER), model)
    assert found.candidates is not None, found.reason
    assert found.candidates.tokens == held(LONG, task)
    assert found.candidates.gap.accepted < 3e-5


@pytest.mark.parametrize("name", TASKS)
def test_as_many_inputs_as_the_rank_tell_nothing_while_b_is_zero(name, request):
    model = request.getfixturevalue(name)
    found = find_lora_tokens(observe_lora(model, LONG, task=TASKS[name], rank=4), model)
    assert found.candidates is None
    assert "4 directions" in found.reason
    assert "B are zero" in found.reason


def test_more_tokens_than_the_width_tell_nothing(tiny_llama):
    texts = [list(range(start, start + 20)) for start in (10, 100, 200, 300)]
    found = find_lora_tokens(observe_lora(tiny_llama, texts, steps=2, earlier_texts=EARLIER), tiny_llama)
    assert found.candidates is None
    assert "the batch holds more" in found.reason


def columns_of(evidence, change):
    """The evidence with every factor's gradient changed."""
    return replace(evidence, gradients={name: change(g) for name, g in evidence.gradients.items()})


CONTROLS = {
    "noise": lambda g, draw: torch.randn(g.shape, generator=draw),
    "shuffled columns": lambda g, draw: g[:, torch.randperm(g.shape[1], generator=draw)],
    "a little noise": lambda g, draw: g + 1e-2 * g.std() * torch.randn(g.shape, generator=draw),
    "signs": lambda g, draw: g.sign(),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_what_is_no_gradient_tells_nothing(tiny_llama, control):
    evidence = observe_lora(tiny_llama, LONG, rank=4, steps=2, earlier_texts=EARLIER)
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        changed = columns_of(evidence, lambda g, draw=draw: CONTROLS[control](g, draw))
        assert not recover_text(changed, tiny_llama).value.token_set


def test_the_gradients_of_another_model_tell_nothing(tiny_llama, tiny_mistral):
    if tiny_llama.width == tiny_mistral.width:
        evidence = observe_lora(tiny_mistral, LONG, rank=4, steps=2, earlier_texts=EARLIER)
        assert find_lora_tokens(evidence, tiny_llama).candidates is None


def test_equal_tokens_are_a_class(tiny_llama):
    """Two tokens of one embedding: which of them occurs cannot be told."""
    model = tiny_llama.to()
    with torch.no_grad():
        weights = model.parameter(model.token_embedding)
        weights[401] = weights[99]
    recovery = recover_text(
        observe_lora(model, LONG, rank=4, steps=2, earlier_texts=EARLIER), model, attack="bag-of-words"
    )
    assert not recovery.value.token_set & {99, 401}
    assert recovery.value.token_set == held(LONG, "next_token") - {99}


def test_an_update_of_other_adapters_yields_nothing(tiny_bert):
    """Negative control: gradients taken at other adapter weights than the server believes."""
    evidence = observe_lora(tiny_bert, SHORT, task="classification", rank=8)
    generator = torch.Generator().manual_seed(3)
    for tensor in evidence.adapters.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    found = find_lora_tokens(evidence, tiny_bert)
    assert found.candidates is None or found.candidates.gap.decades < 1 or not found.candidates.tokens


def test_without_adapters_the_reason_says_so(tiny_bert):
    evidence = observe_lora(tiny_bert, SHORT, task="classification", rank=8)
    assert "no adapter" in find_lora_tokens(evidence.only("layer.1."), tiny_bert).reason


def test_real_weights(minilm):
    texts = [minilm.encode("Ring at Petersen.")]
    found = find_lora_tokens(observe_lora(minilm, texts, task="classification", rank=8), minilm)
    assert found.candidates is not None
    assert found.candidates.tokens == set(texts[0])


@pytest.mark.slow
def test_many_more_tokens_than_the_rank_on_real_weights(minilm):
    texts = [minilm.encode(text) for text in TEXTS]
    earlier = [minilm.encode("The ferry leaves at six.")]
    evidence = observe_lora(minilm, texts, task="classification", rank=4, steps=2, earlier_texts=earlier)
    found = find_lora_tokens(evidence, minilm)
    assert found.candidates is not None
    assert found.candidates.tokens == {token for text in texts for token in text}
    assert len(found.candidates.tokens) > 10 * 4


def test_tokens_that_pass_by_chance_are_not_claimed(tiny_bert):
    """Rank 2: of 500 tokens at 64 positions, some lie in any one of two directions nearly."""
    for seed in range(10):
        texts = [torch.randint(5, 490, (3,), generator=torch.Generator().manual_seed(seed)).tolist()]
        evidence = observe_lora(tiny_bert, texts, task="classification", rank=2, seed=seed)
        assert recover_text(evidence, tiny_bert).value.token_set <= set(texts[0])


# Through the whole attack


@pytest.mark.parametrize("name", TASKS)
def test_below_the_rank_the_bag_of_words_is_recovered(name, request):
    model, task = request.getfixturevalue(name), TASKS[name]
    recovery = recover_text(observe_lora(model, SHORT, task=task, rank=8), model)
    assert recovery.status is Status.PARTIAL, recovery.reason
    assert recovery.value.token_set == held(SHORT, task)
    assert not recovery.value.texts
    assert recovery.certificate.holds
    assert recovery.used
    assert all("lora_B" in used for used in recovery.used)


@pytest.mark.parametrize("name", TASKS)
def test_above_the_rank_the_reason_names_it(name, request):
    model = request.getfixturevalue(name)
    recovery = recover_text(observe_lora(model, LONG, task=TASKS[name], rank=4), model)
    assert recovery.status is Status.NOT_IDENTIFIABLE
    assert "show 4 directions" in recovery.reason
    assert not recovery.value.token_set


def test_adapters_of_later_blocks_are_missing_evidence(tiny_bert):
    evidence = observe_lora(tiny_bert, SHORT, task="classification", rank=8)
    assert recover_text(evidence.only("layer.1."), tiny_bert).status is Status.MISSING_EVIDENCE


def test_noise_in_place_of_the_factors_yields_nothing(tiny_bert):
    evidence = observe_lora(tiny_bert, SHORT, task="classification", rank=8)
    generator = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(g.shape, generator=generator) for name, g in evidence.gradients.items()}
    recovery = recover_text(replace(evidence, gradients=noise), tiny_bert)
    assert not recovery.status.conclusive
    assert not recovery.value.token_set


# Why nothing is read


def test_frozen_factors_a_are_named_where_b_is_not_zero(tiny_llama):
    """FFA-LoRA trains B alone. The reason had said that B is zero."""
    evidence = observe_lora(tiny_llama, LONG, rank=4, steps=2, earlier_texts=EARLIER).only("lora_B")
    recovery = recover_text(evidence, tiny_llama)
    assert recovery.status is Status.NOT_IDENTIFIABLE
    assert "does not hold the factors A" in recovery.reason
    assert "B are zero" not in recovery.reason


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_first_step_of_adamw_is_not_read(tiny_llama, weight_decay):
    """The tensors are there, so nothing is missing: B shows signs, and A moves by its decay alone."""
    evidence = observe_lora(tiny_llama, LONG, rank=4, local_steps=1, weight_decay=weight_decay)
    recovery = recover_text(evidence, tiny_llama)
    assert recovery.status is Status.NOT_APPLICABLE
    assert "one AdamW step" in recovery.reason
    assert "A has no gradient yet" in recovery.reason
    assert any("lora_B" in name for name in recovery.used)


def test_adamw_steps_of_frozen_factors_a_say_so(tiny_llama):
    evidence = observe_lora(tiny_llama, LONG, rank=4, steps=1, earlier_texts=EARLIER, local_steps=3).only("lora_B")
    recovery = recover_text(evidence, tiny_llama)
    assert recovery.status is Status.NOT_APPLICABLE
    assert "does not hold the factors A" in recovery.reason


def test_adapters_that_the_server_did_not_keep_are_asked_for(tiny_llama):
    evidence = observe_lora(tiny_llama, SHORT, rank=8)
    later = {name: factor for name, factor in evidence.adapters.items() if "layers.0." not in name}
    found = find_lora_tokens(replace(evidence, adapters=later), tiny_llama)
    assert found.status is Status.MISSING_EVIDENCE
    assert "pass adapters=…" in found.reason
