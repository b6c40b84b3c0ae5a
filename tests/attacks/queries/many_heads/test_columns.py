import pytest
import torch
from tests.attacks.queries.layers import asking_token, isolation_of, pairs_of
from tests.attacks.queries.random_heads import random_head
from tests.attacks.queries.random_networks import normal, relative

from unmask.attacks.queries.many_heads.columns import Columns
from unmask.attacks.queries.many_heads.heads_at_point import HeadsAtPoint
from unmask.attacks.queries.many_heads.isolation import Isolation
from unmask.attacks.queries.resolution import NoPlane
from unmask.attacks.run import Run, silent
from unmask.evidence.ledger import BudgetSpent
from unmask.linalg.heads import HeadWeights

WIDTH = 16


def columns_of(heads, seed=0, progress=silent, **options) -> Columns:
    """Columns that begin with the true heads at one y."""
    y = asking_token(heads.v.shape[1], seed)
    return Columns(HeadsAtPoint(y, isolation_of(heads, y), pairs_of(heads, **options)), Run(seed, progress))


def asked(columns) -> int:
    return columns.view.pairs.evidence.ledger.num_asked


@pytest.mark.parametrize("num_heads", [1, 3, 8])
def test_all_columns_are_learned_with_width_queries_each(num_heads):
    heads = random_head(WIDTH, num_heads=num_heads)
    columns = columns_of(heads)
    columns.learn()
    assert relative(columns.W, heads.W) < 1e-10
    assert columns.ranks == [WIDTH] * num_heads
    # width − 1 columns of width queries, the middle of each head and two predictions.
    assert asked(columns) <= 1.1 * (WIDTH - 1) * (num_heads * (WIDTH + 1) + 2)


def test_nothing_is_known_before_it_is_learned():
    columns = columns_of(random_head(WIDTH, num_heads=2))
    assert columns.W.shape == (2, WIDTH, WIDTH)
    assert columns.W.isnan().all()


def test_measuring_again_gains_digits():
    heads = random_head(WIDTH, num_heads=6)
    columns = columns_of(heads)
    columns.learn()
    before = relative(columns.W, heads.W)
    columns.polish()
    assert relative(columns.W, heads.W) < before / 2


@pytest.mark.parametrize("seed", range(2))
def test_spans_are_found_head_by_head_and_save_queries(seed):
    draw = normal(seed)
    ranks = [1, 3, WIDTH]
    W = torch.stack([draw(WIDTH, rank) @ draw(rank, WIDTH) / rank**0.5 for rank in ranks]) / WIDTH**0.5
    heads = HeadWeights(W=W, v=draw(3, WIDTH))
    columns = columns_of(heads, seed)
    columns.learn()
    assert columns.ranks == ranks
    assert relative(columns.W, heads.W) < 1e-9
    full = columns_of(random_head(WIDTH, num_heads=3), seed)
    full.learn()
    assert asked(columns) < 0.65 * asked(full)
    for span, own in zip(columns.spans[:2], W[:2], strict=True):
        assert relative(span @ (span.T @ own), own) < 1e-9
    assert columns.spans[2] is None


def test_a_span_that_later_columns_leave_is_given_up():
    heads = random_head(WIDTH, num_heads=2, rank=2)
    heads.W[0, :, 9:] = random_head(WIDTH, seed=5).W[0, :, 9:]
    columns = columns_of(heads)
    columns.learn()
    assert columns.ranks == [9, 2]
    assert relative(columns.W, heads.W) < 1e-9


def test_steps_shrink_where_predictions_fail(monkeypatch):
    heads = random_head(WIDTH, num_heads=6)
    usual = columns_of(heads)
    usual.learn()
    monkeypatch.setattr(Isolation, "reach", lambda self: 3.0)
    columns = columns_of(heads)
    columns.learn()
    assert asked(columns) > 1.2 * asked(usual)
    # Heads that leak by less than a prediction shows are allowed here; measuring again takes them out.
    assert relative(columns.W, heads.W) < 1e-2
    columns.polish()
    assert relative(columns.W, heads.W) < 1e-10


def test_an_oracle_of_other_heads_is_refused():
    heads, other = random_head(WIDTH, num_heads=2), random_head(WIDTH, seed=1, num_heads=2)
    y = asking_token(WIDTH)
    columns = Columns(HeadsAtPoint(y, isolation_of(heads, y), pairs_of(other)), Run())
    with pytest.raises(NoPlane, match="fail at any distance"):
        columns.learn()
    assert columns.W.isnan().all()


def test_a_budget_that_ends_leaves_whole_columns():
    heads = random_head(WIDTH, num_heads=2)
    columns = columns_of(heads, budget=300)
    with pytest.raises(BudgetSpent):
        columns.learn()
    known = columns.W.isfinite().all(dim=(0, 1))
    assert 5 <= int(known.sum()) < WIDTH - 1
    assert columns.W[:, :, ~known].isnan().all()
    assert torch.allclose(columns.W[:, :, known], heads.W[:, :, known], rtol=0, atol=1e-11)


def test_progress_counts_the_columns():
    told = []
    columns_of(random_head(6, num_heads=2), progress=lambda *step: told.append(step)).learn()
    assert told[0] == ("learning columns of W", 1, 5)
    assert told[-1] == ("learning columns of W", 5, 5)
