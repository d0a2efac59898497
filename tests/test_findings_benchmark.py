"""benchmarks/findings.py: what it says of selections."""

import sys
from pathlib import Path

import torch

from statecut.pruning.selection import Selection

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from findings import signs, spread, without_seed


def test_how_evenly_scores_are_spread_over_a_head():
    uneven = Selection({"scores": torch.tensor([[[1.0, 6.0, 2.0, 1.0]]])}, {})
    drawn = Selection({"scores": torch.rand(1, 1, 4)}, {"seed": 0})
    chosen = {("grad", "kq", 0.5, 0): uneven, ("grad", "k", 0.5, 0): drawn}
    chosen |= {("grad", "kq", 0.75, 0): uneven, ("rand", "kq", 0.5, 0): drawn}
    assert [*spread(chosen)] == [["grad", "1", "80", "6.0"]]


def test_draws_of_a_cut_are_one_row():
    cut = "recovered/m/drrqr-kq-0.5-1"
    names = ["models/m-1", cut, f"{cut}-refitted", f"{cut}-matched", f"{cut}-matched-refitted"]
    ends = ["", "-refitted", "-matched", "-matched-refitted"]
    assert [*map(without_seed, names)] == ["models/m-1", *(f"{cut[:-2]}{end}" for end in ends)]


def test_a_rotation_without_its_matrices_has_no_signs():
    assert [*signs({("pca_proper", "k", 0.5, 0): Selection({}, {})})] == []
