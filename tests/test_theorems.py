"""The paper's statements, each where it holds, and examples of where one does not."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from keycut.analysis import theorems
from keycut.analysis.spectra import er, kappa, rank, u
from keycut.models.architectures import architecture
from keycut.models.delta_rule import recurrent_delta_rule
from keycut.models.plain_kernels import causal_conv1d
from keycut.selection.rrqr import strong_rrqr

some = settings(max_examples=40, deadline=None, derandomize=True)
SLACK = 1 + 1e-9  # rounding
seeds = st.integers(0, 2**32)
widths = st.integers(1, 12)


def normal(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def orthogonal(seed, d):
    return torch.linalg.qr(normal(seed, d, d)).Q


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


@st.composite
def matrices(draw, rows=widths, columns=widths, full_rank=False):
    """Of any rank from 1 on, with nonzero singular values that fall to 10^-decay."""
    m, n = draw(rows), draw(columns)
    r = min(m, n) if full_rank else draw(st.integers(1, min(m, n)))
    sigma = torch.logspace(0, -draw(st.floats(0, 3)), r, dtype=torch.float64)
    seed = draw(seeds)
    return 10 ** draw(st.floats(-3, 3)) * (
        (orthogonal(seed, m)[:, :r] * sigma) @ orthogonal(seed + 1, n)[:r]
    )


tall = st.integers(1, 8).flatmap(
    lambda d_k: matrices(st.integers(d_k, 12), st.just(d_k), full_rank=True)
)


def close(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


# er, u and κ


@some
@given(matrices(), seeds, st.floats(0.1, 10))
def test_er_knows_neither_transposition_nor_rotation_nor_scale(A, seed, c):
    close(er(A.mT), er(A))
    U, V = orthogonal(seed, A.shape[0]), orthogonal(seed + 1, A.shape[1])
    close(er(-c * U @ A @ V.mT), er(A))


@some
@given(matrices())
def test_er_lies_between_one_and_the_rank(A):
    assert er(A) * SLACK >= 1
    assert er(A) <= rank(A) * SLACK
    assert rank(A) == torch.linalg.matrix_rank(A)
    close(u(A), er(A) / min(A.shape))
    close(er(A), A.square().sum() / torch.linalg.matrix_norm(A, 2) ** 2)


@pytest.mark.parametrize(
    ("sigma", "expected"),
    [((3, 0, 0), 1), ((3, 0.01, 0), 1 + 1 / 90000), ((2, 2, 0), 2), ((2, 1.9, 0), 1.9025)],
)
def test_er_is_one_for_rank_one_and_the_rank_for_equal_singular_values_only(sigma, expected):
    A = orthogonal(1, 4)[:, :3] * tensor(*sigma) @ orthogonal(2, 3)
    assert er(A).item() == pytest.approx(expected)


@some
@given(matrices())
def test_kappa_squared_is_at_least_rank_over_er(A):
    assert theorems.kappa_bound(A) <= kappa(A) ** 2 * SLACK
    assert theorems.kappa_bound(A) == pytest.approx(float(rank(A) / er(A)))
    if rank(A) == min(A.shape):
        assert 1 / u(A) <= kappa(A) ** 2 * SLACK


def test_kappa_bound_is_reached_where_all_singular_values_are_equal():
    A = orthogonal(1, 5)[:, :3] @ orthogonal(2, 4)[:3]
    assert theorems.kappa_bound(A) == pytest.approx(1)
    assert kappa(A).item() == pytest.approx(1)


@some
@given(matrices(), st.data())
def test_keys_on_their_first_principal_axes_are_used_no_less(K, data):
    """The lemma on PCA; also for fewer tokens than channels."""
    width = data.draw(st.integers(1, K.shape[1]))
    part = theorems.principal_part(K, width)
    assert u(part) * SLACK >= u(K)
    kept = min(width, *K.shape)
    sigma = torch.linalg.svdvals(K)
    close(torch.linalg.svdvals(part)[:kept], sigma[:kept])


def test_the_last_principal_axes_may_be_used_less():
    """So the lemma says something: not every choice of axes does it."""
    K = torch.diag(tensor(1, 1, 1, 0.1))
    assert u(K[:, 2:]) < u(K)


# What a state can hold


def sequence(seed, T, d_k, d_v, rank_k, rank_v):
    K = normal(seed, T, rank_k) @ normal(seed + 1, rank_k, d_k)
    V = normal(seed + 2, T, rank_v) @ normal(seed + 3, rank_v, d_v)
    return K / K.norm(dim=1, keepdim=True), V


@some
@given(seeds, st.integers(1, 12), *[st.integers(1, 6)] * 4)
def test_a_state_lies_in_the_spans_of_keys_and_values(seed, T, d_k, d_v, rank_k, rank_v):
    K, V = sequence(seed, T, d_k, d_v, rank_k, rank_v)
    alpha, beta, gamma = normal(seed + 4, 3, T) / 2
    S = theorems.recurrence(alpha, beta, gamma, K, V)
    close(S @ torch.linalg.pinv(K, rtol=1e-9) @ K, S, 1e-7)  # rows
    close(S.mT @ torch.linalg.pinv(V, rtol=1e-9) @ V, S.mT, 1e-7)  # columns
    bound = theorems.rank_bound(K, V)
    assert torch.linalg.matrix_rank(S, rtol=1e-9) <= bound <= T


@some
@given(seeds, *[st.integers(1, 5)] * 2)
def test_the_bound_on_the_rank_is_reached(seed, rank_k, rank_v):
    K, V = sequence(seed, 12, 6, 7, rank_k, rank_v)
    ones = torch.ones(12, dtype=torch.float64)
    S = theorems.recurrence(ones, 0 * ones, ones, K, V)
    close(S, V.mT @ K)
    assert torch.linalg.matrix_rank(S, rtol=1e-9) == theorems.rank_bound(K, V)
    assert theorems.rank_bound(K, V) == min(rank_k, rank_v)


@some
@given(matrices(), seeds, widths)
def test_conditioning_of_the_keys_bounds_er_from_below(K, seed, d_v):
    """Prop. sandwich and its corollary, also for keys that depend on one another."""
    V = normal(seed, len(K), d_v)
    assume(theorems.parallel_values(K, V).norm() > 1e-3)
    S = V.mT @ K
    bound = theorems.sandwich_bound(K, V)
    assert bound <= er(S) * SLACK
    assert bound / min(S.shape) <= u(S) * SLACK


@some
@given(matrices(), seeds, widths)
def test_parallel_values_write_what_all_values_write(K, seed, d_v):
    V = normal(seed, len(K), d_v)
    parallel = theorems.parallel_values(K, V)
    close(K.mT @ parallel, K.mT @ V, 1e-7)
    close(K @ torch.linalg.pinv(K, rtol=1e-9) @ parallel, parallel, 1e-7)


def test_the_sandwich_is_an_equality_for_isotropic_keys():
    K, V = orthogonal(1, 6)[:, :4], normal(2, 6, 5)
    assert theorems.sandwich_bound(K, V) == pytest.approx(er(V.mT @ K).item())
    uneven = K * tensor(1, 1, 1, 0.5)
    assert theorems.sandwich_bound(uneven, V) == pytest.approx(
        er(theorems.parallel_values(K, V)).item() / 4
    )


def test_er_of_all_values_is_no_bound():
    """ν(V) must be er(V_∥): three values on one key make a state of rank one."""
    K, V = tensor([1], [0], [0]), torch.eye(3, dtype=torch.float64)
    assert er(V.mT @ K) == 1
    assert er(V) / kappa(K) ** 2 == 3
    assert theorems.sandwich_bound(K, V) == 1


# Noise in a query


@some
@given(matrices(), seeds)
def test_delta_and_one_over_gamma_bound_the_error_within_the_papers_bounds(S, seed):
    """Thm. snr-degradation, and that er(S) in it is slack."""
    q, n = normal(seed, 2, S.shape[1])
    assume((S @ q).norm() > 1e-6 * S.norm() * q.norm())
    ratio = theorems.amplification(S, q, n)
    loose, sharp = theorems.snr_bounds(S, q, n), theorems.sharp_snr_bounds(S, q, n)
    assert loose[0] <= sharp[0] * SLACK
    assert sharp[0] <= ratio * SLACK
    assert ratio <= sharp[1] * SLACK
    assert sharp[1] <= loose[1] * SLACK
    root = er(S).sqrt().item()
    assert sharp[0] / loose[0] == pytest.approx(root)
    assert loose[1] / sharp[1] == pytest.approx(root)


@some
@given(seeds, widths, st.integers(2, 12))
def test_delta_and_one_over_gamma_are_both_reached(seed, d_v, d_k):
    w_1 = orthogonal(seed, d_k)[0]
    S = torch.outer(normal(seed + 1, d_v), w_1)
    x = normal(seed + 2, d_k)
    aligned = (x @ w_1).abs().item() / x.norm().item()
    for q, n in ((w_1, x), (x, w_1)):
        ratio = theorems.amplification(S, q, n)
        reached = theorems.sharp_snr_bounds(S, q, n)[0 if n is x else 1]
        assert ratio == pytest.approx(reached)
        assert ratio == pytest.approx(aligned if n is x else 1 / aligned)


def test_amplification_by_hand():
    S, e_1, e_2 = torch.diag(tensor(2, 1)), tensor(1, 0), tensor(0, 1)
    assert theorems.amplification(S, q=e_2, n=5 * e_1) == pytest.approx(2)
    assert theorems.amplification(S, q=3 * e_1, n=e_2) == pytest.approx(0.5)


@some
@given(tall, seeds)
def test_kappa_bounds_the_error_where_values_are_at_least_as_wide_as_keys(S, seed):
    q, n = normal(seed, 2, S.shape[1])
    lower, upper = theorems.kappa_snr_bounds(S)
    assert lower <= theorems.amplification(S, q, n) * SLACK
    assert theorems.amplification(S, q, n) <= upper * SLACK


def test_kappa_bounds_are_reached_along_the_singular_vectors():
    S = orthogonal(1, 4) * tensor(5, 3, 2, 1) @ orthogonal(2, 4)
    w = torch.linalg.svd(S).Vh
    assert theorems.kappa_snr_bounds(S) == pytest.approx((0.2, 5))
    assert theorems.amplification(S, q=w[-1], n=w[0]) == pytest.approx(5)
    assert theorems.amplification(S, q=w[0], n=w[-1]) == pytest.approx(0.2)


def test_kappa_bounds_nothing_where_values_are_narrower_than_keys():
    """Eq. double-bound-kappa needs d_v >= d_k: S = (1, 0) has κ = 1, and R is not 1."""
    S = tensor([1, 0])
    assert theorems.kappa_snr_bounds(S) == (1, 1)
    assert theorems.amplification(S, q=tensor(1, 1), n=tensor(1, 0)) == pytest.approx(math.sqrt(2))
    assert theorems.amplification(S, q=tensor(1, 0), n=tensor(0, 1)) == 0


@pytest.mark.parametrize("d", [1, 2, 5, 128])
def test_mu_is_the_expected_norm(d):
    assert theorems.mu(1) == pytest.approx(math.sqrt(2 / math.pi))
    assert theorems.mu(d) * theorems.mu(d + 1) == pytest.approx(d)  # with mu(1) that fixes all
    identity, q = torch.eye(d, dtype=torch.float64), orthogonal(d, d)[0]
    assert theorems.expected_error(identity, q, xi=0.3) == pytest.approx(0.3 * theorems.mu(d))


def test_the_expected_error_is_that_of_many_draws():
    S, q = normal(1, 3, 7) * torch.logspace(0, -1, 7, dtype=torch.float64), orthogonal(2, 7)[0]
    noise = 0.4 * normal(3, 200_000, 7)
    errors = (noise @ S.mT).norm(dim=1) / (S @ q).norm()
    assert theorems.expected_error(S, q, xi=0.4) == pytest.approx(errors.mean().item(), rel=5e-3)


@some
@given(matrices(), seeds, st.floats(0.01, 10))
def test_the_expected_error_lies_within_sharper_bounds_within_the_papers(S, seed, xi):
    """Cor. expected-error: μ is superfluous from rank two on, er in the lower bound always."""
    q = orthogonal(seed, S.shape[1])[0]
    assume((S @ q).norm() > 1e-6 * S.norm())
    mean = theorems.expected_error(S, q, xi)
    loose = theorems.expected_error_bounds(S, q, xi)
    sharp = theorems.sharp_expected_error_bounds(S, q, xi)
    assert loose[0] <= sharp[0] * SLACK
    assert sharp[0] <= mean * (1 + 1e-6)  # the integral has a tolerance of its own
    assert mean <= sharp[1] * (1 + 1e-6)
    assert sharp[1] <= loose[1] * SLACK
    assert loose[1] / sharp[1] == pytest.approx(
        theorems.mu(S.shape[1]) / min(1, theorems.mu(int(rank(S))))
    )
    assert sharp[0] / loose[0] == pytest.approx(er(S).sqrt().item())


def test_both_sharp_bounds_on_the_expected_error_are_reached():
    w_1 = orthogonal(1, 6)[0]
    S = torch.outer(normal(2, 3), w_1)
    mean = theorems.expected_error(S, w_1, 0.2)
    assert theorems.sharp_expected_error_bounds(S, w_1, 0.2) == pytest.approx((mean, mean))
    # Jensen's bound, in the limit of many equal singular values.
    many = torch.eye(400, dtype=torch.float64)
    upper = theorems.sharp_expected_error_bounds(many, many[0], 0.2)[1]
    assert theorems.expected_error(many, many[0], 0.2) == pytest.approx(upper, rel=1e-3)


def test_noise_is_as_long_as_keys_are_wide():
    """μ of min(d_k, d_v) is not E||n||; the bound with it holds because S sees d_v directions."""
    d_k, d_v = 9, 4
    lengths = normal(1, 100_000, d_k).norm(dim=1)
    assert lengths.mean().item() == pytest.approx(theorems.mu(d_k), rel=5e-3)
    assert theorems.mu(d_v) < 0.7 * theorems.mu(d_k)
    S, q = normal(2, d_v, d_k), orthogonal(3, d_k)[0]
    mean, gamma = theorems.expected_error(S, q, 1.0), theorems.alignment(S, q)
    assert mean <= er(S).sqrt() / gamma * theorems.mu(d_v)


@some
@given(tall, seeds, st.floats(0.01, 10))
def test_kappa_bounds_the_expected_error(S, seed, xi):
    q = orthogonal(seed, S.shape[1])[0]
    lower, upper = theorems.kappa_expected_error_bounds(S, xi)
    assert lower <= theorems.expected_error(S, q, xi) * (1 + 1e-6)
    assert theorems.expected_error(S, q, xi) <= upper * (1 + 1e-6)


def test_without_xi_kappa_bounds_no_expected_error():
    """The paper's line has μ for ξ μ: for S = I its two sides are μ, and the error is ξ μ."""
    identity = torch.eye(5, dtype=torch.float64)
    mean = theorems.expected_error(identity, identity[0], 0.1)
    assert theorems.kappa_expected_error_bounds(identity, 0.1) == pytest.approx((mean, mean))
    assert mean == pytest.approx(0.1 * theorems.mu(5))


