import pytest
import torch
from tests.attacks.queries.random_heads import oracle_of, random_head

import unmask
from unmask.attacks.queries.samples import SamplesAttack, sample_equations
from unmask.errors import InputError
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Status
from unmask.scores.weights import score_heads


def samples_of(heads, num, length=4, noise=0.0, size=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = size * torch.randn(num, length, heads.v.shape[1], generator=generator, dtype=torch.float64)
    answers = heads(X)
    return unmask.SampleEvidence(X, answers + noise * torch.randn(num, generator=generator, dtype=torch.float64))


def test_one_head_from_samples_that_nobody_chose():
    head = random_head(6)
    recovery = unmask.recover_weights(samples_of(head, 160))
    assert recovery.status is Status.RECOVERED
    assert recovery.cost.queries == 0
    assert score_heads(recovery.value, head).worst_W_error <= 1e-10
    assert recovery.certificate.details["held_out"] == 32


def test_samples_from_a_file(tmp_path):
    head = random_head(5)
    path = samples_of(head, 130).save(tmp_path / "samples.safetensors")
    recovery = unmask.recover_weights(unmask.load_evidence(path))
    assert score_heads(recovery.value, head).worst_W_error <= 1e-10


def test_noise_gives_the_error_that_is_told():
    head = random_head(5)
    recovery = SamplesAttack()(samples_of(head, 400, noise=1e-3))
    error = score_heads(recovery.value, head).worst_W_error
    assert recovery.status is Status.RECOVERED
    assert error <= recovery.certificate.details["estimated_error"]
    assert error <= 0.05


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [1e-8, 1e-3, 3e-2])
def test_a_small_second_head_is_not_taken_for_noise(seed, share):
    heads = random_head(4, seed, num_heads=2)
    heads = HeadWeights(W=2 * heads.W, v=heads.v * torch.tensor([[1.0], [share]]))
    evidence = samples_of(heads, 600, length=5, seed=seed)
    alone = SamplesAttack()(evidence)
    assert alone.status is Status.NOTHING_FOUND
    assert "is no noise" in alone.reason or "held out are off" in alone.reason
    recovery = SamplesAttack(max_heads=2)(evidence)
    assert recovery.status is Status.RECOVERED
    assert len(recovery.value) == 2
    score = score_heads(recovery.value, heads)
    assert score.worst_W_error <= max(1e-12, recovery.certificate.details["estimated_error"])


@pytest.mark.parametrize("seed", range(6))
def test_noise_is_not_taken_for_a_second_head(seed):
    head = random_head(4, seed)
    recovery = SamplesAttack(max_heads=2)(samples_of(head, 300, noise=1e-2, size=2.0, seed=seed))
    assert recovery.status is Status.RECOVERED
    assert len(recovery.value) == 1
    assert score_heads(recovery.value, head).worst_W_error <= recovery.certificate.details["estimated_error"]


def test_samples_that_cannot_tell_noise_from_a_second_head_are_a_part():
    recovery = SamplesAttack()(samples_of(random_head(6), 110, noise=1e-4))
    assert recovery.status is Status.PARTIAL
    assert "noise or a further head is not known" in recovery.reason
    assert "118 are needed" in recovery.reason  # 84 weights of two heads


def test_two_heads_where_two_are_tried():
    heads = random_head(4, num_heads=2)
    evidence = samples_of(heads, 400, length=5)
    assert SamplesAttack()(evidence).status is Status.NOTHING_FOUND
    recovery = SamplesAttack(max_heads=2, num_starts=8)(evidence)
    assert recovery.status is Status.RECOVERED
    assert score_heads(recovery.value, heads).worst_W_error <= 1e-8


def test_fewer_samples_than_weights_are_told():
    recovery = SamplesAttack()(samples_of(random_head(6), 60))
    assert recovery.status is Status.NOTHING_FOUND
    assert "75 are needed" in recovery.reason  # 42 weights, 2 % to spare, 32 held out


@pytest.mark.parametrize("seed", range(3))
def test_answers_by_chance_are_refused(seed):
    evidence = samples_of(random_head(5), 200, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    chance = unmask.SampleEvidence(evidence.sequences, torch.randn(200, generator=generator, dtype=torch.float64))
    recovery = SamplesAttack()(chance)
    assert recovery.status is Status.NOTHING_FOUND
    assert len(recovery.value) == 0


def test_tokens_of_a_subspace_do_not_determine_W():
    head = random_head(6)
    evidence = samples_of(head, 200)
    flat = evidence.sequences.clone()
    flat[:, :, 5] = 0
    recovery = SamplesAttack()(unmask.SampleEvidence(flat, head(flat)))
    assert recovery.status is Status.NOTHING_FOUND


def test_scores_that_hardly_vary_do_not_show_W():
    head = random_head(5)
    weak = HeadWeights(W=1e-9 * head.W, v=head.v)
    assert SamplesAttack()(samples_of(weak, 200, noise=1e-6)).status is Status.NOTHING_FOUND


def test_silence_is_told():
    head = random_head(5)
    head.v.zero_()
    assert SamplesAttack()(samples_of(head, 200)).status is Status.NOT_IDENTIFIABLE


def test_the_jacobian_is_the_slope():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(7, 3, 2, generator=generator, dtype=torch.float64)
    equations = sample_equations(X, torch.zeros(7, dtype=torch.float64), 2)
    x, step = torch.randn(2, 12, generator=generator, dtype=torch.float64)
    slope = (equations(x + 1e-6 * step)[0] - equations(x - 1e-6 * step)[0]) / 2e-6
    assert torch.allclose(equations(x)[1] @ step, slope, atol=1e-8)


def test_an_oracle_is_not_a_sample():
    with pytest.raises(InputError, match="SampleEvidence"):
        SamplesAttack()(oracle_of(random_head(4)))
    with pytest.raises(InputError, match="width"):
        unmask.recover_weights(unmask.FunctionOracle(random_head(4)))
