"""What an archive holds; that it renders the same bytes is tested on the demo (test_demo.py)."""

import torch

from reproduction.reporting.archive import archived_content
from statecut.pruning.selection import Selection


def test_of_a_rotation_only_what_it_says_about_itself_is_archived(tmp_path):
    about = {"method": "pca_proper", "width": 2}
    whole, archived = tmp_path / "whole.safetensors", tmp_path / "archived.safetensors"
    Selection({"rotation": torch.randn(1, 1, 2, 4)}, about).save(whole)
    archived.write_bytes(archived_content(whole))
    read = Selection.load(archived)
    assert (read.tensors, read.about) == ({}, about)


def test_all_else_is_archived_as_it_is(tmp_path):
    path = tmp_path / "selection.safetensors"
    Selection({"kept": torch.tensor([[[0, 2]]])}, {"method": "l1"}).save(path)
    assert archived_content(path) == path.read_bytes()
