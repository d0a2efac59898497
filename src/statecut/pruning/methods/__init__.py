"""The methods, each in its file. A file here is all that it takes to add some."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from statecut.errors import InputError, nearest
from statecut.pruning.method import Method

METHODS: dict[str, Method] = {}
for _file in iter_modules(__path__):
    for _method in import_module(f"{__name__}.{_file.name}").METHODS:
        if METHODS.setdefault(_method.name, _method) is not _method:
            raise ValueError(f"{_file.name}.py and another file have a method {_method.name!r}")


def method_named(name: str) -> Method:
    if name not in METHODS:
        raise InputError(f"method {name!r} does not exist{nearest(name, METHODS)}")
    return METHODS[name]
