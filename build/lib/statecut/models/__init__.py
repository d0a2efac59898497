"""Models: where an architecture keeps its key channels, how one is loaded, saved and created.

`load`, `save` and `create` import torch, transformers and flash-linear-attention when they are
first used; the tables of `statecut.models.architectures` need none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statecut.models.checkpoint import create, load, save

__all__ = ["create", "load", "save"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from statecut.models import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