@some
@given(matrices(), seeds, st.integers(1, 5))
def test_the_gradient_of_the_query_projection_is_as_conditioned_as_the_state(S, seed, hidden):
    x, W = normal(seed, hidden), normal(seed + 1, S.shape[1], hidden)
    jacobian = theorems.query_jacobian(S, x)
    # vec stacks columns, and autograd's Jacobian has them apart: (d_v, d_k, hidden).
    slow = torch.autograd.functional.jacobian(lambda W: S @ (W @ x), W)
    close(jacobian, slow.transpose(1, 2).reshape(len(S), -1))
    close(kappa(jacobian), kappa(S), 1e-6)


def test_the_gradient_has_zeros_that_the_state_has_not():
    """After pruning d_v > d_k, and κ over all singular values is infinite for the gradient."""
    S = normal(1, 6, 2)
    jacobian = theorems.query_jacobian(S, normal(2, 3))
    assert len(torch.linalg.svdvals(jacobian)) == 6
    assert rank(jacobian) == rank(S) == 2


# What may be done to keys and queries


@some
@given(seeds, st.data())
def test_an_axis_aligned_projection_picks_channels(seed, data):
    d_k = data.draw(widths)
    kept = torch.tensor(sorted(data.draw(st.sets(st.integers(0, d_k - 1), min_size=1))))
    P = theorems.axis_aligned(kept, d_k)
    assert torch.equal(P @ P.mT, torch.eye(len(kept), dtype=torch.float64))
    X, W = normal(seed, 9, d_k), normal(seed + 1, d_k, 4)
    assert torch.equal(X @ P.mT, X[:, kept])
    close(theorems.depthwise(X, W) @ P.mT, theorems.depthwise(X @ P.mT, P @ W))


