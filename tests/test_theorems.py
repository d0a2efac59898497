"""The paper's statements in its symbols, each where it holds, and examples of where one does not.

A state is S (d_v, d_k), a query q and noise n are (d_k), K (T, d_k) and V (T, d_v) hold a token in
each row. w_1 is the first right singular vector, ξ² the variance of noise.
"""

import math
from itertools import combinations, pairwise, product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from measures import er, kappa, rank, singular_values, u
from scipy.integrate import quad
from torch.nn.functional import normalize, silu

from statecut.models.architectures import architecture
from statecut.models.delta_rule import recurrent_delta_rule
from statecut.models.plain_kernels import causal_conv1d
from statecut.pruning.rrqr import strong_rrqr

some = settings(max_examples=40, deadline=None, derandomize=True)
SLACK = 1 + 1e-9  # rounding
INTEGRAL = 1 + 1e-6  # the tolerance of scipy's quad
seeds = st.integers(0, 2**32)
widths = st.integers(1, 12)
few = st.integers(1, 6)


def normal(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def orthogonal(seed, d):
    return torch.linalg.qr(normal(seed, d, d)).Q


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def eye(d):
    return torch.eye(d, dtype=torch.float64)


@st.composite
def matrices(draw, sizes=widths, tall=False):
    """Of any rank from 1 on, or tall and of full rank; singular values fall to 10^-decay."""
    m, n = draw(sizes), draw(sizes)
    m, n = (max(m, n), min(m, n)) if tall else (m, n)
    r = n if tall else draw(st.integers(1, min(m, n)))
    sigma = torch.logspace(0, -draw(st.floats(0, 3)), r, dtype=torch.float64)
    seed, scale = draw(seeds), 10 ** draw(st.floats(-3, 3))
    return scale * (orthogonal(seed, m)[:, :r] * sigma) @ orthogonal(seed + 1, n)[:r]


def close(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def ascending(*values, slack=SLACK):
    assert all(low <= high * slack for low, high in pairwise(values)), values


@some
@given(matrices(), seeds, st.floats(0.1, 10))
def test_er_lies_between_one_and_the_rank_and_knows_neither_rotation_nor_scale(A, seed, c):
    """It is 1 for rank one only, and the rank for equal singular values only."""
    close(er(A), A.square().sum() / torch.linalg.matrix_norm(A, 2) ** 2)
    close(u(A), er(A) / min(A.shape))
    close(er(A.mT), er(A))
    close(er(-c * orthogonal(seed, len(A)) @ A @ orthogonal(seed + 1, A.shape[1])), er(A))
    r = torch.linalg.matrix_rank(A).item()
    assert rank(A) == r
    ascending(1, er(A), r)
    assert (er(A) > SLACK) == (r > 1)
    if kappa(A) > 1.001:
        assert er(A) * SLACK < r


@some
@given(matrices())
def test_kappa_squared_is_at_least_rank_over_er(A):
    """Prop. stable-rank-relation-to-condition-number; equal for equal singular values."""
    r = rank(A).item()
    ascending(r / er(A), r / min(A.shape) / u(A), kappa(A) ** 2)  # for full rank, 1 / u
    U, _, Vh = torch.linalg.svd(A)
    even = U[:, :r] @ Vh[:r]
    assert (er(even).item(), kappa(even).item()) == pytest.approx((r, 1))


@some
@given(matrices(), st.data())
def test_keys_on_their_first_principal_axes_are_used_no_less(K, data):
    """The lemma on PCA, u(K V_{1:d'}) >= u(K); also for fewer tokens than channels."""
    width = data.draw(st.integers(1, K.shape[1]))
    part = K @ torch.linalg.svd(K, full_matrices=False).Vh[:width].mT
    ascending(u(K), u(part))
    kept = min(width, *K.shape)
    close(torch.linalg.svdvals(part)[:kept], torch.linalg.svdvals(K)[:kept])
    others = torch.diag(tensor(1, 1, 1, 0.1))  # for which the last two axes are used less
    assert u(others[:, 2:]) < u(others)


def recurrence(alpha, beta, gamma, K, V):
    """S_T of S_t = S_{t-1} (α_t I - β_t k_t k_tᵀ) + γ_t v_t k_tᵀ, S_0 = 0 (app. proof-rank)."""
    S = K.new_zeros(V.shape[1], K.shape[1])
    for a, b, c, k, v in zip(alpha, beta, gamma, K, V, strict=True):
        S = a * S - b * torch.outer(S @ k, k) + c * torch.outer(v, k)
    return S


@some
@given(seeds, widths, few, few, few, few)
def test_a_state_lies_in_the_spans_of_keys_and_values(seed, T, d_k, d_v, rank_k, rank_v):
    """Eq. rank-S-bound, rank S <= min(rank K, rank V); linear attention, S = VᵀK, reaches it."""
    K = normalize(normal(seed, T, rank_k) @ normal(seed + 1, rank_k, d_k))
    V = normal(seed + 2, T, rank_v) @ normal(seed + 3, rank_v, d_v)
    S = recurrence(*normal(seed + 4, 3, T) / 2, K, V)
    close(S @ torch.linalg.pinv(K, rtol=1e-9) @ K, S, 1e-7)  # rows
    close(S.mT @ torch.linalg.pinv(V, rtol=1e-9) @ V, S.mT, 1e-7)  # columns
    bound = min(rank(K), rank(V))
    assert bound == min(rank_k, rank_v, T, d_k, d_v)
    assert torch.linalg.matrix_rank(S, rtol=1e-9) <= bound
    assert torch.linalg.matrix_rank(V.mT @ K, rtol=1e-9) == bound


@some
@given(matrices(), seeds, widths)
def test_conditioning_of_the_keys_bounds_er_from_below(K, seed, d_v):
    """Prop. sandwich, ν(V) / κ(K)² <= er(VᵀK), and over d for u (app. proof-stable-rank).

    ν(V) = er(V_∥), V_∥ = K K⁺ V. The proof takes K of full column rank. It holds for every K if κ
    runs over the singular values that are not zero, with equality for isotropic keys.
    """
    V = normal(seed, len(K), d_v)
    S, V_par = V.mT @ K, K @ torch.linalg.pinv(K, rtol=1e-9) @ V
    close(V_par.mT @ K, S, 1e-7)  # it writes what all values write
    assume(V_par.norm() > 1e-3)
    bound = er(V_par) / kappa(K) ** 2
    ascending(bound, er(S))
    ascending(bound / min(S.shape), u(S))
    even = orthogonal(seed + 1, len(K))[:, : rank(K)]
    close(er(even @ even.mT @ V), er(V.mT @ even))
    # κ instead of κ² does not do, here for V = I. Nor does er(V): three values on one key make a
    # state of rank one.
    uneven = torch.diag(tensor(1, *[0.5] * 11))
    ascending(12 / kappa(uneven) ** 2, er(uneven), 0.7 * 12 / kappa(uneven))
    K, V = tensor([1], [0], [0]), eye(3)
    assert er(V.mT @ K) == er(K @ K.mT @ V) / kappa(K) ** 2 == 1
    assert er(V) / kappa(K) ** 2 == 3


def amplification(S, q, n):
    """R = (||S n|| / ||S q||) / (||n|| / ||q||), the ratio that eq. snr-degradation bounds."""
    return float(((S @ n).norm() / (S @ q).norm()) / (n.norm() / q.norm()))


@some
@given(matrices(), seeds)
def test_delta_and_one_over_gamma_bound_the_error_within_the_papers_bounds(S, seed):
    """Thm. snr-degradation, δ / sqrt(er(S)) <= R <= sqrt(er(S)) / γ with γ, δ = |x · w_1| / ||x||.

    er enters only because ||S x|| <= ||S||_F ||x|| is used where σ_1 would do: without it both
    sides hold, and S of rank one reaches both.
    """
    q, n = normal(seed, 2, S.shape[1])
    assume((S @ q).norm() > 1e-6 * S.norm() * q.norm())
    w_1, root = torch.linalg.svd(S).Vh[0], math.sqrt(er(S))
    gamma, delta = ((x @ w_1).abs().item() / x.norm().item() for x in (q, n))
    ascending(delta / root, delta, amplification(S, q, n), 1 / gamma, root / gamma)
    first = torch.outer(S @ w_1, w_1)
    assert amplification(first, q=w_1, n=n) == pytest.approx(delta)
    assert amplification(first, q=q, n=w_1) == pytest.approx(1 / gamma)


def mu(d):
    """μ = sqrt(2) Γ((d+1)/2) / Γ(d/2), the expected norm of a standard Gaussian in R^d."""
    return math.sqrt(2) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))


