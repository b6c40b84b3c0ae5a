"""Spans of gradients: Theorem 5.1, rank by gap, probes, and parity with a full SVD."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference.svd_span import svd_distance, svd_projector, svd_singular_values
from torch import Tensor

from unmask.errors import InputError
from unmask.linalg.subspace import Span, column_span, rank_by_gap

quick = settings(max_examples=30)
seeds = st.integers(0, 2**32 - 1)

# A float64 projection of a unit row is rounded by about √d·1e-16; well-conditioned spans add one or two digits.
FLOAT64_ZERO = 1e-12
# float32 gradients are rounded by 6e-8 of their largest entries, over the smallest singular value (about a tenth of
# the largest here).
FLOAT32_ZERO = 1e-5


def gaussian(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def gradient_of(rows: Tensor, num_columns: int, seed: int = 1) -> Tensor:
    """G = Xᵀ·∂L/∂Y with a random ∂L/∂Y, which has full rank with probability 1."""
    return rows.T @ gaussian(seed, len(rows), num_columns).to(rows)


def orthogonal(seed: int, size: int) -> Tensor:
    return torch.linalg.qr(gaussian(seed, size, size))[0]


def with_spectrum(values: Tensor, width: int, num_columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix with these singular values, and its left singular vectors."""
    left = orthogonal(seed, width)[:, : len(values)]
    right = orthogonal(seed + 1, num_columns)[:, : len(values)]
    return left * values @ right.T, left


def projector(span: Span) -> Tensor:
    return span.basis @ span.basis.T


# Theorem 5.1 of DAGER: if ∂L/∂Y has full rank b, the column space of G is the row space of X


@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 1), (5, 40), (20, 20), (39, 60)])
def test_theorem_5_1_the_columns_of_the_gradient_span_the_rows_of_the_input(num_rows, num_columns):
    rows = gaussian(0, num_rows, 40)
    span = column_span(gradient_of(rows, num_columns))
    assert span.rank == num_rows
    assert span.width == 40
    # The square case is the worst conditioned: singular values of a random (20, 20) matrix reach down to 1e-2.
    assert span.distance(rows).max() < 1e3 * FLOAT64_ZERO
    expected = svd_projector(rows.T, rank=num_rows)
    assert torch.allclose(projector(span), expected, atol=1e3 * FLOAT64_ZERO)


def test_theorem_5_1_other_vectors_are_not_in_the_span():
    rows = gaussian(0, 20, 40)
    strangers = gaussian(2, 200, 40)
    distances = column_span(gradient_of(rows, 60)).distance(strangers)
    # A random vector keeps √((d − b)/d) = 0.71 of its length outside; 200 of them spread by about 0.06 each.
    assert distances.min() > 0.4
    assert distances.mean() == pytest.approx(math.sqrt(0.5), abs=0.02)


def test_theorem_5_1_repeated_rows_count_once():
    distinct = gaussian(0, 7, 40)
    span = column_span(gradient_of(distinct[[0, 0, 1, 2, 3, 4, 5, 6, 6, 6]], 60))
    assert span.rank == 7
    assert span.distance(distinct).max() < FLOAT64_ZERO


def test_theorem_5_1_a_row_without_gradient_leaves_no_trace():
    """The condition of the theorem: where ∂L/∂y is zero, as for queries of first tokens, the row is not seen."""
    rows = gaussian(0, 8, 40)
    arriving = gaussian(1, 8, 60)
    arriving[0] = 0
    span = column_span(rows.T @ arriving)
    assert span.rank == 7
    assert span.distance(rows)[0] > 0.5
    assert span.distance(rows)[1:].max() < FLOAT64_ZERO


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_theorem_5_1_survives_the_noise_of_the_gradients_precision(dtype):
    rows = gaussian(0, 20, 64, dtype=torch.float32)
    span = column_span(gradient_of(rows, 64).to(dtype))
    assert span.rank == 20
    # Rounding of entries by eps/2 is a random matrix of norm about eps·√(d + m)/2 beside a G of norm 1 (Frobenius).
    precision = torch.finfo(dtype).eps
    assert span.noise_floor < 5 * precision
    assert span.noise_floor > precision / 1e3
    # From a smallest singular value of about a tenth of the largest down to that noise.
    assert span.gap_decades > -math.log10(precision) - 2
    assert span.distance(rows).max() < FLOAT32_ZERO * precision / torch.finfo(torch.float32).eps


