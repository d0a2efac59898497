"""Changes to other software, one file for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

Functions = Mapping[tuple[str, str], Callable[..., Any]]
"""By module and name."""


def replace_functions(functions: Functions) -> Functions:
    """Put functions in the places of others. Returns those that were there, to put them back."""
    before = {}
    for (module, name), function in functions.items():
        before[module, name] = getattr(import_module(module), name)
        setattr(import_module(module), name, function)
    return before
