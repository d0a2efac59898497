"""From a YAML file to a configuration, or to a line for every mistake in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from reproduction.config.checks import problems
from reproduction.config.rehearsal import rehearsed
from reproduction.config.run import Config
from statecut.errors import InputError


class _Loader(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if repeated := [key for i, key in enumerate(keys) if key in keys[:i]]:
            problem = f"key {repeated[0]!r} stands twice"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node


def load_config(path: Path | str, **settings: Any) -> Config:
    """Read a configuration. Every problem of the file is a line of the InputError. `settings` are
    put in place of its own.

    References and sizes are checked once all values are what they should be.
    """
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    return parse_config({**data, **settings} if isinstance(data, dict) else data, str(path))


def parse_config(data: Any, origin: str) -> Config:
    """Check a configuration that is already a mapping; `origin` names it in messages."""
    try:
        config = Config.model_validate(data)
        lines = problems(config)
        if config.rehearsal and not lines:
            config = Config.model_validate(rehearsed(config))
            lines = problems(config)
    except ValidationError as error:
        lines = [_explain(detail, data) for detail in error.errors()]
    if lines:
        raise InputError("\n".join(f"{origin}: {line}" for line in lines))
    return config


def _explain(error: ErrorDetails, data: Any) -> str:
    """What is wrong, by the key's dotted path: pydantic's locations also name the members of unions
    that it went through, which a reader of the file would look for in vain."""
    names: list[str] = []
    for piece in error["loc"]:
        try:
            data = data[piece]
        except (LookupError, TypeError):
            if error["type"] != "missing" or piece != error["loc"][-1]:
                continue
        names.append(str(piece))
    value = "" if isinstance(error["input"], dict | list) else repr(error["input"])
    message = error["msg"].removeprefix("Value error, ")
    return ": ".join(filter(None, [".".join(names), value, message]))