def test_gap_and_noise_floor_belong_to_the_same_fall():
    span = column_span(gradient_of(gaussian(0, 20, 64, dtype=torch.float32), 64))
    kept, dropped = span.singular_values[19], span.singular_values[20]
    assert span.gap_decades == pytest.approx(float(torch.log10(kept / dropped)), abs=1e-9)  # of ~6 decades
    assert span.noise_floor == float(dropped / span.singular_values[0])


# Several gradients of one input


def test_gradients_join_what_each_alone_lacks():
    """Two gradients with 6 columns each of 10 rows: grouped keys and values, say."""
    rows = gaussian(0, 10, 40)
    first, second = gradient_of(rows, 6, seed=1), gradient_of(rows, 6, seed=2)
    assert column_span(first).is_full
    joint = column_span(first, second)
    assert joint.rank == 10
    assert not joint.is_full
    assert joint.distance(rows).max() < 1e2 * FLOAT64_ZERO  # a (10, 12) factor is worse conditioned than a wide one


def test_a_weak_gradient_counts_as_much_as_a_strong_one():
    """Gradients are scaled to norm 1: values may have gradients that are 1e9 times those of keys."""
    rows = gaussian(0, 10, 40)
    weak = gradient_of(rows[:5], 30, seed=1) * 1e-9
    span = column_span(weak, gradient_of(rows[5:], 30, seed=2))
    assert span.rank == 10
    assert span.distance(rows).max() < FLOAT64_ZERO


def test_zero_gradients_beside_others_change_nothing():
    gradient = gradient_of(gaussian(0, 10, 40), 30)
    alone, joint = column_span(gradient), column_span(torch.zeros(40, 7), gradient)
    assert joint.rank == alone.rank == 10
    assert torch.equal(joint.basis, alone.basis)


@pytest.mark.parametrize("num_columns", [7, 60])
def test_zero_gradients_alone_span_nothing(num_columns):
    span = column_span(torch.zeros(40, num_columns))
    assert span.rank == 0
    assert not span.is_full
    assert span.noise_floor == 0
    assert torch.equal(span.distance(gaussian(0, 3, 40)), torch.ones(3, dtype=torch.float64))


def test_gradients_of_different_widths_are_refused():
    with pytest.raises(InputError, match=r"same number of rows, got \[40, 41\]"):
        column_span(torch.ones(40, 3), torch.ones(41, 3))


def test_no_gradients_are_refused():
    with pytest.raises(InputError, match="at least one gradient"):
        column_span()


# Full spans


def test_more_rows_than_columns_saturate():
    """d > m: the gradient could not have shown a higher rank, so rows may be missing."""
    span = column_span(gradient_of(gaussian(0, 30, 40), 12))
    assert span.rank == 12
    assert span.is_full


def test_more_rows_than_the_width_fill_the_space():
    span = column_span(gradient_of(gaussian(0, 80, 40), 100))
    assert span.rank == span.width == 40
    assert span.is_full
    assert span.distance(gaussian(5, 10, 40)).max() < FLOAT64_ZERO


def test_noise_with_a_flat_spectrum_is_full():
    """Gaussian noise has no fall of a decade, so no rank is read into it."""
    span = column_span(gaussian(0, 64, 128))
    assert span.is_full
    assert span.noise_floor == 0
    assert span.gap_decades < 1


