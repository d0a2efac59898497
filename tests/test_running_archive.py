"""What an archive holds; that it renders the same bytes is tested on the demo (test_demo.py)."""

import torch

from reproduction.reporting.archive import archived_content
from statecut.pruning.selection import Selection, load_selection, save_selections

ABOUT = {"method": "pca_proper", "width": 1, "full_width": 4}


def test_of_a_rotation_only_what_it_says_about_itself_is_archived(tmp_path):
    whole, archived = tmp_path / "whole.safetensors", tmp_path / "archived.safetensors"
    save_selections([Selection({"rotation": torch.randn(1, 1, 1, 4)}, ABOUT)], whole)
    archived.write_bytes(archived_content(whole))
    read = load_selection(archived, keys=1, values=4)
    assert (read.tensors, read.about) == ({}, ABOUT)


def test_all_else_is_archived_as_it_is(tmp_path):
    path = tmp_path / "selection.safetensors"
    save_selections([Selection({"kept": torch.tensor([[[2]]])}, ABOUT)], path)
    assert archived_content(path) == path.read_bytes()