def expected_error(S, q, xi):
    """E[||S n|| / ||S q||] for n ~ N(0, ξ² I), exactly.

    ||S n||² = ξ² Σ σ_i² z_i² =: ξ² X, and E[sqrt(X)] is the integral of (1 - E[exp(-s X)]) s^(-3/2)
    over s > 0, divided by 2 sqrt(π); E[exp(-s X)] = Π (1 + 2 s σ_i²)^(-1/2). Here s = t².
    """
    sigma = singular_values(S)
    squares = (sigma / sigma[0]).square()

    def integrand(t):
        return -math.expm1(-0.5 * float(torch.log1p(2 * t * t * squares).sum())) / (t * t)

    parts = [quad(integrand, *ends, limit=200)[0] for ends in ((0, 1), (1, math.inf))]
    return xi * float(sigma[0] / (S @ q).norm()) * sum(parts) / math.sqrt(math.pi)


@pytest.mark.parametrize("d", [1, 2, 5, 128, 400])
def test_for_the_identity_the_expected_error_is_xi_mu(d):
    """And κ = 1: app. tighter-bounds, whose line has μ for ξ μ, says that it is μ."""
    assert mu(1) == pytest.approx(math.sqrt(2 / math.pi))
    assert mu(d) * mu(d + 1) == pytest.approx(d)  # with μ(1) that fixes all
    assert expected_error(eye(d), eye(d)[0], xi=0.3) == pytest.approx(0.3 * mu(d))
    # er = d and γ = 1: Jensen's bound, sqrt(er) ξ / γ, is reached as d grows.
    assert mu(d) == pytest.approx(math.sqrt(d), rel=1 / (3 * d))