def test_noise_of_the_gradients_own_norm_hides_its_rank():
    gradient = gradient_of(gaussian(0, 10, 64), 128)
    noise = gaussian(2, 64, 128)
    assert column_span(gradient / gradient.norm() + noise / noise.norm()).is_full


def test_the_smallest_gap_that_counts_is_the_callers():
    gradient = gradient_of(gaussian(0, 20, 64, dtype=torch.float32), 64)
    decades = column_span(gradient).gap_decades
    assert column_span(gradient, min_gap_decades=decades - 0.01).rank == 20
    assert column_span(gradient, min_gap_decades=decades + 0.01).is_full


@pytest.mark.parametrize("num_columns", [1, 2])
def test_one_column_spans_a_line(num_columns):
    """A single value has no fall behind it; two columns of the same direction have."""
    row = gaussian(0, 1, 40)
    span = column_span(row.T @ torch.ones(1, num_columns, dtype=torch.float64))
    assert span.rank == 1
    assert span.distance(row).item() < FLOAT64_ZERO
    assert span.is_full == (num_columns == 1)


# Rank by gap


def test_rank_by_gap_by_hand():
    assert rank_by_gap(torch.tensor([1.0, 0.5, 1e-5, 1e-6]))[0] == 2
    assert rank_by_gap(torch.tensor([1.0, 0.5, 0.2]))[0] == 3
    assert rank_by_gap(torch.tensor([0.0, 0.0])) == (0, math.inf)
    assert rank_by_gap(torch.tensor([3.0])) == (1, 0.0)


@quick
@given(st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=10), st.floats(1e-6, 1e6))
def test_rank_by_gap_ignores_the_scale(values, factor):
    spectrum = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
    rank, gap = rank_by_gap(spectrum)
    scaled_rank, scaled_gap = rank_by_gap(spectrum * factor)
    assert scaled_gap == pytest.approx(gap, abs=1e-12)  # logarithms of at most 9 are rounded by 1e-15
    falls = torch.log10(spectrum[:-1] / spectrum[1:]).sort().values
    tied = len(falls) > 1 and float(falls[-1] - falls[-2]) < 1e-12
    near_the_limit = abs(gap - 1.0) < 1e-12
    assert scaled_rank == rank or tied or near_the_limit


# Weak directions


@pytest.mark.parametrize(("width", "num_columns"), [(64, 96), (96, 64)])
def test_directions_a_million_times_weaker_are_kept_accurate(width, num_columns):
    """Condition number 1e6: a Gram matrix has it squared, so the weak directions come from a second, deflated pass."""
    values = torch.logspace(0, -6, 30, dtype=torch.float64)
    gradient, left = with_spectrum(values, width, num_columns)
    span = column_span(gradient)
    assert span.rank == 30
    # The first pass keeps directions down to 1e-4, where squaring leaves 1e-16/(1e-4)² = 1e-8 of the others.
    assert span.distance(left.T).max() < 1e-8
    # Below, 1e-16 of the strong ones stays beside directions of size 1e-6.
    assert span.distance(left[:, -1:].T).item() < 1e-9
    scaled = values / values.norm()
    assert torch.allclose(span.singular_values[:30], scaled, rtol=1e-7)  # 1e-8 at worst, for the same reason


def test_without_deflation_the_weak_directions_would_be_lost():
    """The reason for the second pass: eigenvectors of GGᵀ alone are off by 1e-16/(1e-6)² = 1e-4."""
    values = torch.logspace(0, -6, 30, dtype=torch.float64)
    gradient, left = with_spectrum(values, 64, 96)
    plain = torch.linalg.eigh(gradient @ gradient.T)[1].flip(1)[:, :30]
    weakest = left[:, -1]
    naive_distance = (weakest - plain @ (plain.T @ weakest)).norm()
    assert naive_distance > 1e2 * column_span(gradient).distance(weakest[None])[0]


# Distances


