"""The paper's statements in its symbols, each where it holds, and examples of where one does not.

A state is S (d_v, d_k), a query q and noise n are (d_k), K (T, d_k) and V (T, d_v) hold a token in
each row. w_1 is the first right singular vector.
"""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measures import er, kappa, rank, u
from torch.nn.functional import normalize

from statecut.models.delta_rule import recurrent_delta_rule
from statecut.pruning.rrqr import strong_rrqr

some = settings(max_examples=40, deadline=None, derandomize=True)
SLACK = 1 + 1e-9  # rounding
seeds = st.integers(0, 2**32)
widths = st.integers(1, 12)
few = st.integers(1, 6)


def normal(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def orthogonal(seed, d):
    return torch.linalg.qr(normal(seed, d, d)).Q


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


def recurrence(alpha, beta, gamma, K, V):
    """S_T of S_t = S_{t-1} (α_t I - β_t k_t k_tᵀ) + γ_t v_t k_tᵀ, S_0 = 0 (app. proof-rank)."""
    S = K.new_zeros(V.shape[1], K.shape[1])
    for a, b, c, k, v in zip(alpha, beta, gamma, K, V, strict=True):
        S = a * S - b * torch.outer(S @ k, k) + c * torch.outer(v, k)
    return S


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
