"""flame at e11e7be, whose files stay as they are. Before `flame.train` is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def replace_data(build_dataset: Callable[..., Any], build_dataloader: Callable[..., Any]) -> None:
    """Put two functions in the places of those that give flame its text.

    Its own read text and tokenize it on the way, which leaves no room for packed tokens.
    Upstream: none known. Goes when flame takes a data set of token ids.
    """
    data: Any = import_module("flame.data")
    data.build_dataset, data.build_dataloader = build_dataset, build_dataloader


def provide_custom_models() -> None:
    """An empty package `custom_models`, if there is none.

    flame imports a folder of its repository that its installation leaves out.
    Upstream: none known. Goes when flame installs that folder, or does not import it.
    """
    if find_spec("custom_models") is None:
        sys.modules["custom_models"] = ModuleType("custom_models")