def rule(q, k, v, beta, g):
    """One head, T tokens, through Keycut's own recurrence."""
    q, k, v, beta, g = (x[None, :, None] for x in (q, k, v, beta, g))
    empty = torch.zeros(1, 1, k.shape[-1], v.shape[-1], dtype=torch.float64)
    o, state = recurrent_delta_rule(q, k, v, beta, g, 1.0, empty)
    return o[0, :, 0], state[0, 0].mT


def tokens(seed, T, d_k, d_v):
    q, k = torch.nn.functional.normalize(normal(seed, 2, T, d_k), dim=-1)
    beta, g = normal(seed + 2, T).sigmoid(), -normal(seed + 3, T).exp()
    return q, k, normal(seed + 1, T, d_v), beta, g


@some
@given(seeds, st.integers(1, 10), st.integers(2, 6), st.integers(1, 6))
def test_rotating_keys_and_queries_together_changes_no_output(seed, T, d_k, d_v):
    q, k, v, beta, g = tokens(seed, T, d_k, d_v)
    turn = orthogonal(seed + 4, d_k)
    o, S = rule(q, k, v, beta, g)
    turned, S_turned = rule(q @ turn.mT, k @ turn.mT, v, beta, g)
    close(turned, o)
    close(S_turned, S @ turn.mT)


