import pytest
import torch
from tests.attacks.queries.random_heads import added, oracle_of, random_head

from unmask.attacks.baselines.query_papers import NuclearNormAttack, PaperSingleHeadAttack, unit_probes
from unmask.attacks.queries.one_head.single_head import SingleHeadAttack
from unmask.errors import InputError
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Status
from unmask.scores.weights import score_heads


def learn(heads, attack, **options):
    recovery = attack(oracle_of(heads, **options))
    return recovery, score_heads(recovery.value, heads), recovery.certificate.details["learning_queries"]


@pytest.mark.parametrize("attack", [PaperSingleHeadAttack("basis"), PaperSingleHeadAttack("random", kappa=0.5)])
def test_theorem_4_1_as_the_paper_has_it(attack):
    for seed in range(3):
        recovery, score, queries = learn(random_head(16, seed), attack)
        assert recovery.status is Status.RECOVERED
        assert queries == 16 + 16**2
        assert score.W_error <= 1e-10  # small v·u and the condition of U cost some digits


def test_leaning_towards_v_is_what_saves_digits():
    head = random_head(32)
    head.v[0, 3] = 1e-7
    theirs, ours = (learn(head, attack)[1].W_error for attack in (PaperSingleHeadAttack("basis"), SingleHeadAttack()))
    assert ours <= 1e-14
    assert theirs >= 1e5 * ours


@pytest.mark.parametrize("zeros", [(3,), (0, 1, 2, 3, 4, 5, 7)])
def test_theorem_4_1_where_v_has_zeros_the_second_probe_is_asked(zeros):
    """e_i + e_p instead of e_i, with v_p ≠ 0: the same number of queries, and no digit lost."""
    head = random_head(8)
    head.v[0, list(zeros)] = 0
    recovery, score, queries = learn(head, PaperSingleHeadAttack("basis"))
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert score.W_error <= 1e-13
    assert queries == 8 + 8**2


def test_theorem_6_1_zeros_of_v_need_a_margin_under_noise():
    """Noise makes a zero of v a small number; without a margin the learner divides by it."""
    head = random_head(8)
    head.v[0] = torch.where(head.v[0] < 0, -1.0, 1.0) * head.v[0].abs().clamp_min(0.1)
    head.v[0, 2] = 0
    errors = []
    for margin in (0.0, 0.05):
        evidence = oracle_of(head, added(1e-6))
        v = evidence.ask(torch.eye(8, dtype=torch.float64)[:, None])
        W = PaperSingleHeadAttack("basis", margin=margin).weights(evidence, v, torch.Generator())
        errors.append(float((W - head.W[0]).norm()))
    assert not errors[0] <= 0.1
    assert errors[1] <= 1e-2


def test_unit_probes_lean_on_the_largest_entry_only_where_v_is_zero():
    v = torch.tensor([0.5, 0.0, -2.0, 1e-3, 1e-17], dtype=torch.float64)
    expected = torch.eye(5, dtype=torch.float64)
    expected[1, 2] = expected[4, 2] = 1
    assert torch.equal(unit_probes(v), expected)


@pytest.mark.parametrize("attack", [PaperSingleHeadAttack(), NuclearNormAttack(20)])
def test_endings(attack):
    head = random_head(8)
    assert learn(HeadWeights(W=head.W, v=0 * head.v), attack)[0].status is Status.NOT_IDENTIFIABLE
    assert learn(random_head(8, num_heads=2), attack)[0].status is Status.NOTHING_FOUND
    assert learn(head, attack, after=torch.sign)[0].status is Status.NOT_APPLICABLE
    assert learn(head, attack, budget=50)[0].status is Status.BUDGET_EXHAUSTED


@pytest.mark.parametrize("rank", [1, 2])
def test_theorem_5_1_by_the_nuclear_norm(rank):
    freedom = rank * (2 * 16 - rank)
    recovery, score, queries = learn(random_head(16, rank=rank), NuclearNormAttack(3 * freedom))
    assert recovery.status is Status.RECOVERED
    assert queries == 16 + 3 * freedom
    assert score.W_error <= 1e-8  # where the solver stops


def test_too_few_measurements_for_the_nuclear_norm():
    recovery, *_ = learn(random_head(16, rank=2), NuclearNormAttack(90))
    assert recovery.status is Status.NOTHING_FOUND
    assert len(recovery.value) == 0


def test_settings_that_cannot_be():
    with pytest.raises(InputError, match="probes must be"):
        PaperSingleHeadAttack("unit")
    with pytest.raises(InputError, match="kappa must be"):
        PaperSingleHeadAttack(kappa=0)
    with pytest.raises(InputError, match="num_measurements must be 1"):
        NuclearNormAttack(0)
    with pytest.raises(InputError, match="num_measurements must be at most 64"):
        NuclearNormAttack(65)(oracle_of(random_head(8)))
