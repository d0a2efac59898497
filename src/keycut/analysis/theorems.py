"""Every statement of the paper that can be checked, as functions in its symbols.

A state is S (d_v, d_k), a query q and noise n are (d_k), K (T, d_k) and V (T, d_v) hold a token in
each row. σ_1 >= σ_2 >= ... are singular values, w_1 is the first right singular vector. Bounds
come as (lower, upper). Where the paper's is loose, or needs more than it says, the docstring says
so and the sharper one stands beside it; tests/test_theorems.py has the counter-examples.
"""

from __future__ import annotations

import math

import torch
from scipy.integrate import quad
from torch import Tensor

from keycut.analysis.spectra import er, kappa, rank, singular_values

Bounds = tuple[float, float]


# What a state can hold (section "On the role of the rank")


def recurrence(alpha: Tensor, beta: Tensor, gamma: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """S_T of S_t = S_{t-1} (α_t I - β_t k_t k_tᵀ) + γ_t v_t k_tᵀ, S_0 = 0 (app. proof-rank).

    Linear attention is α = γ = 1, β = 0. DeltaNet, eq. dn-recursion, is α = 1, γ = β. Gated
    DeltaNet, with its decay a, is α = a, γ = β of the rule and β = a β of the rule.
    """
    S = K.new_zeros(V.shape[1], K.shape[1])
    for a, b, c, k, v in zip(alpha, beta, gamma, K, V, strict=True):
        S = a * S - b * torch.outer(S @ k, k) + c * torch.outer(v, k)
    return S


def rank_bound(K: Tensor, V: Tensor) -> int:
    """min(rank K_t, rank V_t) >= rank S_t, eq. rank-S-bound."""
    return int(min(rank(K), rank(V)))


def parallel_values(K: Tensor, V: Tensor) -> Tensor:
    """V_∥ = K K⁺ V, the part of the values in the column space of K (app. proof-stable-rank)."""
    return K @ torch.linalg.lstsq(K, V, driver="gelsd").solution


def sandwich_bound(K: Tensor, V: Tensor) -> float:
    """ν(V) / κ(K)² <= er(VᵀK) with ν(V) = er(V_∥), prop. sandwich; over d it bounds u.

    The proof takes K of full column rank. It holds for every K if κ runs over the singular
    values that are not zero, as here.
    """
    return float(er(parallel_values(K, V)) / kappa(K) ** 2)


def kappa_bound(A: Tensor) -> float:
    """rank(A) / er(A) <= κ(A)², prop. stable-rank-relation-to-condition-number.

    For full rank that is 1 / u(A).
    """
    return float(rank(A) / er(A))


def principal_part(K: Tensor, width: int) -> Tensor:
    """K V_{1:d'}: the keys on their first `width` principal axes (lemma on PCA): u(K') >= u(K)."""
    return K @ torch.linalg.svd(K, full_matrices=False).Vh[:width].mT


# How noise in a query comes out (theorem snr-degradation and what follows)


def alignment(S: Tensor, x: Tensor) -> float:
    """|x · w_1| / ||x||: γ of a query, δ of noise."""
    w_1 = torch.linalg.svd(S).Vh[0]
    return float((x @ w_1).abs() / x.norm())


def amplification(S: Tensor, q: Tensor, n: Tensor) -> float:
    """R = (||S n|| / ||S q||) / (||n|| / ||q||), the ratio that eq. snr-degradation bounds."""
    return float(((S @ n).norm() / n.norm()) / ((S @ q).norm() / q.norm()))


def snr_bounds(S: Tensor, q: Tensor, n: Tensor) -> Bounds:
    """δ / sqrt(er(S)) <= R <= sqrt(er(S)) / γ, thm. snr-degradation.

    True, but er enters only because ||S x|| <= ||S||_F ||x|| is used where σ_1 would do; the
    smaller er, the nearer it comes to `sharp_snr_bounds`.
    """
    root = math.sqrt(er(S))
    return alignment(S, n) / root, root / alignment(S, q)


def sharp_snr_bounds(S: Tensor, q: Tensor, n: Tensor) -> Bounds:
    """δ <= R <= 1 / γ: sharper by sqrt(er) on both sides, and free of it."""
    return alignment(S, n), 1 / alignment(S, q)


def kappa_snr_bounds(S: Tensor) -> Bounds:
    """1 / κ <= R <= κ, eq. double-bound-kappa, with κ = σ_1 / σ_d.

    Only for d_v >= d_k. Otherwise S has a null space, where a query or noise may lie, and R takes
    every value from 0 to infinity.
    """
    sigma = singular_values(S)
    ratio = float(sigma[0] / sigma[-1])
    return 1 / ratio, ratio


def mu(d: int) -> float:
    """μ = sqrt(2) Γ((d+1)/2) / Γ(d/2), the expected norm of a standard Gaussian in R^d.

    The paper writes d = min(d_k, d_v), and once a factor ξ too many. Noise lies in R^{d_k}.
    """
    return math.sqrt(2) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))