def test_other_transformations_change_the_output():
    q, k, v, beta, g = tokens(1, 8, 4, 3)
    g = 0.1 * g  # states that last, so that a difference shows
    o, _ = rule(q, k, v, beta, g)
    turn, stretch = orthogonal(2, 4), torch.diag(tensor(1, 2, 0.5, 1))
    for new_q, new_k in (
        (q, k @ turn.mT),  # keys alone
        (q @ torch.linalg.inv(stretch), k @ stretch),  # invertible, not orthogonal
    ):
        assert (rule(new_q, new_k, v, beta, g)[0] - o).norm() > 0.1 * o.norm()


@some
@given(seeds, st.integers(2, 6), st.floats(0.05, 0.95))
def test_the_transformed_transition_has_its_beta(seed, d_k, beta):
    k, T = normal(seed, d_k), normal(seed + 1, d_k, d_k)
    assume(torch.linalg.cond(T) < 1e3)
    A = torch.eye(d_k, dtype=torch.float64) - beta * torch.outer(k, k)
    slow = torch.linalg.inv(T.mT) @ A @ T.mT
    close(theorems.transformed_transition(T, k, beta), slow, 1e-7)
    without = theorems.transformed_transition(T, k, 1.0)  # as the paper prints it
    assert (without - slow).norm() > 1e-3 * torch.outer(k, k).norm()
    turn = orthogonal(seed + 2, d_k)
    symmetric = theorems.transformed_transition(turn, k, beta)
    close(symmetric.mT, symmetric)