def test_noise_is_as_long_as_keys_are_wide():
    """Cor. expected-error takes d = min(d_k, d_v) for μ, and once a factor ξ too many. μ of that d
    is not E||n||; the bound with it holds because S sees d_v directions."""
    d_k, d_v, xi = 9, 4, 0.4
    S, q, noise = normal(2, d_v, d_k), orthogonal(3, d_k)[0], xi * normal(1, 200_000, d_k)
    assert noise.norm(dim=1).mean().item() == pytest.approx(xi * mu(d_k), rel=5e-3)
    assert mu(d_v) < 0.7 * mu(d_k)
    seen = ((noise @ S.mT).norm(dim=1) / (S @ q).norm()).mean().item()
    mean, gamma = expected_error(S, q, xi), (q @ torch.linalg.svd(S).Vh[0]).abs()
    assert mean == pytest.approx(seen, rel=5e-3)
    assert mean <= er(S).sqrt() * xi / gamma * mu(d_v)


@some
@given(matrices(), seeds, st.floats(0.01, 10))
def test_the_expected_error_lies_within_sharper_bounds_within_the_papers(S, seed, xi):
    """Cor. expected-error, sqrt(2 / (π er)) ξ <= E <= sqrt(er) ξ μ / γ for ||q|| = 1.

    er is superfluous in the lower bound, and μ in the upper: E||S n|| <= ||S||_F ξ by Jensen. S
    sees noise in its row space only; for rank one that gives μ(1) < 1, and both are reached.
    """
    q, w_1 = orthogonal(seed, S.shape[1])[0], torch.linalg.svd(S).Vh[0]
    assume((S @ q).norm() > 1e-6 * S.norm())
    lower, upper = math.sqrt(2 / math.pi) * xi, er(S).sqrt() * xi / (q @ w_1).abs()
    sharp, loose = upper * min(1, mu(int(rank(S)))), upper * mu(S.shape[1])
    ascending(lower / er(S).sqrt(), lower, expected_error(S, q, xi), sharp, loose, slack=INTEGRAL)
    assert expected_error(torch.outer(S @ w_1, w_1), w_1, xi) == pytest.approx(lower)


