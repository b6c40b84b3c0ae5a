"""The hidden size and the output layer of models whose truth is known, behind every kind of view."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.sampling import sample
from tests.tiny_models import VOCAB, WIDTH, gpt2_config, random_model

from unmask.attacks.queries.output_layer.attack import OutputLayerAttack
from unmask.errors import InputError
from unmask.evidence.ledger import Ledger
from unmask.evidence.logits import FunctionLogitOracle, LogitEvidence
from unmask.models import adapt
from unmask.recovery import Status
from unmask.scores.weights import score_up_to_linear_map


def logits_of(model, change=lambda z: z):
    """A function of prompts; `change` is what the service does to its logits."""

    @torch.no_grad()
    def function(prompts):
        return change(model.hf(input_ids=prompts).logits[:, -1])

    return function


def seen(model, change=lambda z: z, ledger=None, **view):
    oracle = FunctionLogitOracle(logits_of(model, change), VOCAB, **view)
    return LogitEvidence(oracle, Ledger() if ledger is None else ledger)


def score(recovery, model):
    W = model.unembedding.detach().double()[recovery.value.tokens]
    return score_up_to_linear_map(recovery.value.W, W - W.mean(0))


def noisy(sigma):
    generator = torch.Generator().manual_seed(7)
    return lambda z: z + sigma * torch.randn(z.shape, generator=generator)


@sample("top", [None, 20, 5], [None, 5])
def test_carlini_section_4_the_rank_of_logits_is_the_hidden_size(tiny_llama, top):
    recovery = OutputLayerAttack()(seen(tiny_llama, top=top))
    assert recovery.status is Status.RECOVERED
    assert (recovery.value.hidden_size, recovery.value.affine_size) == (WIDTH, WIDTH)
    certificate = recovery.certificate
    assert certificate.holds
    assert certificate.rejected > 100 * certificate.residual
    # W explains the logits no better than its own error lets it; a random matrix scores 0.5 and more.
    assert score(recovery, tiny_llama) < 10 * certificate.details["relative_residual"] < 1e-4
    assert len(recovery.value.tokens) == len(recovery.value.W)


def test_log_probabilities_give_what_logits_give(tiny_llama):
    plain = OutputLayerAttack()(seen(tiny_llama))
    normalised = OutputLayerAttack()(seen(tiny_llama, lambda z: z.log_softmax(1)))
    assert normalised.value.hidden_size == plain.value.hidden_size == WIDTH
    assert normalised.cost.queries == plain.cost.queries


def test_layernorm_with_a_bias_shows_as_an_offset(tiny_gpt2):
    value = OutputLayerAttack()(seen(tiny_gpt2)).value
    assert (value.hidden_size, value.affine_size) == (WIDTH, WIDTH - 1)
    assert "LayerNorm with bias" in value.describe()


def test_layernorm_without_a_bias_hides_a_direction():
    hf = random_model(transformers.GPT2LMHeadModel, gpt2_config())
    with torch.no_grad():
        hf.transformer.ln_f.bias.zero_()
    value = OutputLayerAttack()(seen(adapt(hf))).value
    assert (value.hidden_size, value.affine_size) == (WIDTH - 1, WIDTH - 1)
    assert f"would be {WIDTH}" in value.describe()


def test_a_bias_on_the_logits_is_an_offset_too(tiny_llama):
    bias = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    value = OutputLayerAttack()(seen(tiny_llama, lambda z: z + bias)).value
    assert (value.hidden_size, value.affine_size) == (WIDTH + 1, WIDTH)


@pytest.mark.parametrize(
    "change",
    [lambda z: z.bfloat16(), lambda z: (100 * z).round() / 100, lambda z: (10 * z).round() / 10, noisy(0.1)],
    ids=["bfloat16", "2 decimals", "1 decimal", "noise 0.1"],
)
@sample("top", [None, 20], [20])
def test_coarse_logits_give_the_size_or_a_bound_but_never_a_wrong_size(tiny_llama, change, top):
    recovery = OutputLayerAttack(max_prompts=400)(seen(tiny_llama, change, top=top))
    assert recovery.status in (Status.RECOVERED, Status.PARTIAL)
    assert recovery.value.hidden_size in (None, WIDTH)
    assert 0 < recovery.value.at_least <= WIDTH


@sample("sigma", [0.05, 0.2, 0.4], [0.2])
def test_the_noise_of_anchors_is_not_taken_for_hidden_directions(tiny_llama, sigma):
    """Each answer of a top-k service shares its anchor's noise, which without `evened` adds a direction an answer."""

    @torch.no_grad()
    def answers(questions):
        prompts = torch.tensor([question.prompt for question in questions])
        tokens = torch.tensor([question.tokens for question in questions])
        logits = tiny_llama.hf(input_ids=prompts).logits[:, -1].gather(1, tokens)
        return logits + sigma * torch.randn(logits.shape, generator=generator)

    class NoisyAnswers(FunctionLogitOracle):
        def pieces(self, questions):
            yield list(range(len(questions))), answers(questions)

    generator = torch.Generator().manual_seed(5)
    evidence = LogitEvidence(NoisyAnswers(logits_of(tiny_llama), VOCAB, top=8))
    recovery = OutputLayerAttack(max_prompts=160)(evidence)
    assert recovery.value.hidden_size in (None, WIDTH)
    assert recovery.value.at_least <= WIDTH


