import pytest
import torch
from safetensors.torch import save_file
from tests.attacks.queries.many_heads.test_orthogonal_heads import normal, orthogonal_heads
from tests.attacks.queries.random_heads import added, oracle_of, random_head, rounded

import unmask
from unmask.attacks.queries.many_heads.known_subspaces import InSubspace, KnownSubspacesAttack
from unmask.errors import InputError
from unmask.evidence.oracles import FunctionOracle, OracleEvidence
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Status
from unmask.scores.weights import score_heads


def known(num_heads, rank, width, seed=0):
    """Heads in random subspaces, and the subspaces."""
    heads = orthogonal_heads(num_heads, rank, width, seed)
    Q = torch.linalg.qr(normal(width, width, seed=seed)).Q.T
    return heads, list(Q[: num_heads * rank].reshape(num_heads, rank, width))


@pytest.mark.parametrize("shape", [(4, 4, 16), (2, 3, 8), (1, 4, 6), (4, 1, 4), (4, 8, 64)])
def test_proposition_C_2_known_subspaces_take_r_squared_plus_r_queries_a_head(shape):
    heads, subspaces = known(*shape)
    recovery = KnownSubspacesAttack(subspaces=subspaces)(oracle_of(heads))
    num_heads, rank, _ = shape
    assert recovery.status is Status.RECOVERED
    assert recovery.certificate.details["learning_queries"] == num_heads * (rank**2 + rank)  # (4, 4, 16): 80
    assert recovery.certificate.details["fresh_queries"] == 48 + 39
    assert score_heads(recovery.value, heads).worst_W_error <= 1e-12  # measured: 1e-15 to 1e-14


def test_subspaces_of_different_widths_and_any_rows_that_span_them():
    heads, _ = known(2, 3, 10)
    Q = torch.linalg.qr(normal(10, 10)).Q.T
    small = HeadWeights(W=torch.outer(Q[9], Q[9])[None], v=Q[9:10])
    layer = HeadWeights(W=torch.cat([heads.W, small.W]), v=torch.cat([heads.v, small.v]))
    rows = [normal(3, 3, seed=4) @ Q[:3], normal(5, 3, seed=5) @ Q[3:6], Q[9:10]]
    recovery = KnownSubspacesAttack(subspaces=rows)(oracle_of(layer))
    assert recovery.status is Status.RECOVERED
    assert recovery.certificate.details["learning_queries"] == 12 + 12 + 2
    assert score_heads(recovery.value, layer).worst_W_error <= 1e-11


def test_the_front_door_takes_subspaces():
    heads, subspaces = known(4, 4, 16)
    recovery = unmask.recover_weights(FunctionOracle(heads), width=16, subspaces=subspaces)
    assert recovery.status is Status.RECOVERED
    assert recovery.certificate.details["learning_queries"] == 80
    with pytest.raises(InputError, match="leave one of them out"):
        unmask.recover_weights(FunctionOracle(heads), width=16, subspaces=subspaces, attack="many-heads")


def test_a_file_of_subspaces(tmp_path):
    heads, subspaces = known(2, 3, 8)
    save_file({str(n): basis.contiguous() for n, basis in enumerate(subspaces)}, tmp_path / "bases.safetensors")
    attack = f"known-subspaces:file={tmp_path / 'bases.safetensors'}"
    recovery = unmask.recover_weights(FunctionOracle(heads), width=8, attack=attack)
    assert recovery.status is Status.RECOVERED
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        KnownSubspacesAttack(file=str(tmp_path / "none"))(oracle_of(heads))


@pytest.mark.parametrize("after", [rounded(4), added(1e-4)])
def test_added_errors_are_outgrown(after):
    heads, subspaces = known(2, 3, 8)
    recovery = KnownSubspacesAttack(subspaces=subspaces)(oracle_of(heads, after))
    assert recovery.status is Status.RECOVERED
    assert score_heads(recovery.value, heads).worst_W_error <= 1e-9


def test_float32():
    heads, subspaces = known(2, 4, 8)
    recovery = KnownSubspacesAttack(subspaces=subspaces)(oracle_of(heads, dtype=torch.float32))
    assert recovery.status is Status.RECOVERED
    assert score_heads(recovery.value, heads).worst_W_error <= 1e-5