def expected_error(S: Tensor, q: Tensor, xi: float) -> float:
    """E[||S n|| / ||S q||] for n ~ N(0, ξ² I), exactly.

    ||S n||² = ξ² Σ σ_i² z_i² =: ξ² X, and E[sqrt(X)] is the integral of (1 - E[exp(-s X)]) s^(-3/2)
    over s > 0, divided by 2 sqrt(π); E[exp(-s X)] = Π (1 + 2 s σ_i²)^(-1/2). Here s = t².
    """
    sigma = singular_values(S).double()
    squares = (sigma / sigma[0]).square()

    def integrand(t: float) -> float:
        return -math.expm1(-0.5 * float(torch.log1p(2 * t * t * squares).sum())) / (t * t)

    parts = [quad(integrand, *ends, limit=200)[0] for ends in ((0, 1), (1, math.inf))]
    return xi * float(sigma[0] / (S @ q).norm()) * sum(parts) / math.sqrt(math.pi)


def expected_error_bounds(S: Tensor, q: Tensor, xi: float) -> Bounds:
    """sqrt(2 / (π er)) ξ <= E <= sqrt(er) ξ μ / γ, cor. expected-error, for ||q|| = 1."""
    root = math.sqrt(er(S))
    lower = math.sqrt(2 / math.pi) / root * xi
    return lower, root * xi * mu(S.shape[1]) / alignment(S, q)


def sharp_expected_error_bounds(S: Tensor, q: Tensor, xi: float) -> Bounds:
    """sqrt(2 / π) ξ <= E <= sqrt(er) ξ min(1, μ(r)) / γ for ||q|| = 1, r = rank(S).

    E||S n|| <= ||S||_F ξ by Jensen, without μ. And S sees only the part of the noise in its row
    space, of dimension r; that helps for r = 1 alone, where μ(1) = sqrt(2 / π).
    """
    factor = min(1.0, mu(int(rank(S))))
    return math.sqrt(2 / math.pi) * xi, math.sqrt(er(S)) * xi * factor / alignment(S, q)


def kappa_expected_error_bounds(S: Tensor, xi: float) -> Bounds:
    """ξ μ / κ <= E <= κ ξ μ for ||q|| = 1 and d_v >= d_k (app. tighter-bounds).

    The paper leaves out the expectation and ξ.
    """
    lower, upper = kappa_snr_bounds(S)
    return lower * xi * mu(S.shape[1]), upper * xi * mu(S.shape[1])


def query_jacobian(S: Tensor, x: Tensor) -> Tensor:
    """∂o / ∂vec(W_Qᵀ) = xᵀ ⊗ S for o = S W_Qᵀ x: (d_v, hidden d_k) (app. matrix-derivative).

    κ of it is κ(S) over the singular values that are not zero. For d_v > d_k, which is every
    pruned model, it has d_v - d_k zeros that S has not.
    """
    return torch.kron(x[None], S)


# What may be done to keys and queries (sections on invariance and convolutions)


def axis_aligned(kept: Tensor, d_k: int) -> Tensor:
    """P_I (d_k', d_k), whose rows are e_i for i in `kept`: P_I P_Iᵀ = I."""
    return torch.eye(d_k, dtype=torch.float64)[kept]


def transformed_transition(T: Tensor, k: Tensor, beta: float) -> Tensor:
    """T^-ᵀ (I - β k kᵀ) Tᵀ = I - β (T^-ᵀ k) (T k)ᵀ; the paper drops β.

    Symmetric for all k, and so a DeltaNet again, for orthogonal T only (prop. invariance).
    """
    return torch.eye(len(k)).to(k) - beta * torch.outer(torch.linalg.solve(T.mT, k), T @ k)