def test_much_noise_leaves_a_bound(tiny_llama):
    recovery = OutputLayerAttack(max_prompts=200)(seen(tiny_llama, noisy(3.0)))
    assert recovery.status is Status.PARTIAL
    assert 0 < recovery.value.at_least < WIDTH
    assert "at least" in recovery.reason
    assert recovery.certificate.holds
    assert f"{recovery.value.at_least} singular values" in recovery.certificate.claim


@pytest.mark.parametrize("top", [None, 20])
def test_noise_alone_gives_nothing(top):
    generator = torch.Generator().manual_seed(11)
    oracle = FunctionLogitOracle(lambda p: torch.randn(len(p), VOCAB, generator=generator), VOCAB, top=top)
    recovery = OutputLayerAttack(max_prompts=300)(LogitEvidence(oracle))
    assert recovery.status is Status.NOTHING_FOUND
    assert recovery.value.at_least == 0
    assert not recovery.certificate.holds


def test_too_few_prompts_or_tokens_give_a_bound(tiny_llama):
    for attack in (OutputLayerAttack(first_prompts=32, max_prompts=50), OutputLayerAttack(num_tokens=50)):
        recovery = attack(seen(tiny_llama))
        assert recovery.status is Status.PARTIAL
        assert recovery.value.hidden_size is None
        assert 0 < recovery.value.at_least <= 50
        assert "num_tokens" in recovery.reason


def test_a_budget_ends_with_what_is_known_and_can_be_resumed(tiny_llama, tmp_path):
    attack = OutputLayerAttack(first_prompts=48)
    whole = attack(seen(tiny_llama, top=20))
    path = tmp_path / "answers.sqlite"
    half = Ledger(path, budget=whole.cost.queries // 2)
    cut = attack(seen(tiny_llama, top=20, ledger=half))
    half.close()
    assert cut.status is Status.BUDGET_EXHAUSTED
    assert cut.value.hidden_size is None
    assert cut.value.at_least <= WIDTH
    resumed = seen(tiny_llama, top=20, ledger=Ledger(path))
    again = attack(resumed)
    assert again.value.hidden_size == WIDTH
    assert torch.equal(again.value.W, whole.value.W)
    assert resumed.ledger.num_paid < whole.cost.queries


def test_no_budget_at_all_is_said(tiny_llama):
    recovery = OutputLayerAttack()(seen(tiny_llama, ledger=Ledger(budget=3)))
    assert recovery.status is Status.BUDGET_EXHAUSTED
    assert recovery.value.at_least == 0


def test_one_shown_token_is_not_enough(tiny_llama):
    recovery = OutputLayerAttack()(seen(tiny_llama, top=1))
    assert recovery.status is Status.NOT_APPLICABLE
    assert "1 of the likeliest" in recovery.reason


def test_the_cost_is_what_the_docstring_says(tiny_llama):
    whole = OutputLayerAttack()(seen(tiny_llama))
    assert whole.cost.queries <= 1.25 * 1.25 * (WIDTH + 16) + 48
    assert OutputLayerAttack()(seen(tiny_llama)).value.W.equal(whole.value.W)


def test_settings_are_checked():
    with pytest.raises(InputError, match="num_tokens must be 32 or more"):
        OutputLayerAttack(num_tokens=5)
    with pytest.raises(InputError, match="max_prompts"):
        OutputLayerAttack(max_prompts=40)


@pytest.mark.parametrize("vocab_size", [128, 200])
def test_random_logits_behind_a_top_k_service_have_no_hidden_size(vocab_size):
    """Every answer repeats the anchor's logit: that is a direction of the service's answers, and none of a layer."""

    def table(prompts: torch.Tensor) -> torch.Tensor:
        keys = [hash(tuple(prompt)) % 2**62 for prompt in prompts.tolist()]  # of integers: the same in every process
        draws = [torch.Generator().manual_seed(key) for key in keys]
        return torch.stack([torch.randn(vocab_size, generator=draw, dtype=torch.float64) for draw in draws])

    recovery = OutputLayerAttack()(LogitEvidence(FunctionLogitOracle(table, vocab_size, top=20)))
    assert recovery.status is not Status.RECOVERED, recovery.reason
    assert recovery.value.hidden_size is None