@some
@given(matrices(tall=True), seeds, st.floats(0.01, 10))
def test_kappa_bounds_the_error_where_values_are_at_least_as_wide_as_keys(S, seed, xi):
    """Eq. double-bound-kappa, 1 / κ <= R <= κ, reached along singular vectors; and with its ξ
    app. tighter-bounds, ξ μ / κ <= E <= κ ξ μ for ||q|| = 1."""
    q, n = normal(seed, 2, S.shape[1])
    ascending(1 / kappa(S), amplification(S, q, n), kappa(S))
    w = torch.linalg.svd(S).Vh
    assert amplification(S, q=w[-1], n=3 * w[0]) == pytest.approx(kappa(S).item())
    assert amplification(S, q=3 * w[0], n=w[-1]) == pytest.approx(1 / kappa(S).item())
    length, mean = xi * mu(S.shape[1]), expected_error(S, q / q.norm(), xi)
    ascending(length / kappa(S), mean, length * kappa(S), slack=INTEGRAL)


def test_kappa_bounds_nothing_where_values_are_narrower_than_keys():
    """A query or noise may lie in the null space: S = (1, 0) has κ = 1, and R is not 1."""
    S = tensor([1, 0])
    assert kappa(S) == 1
    assert amplification(S, q=tensor(1, 1), n=tensor(1, 0)) == pytest.approx(math.sqrt(2))
    assert amplification(S, q=tensor(1, 0), n=tensor(0, 1)) == 0


@some
@given(matrices(), seeds, st.integers(1, 5))
def test_the_gradient_of_the_query_projection_is_as_conditioned_as_the_state(S, seed, hidden):
    """∂o / ∂vec(W_Qᵀ) = xᵀ ⊗ S for o = S W_Qᵀ x (app. matrix-derivative), if κ leaves out zeros:
    for d_v > d_k, as after pruning, the gradient has some that the state has not."""
    x, W = normal(seed, hidden), normal(seed + 1, S.shape[1], hidden)
    gradient = torch.kron(x[None], S)
    # vec stacks columns, and autograd's Jacobian has them apart: (d_v, d_k, hidden).
    slow = torch.autograd.functional.jacobian(lambda W: S @ (W @ x), W)
    close(gradient, slow.transpose(1, 2).reshape(len(S), -1))
    close(kappa(gradient), kappa(S), 1e-6)
    narrow = torch.kron(normal(seed, 1, 3), normal(seed + 1, 6, 2))
    assert (len(torch.linalg.svdvals(narrow)), rank(narrow)) == (6, 2)


def rule(q, k, v, beta, g):
    """One head, T tokens, through Statecut's own recurrence."""
    q, k, v, beta, g = (x[None, :, None] for x in (q, k, v, beta, g))
    empty = torch.zeros(1, 1, k.shape[-1], v.shape[-1], dtype=torch.float64)
    o, state = recurrent_delta_rule(q, k, v, beta, g, 1.0, empty)
    return o[0, :, 0], state[0, 0].mT


def tokens(seed, T, d_k, d_v):
    q, k = normalize(normal(seed, 2, T, d_k), dim=-1)
    beta, g = normal(seed + 2, T).sigmoid(), -normal(seed + 3, T).exp()
    return q, k, normal(seed + 1, T, d_v), beta, g


