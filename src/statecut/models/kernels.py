"""fla's kernels made ready for the machine at hand: `prepare`."""

from __future__ import annotations

import warnings

from statecut.models.fixes import fla as fla_patches
from statecut.models.fixes import triton as triton_patches


def prepare() -> None:
    """Import fla, and apply what this machine needs of `statecut.models.fixes`. Safe to repeat."""
    with warnings.catch_warnings():
        # Without a GPU it warns of what is replaced here.
        warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
        import fla  # noqa: F401 (registers its models with transformers)
    if triton_device():
        triton_patches.assemble_with_ptxas_13()
        triton_patches.compile_on_all_cores()
    else:
        fla_patches.use_plain_kernels()


def triton_device() -> bool:
    """Whether Triton can drive a device here (fla asks the same question)."""
    from fla.utils import device_platform

    return bool(device_platform != "cpu")
