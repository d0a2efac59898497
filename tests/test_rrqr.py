"""Strong RRQR: what a swap gains, where the swaps end, and what happens at the edges."""

import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_rrqr import strong_rrqr_slow

from statecut.errors import InputError
from statecut.pruning.methods import METHODS
from statecut.pruning.rrqr import (
    PivotedFactor,
    StrongRRQR,
    pivoted_cholesky,
    pivoted_qr,
    strong_rrqr,
    strong_swaps,
)

some = settings(max_examples=40, deadline=None, derandomize=True)


def random_matrix(seed, rows, columns, decay):
    """Dense, with singular values that fall to 10^-decay or so; no two pivots tie."""
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.logspace(0, -decay, columns, dtype=torch.float64)
    mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    rows_of = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return (rows_of * spectrum) @ mixing


@st.composite
def matrices(draw):
    """A matrix of full column rank and a number of columns to keep, not all."""
    columns = draw(st.integers(2, 24))
    rows = columns + draw(st.integers(0, 40))
    matrix = random_matrix(draw(st.integers(0, 2**32)), rows, columns, draw(st.floats(0, 2.5)))
    return matrix, draw(st.integers(1, columns - 1))


thresholds = st.sampled_from([1.0, 1.01, 1.5, 4.0])


def unpivoted(matrix):
    """The columns as they come: a bad start, and so one of many swaps."""
    R = torch.linalg.qr(matrix, mode="r").R
    n = R.shape[-1]
    pivots = torch.arange(n).expand(*R.shape[:-2], n)
    return PivotedFactor(R, pivots, torch.full(R.shape[:-2], n), R.device)


def log_volume(matrix, columns):
    return torch.linalg.svdvals(matrix[:, columns]).log().sum().item()


def all_gains(matrix, order, keep):
    """ρ_ij for every i and j, from nothing but the definition."""
    R = torch.linalg.qr(matrix[:, order], mode="r").R
    A, B, C = R[:keep, :keep], R[:keep, keep:], R[keep:, keep:]
    inverse = torch.linalg.inv(A)
    return torch.hypot(inverse @ B, inverse.norm(dim=1)[:, None] * C.norm(dim=0))


def kahan(n, c=0.285):
    """Kahan's matrix, its diagonal raised a little so that column pivoting leaves it alone."""
    s = math.sqrt(1 - c * c)
    upper = np.diag(s ** np.arange(n)) @ (np.eye(n) - c * np.triu(np.ones((n, n)), 1))
    return upper + np.diag(1e3 * np.finfo(float).eps * np.arange(n, 0, -1))


@some
@given(matrices(), thresholds)
def test_at_the_end_no_gain_exceeds_f(drawn, f):
    matrix, keep = drawn
    for start in (pivoted_qr(matrix), unpivoted(matrix)):
        found = strong_swaps(start, keep, f)
        gains = all_gains(matrix, found.order, keep)
        assert gains.max() <= f * (1 + 1e-8)
        assert found.largest_gain.item() == pytest.approx(gains.max().item(), rel=1e-7)
        assert found.log_volume.item() == pytest.approx(log_volume(matrix, found.kept), abs=1e-9)


@some
@given(matrices(), thresholds)
def test_matrix_r_factor_gram_matrix_batch_and_the_slow_one_choose_the_same(drawn, f):
    matrix, keep = drawn
    found, slow = strong_rrqr(matrix, keep, f), strong_rrqr_slow(matrix.numpy(), keep, f)
    assert torch.equal(found.order, slow.order)
    assert found.swaps == slow.swaps
    assert found.largest_gain.item() == pytest.approx(slow.largest_gain.item(), rel=1e-7)
    R = torch.linalg.qr(matrix, mode="r").R
    gram = matrix.mT @ matrix
    others = torch.stack([matrix.flip(0), matrix.flip(1), matrix]).reshape(1, 3, *matrix.shape)
    batch = strong_rrqr(others, keep, f)
    last = StrongRRQR(**{name: value[0, 2] for name, value in vars(batch).items()})
    from_gram = strong_swaps(pivoted_cholesky(gram), keep, f)
    for other in (strong_rrqr(R, keep, f), from_gram, last, slow):
        assert torch.equal(other.kept, found.kept)
        assert other.log_volume.item() == pytest.approx(found.log_volume.item(), abs=1e-9)


@some
@given(matrices())
def test_a_swap_gains_exactly_the_ratio_of_determinants(drawn):
    """Where the paper says at least."""
    matrix, k = drawn
    gains = all_gains(matrix, torch.arange(matrix.shape[1]), k)
    before = log_volume(matrix, range(k))
    for i, j in product(range(k), range(matrix.shape[1] - k)):
        swapped = [*range(i), k + j, *range(i + 1, k)]
        rise = log_volume(matrix, swapped) - before
        assert rise == pytest.approx(gains[i, j].log().item(), abs=1e-6)