@some
@given(seeds, st.integers(1, 10), st.integers(2, 6), few)
def test_rotating_keys_and_queries_together_changes_no_output(seed, T, d_k, d_v):
    """Prop. invariance."""
    q, k, v, beta, g = tokens(seed, T, d_k, d_v)
    turn, (o, S) = orthogonal(seed + 4, d_k), rule(q, k, v, beta, g)
    turned, S_turned = rule(q @ turn.mT, k @ turn.mT, v, beta, g)
    close(turned, o)
    close(S_turned, S @ turn.mT)


def test_other_transformations_change_the_output():
    q, k, v, beta, g = tokens(1, 8, 4, 3)
    g = 0.1 * g  # states that last, so that a difference shows
    o, _ = rule(q, k, v, beta, g)
    turn, stretch = orthogonal(2, 4), torch.diag(tensor(1, 2, 0.5, 1))
    keys_alone, not_orthogonal = (q, k @ turn.mT), (q @ torch.linalg.inv(stretch), k @ stretch)
    for other in (keys_alone, not_orthogonal):
        assert (rule(*other, v, beta, g)[0] - o).norm() > 0.1 * o.norm()


@some
@given(seeds, st.integers(2, 6), st.floats(0.05, 0.95))
def test_a_transformed_transition_has_its_beta_and_is_symmetric_for_rotations(seed, d_k, beta):
    """T^-ᵀ (I - β k kᵀ) Tᵀ = I - β (T^-ᵀ k) (T k)ᵀ, a DeltaNet's for orthogonal T only (prop.
    invariance); the paper drops β."""
    k, T, turn = normal(seed, d_k), normal(seed + 1, d_k, d_k), orthogonal(seed + 2, d_k)
    assume(torch.linalg.cond(T) < 1e3)
    A, stretch = eye(d_k) - beta * torch.outer(k, k), torch.diag(1 + eye(d_k)[1])
    slow, turned, stretched = (torch.linalg.inv(B.mT) @ A @ B.mT for B in (T, turn, stretch))
    update = torch.outer(torch.linalg.solve(T.mT, k), T @ k)
    close(eye(d_k) - beta * update, slow, 1e-7)
    assert (eye(d_k) - update - slow).norm() > 1e-3 * torch.outer(k, k).norm()
    close(turned.mT, turned)
    close(stretched[0, 1], 4 * stretched[1, 0])


def test_slicing_before_the_norm_is_not_projecting_after_it():
    """The kernels normalise what slicing leaves: P k / ||P k||, which forgets more than P k."""
    q, k, v, beta, g = tokens(3, 12, 6, 4)
    q, k = q[:, [0, 2, 3]], k[:, [0, 2, 3]]
    projected, sliced = (rule(q, x, v, beta, g)[0] for x in (k, normalize(k, dim=-1)))
    assert (projected - sliced).norm() > 0.1 * projected.norm()
    assert (1 - beta < 1 - beta * k.square().sum(1)).all()  # what is left along the key


def convolved(X, W):
    """W * X, causal, by the models' code: X (T, d), W (d, l), lag j in column j."""
    return causal_conv1d(X[None], W.flip(1))[0][0]


@some
@given(seeds, widths, widths, st.integers(1, 5), st.data())
def test_filters_commute_with_slicing_and_shared_ones_with_linear_maps(seed, T, d, lags, data):
    """Slicing is P_I (d', d), whose rows are e_i for i in I: P_I P_Iᵀ = I."""
    X, W, A = normal(seed, T, d), normal(seed + 1, d, lags), normal(seed + 2, d, d)
    slow = [sum(W[:, j] * X[t - j] for j in range(min(lags, t + 1))) for t in range(T)]
    close(convolved(X, W), torch.stack(slow))
    kept = sorted(data.draw(st.sets(st.integers(0, d - 1), min_size=1)))
    P, shared = eye(d)[kept], W[:1].expand(d, lags)
    assert torch.equal(P @ P.mT, eye(len(kept)))
    assert torch.equal(X @ P.mT, X[:, kept])
    close(convolved(X, W) @ P.mT, convolved(X @ P.mT, P @ W))
    close(convolved(X @ A.mT, shared), convolved(X, shared) @ A.mT)


