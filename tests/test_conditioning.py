"""Condition number and effective rank of kept columns."""

import torch

from statecut.pruning.conditioning import condition_number, effective_rank, spectrum_from_gram

KEPT = torch.tensor([[0, 2, 5], [1, 3, 4]])


def test_the_gram_matrix_gives_the_singular_values_of_the_kept_columns():
    M = torch.randn(2, 40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    columns = torch.stack([head[:, kept] for head, kept in zip(M, KEPT, strict=True)])
    expected = torch.linalg.svdvals(columns)
    sigma = spectrum_from_gram(M.mT @ M, KEPT)
    torch.testing.assert_close(sigma, expected)
    torch.testing.assert_close(condition_number(sigma), torch.linalg.cond(columns))
    norms = columns.square().sum((-2, -1)) / expected[:, 0].square()
    torch.testing.assert_close(effective_rank(sigma), norms)
    torch.testing.assert_close(spectrum_from_gram(M.mT @ M), torch.linalg.svdvals(M))
    M[..., 2] = M[..., 0]  # a dependent column leaves the condition number finite
    sigma = spectrum_from_gram(M.mT @ M, KEPT)
    assert sigma[0, -1] == 0
    torch.testing.assert_close(condition_number(sigma)[0], sigma[0, 0] / sigma[0, 1])


def test_columns_of_zeros_have_effective_rank_zero_and_no_condition():
    sigma = spectrum_from_gram(torch.zeros(3, 4, 4))
    assert effective_rank(sigma).tolist() == [0, 0, 0]
    assert condition_number(sigma).isposinf().all()