@pytest.mark.parametrize("n", [20, 60, 128])
def test_kahans_matrix_defeats_column_pivoting_and_one_swap_repairs_it(n):
    """From its Gram matrix up to gains of 1e6: beyond, squares leave too few digits to tell the
    last two pivots from zero, and whether the swap is found is luck."""
    matrix = kahan(n)
    pivoting, strong = strong_rrqr(matrix, n - 1, f=math.inf), strong_rrqr(matrix, n - 1)
    assert pivoting.order.tolist() == list(range(n))
    assert (pivoting.swaps, strong.swaps) == (0, 1)
    assert strong.largest_gain < 1
    rise = (strong.log_volume - pivoting.log_volume).item()
    assert rise == pytest.approx(pivoting.largest_gain.log().item(), abs=1e-6)
    assert torch.equal(strong.kept, strong_rrqr_slow(matrix, n - 1).kept)
    if n == 128:
        assert pivoting.largest_gain > 2e13
    else:
        gram = torch.from_numpy(matrix.T @ matrix)
        model = SimpleNamespace(sum_over=lambda *_: gram)
        given = {"rows": "all", "activations": "raw"}
        (start,) = METHODS["qrcp"].choose(model, "kq", [n - 1], **given)
        (found,) = METHODS["drrqr"].choose(model, "kq", [n - 1], **given, f=1.5)
        assert (start["swaps"], found["swaps"]) == (0, 1)
        assert torch.equal(found["kept"], strong.kept)


def gram_of(matrix, keep, f=1.5):
    return strong_swaps(pivoted_cholesky(matrix.mT @ matrix), keep, f)


both = pytest.mark.parametrize("choose", [strong_rrqr, gram_of])


@both
def test_fewer_rows_than_columns(choose):
    matrix = random_matrix(0, 5, 9, 0.5)
    within = choose(matrix, 4, 1.5)
    assert within.log_volume.item() == pytest.approx(log_volume(matrix, within.kept), abs=1e-9)
    beyond = choose(matrix, 7, 1.5)
    assert torch.linalg.matrix_rank(matrix[:, beyond.order[:5]]) == 5
    assert beyond.log_volume == -math.inf
    assert beyond.largest_gain <= 1.5
    rest = sorted(set(range(9)) - set(beyond.order[:5].tolist()))
    assert beyond.order[5:].tolist() == rest
    assert beyond.kept.tolist() == sorted(beyond.order[:5].tolist() + rest[:2])


@both
def test_columns_of_zeros_are_kept_last_and_lowest_first(choose):
    matrix = random_matrix(0, 20, 8, 0.5)
    matrix[:, [1, 4, 6]] = 0
    assert choose(matrix, 5, 1.5).kept.tolist() == [0, 2, 3, 5, 7]
    assert choose(matrix, 6, 1.5).kept.tolist() == [0, 1, 2, 3, 5, 7]
    assert choose(matrix, 6, 1.5).log_volume == -math.inf
    assert choose(torch.zeros(3, 4), 2, 1.5).order.tolist() == [0, 1, 2, 3]
    assert choose(torch.zeros(3, 4), 2, 1.5).largest_gain == 0


@both
def test_a_duplicate_is_kept_once_and_never_swapped_for_ever(choose):
    matrix = random_matrix(0, 20, 4, 0.5).repeat(1, 2)
    for keep in range(1, 5):
        found = choose(matrix, keep, 1.0)
        assert len(set((found.kept % 4).tolist())) == keep
        assert found.largest_gain.item() == pytest.approx(1.0, abs=1e-9)
    full = choose(matrix, 6, 1.0)
    assert set((full.kept % 4).tolist()) == {0, 1, 2, 3}


@both
def test_rank_below_keep_in_one_head_leaves_the_others_alone(choose):
    full, low = random_matrix(0, 20, 8, 0.5), random_matrix(1, 20, 8, 0.5)
    low[:, 3:] = low[:, :3] @ random_matrix(2, 3, 5, 0.0)
    found = choose(torch.stack([full, low, torch.zeros_like(full)]), 5, 1.5)
    assert torch.equal(found.kept[0], strong_rrqr(full, 5).kept)
    assert torch.linalg.matrix_rank(low[:, found.order[1, :3]]) == 3
    assert found.kept[2].tolist() == [0, 1, 2, 3, 4]
    assert found.log_volume.isneginf().tolist() == [False, True, True]


@pytest.mark.parametrize("scale", [1e-140, 1e140])
def test_the_scale_of_the_matrix_does_not_matter(scale):
    matrix = random_matrix(0, 20, 8, 1.0)
    found, scaled = strong_rrqr(matrix, 4, 1.0), strong_rrqr(matrix * scale, 4, 1.0)
    assert torch.equal(scaled.order, found.order)
    torch.testing.assert_close(scaled.largest_gain, found.largest_gain)
    assert pivoted_qr(matrix * 1e-155).rank == 0  # too small to square


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_by_the_name_of_its_head(bad):
    heads = torch.ones(2, 3, 4, 4, dtype=torch.float64)
    heads[1, 2, 3, 0] = bad
    for factor in (pivoted_qr, pivoted_cholesky):
        with pytest.raises(InputError, match=r"of head \(1, 2\) holds NaN"):
            factor(heads)
