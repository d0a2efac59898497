"""What the preflight wrote down about a shape, and what training makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from statecut.errors import InputError
from statecut.files import read_json
from statecut.models.shapes import Shape
from statecut.preflight import ShapeVerdict


def from_json(record: dict[str, Any]) -> ShapeVerdict:
    return ShapeVerdict(**record | {"shape": Shape(**record["shape"])})


def padding(path: Path | str, *, may_pad: bool = True) -> int | None:
    """The width that keys are padded to for training, None for their own, by a written verdict."""
    verdict = from_json(read_json(path))
    checked = verdict.machine.get("gpu")
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if checked != here:
        raise InputError(
            f"{path}: {checked or 'a CPU'} was checked, and this is {here or 'a CPU'}: have all "
            "jobs run on one kind of GPU (`gpu_model` in the profile of a cluster), or delete the "
            "file to have it checked again"
        )
    if not (verdict.trainable if may_pad else verdict.trains):
        raise InputError(f"{path}: {verdict.shape.name} cannot be trained here: {verdict.reason}")
    return verdict.padded_to