def test_the_transformed_transition_is_not_symmetric_for_a_stretch():
    A = theorems.transformed_transition(torch.diag(tensor(1, 2)), tensor(1, 1), 0.5)
    close(A, tensor([0.5, -1], [-0.25, 0.5]))


def test_slicing_before_the_norm_is_not_projecting_after_it():
    """The kernels normalise what slicing leaves: P k / ||P k||, which forgets more than P k."""
    q, k, v, beta, g = tokens(3, 12, 6, 4)
    P = theorems.axis_aligned(torch.tensor([0, 2, 3]), 6)
    q, k = q @ P.mT, k @ P.mT
    projected, _ = rule(q, k, v, beta, g)
    sliced, _ = rule(q, torch.nn.functional.normalize(k, dim=-1), v, beta, g)
    assert (projected - sliced).norm() > 0.1 * projected.norm()
    for key, b in zip(k, beta.tolist(), strict=True):
        unit = key / key.norm()
        assert theorems.transition_eigenvalue(unit, b) < theorems.transition_eigenvalue(key, b)


@some
@given(seeds, st.integers(1, 12), widths, st.integers(1, 5))
def test_depthwise_is_the_models_convolution(seed, T, d, lags):
    X, W = normal(seed, T, d), normal(seed + 1, d, lags)
    y, _ = causal_conv1d(X[None], W.flip(1))
    close(theorems.depthwise(X, W), y[0])


