"""fla's kernels made ready for the machine at hand: `prepare`."""

from __future__ import annotations

import warnings

from statecut.models.fixes import fla as fla_fixes
from statecut.models.fixes import triton as triton_fixes


def prepare() -> None:
    """Import fla, and apply what this machine needs of `statecut.models.fixes`. Safe to repeat."""
    with warnings.catch_warnings():
        # Without a GPU it warns of what is replaced here.
        warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
        import fla.utils  # registers its models with transformers, too
    if fla.utils.device_platform == "cpu":  # Triton can drive no device here
        fla_fixes.use_plain_kernels()
    else:
        triton_fixes.assemble_with_ptxas_13()
        triton_fixes.compile_on_all_cores()
        triton_fixes.tune_once_for_all_counts()
