"""Models: where an architecture keeps its key channels, how one is loaded, saved and created.

`load`, `save` and `create` import torch, transformers and flash-linear-attention when they are
first used; the tables of `statecut.models.architectures` need none of them.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("create", "load", "save"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from statecut.models import checkpoint

    return getattr(checkpoint, name)