@some
@given(seeds, st.integers(2, 8), st.integers(1, 5))
def test_a_shared_filter_commutes_with_every_linear_map(seed, d, lags):
    X, T = normal(seed, 10, d), normal(seed + 1, d, d)
    W = normal(seed + 2, 1, lags).expand(d, lags)
    close(theorems.depthwise(X @ T.mT, W), theorems.depthwise(X, W) @ T.mT)


def test_it_does_not_commute_unshared_nor_with_the_models_activation():
    X, turn = normal(1, 30, 6), orthogonal(2, 6)
    shared, own = normal(3, 1, 4).expand(6, 4), normal(4, 6, 4)
    after, before = theorems.depthwise(X, own) @ turn.mT, theorems.depthwise(X @ turn.mT, own)
    assert (after - before).norm() > 0.1 * after.norm()
    after = silu(theorems.depthwise(X, shared)) @ turn.mT
    before = silu(theorems.depthwise(X @ turn.mT, shared))
    assert (after - before).norm() > 0.1 * after.norm()


def autocovariances(A, noise, lags):
    """E[x_t x_{t-j}ᵀ], j = -(lags - 1) .. lags - 1, of x_t = A x_{t-1} + e_t, e ~ (0, noise)."""
    d = len(A)
    identity = torch.eye(d * d, dtype=torch.float64)
    now = torch.linalg.solve(identity - torch.kron(A, A), noise.reshape(-1)).reshape(d, d)
    later = [torch.linalg.matrix_power(A, j) @ now for j in range(lags)]
    return torch.stack([C.mT for C in later[:0:-1]] + later)


@st.composite
def signals(draw, correlated):
    """A rotation, filters, and the autocovariances of an input whose rotated channels are, or are
    not, correlated with one another. Each is correlated with its own past."""
    seed, d, lags = draw(seeds), draw(st.integers(2, 5)), draw(st.integers(2, 4))
    T, W = orthogonal(seed, d), normal(seed + 1, d, lags)
    persistence = torch.diag(0.9 * torch.tanh(normal(seed + 2, d)))
    noise = torch.diag(normal(seed + 3, d).exp())
    if correlated:
        turn = orthogonal(seed + 4, d)
        persistence = turn @ persistence @ turn.mT
    return T, W, autocovariances(T.mT @ persistence @ T, T.mT @ noise @ T, lags)


@some
@given(signals(correlated=False))
def test_mixed_filters_are_optimal_for_channels_uncorrelated_at_all_lags(drawn):
    T, W, C = drawn
    close(theorems.optimal_filters(T, W, C), theorems.mixed_filters(T, W), 1e-7)


@some
@given(signals(correlated=True), seeds)
def test_optimal_filters_have_the_least_error(drawn, seed):
    T, W, C = drawn
    best = theorems.optimal_filters(T, W, C)
    least = theorems.reconstruction_error(best, T, W, C)
    assert least <= theorems.reconstruction_error(theorems.mixed_filters(T, W), T, W, C) * SLACK
    step = normal(seed, *W.shape)
    there, back = (
        theorems.reconstruction_error(best + s * step, T, W, C) for s in (0.1, -0.1)
    )  # a parabola with its vertex at `best`
    assert there > least
    assert there == pytest.approx(back, rel=1e-6)