def test_distance_is_relative_and_in_float64():
    span = column_span(gradient_of(gaussian(0, 10, 40), 30))
    rows = gaussian(3, 5, 40, dtype=torch.float32)
    distances = span.distance(rows)
    assert distances.dtype == torch.float64
    # 1e6 is no power of two, so the scaled float32 rows are rounded once more.
    assert torch.allclose(span.distance(rows * 1e6), distances, rtol=1e-6)


def test_zero_rows_are_never_in_the_span():
    span = column_span(gradient_of(gaussian(0, 10, 40), 30))
    assert span.distance(torch.zeros(2, 40)).tolist() == [1.0, 1.0]


# Probes


def test_probes_vanish_on_the_span_and_are_orthogonal():
    rows = gaussian(0, 20, 64)
    span = column_span(gradient_of(rows, 80))
    probes = span.probes(16, torch.Generator().manual_seed(0))
    assert probes.shape == (64, 16)
    assert (probes.T @ span.basis).abs().max() < FLOAT64_ZERO
    assert ((rows @ probes).norm(dim=1) / rows.norm(dim=1)).max() < 1e2 * FLOAT64_ZERO
    scale = (64 - 20) / 16
    assert torch.allclose(probes.T @ probes, scale * torch.eye(16, dtype=torch.float64), atol=FLOAT64_ZERO)


def test_probes_estimate_the_distance_without_bias():
    span = column_span(gradient_of(gaussian(0, 20, 64), 80))
    row = gaussian(3, 1, 64)
    generator = torch.Generator().manual_seed(0)
    squares = torch.stack([(row @ span.probes(8, generator)).square().sum() for _ in range(400)])
    true_square = (span.distance(row) * row.norm()).square().item()
    # A share of 8 of 44 dimensions has relative variance 2·(44 − 8)/(8·46) = 0.2; of 400 draws the mean has a standard
    # deviation of 2.2 %, and five of them are allowed.
    assert squares.mean().item() == pytest.approx(true_square, rel=0.11)


def test_as_many_probes_as_the_complement_has_dimensions_give_the_exact_distance():
    span = column_span(gradient_of(gaussian(0, 20, 64), 80))
    rows = gaussian(3, 5, 64)
    probes = span.probes(1000, torch.Generator().manual_seed(0))
    assert probes.shape == (64, 44)
    exact = span.distance(rows) * rows.norm(dim=1)
    assert torch.allclose((rows @ probes).norm(dim=1), exact, rtol=1e-10)  # an orthonormal basis, rounded