def depthwise(X: Tensor, W: Tensor) -> Tensor:
    """W * X: y_t = Σ_j W_{:,j} ⊙ x_{t-j}, causal; X (T, d), W (d, l), lag j in column j."""
    T, lags = len(X), W.shape[1]
    padded = torch.cat([X.new_zeros(lags - 1, X.shape[1]), X])
    return sum((padded[lags - 1 - j :][:T] * W[:, j] for j in range(lags)), torch.zeros_like(X))


def mixed_filters(T: Tensor, W: Tensor) -> Tensor:
    """(T ⊙ T) W, prop. optimal-conv: the best diagonal filters after a rotation T.

    Only where the rotated channels are uncorrelated with one another at all lags of the filter.
    The axes of PCA give that at lag 0. See `optimal_filters`.
    """
    return T.square() @ W


def optimal_filters(T: Tensor, W: Tensor, C: Tensor) -> Tensor:
    """W' (d, l) that minimises E||W' * (T x) - T (W * x)||² for any stationary input x.

    C (2 l - 1, d, d) holds E[x_t x_{t-j}ᵀ] for j = -(l - 1) .. l - 1. For channel c, the normal
    equations of its own l lags.
    """
    moments, M = _rotated(T, W, C)
    own = moments.diagonal(dim1=-2, dim2=-1).permute(2, 0, 1)  # (d, l, l)
    return torch.linalg.solve(own, torch.einsum("ijcn,jcn->ci", moments, M))


def reconstruction_error(filters: Tensor, T: Tensor, W: Tensor, C: Tensor) -> float:
    """E||filters * (T x) - T (W * x)||², for C as `optimal_filters` has it."""
    moments, M = _rotated(T, W, C)
    wrong = torch.diag_embed(filters.mT) - M
    return float(torch.einsum("icm,ijmn,jcn->", wrong, moments, wrong))


def _rotated(T: Tensor, W: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """E[x̃_{t-i} x̃_{t-j}ᵀ] (l, l, d, d) of x̃ = T x, and M_j = T diag(w_j) Tᵀ (l, d, d), the dense
    filters that would do exactly what W did."""
    lag = torch.arange(W.shape[1])
    moments = (T @ C @ T.mT)[lag[None, :] - lag[:, None] + len(lag) - 1]
    return moments, torch.einsum("cm,mj,nm->jcn", T, W, T)


# Which channels to keep (section on DRRQR)


def swap_gains(M: Tensor, k: int) -> Tensor:
    """ρ_ij = sqrt((A⁻¹B)_ij² + (γ_j(C) / ω_i(A))²) for the first k columns of M: (k, n - k).

    It is |det A| after the swap of column i with column k + j over |det A| before, exactly.
    """
    R = torch.linalg.qr(M, mode="r").R
    A, B, C = R[:k, :k], R[:k, k:], R[k:, k:]
    W = torch.linalg.inv(A)
    omega = 1 / W.norm(dim=1)
    gamma = C.norm(dim=0)
    return torch.hypot(W @ B, gamma / omega[:, None])


# The recurrence as a discretised flow (appendix dynamical systems)


def euler_step(S: Tensor, k: Tensor, v: Tensor, beta: float) -> Tensor:
    """S - β ∇_S ½ ||v - S k||² = S + β (v - S k) kᵀ, eq. ode-flow: one step of the delta rule."""
    return S + beta * torch.outer(v - S @ k, k)


def transition_eigenvalue(k: Tensor, beta: float) -> float:
    """1 - β ||k||², the eigenvalue of I - β k kᵀ along k; the others are 1.

    Stable if it lies in [-1, 1]: for unit keys, β in [0, 2].
    """
    return float(1 - beta * k.square().sum())


# What a smaller d_k costs (section on speed)


def projection_weights(hidden: int, heads: int, d_k: int, d_v: int) -> int:
    """Weights of W_Q, W_K, W_V and W_O, to which a mixer's products of dense matrices run.

    Their ratio before and after pruning explains the speedups that the paper measures.
    """
    return 2 * hidden * heads * (d_k + d_v)
