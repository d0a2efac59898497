"""benchmarks/value_ranks.py: what kept channels cannot rebuild is what least squares leaves."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from value_ranks import entropy_rank, not_rebuilt


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_residual_of_least_squares(seed):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    rows = torch.randn(200, 12, generator=generator, dtype=torch.float64) @ mix
    kept = torch.randperm(12, generator=generator)[:5]
    fitted = rows[:, kept] @ torch.linalg.lstsq(rows[:, kept], rows).solution
    expected = ((rows - fitted) ** 2).sum() / (rows**2).sum()
    assert not_rebuilt(rows.T @ rows, kept) == pytest.approx(expected.item(), rel=1e-8)


def test_nothing_is_left_where_the_kept_span_all():
    rows = torch.randn(50, 3, dtype=torch.float64) @ torch.randn(3, 8, dtype=torch.float64)
    assert not_rebuilt(rows.T @ rows, torch.arange(3)) == pytest.approx(0, abs=1e-9)


def test_the_rank_of_a_plain_spectrum_is_its_width():
    assert entropy_rank(torch.eye(6, dtype=torch.float64)[None]) == pytest.approx(6)
