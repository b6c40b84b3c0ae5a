"""Exact prompts from hidden states, on small random models and on SmolLM2; what noise and rounding leave; controls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.sampling import sample

import unmask
from unmask.attacks.outputs.prompts.attack import PromptAttack
from unmask.evidence import HiddenEvidence, Site
from unmask.models import Model
from unmask.protocols import observe_hidden
from unmask.recovery import RecoveredTexts, Recovery, Status

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49]]
SENTENCE = "The spare key lies under the blue flower pot behind the garage, said 4711."


@pytest.fixture(scope="module", autouse=True)
def small_matrices(one_thread: None) -> None:
    """Threads only get in each other's way on matrices of this size."""


@pytest.fixture(params=["tiny_gpt2", "tiny_llama", "tiny_qwen2"])
def decoder(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def read(recovery: Recovery[RecoveredTexts]) -> set[tuple[int, ...]]:
    return {text.tokens for text in recovery.value.certain}


def assert_exact(recovery: Recovery[RecoveredTexts], texts: list[list[int]]) -> None:
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert recovery.certificate.holds
    assert read(recovery) == {tuple(text) for text in texts}


def noise_like(evidence: HiddenEvidence, share: float, seed: int = 0) -> torch.Tensor:
    noise = torch.randn(evidence.states.shape, generator=torch.Generator().manual_seed(seed))
    norms = evidence.states.norm(dim=2, keepdim=True)
    return noise / noise.norm(dim=2, keepdim=True) * norms * share


@sample("layer", [1, 2, 3], [1, 3])
def test_every_layer_gives_the_texts_away(decoder, layer):
    assert_exact(PromptAttack()(observe_hidden(decoder, TEXTS, layer=layer), decoder), TEXTS)


def test_embeddings_prove_tokens_and_no_text(decoder):
    """Rows in another order, and rows of two texts one behind the other, used to be RECOVERED, certain and wrong."""
    evidence = observe_hidden(decoder, [[5, 17, 99, 250], [400, 3, 8, 21]], layer=0)
    spliced = evidence.states.clone()
    spliced[0, 2:] = evidence.states[1, 2:]
    shuffled = evidence.states[:, [2, 1, 0, 3]]
    for states in (evidence.states, spliced, shuffled):
        recovery = PromptAttack()(replace(evidence, states=states), decoder)
        assert recovery.status is not Status.RECOVERED
        assert not recovery.value.certain
        assert not any(text.ambiguities for text in recovery.value.texts)
        assert recovery.value.token_set <= {5, 17, 99, 250, 400, 3, 8, 21}
        assert recovery.value.token_set or states is shuffled  # added positions tell that rows were moved
        assert "from the dump" in recovery.reason or "position" in recovery.reason
    plain = PromptAttack()(evidence, decoder)
    assert {text.tokens for text in plain.value.texts} == {(5, 17, 99, 250), (400, 3, 8, 21)}
    assert "not proven" in plain.certificate.claim


@sample("layer", [1, 2], [2])
def test_behind_a_block_other_orders_and_spliced_rows_are_not_believed(decoder, layer):
    evidence = observe_hidden(decoder, [[5, 17, 99, 250], [400, 3, 8, 21]], layer=layer)
    spliced = evidence.states.clone()
    spliced[0, 2:] = evidence.states[1, 2:]
    for states in (spliced, evidence.states[:, [2, 1, 0, 3]]):
        recovery = PromptAttack()(replace(evidence, states=states), decoder)
        assert recovery.status is not Status.RECOVERED
        assert read(recovery) <= {(400, 3, 8, 21)}


@sample("side", ["left", "right"], ["left"])
def test_padding_does_not_matter(decoder, side):
    evidence = observe_hidden(decoder, TEXTS, layer=2, padding_side=side)
    assert_exact(PromptAttack()(evidence, decoder), TEXTS)


def test_behind_the_final_norm_they_are_there_still(decoder):
    evidence = observe_hidden(decoder, TEXTS, site=Site.FINAL_NORM)
    assert_exact(PromptAttack()(evidence, decoder), TEXTS)


def test_a_text_of_one_token(decoder):
    assert_exact(PromptAttack()(observe_hidden(decoder, [[123]], layer=3), decoder), [[123]])


def test_a_text_without_tokens_is_left_out(tiny_llama):
    evidence = observe_hidden(tiny_llama, TEXTS, layer=2)
    mask = evidence.mask.clone()
    mask[1] = False
    assert_exact(PromptAttack()(replace(evidence, mask=mask), tiny_llama), [TEXTS[0], TEXTS[2]])


def test_float64_states(tiny_gpt2):
    model = tiny_gpt2.to(dtype=torch.float64)
    recovery = PromptAttack()(observe_hidden(model, TEXTS, layer=3), model)
    assert_exact(recovery, TEXTS)
    assert recovery.certificate.residual < 1e-10


def test_a_body_without_a_head_has_no_prior_and_is_read_all_the_same(tiny_llama):
    body = unmask.load_model(tiny_llama.hf.model)
    assert body.unembedding is None
    assert_exact(PromptAttack()(observe_hidden(body, TEXTS, layer=2), body), TEXTS)


@sample("seed", range(2), [0])
def test_noise_of_the_same_norm_is_not_recovered(decoder, seed):
    evidence = observe_hidden(decoder, TEXTS, layer=2)
    recovery = PromptAttack()(replace(evidence, states=noise_like(evidence, 1.0, seed)), decoder)
    assert recovery.status is Status.NOTHING_FOUND
    assert not recovery.value.certain
    assert not recovery.certificate.holds


def test_states_of_another_layer_are_not_recovered(decoder):
    evidence = replace(observe_hidden(decoder, TEXTS, layer=2), layer=1)
    assert PromptAttack()(evidence, decoder).status is not Status.RECOVERED


def test_a_text_ends_where_its_states_stop_making_sense(tiny_llama):
    evidence = observe_hidden(tiny_llama, TEXTS, layer=2)
    states = evidence.states.clone()
    states[2, 4] = states[2, 4].flip(0)
    recovery = PromptAttack()(replace(evidence, states=states), tiny_llama)
    assert recovery.status is Status.PARTIAL
    assert read(recovery) == {tuple(TEXTS[0]), tuple(TEXTS[1])}
    (cut,) = [text for text in recovery.value.texts if not text.certain]
    assert cut.tokens[:4] == tuple(TEXTS[2][:4])
    assert "for 2 tokens the one whose state points nearest to that seen is shown, without a proof" in recovery.reason
    assert not recovery.looked_for
    assert "stopped after 4 of 6 tokens of text 3" in recovery.reason


def test_a_budget_of_candidates_is_kept(tiny_llama):
    evidence = observe_hidden(tiny_llama, [TEXTS[0]], layer=2)
    noise = replace(evidence, states=noise_like(evidence, 1.0))
    assert PromptAttack(max_candidates=40)(noise, tiny_llama).cost.candidates == 40


def test_what_it_does_not_apply_to(tiny_bert, tiny_gpt2):
    assert PromptAttack()(observe_hidden(tiny_bert, TEXTS, layer=1), tiny_bert).status is Status.NOT_APPLICABLE
    pooled = observe_hidden(tiny_gpt2, TEXTS, layer=1, site=Site.MEAN)
    assert PromptAttack()(pooled, tiny_gpt2).status is Status.NOT_APPLICABLE


# SmolLM2: all here, as they share what is measured once. The last layer: `examples/outputs_to_inputs.py`.


@pytest.fixture(scope="module")
def sentence(smollm2: Model) -> list[int]:
    return smollm2.encode(SENTENCE)


@pytest.mark.slow
def test_smollm2_random_tokens(smollm2):
    tokens = torch.randint(0, smollm2.vocab_size, (12,), generator=torch.Generator().manual_seed(3)).tolist()
    assert_exact(PromptAttack()(observe_hidden(smollm2, [tokens], layer=2), smollm2), [tokens])


@pytest.mark.slow
def test_tokens_that_smollm2_never_learned(smollm2):
    """'every token proven by its own state', and 0 of 2 texts true."""
    texts = ["<file_sep>def f(x): return x", "PlaneProtection of the old bridge", "The key is under the pot."]
    tokens = [smollm2.encode(text) for text in texts]
    recovery = unmask.recover_text(observe_hidden(smollm2, tokens, layer=2), smollm2)
    assert recovery.status is Status.PARTIAL
    assert [text.text for text in recovery.value.certain] == texts[2:]
    open_texts = [text for text in recovery.value.texts if not text.certain]
    assert len(open_texts) == 2
    for text in tokens[:2]:
        assert any(one.covers(text) for one in open_texts)


# Beyond bfloat16 the first position is tested against the whole vocabulary: some 30 seconds each.
@pytest.mark.slow
@pytest.mark.parametrize("defence", ["bf16", "int8", "fp8", "noise:sigma=0.1,relative=true"])
def test_smollm2_coarse_states_protect_nothing(smollm2, sentence, defence):
    evidence = observe_hidden(smollm2, [sentence], layer=6)
    stored = unmask.defend_states(evidence, unmask.parse_defence(defence), torch.Generator())
    assert not torch.equal(stored.states, evidence.states)
    assert_exact(PromptAttack()(stored, smollm2), [sentence])


@pytest.mark.slow
def test_smollm2_in_bfloat16(smollm2, sentence):
    """The service runs the model in bfloat16: its states are off by a per cent or more, and wrong tokens by more."""
    evidence = observe_hidden(smollm2.to(dtype=torch.bfloat16), [sentence], layer=6)
    recovery = unmask.recover_text(evidence, smollm2)
    assert recovery.status.conclusive, recovery.reason
    assert recovery.value.texts[0].tokens == tuple(sentence)[: len(recovery.value.texts[0].tokens)]


def test_a_service_in_bfloat16_is_not_believed_too_much(decoder):
    evidence = observe_hidden(decoder.to(dtype=torch.bfloat16), TEXTS, layer=2)
    recovery = unmask.recover_text(evidence, decoder)
    assert read(recovery) <= {tuple(text) for text in TEXTS}
    assert recovery.value.token_set <= {token for text in TEXTS for token in text}
