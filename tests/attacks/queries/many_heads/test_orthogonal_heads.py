import pytest
import torch
from tests.attacks.queries.random_heads import oracle_of, random_head

from unmask.attacks.queries.many_heads.orthogonal_heads import OrthogonalHeadsAttack, find_blocks
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Status
from unmask.scores.weights import score_heads


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal_heads(num_heads, rank, width, seed=0):
    """Heads in orthogonal subspaces of equal width, as in Assumption C.1."""
    Q = torch.linalg.qr(normal(width, width, seed=seed)).Q.T
    bases = Q[: num_heads * rank].reshape(num_heads, rank, width)
    W = bases.mT @ normal(num_heads, rank, rank, seed=seed + 1) @ bases / rank**0.5
    return HeadWeights(W=W, v=torch.einsum("hrd,hr->hd", bases, normal(num_heads, rank, seed=seed + 2)) / rank**0.5)


@pytest.mark.parametrize("seed", [0, 10])
def test_proposition_C_2_heads_in_orthogonal_subspaces_are_learned(seed):
    heads = orthogonal_heads(4, 4, 16, seed)
    recovery = OrthogonalHeadsAttack()(oracle_of(heads))
    score = score_heads(recovery.value, heads)
    assert recovery.status is Status.RECOVERED
    assert len(recovery.value) == 4
    assert score.worst_W_error <= 1e-8  # measured: 2e-11 to 1e-10
    # K = r Hessians of 4·d(d + 1) answers, d² scores, v, and pilots.
    assert recovery.certificate.details["learning_queries"] <= 4 * 4 * 16 * 17 + 16**2 + 16 + 600


@pytest.mark.parametrize(("num_heads", "rank", "width"), [(2, 3, 8), (1, 4, 6), (3, 2, 6), (4, 1, 4)])
def test_the_number_and_the_widths_of_subspaces_need_not_be_known(num_heads, rank, width):
    heads = orthogonal_heads(num_heads, rank, width)
    recovery = OrthogonalHeadsAttack()(oracle_of(heads))
    assert recovery.status is Status.RECOVERED
    assert score_heads(recovery.value, heads).worst_W_error <= 1e-8


def test_float32_keeps_three_digits():
    heads = orthogonal_heads(2, 4, 8)
    recovery = OrthogonalHeadsAttack()(oracle_of(heads, dtype=torch.float32))
    assert recovery.status is Status.RECOVERED
    assert score_heads(recovery.value, heads).worst_W_error <= 1e-3


def test_conjecture_C_hessians_are_block_diagonalised_at_once():
    """The finest simultaneous block-diagonalisation of random symmetric matrices with common blocks, up to noise."""
    sizes, width, noise = (4, 3, 2), 12, 1e-10
    Q = torch.linalg.qr(normal(width, width)).Q.T
    bases = Q[: sum(sizes)].split(sizes)
    hessians = torch.zeros(5, width, width, dtype=torch.float64)
    for place, basis in enumerate(bases):
        inner = normal(5, len(basis), len(basis), seed=place)
        hessians += basis.T @ (inner + inner.mT) @ basis
    rough = noise * normal(5, width, width, seed=9)
    blocks = find_blocks(hessians + rough + rough.mT, 1e-6, torch.Generator().manual_seed(0))
    assert sorted(map(len, blocks), reverse=True) == list(sizes)
    for block in blocks:
        projector = block.T @ block
        nearest = min(float((basis.T @ basis - projector).norm()) for basis in bases)
        assert nearest <= 100 * noise


def test_one_sum_of_hessians_would_not_do():
    """Σ_i ρ_i M_i has rank 2H at most, whatever K is: the reason for squares."""
    heads = orthogonal_heads(2, 4, 8)
    a = torch.einsum("hij,kj->hki", heads.W, normal(6, 8))
    M = torch.einsum("hi,hkj->kij", heads.v, a)
    total = torch.einsum("k,kij->ij", torch.rand(6, dtype=torch.float64), M + M.mT)
    assert int(torch.linalg.matrix_rank(total)) == 4
    assert int(torch.linalg.matrix_rank((M @ M.mT + M.mT @ M).sum(0))) == 8


@pytest.mark.parametrize("mixed", [1.0, 1e-2, 1e-6])
def test_heads_that_violate_assumption_C_1_are_refused(mixed):
    heads = orthogonal_heads(3, 3, 9)
    slanted = HeadWeights(W=heads.W + mixed * random_head(9, num_heads=3).W, v=heads.v)
    recovery = OrthogonalHeadsAttack()(oracle_of(slanted))
    assert recovery.status is Status.NOTHING_FOUND
    assert len(recovery.value) == 0


def test_tokens_stay_within_a_bound():
    heads = orthogonal_heads(2, 3, 6)
    recovery = OrthogonalHeadsAttack()(oracle_of(heads, max_norm=5.0))
    assert recovery.status is Status.RECOVERED


def test_too_few_hessians_and_a_small_budget_are_told():
    heads = orthogonal_heads(2, 4, 8)
    few = OrthogonalHeadsAttack(max_hessians=2)(oracle_of(heads))
    assert few.status is Status.NOTHING_FOUND
    assert "2 Hessians" in few.reason
    assert OrthogonalHeadsAttack()(oracle_of(heads, budget=300)).status is Status.BUDGET_EXHAUSTED


def test_silence_is_refused():
    heads = orthogonal_heads(2, 2, 4)
    heads.v.zero_()
    assert not OrthogonalHeadsAttack()(oracle_of(heads)).status.conclusive