def var_1(seed=5, d=4, lags=4):
    """Correlated over time, and T the principal axes of x: uncorrelated at lag 0 alone."""
    A = 0.8 * orthogonal(seed, d)
    C = autocovariances(A, torch.diag(tensor(4, 2, 1, 0.5)), lags)
    T = torch.linalg.eigh(C[lags - 1]).eigenvectors.mT
    return A, T, normal(seed + 1, d, lags), C


def test_mixed_filters_are_not_optimal_for_an_input_correlated_over_time():
    """Prop. optimal-conv assumes that the axes of PCA decorrelate; they do so at lag 0 only."""
    _, T, W, C = var_1()
    rotated = T @ C[3] @ T.mT
    close(rotated, torch.diag(rotated.diagonal()))
    best, mixed = theorems.optimal_filters(T, W, C), theorems.mixed_filters(T, W)
    assert (best - mixed).abs().max() > 0.3
    assert theorems.reconstruction_error(best, T, W, C) < 0.8 * theorems.reconstruction_error(
        mixed, T, W, C
    )


def test_the_errors_are_those_of_a_simulated_input():
    A, T, W, C = var_1()
    steps = normal(9, 60_000, 4) * tensor(4, 2, 1, 0.5).sqrt()
    x, rows = torch.zeros(4, dtype=torch.float64), []
    for e in steps:
        x = A @ x + e
        rows.append(x)
    X = torch.stack(rows)
    wanted = theorems.depthwise(X, W) @ T.mT
    for filters in (theorems.optimal_filters(T, W, C), theorems.mixed_filters(T, W)):
        found = theorems.depthwise(X @ T.mT, filters)
        seen = (found - wanted)[100:].square().sum(1).mean().item()
        assert theorems.reconstruction_error(filters, T, W, C) == pytest.approx(seen, rel=0.03)


def test_without_memory_the_axes_of_pca_are_enough_and_others_are_not():
    W, C = normal(1, 4, 3), torch.zeros(5, 4, 4, dtype=torch.float64)
    C[2] = normal(2, 4, 4) @ normal(2, 4, 4).mT  # white in time
    pca, other = torch.linalg.eigh(C[2]).eigenvectors.mT, orthogonal(3, 4)
    close(theorems.optimal_filters(pca, W, C), theorems.mixed_filters(pca, W), 1e-7)
    gap = theorems.optimal_filters(other, W, C) - theorems.mixed_filters(other, W)
    assert gap.abs().max() > 0.1


# Which channels to keep


@some
@given(st.integers(2, 9).flatmap(lambda n: matrices(st.integers(n, 14), st.just(n), True)), seeds)
def test_a_swap_gains_exactly_the_ratio_of_determinants(M, seed):
    """Equal, where the paper says at least."""
    n = M.shape[1]
    k = 1 + seed % (n - 1)
    gains = theorems.swap_gains(M, k)

    def volume(columns):
        return torch.linalg.svdvals(M[:, columns]).prod()

    before = volume(range(k))
    for i in range(k):
        for j in range(n - k):
            swapped = [*range(i), k + j, *range(i + 1, k)]
            assert gains[i, j].item() == pytest.approx((volume(swapped) / before).item(), rel=1e-6)


@some
@given(st.integers(2, 9).flatmap(lambda n: matrices(st.integers(n, 14), st.just(n), True)), seeds)
def test_strong_rrqr_stops_where_no_swap_gains_more_than_f(M, seed):
    k = 1 + seed % (M.shape[1] - 1)
    found = strong_rrqr(M, k, f=1.5)
    largest = theorems.swap_gains(M[:, found.order], k).max().item()
    assert largest <= 1.5 * (1 + 1e-6)
    assert largest == pytest.approx(found.largest_gain.item(), rel=1e-6)


