"""fla's kernels made ready for the machine at hand: `prepare`."""

from __future__ import annotations

import re
import warnings

from statecut.errors import InputError
from statecut.models.architectures.base import Architecture
from statecut.models.fixes import fla as fla_fixes
from statecut.models.fixes import triton as triton_fixes


def prepare(*kinds: Architecture) -> None:
    """Import fla, and apply what this machine needs of `statecut.models.fixes` to run fla's own
    models and those of other architectures. Safe to repeat."""
    with warnings.catch_warnings():
        # Without a GPU it warns of what is replaced here.
        warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
        import fla.utils  # registers its models with transformers, too
    if fla.utils.device_platform == "cpu":  # Triton can drive no device here
        fla_fixes.use_plain_kernels(*kinds)
    else:
        triton_fixes.assemble_with_ptxas_13()
        triton_fixes.compile_on_all_cores()
        triton_fixes.tune_once_for_all_counts()


def checked_device(name: str | None) -> str:
    """The device of that name; without one the GPU, or the CPU where there is none."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        devices = "cpu or cuda" if torch.cuda.is_available() else "cpu, there is no GPU"
        raise InputError(f"--device {name}: give {devices}")
    return name


def check_gradients(device: str) -> None:
    """An error where flash-linear-attention refuses gradients: on a Hopper, Triton before 3.7.1
    computes them wrong (its issue 640). vLLM 0.26 brings such a Triton."""
    import torch
    import triton

    version = tuple(map(int, re.findall(r"\d+", triton.__version__)[:3]))
    on_hopper = device.startswith("cuda") and torch.cuda.get_device_capability(device)[0] == 9
    if on_hopper and version < (3, 7, 1):
        raise InputError(
            f"Triton {triton.__version__} computes the delta rule's gradients wrong on a Hopper: "
            "install triton 3.7.1 in an environment of its own, or give --method drrqr, which "
            "needs none"
        )