def test_filters_do_not_commute_with_rotations_unshared_nor_with_the_models_activation():
    X, turn = normal(1, 30, 6), orthogonal(2, 6)
    shared, own = normal(3, 1, 4).expand(6, 4), normal(4, 6, 4)
    for W, activation in ((own, torch.nn.Identity()), (shared, silu)):
        after, before = activation(convolved(X, W)) @ turn.mT, activation(convolved(X @ turn.mT, W))
        assert (after - before).norm() > 0.1 * after.norm()


def best_filters(X, T, W):
    """W' (d, l) with the least E||W' * (T x) - T (W * x)||², and that error, with (T ⊙ T) W and
    its error. X (N, l, d) are draws of x_{t-j}, and E is the mean over them."""
    turned, wanted = X @ T.mT, (X * W.mT).sum(1) @ T.mT
    best = torch.linalg.lstsq(turned.permute(2, 0, 1), wanted.mT[..., None]).solution[..., 0]
    mixed = T.square() @ W
    errors = [((turned * F.mT).sum(1) - wanted).square().sum(1).mean() for F in (best, mixed)]
    return best, mixed, *errors


@some
@given(seeds, st.integers(2, 5), st.integers(2, 4))
def test_mixed_filters_are_optimal_for_channels_uncorrelated_at_all_lags(seed, d, lags):
    """Prop. optimal-conv: (T ⊙ T) W are the best diagonal filters after a rotation T, whatever
    the correlations of a rotated channel with its own past."""
    T, W, own = orthogonal(seed, d), normal(seed + 1, d, lags), normal(seed + 2, d, lags, lags)
    uncorrelated = orthogonal(seed + 3, d * lags).unflatten(1, (d, lags))
    X = torch.einsum("nci,cij->njc", uncorrelated, own) @ T
    best, mixed, *_ = best_filters(X, T, W)
    close(best, mixed, 1e-7)


def test_mixed_filters_on_the_axes_of_pca_are_optimal_for_an_input_without_memory_only():
    """Prop. optimal-conv assumes that the axes of PCA decorrelate; they do so at lag 0 only."""
    A, W, other = normal(2, 4, 4), normal(6, 4, 4), orthogonal(3, 4)
    X = orthogonal(4, 16).unflatten(1, (4, 4)) @ A.mT  # white in time
    best, mixed, *_ = best_filters(X, torch.linalg.eigh(A @ A.mT).eigenvectors.mT, W)
    close(best, mixed, 1e-7)
    best, mixed, *_ = best_filters(X, other, W)
    assert (best - mixed).abs().max() > 0.1
    past, x = 0.8 * orthogonal(5, 4), normal(9, 20_000, 4) * tensor(4, 2, 1, 0.5).sqrt()
    for t in range(1, len(x)):
        x[t] += past @ x[t - 1]
    X = torch.stack([x[3 - j : len(x) - j] for j in range(4)], 1)
    best, mixed, least, error = best_filters(X, torch.linalg.eigh(x.mT @ x).eigenvectors.mT, W)
    assert (best - mixed).abs().max() > 0.3
    assert least < 0.8 * error