def test_the_largest_volume_is_not_the_best_conditioned():
    """Two of three columns: the pair of volume 10 has κ = 10, the one of volume 0.7 has 2.95."""
    M = tensor([10, 0, 0.7], [0, 1, 0.9])
    pairs = {pair: M[:, list(pair)] for pair in combinations(range(3), 2)}
    largest = max(pairs, key=lambda pair: pairs[pair].det().abs())
    best = min(pairs, key=lambda pair: kappa(pairs[pair]))
    assert (largest, best) == ((0, 1), (1, 2))
    assert kappa(pairs[largest]).item() == pytest.approx(10)
    assert kappa(pairs[best]).item() == pytest.approx(2.95, abs=0.005)
    assert strong_rrqr(M, 2, f=1.0).kept.tolist() == [0, 1]


# The recurrence as a discretised flow


@some
@given(seeds, st.integers(1, 8), st.integers(1, 6), st.integers(1, 6))
def test_the_recurrence_is_linear_attention_deltanet_and_gated_deltanet(seed, T, d_k, d_v):
    q, k, v, beta, g = tokens(seed, T, d_k, d_v)
    a, ones = g.exp(), torch.ones_like(g)
    close(theorems.recurrence(a, a * beta, beta, k, v), rule(q, k, v, beta, g)[1])
    S = torch.zeros(d_v, d_k, dtype=torch.float64)
    for t in range(T):
        S = theorems.euler_step(S, k[t], v[t], float(beta[t]))
    close(S, rule(q, k, v, beta, 0 * g)[1])
    close(theorems.recurrence(ones, 0 * ones, ones, k, v), v.mT @ k)


@some
@given(seeds, st.integers(1, 6), st.integers(1, 6), st.floats(0.1, 2))
def test_an_euler_step_goes_down_the_gradient_of_the_recall_error(seed, d_k, d_v, beta):
    S, k, v = normal(seed, d_v, d_k).requires_grad_(), normal(seed + 1, d_k), normal(seed + 2, d_v)
    loss = 0.5 * (v - S @ k).square().sum()
    (slope,) = torch.autograd.grad(loss, S)
    close(theorems.euler_step(S.detach(), k, v, beta), S.detach() - beta * slope)


@some
@given(seeds, st.integers(2, 6), st.floats(0, 3), st.floats(0.3, 1.5))
def test_a_transition_is_stable_where_its_eigenvalue_lies_in_the_unit_circle(
    seed, d_k, beta, length
):
    k = length * torch.nn.functional.normalize(normal(seed, d_k), dim=0)
    eigenvalue = theorems.transition_eigenvalue(k, beta)
    assume(abs(abs(eigenvalue) - 1) > 1e-6)
    A = torch.eye(d_k, dtype=torch.float64) - beta * torch.outer(k, k)
    assert (A @ k - eigenvalue * k).norm() < 1e-12
    norm = torch.linalg.matrix_norm(A, 2)
    assert (norm <= 1 + 1e-9) == (abs(eigenvalue) <= 1)


@pytest.mark.parametrize(
    ("beta", "stable"), [(0.001, True), (0.999, True), (1.9, True), (2.1, False)]
)
def test_unit_keys_and_a_sigmoid_are_stable_with_room_to_spare(beta, stable):
    assert (abs(theorems.transition_eigenvalue(tensor(0.6, 0.8), beta)) <= 1) == stable


# What a smaller d_k costs


@pytest.mark.parametrize(("d_k", "measured"), [(64, 1.34), (32, 1.60)])
def test_the_projections_alone_explain_the_papers_speedups(d_k, measured):
    """DeltaNet's mixer, hidden 2,048, 16 heads, d_v 128: the table of mixers, not of states."""
    before, after = (theorems.projection_weights(2048, 16, width, 128) for width in (128, d_k))
    assert before == 4 * 2048 * 2048
    assert before / after == pytest.approx(measured, abs=0.01)


def test_a_state_shrinks_with_the_key_width():
    config = {"model_type": "delta_net", "hidden_size": 2048, "num_heads": 16,
              "num_hidden_layers": 24}  # fmt: skip
    kind = architecture(config)
    sizes = [kind.shape(kind.resized(config, d_k)).state_bytes() for d_k in (128, 64, 32)]
    assert [sizes[0] / size for size in sizes] == [1, 2, 4]
