"""flash-linear-attention 0.6.0: plain PyTorch functions in the places of its Triton kernels.

Classes, parameters and configurations stay as they are.
Upstream: none known. fla is written for devices that Triton drives; TRITON_INTERPRET=1 does not
help, since the autotuner asks for a driver.
Goes when fla runs on a CPU by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from statecut.models import plain_kernels
from statecut.models.architectures import ARCHITECTURES
from statecut.models.architectures.base import Architecture
from statecut.models.fixes import Functions, replace_functions


def cpu_fallbacks(*kinds: Architecture) -> Functions:
    """Those of fla's own models, and of other architectures, whose modules take time to import."""
    fallbacks = dict(plain_kernels.FLA)
    own = (kind for kind in ARCHITECTURES.values() if kind.library == "fla.models")
    for kind in (*own, *kinds):
        fallbacks |= {(kind.call.module, name): f for name, f in kind.cpu_fallbacks().items()}
    return fallbacks


def use_plain_kernels(*kinds: Architecture) -> None:
    """Where there is no GPU. Safe to repeat."""
    # torch warns with a stack trace, once per process, where a CPU has no bf16 of its own.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    replace_functions(cpu_fallbacks(*kinds))


@contextmanager
def plain_kernels_in_place() -> Iterator[None]:
    """The same for a while, on a GPU too: the preflight compares a layer with itself."""
    originals = replace_functions(cpu_fallbacks())
    try:
        yield
    finally:
        replace_functions(originals)
