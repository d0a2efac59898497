"""Condition number and effective rank of kept columns."""

from __future__ import annotations

import torch

from statecut.pruning.conditioning import condition_number, effective_rank, spectrum_from_gram

KEPT = torch.tensor([[0, 2, 5], [1, 3, 4]])


def heads() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 40, 6, dtype=torch.float64, generator=generator)


def test_the_gram_matrix_gives_the_singular_values_of_the_kept_columns() -> None:
    M = heads()
    columns = torch.stack([head[:, kept] for head, kept in zip(M, KEPT, strict=True)])
    expected = torch.linalg.svdvals(columns)
    sigma = spectrum_from_gram(M.mT @ M, KEPT)
    torch.testing.assert_close(sigma, expected)
    torch.testing.assert_close(condition_number(sigma), torch.linalg.cond(columns))
    norms = columns.square().sum((-2, -1)) / expected[:, 0].square()
    torch.testing.assert_close(effective_rank(sigma), norms)


def test_without_kept_all_columns_count() -> None:
    M = heads()
    torch.testing.assert_close(spectrum_from_gram(M.mT @ M), torch.linalg.svdvals(M))


def test_a_dependent_column_leaves_the_condition_number_finite() -> None:
    M = heads()
    M[..., 2] = M[..., 0]
    sigma = spectrum_from_gram(M.mT @ M, KEPT)
    assert sigma[0, -1] == 0
    torch.testing.assert_close(condition_number(sigma)[0], sigma[0, 0] / sigma[0, 1])


def test_columns_of_zeros_have_effective_rank_zero_and_no_condition() -> None:
    sigma = spectrum_from_gram(torch.zeros(3, 4, 4))
    assert effective_rank(sigma).tolist() == [0, 0, 0]
    assert condition_number(sigma).isposinf().all()


def test_orthonormal_columns_have_full_effective_rank() -> None:
    sigma = spectrum_from_gram(torch.eye(5))
    assert effective_rank(sigma) == 5
    assert condition_number(sigma) == 1