def test_tokens_stay_within_a_bound():
    heads, subspaces = known(2, 3, 6)
    assert KnownSubspacesAttack(subspaces=subspaces)(oracle_of(heads, max_norm=5.0)).status is Status.RECOVERED


@pytest.mark.parametrize("mixed", [1.0, 1e-2, 1e-6])
def test_heads_outside_of_their_subspaces_are_refused(mixed):
    heads, subspaces = known(3, 3, 9)
    slanted = HeadWeights(W=heads.W + mixed * random_head(9, num_heads=3).W, v=heads.v)
    recovery = KnownSubspacesAttack(subspaces=subspaces)(oracle_of(slanted))
    assert recovery.status is Status.NOTHING_FOUND
    assert len(recovery.value) == 0


def test_wrong_subspaces_and_answers_by_chance_are_refused():
    heads, _ = known(2, 3, 8)
    _, others = known(2, 3, 8, seed=7)
    assert KnownSubspacesAttack(subspaces=others)(oracle_of(heads)).status is Status.NOTHING_FOUND
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        chance = FunctionOracle(lambda X, g=generator: torch.randn(len(X), generator=g, dtype=torch.float64))
        recovery = KnownSubspacesAttack(subspaces=others)(OracleEvidence(chance, 8))
        assert not recovery.status.conclusive
        assert len(recovery.value) == 0


def test_a_silent_head_is_left_out_and_silence_is_told():
    heads, subspaces = known(2, 3, 6)
    quiet = HeadWeights(W=heads.W, v=heads.v * torch.tensor([[1.0], [0.0]]))
    recovery = KnownSubspacesAttack(subspaces=subspaces)(oracle_of(quiet))
    assert recovery.status is Status.RECOVERED
    assert len(recovery.value) == 1
    heads.v.zero_()
    assert KnownSubspacesAttack(subspaces=subspaces)(oracle_of(heads)).status is Status.NOT_IDENTIFIABLE


@pytest.mark.parametrize("size", [1e-9, 1e-10])
def test_a_tiny_head_whose_w_is_wrong_is_not_claimed(size):
    heads, subspaces = known(2, 3, 6)
    W, v = heads.W.clone(), heads.v.clone()
    W[1], v[1] = random_head(6).W[0], size * v[1]  # it reads outside of its subspace
    recovery = KnownSubspacesAttack(subspaces=subspaces)(oracle_of(HeadWeights(W=W, v=v)))
    assert recovery.status is not Status.RECOVERED
    assert score_heads(recovery.value, heads.select(torch.tensor([True, False]))).worst_W_error <= 1e-12
    v = heads.v * torch.tensor([[1.0], [size]])  # and one that does not is claimed
    assert KnownSubspacesAttack(subspaces=subspaces)(oracle_of(HeadWeights(W=heads.W, v=v))).status is Status.RECOVERED


def test_an_oracle_without_numbers_says_nothing_of_subspaces():
    heads, subspaces = known(2, 3, 6)
    recovery = KnownSubspacesAttack(subspaces=subspaces)(oracle_of(heads, lambda answers: answers * torch.nan))
    assert recovery.status is Status.NOTHING_FOUND
    assert recovery.reason.endswith("or it is broken.")
    assert "subspaces" not in recovery.reason


def test_a_small_budget_is_told():
    heads, subspaces = known(2, 4, 8)
    recovery = KnownSubspacesAttack(subspaces=subspaces)(oracle_of(heads, budget=60))
    assert recovery.status is Status.BUDGET_EXHAUSTED


def test_subspaces_must_fit():
    heads, subspaces = known(2, 3, 8)
    evidence = oracle_of(heads)
    with pytest.raises(InputError, match="needs the subspaces"):
        KnownSubspacesAttack()(evidence)
    with pytest.raises(InputError, match="must be \\(rank, 8\\)"):
        KnownSubspacesAttack(subspaces=[torch.zeros(2, 7)])(evidence)
    with pytest.raises(InputError, match="orthogonal to each other"):
        KnownSubspacesAttack(subspaces=[subspaces[0], subspaces[0]])(evidence)


def test_a_view_asks_the_whole_layer_and_pays_from_its_ledger():
    heads, subspaces = known(2, 3, 8)
    evidence = oracle_of(heads)
    Z = normal(4, 2, 3)
    assert torch.equal(InSubspace.of(evidence, subspaces[0]).ask(Z), evidence.ask(Z @ subspaces[0]))
    assert len(evidence.ledger) == 4