@some
@given(matrices(st.integers(2, 10), tall=True), seeds)
def test_a_swap_gains_exactly_the_ratio_of_determinants(M, seed):
    """ρ_ij = sqrt((A⁻¹B)_ij² + (γ_j(C) / ω_i(A))²) is equal to it, where the paper says at least;
    and strong_rrqr stops where none exceeds f."""
    k = 1 + seed % (M.shape[1] - 1)
    found = strong_rrqr(M, k, f=1.1)  # so small that some swaps are made
    for columns in (M, M[:, found.order]):
        R = torch.linalg.qr(columns, mode="r").R
        A, B, C = R[:k, :k], R[:k, k:], R[k:, k:]
        omega, gamma = 1 / torch.linalg.inv(A).norm(dim=1), C.norm(dim=0)
        rho = torch.hypot(torch.linalg.solve(A, B), gamma / omega[:, None])
        for i, j in product(range(k), range(C.shape[1])):
            swapped = columns[:, [*range(i), k + j, *range(i + 1, k)]]
            before, after = (torch.linalg.svdvals(X).prod() for X in (columns[:, :k], swapped))
            close(rho[i, j], after / before, 1e-6)
    ascending(rho.max(), 1.1, slack=1 + 1e-6)
    close(found.largest_gain, rho.max(), 1e-6)


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


@some
@given(seeds, st.integers(1, 8), few, few, st.floats(0.1, 2))
def test_the_delta_rule_goes_down_the_gradient_of_the_recall_error(seed, T, d_k, d_v, step):
    """Eq. ode-flow: S - β ∇_S ½ ||v - S k||² is an Euler step, for keys of any length.

    As `recurrence`, linear attention is α = γ = 1, β = 0; DeltaNet, eq. dn-recursion, is α = 1,
    γ = β; Gated DeltaNet, with its decay a, has a, a β and β for α, β and γ.
    """
    q, _, v, beta, g = tokens(seed, T, d_k, d_v)
    k, beta, a, ones = normal(seed + 4, T, d_k), step * beta, g.exp(), torch.ones_like(g)
    S = torch.zeros(d_v, d_k, dtype=torch.float64)
    for t in range(T):
        S.requires_grad_()
        (slope,) = torch.autograd.grad(0.5 * (v[t] - S @ k[t]).square().sum(), S)
        S = S.detach() - beta[t] * slope
    close(rule(q, k, v, beta, 0 * g)[1], S)
    close(recurrence(ones, beta, beta, k, v), S)
    close(recurrence(a, a * beta, beta, k, v), rule(q, k, v, beta, g)[1])
    close(recurrence(ones, 0 * ones, ones, k, v), v.mT @ k)


@some
@given(seeds, st.integers(2, 6), st.floats(0, 3), st.just(1.0) | st.floats(0.3, 1.5))
def test_a_transition_is_stable_for_an_eigenvalue_of_at_most_one(seed, d_k, beta, length):
    """I - β k kᵀ has 1 - β ||k||² along k, and 1 else: for unit keys, β in [0, 2] is stable."""
    k = length * normalize(normal(seed, d_k), dim=0)
    eigenvalue = 1 - beta * length**2
    assume(abs(abs(eigenvalue) - 1) > 1e-6)
    A = eye(d_k) - beta * torch.outer(k, k)
    assert (A @ k - eigenvalue * k).norm() < 1e-12
    stable = torch.linalg.matrix_norm(A, 2) <= SLACK
    assert stable == (abs(eigenvalue) <= 1) == (beta * length**2 <= 2)


@pytest.mark.parametrize(("d_k", "measured"), [(64, 1.34), (32, 1.60)])
def test_the_projections_alone_explain_the_papers_speedups(d_k, measured):
    """DeltaNet's mixer, hidden 2,048, 16 heads, d_v 128: the weights of W_Q, W_K, W_V and W_O say
    what the table of mixers says. A state shrinks by more."""
    config = {"model_type": "delta_net", "hidden_size": 2048, "num_heads": 16,
              "num_hidden_layers": 24}  # fmt: skip
    before, after = (2 * 2048 * 16 * (width + 128) for width in (128, d_k))
    assert before == 4 * 2048 * 2048
    assert before / after == pytest.approx(measured, abs=0.01)
    kind = architecture(config)
    before, after = (kind.shape(kind.resized(config, width)) for width in (128, d_k))
    assert before.state_bytes() / after.state_bytes() == 128 / d_k