def test_probes_are_the_generators():
    span = column_span(gradient_of(gaussian(0, 20, 64), 80))
    draws = [span.probes(4, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.allclose(draws[0], draws[2])


def test_a_span_that_fills_its_space_has_no_probes():
    span = column_span(gaussian(0, 40, 60))
    with pytest.raises(InputError, match=r"rank 40 of 40.*every vector passes"):
        span.probes(8, torch.Generator())


def test_an_empty_span_has_probes_of_the_whole_space():
    probes = column_span(torch.zeros(40, 50)).probes(40, torch.Generator().manual_seed(0))
    assert torch.allclose(probes @ probes.T, torch.eye(40, dtype=torch.float64), atol=FLOAT64_ZERO)


# Parity with the slow reference


@pytest.mark.parametrize(
    ("width", "num_rows", "columns"),
    [(48, 10, (48,)), (48, 10, (16, 8, 8)), (32, 31, (128,)), (48, 10, (20,)), (96, 5, (30, 30))],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_parity_with_a_full_svd(width, num_rows, columns, dtype):
    rows = gaussian(0, num_rows, width).to(dtype)
    gradients = [gradient_of(rows, num_columns, seed) for seed, num_columns in enumerate(columns, start=1)]
    span = column_span(*gradients)
    assert span.rank == num_rows
    # Both decompose the same matrix in float64; beside 31 of 32 directions the weakest is a hundredth of the largest.
    assert torch.allclose(projector(span), svd_projector(*gradients, rank=num_rows), atol=1e-9)
    values = svd_singular_values(*gradients)
    assert torch.allclose(span.singular_values[:num_rows], values[:num_rows], rtol=1e-9)
    others = gaussian(9, 20, width)
    expected = svd_distance(svd_projector(*gradients, rank=num_rows), others)
    assert torch.allclose(span.distance(others), expected, atol=1e-9)


def test_parity_of_the_noise_floor_with_a_full_svd():
    gradient = gradient_of(gaussian(0, 20, 64, dtype=torch.float32), 64)
    values = svd_singular_values(gradient)
    # The noise is 1e-8 of the gradient, known to 1e-16 of it after the deflation.
    assert column_span(gradient).noise_floor == pytest.approx(float(values[20] / values[0]), rel=1e-4)


# The sketch: gradients with at least 192 rows and columns are first seen through a third of their column space


@pytest.mark.parametrize("num_rows", [1, 20, 69, 70, 84, 86, 150, 255])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_wide_gradient_has_the_span_of_its_rows_whatever_its_rank(num_rows, dtype):
    """Ranks far below the sketch's size (85), near it, beyond it, and one below the width."""
    rows = gaussian(0, num_rows, 256).to(dtype)
    span = column_span(gradient_of(rows, 300))
    assert span.rank == num_rows
    assert not span.is_full
    # A sketch amplifies rounding about fivefold; of 255 directions the weakest is a hundredth of the largest.
    assert span.distance(rows).max() < (1e4 * FLOAT64_ZERO if dtype == torch.float64 else FLOAT32_ZERO)
    assert span.distance(gaussian(5, 20, 256)).min() > 0.5 * math.sqrt((256 - num_rows) / 256) - 0.04


@pytest.mark.parametrize("num_rows", [20, 69, 120])
def test_parity_of_a_wide_gradient_with_a_full_svd(num_rows):
    rows = gaussian(0, num_rows, 256, dtype=torch.float32)
    gradients = [gradient_of(rows, 128, seed) for seed in (1, 2)]
    span = column_span(*gradients)
    values = svd_singular_values(*gradients)
    # float32 noise of 1e-7 turns the sketched span by about 1e-6 against the strongest singular vectors.
    assert torch.allclose(projector(span), svd_projector(*gradients, rank=num_rows), atol=1e-5)
    assert torch.allclose(span.singular_values[:num_rows], values[:num_rows], rtol=1e-5)
    # The sketch sees the noise through fewer directions, so its norm comes out smaller by less than a factor of 2.
    assert span.noise_floor == pytest.approx(float(values[num_rows] / values[0]), rel=0.5)
    assert span.gap_decades == pytest.approx(float(torch.log10(values[num_rows - 1] / values[num_rows])), abs=0.3)


def test_a_fall_that_the_sketch_sees_first_does_not_hide_a_larger_one_behind_it():
    """Rows with a strong common part, as trained models have: the spectrum falls by two decades after the first
    direction and by eight after the last. The second fall lies beyond what the sketch can see."""
    rows = gaussian(0, 150, 256) + 30 * gaussian(1, 1, 256)
    span = column_span(gradient_of(rows, 256, seed=2))
    assert span.rank == 150
    assert span.distance(rows).max() < 1e4 * FLOAT64_ZERO  # condition number about 1e4


def test_a_wide_gradient_of_noise_is_full():
    span = column_span(gaussian(0, 256, 300))
    assert span.is_full
    assert span.rank == 256


def test_wide_zero_gradients_span_nothing():
    span = column_span(torch.zeros(256, 300))
    assert span.rank == 0
    assert not span.is_full


def test_a_wide_gradient_with_few_columns_saturates():
    span = column_span(gradient_of(gaussian(0, 230, 256), 200))
    assert span.rank == 200
    assert span.is_full


def test_a_wide_gradients_span_is_the_same_each_time():
    gradient = gradient_of(gaussian(0, 20, 256), 300)
    state = torch.random.get_rng_state()
    assert torch.equal(column_span(gradient).basis, column_span(gradient).basis)
    assert torch.equal(torch.random.get_rng_state(), state)


# Properties


@quick
@given(seeds, st.integers(1, 15), st.floats(1e-30, 1e30))
def test_scaling_a_gradient_changes_nothing(seed, num_rows, factor):
    rows = gaussian(seed, num_rows, 24)
    first, second = gradient_of(rows, 24, seed=1), gradient_of(rows, 24, seed=2)
    plain, scaled = column_span(first, second), column_span(first * factor, second)
    assert scaled.rank == plain.rank == num_rows
    assert torch.allclose(projector(scaled), projector(plain), atol=1e-9)


@quick
@given(seeds, st.integers(1, 15))
def test_turning_the_outputs_changes_nothing(seed, num_rows):
    """G·Q has the column space and the singular values of G for any orthogonal Q."""
    gradient = gradient_of(gaussian(seed, num_rows, 24), 32)
    plain, turned = column_span(gradient), column_span(gradient @ orthogonal(seed, 32))
    assert turned.rank == plain.rank == num_rows
    assert torch.allclose(projector(turned), projector(plain), atol=1e-9)
    kept = slice(0, num_rows)
    assert torch.allclose(turned.singular_values[kept], plain.singular_values[kept], rtol=1e-9)


@quick
@given(seeds, st.integers(1, 15))
def test_turning_the_inputs_turns_the_span(seed, num_rows):
    gradient, turn = gradient_of(gaussian(seed, num_rows, 24), 32), orthogonal(seed, 24)
    others = gaussian(seed, 5, 24)
    plain, turned = column_span(gradient), column_span(turn @ gradient)
    assert torch.allclose(turned.distance(others @ turn.T), plain.distance(others), atol=1e-9)


@quick
@given(seeds, st.integers(1, 23), st.integers(1, 40))
def test_the_basis_is_orthonormal_and_contiguous(seed, num_rows, num_columns):
    span = column_span(gradient_of(gaussian(seed, num_rows, 24), num_columns))
    gram = span.basis.T @ span.basis
    assert torch.allclose(gram, torch.eye(span.rank, dtype=torch.float64), atol=FLOAT64_ZERO)
    assert span.basis.is_contiguous()
    assert span.basis.dtype == torch.float64
    assert len(span.singular_values) == min(24, num_columns)
    assert (span.singular_values[:-1] >= span.singular_values[1:]).all()


def test_gradients_are_not_changed():
    gradient = gradient_of(gaussian(0, 10, 40), 30)
    before = gradient.clone()
    column_span(gradient, gradient)
    assert torch.equal(gradient, before)


# Further directions


def test_joined_directions_are_in_the_span_and_the_old_ones_stay():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 20, generator=generator, dtype=torch.float64)
    span, further = column_span(rows.T @ torch.randn(6, 30, generator=generator, dtype=torch.float64)), rows[:1] + 1
    joined = span.join(further)
    assert joined.rank == span.rank + 1
    assert float(joined.distance(torch.cat([rows, further])).max()) < 1e-9  # float64
    assert float(span.distance(further).min()) > 0.1
    torch.testing.assert_close(joined.basis.T @ joined.basis, torch.eye(joined.rank, dtype=torch.float64))


def test_directions_that_a_span_holds_add_nothing():
    rows = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    span = column_span(rows.T)
    assert span.join(torch.cat([rows[:1] - rows[1:2], torch.zeros(1, 8)])).rank == 3
    assert span.join(torch.zeros(0, 8)).rank == 3


def test_a_span_at_some_entries_holds_what_they_hold_of_its_vectors():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 30, generator=generator, dtype=torch.float64)
    entries = torch.tensor([3, 29, 8, 1, 17, 5, 22])
    part = column_span(rows.T).at(entries)
    assert (part.rank, part.width) == (4, 7)
    assert float(part.distance(rows[:, entries]).max()) < 1e-12
    others = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    assert float(part.distance(others).min()) > 1e-2
