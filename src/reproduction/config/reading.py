"""From a YAML file to a configuration, or to a line for every mistake in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from reproduction.config.checks import problems
from reproduction.config.run import Config
from reproduction.config.section import PATTERNS, alternatives
from statecut.errors import InputError, nearest


class _Loader(yaml.SafeLoader):
    """YAML without its silent traps: a key given twice is an error, and 1e-4 is a number."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"key {key.value!r} stands twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def load_config(path: Path | str) -> Config:
    """Read a configuration. Every problem of the file is a line of the InputError.

    References and sizes are checked once all values are what they should be.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    try:
        data = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if data is None:
        raise InputError(f"{path}: empty; see config/README.md for what belongs in it")
    return parse_config(data, str(path))


def parse_config(data: Any, origin: str) -> Config:
    """Check a configuration that is already a mapping; `origin` names it in messages."""
    if not isinstance(data, Mapping):
        raise InputError(f"{origin}: a {type(data).__name__}; a mapping of keys was expected")
    try:
        config = Config.model_validate(data)
        lines = problems(config)
    except ValidationError as error:
        lines = [line for detail in error.errors() for line in _explain(detail)]
    if lines:
        raise InputError("\n".join(f"{origin}: {line}" for line in lines))
    return config


def _explain(error: ErrorDetails) -> list[str]:
    """What is wrong, in lines that begin with the key's dotted path."""
    names, part = _follow(error["loc"])
    path, value, context = ".".join(names), error["input"], error.get("ctx", {})
    shown = "" if isinstance(value, dict | list) else f" {value!r}:"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    match error["type"]:
        case "extra_forbidden":
            return [f"{path}: unknown key{nearest(names[-1], part.model_fields)}"]
        case "missing":
            return [f"{path}: missing: {part.model_fields[names[-1]].description}"]
        case "literal_error":
            return [f"{path}:{shown} unknown{nearest(str(value), _quoted(context['expected']))}"]
        case "union_tag_invalid":
            key, known = context["discriminator"].strip("'"), _quoted(context["expected_tags"])
            return [f"{path}.{key}: {context['tag']!r}: unknown{nearest(context['tag'], known)}"]
        case "union_tag_not_found":
            return [f"{path}.{context['discriminator'].strip(chr(39))}: missing"]
        case "string_pattern_mismatch":
            return [f"{path}:{shown} {PATTERNS[context['pattern']]}"]
        case "too_short":  # also said of values that are all wrong, each of which has its line
            return [] if value else [f"{path}: is empty"]
        case _:
            return [f"{path}:{shown} {message}"]


def _quoted(text: str) -> list[str]:
    return re.findall(r"'([^']*)'", text)


def _follow(location: tuple[int | str, ...]) -> tuple[list[str], Any]:
    """The keys that lead to a place, and the section that holds the last of them.

    pydantic's locations also name the members of unions that it went through, and end in [key]
    where the key itself is wrong; a reader of the file would look for these in vain.
    """
    names: list[str] = []
    section: Any = Config
    here: Any = Config
    for piece in location:
        if piece == "[key]":
            break
        types = alternatives(here)
        if len(types) > 1:
            here = next(member for member in types if piece in _tags(member))
            continue
        here = types[0]
        names.append(str(piece))
        if isinstance(here, type) and issubclass(here, BaseModel):
            section = here
            field = here.model_fields.get(str(piece))
            here = field.annotation if field else Any
        else:
            here = (get_args(here) or (Any,))[-1 if get_origin(here) is dict else 0]
    return names, section


def _tags(section: Any) -> tuple[str, ...]:
    """The values by which a member of a union is chosen."""
    for name in ("kind", "architecture", "algorithm"):
        if name in section.model_fields:
            return get_args(section.model_fields[name].annotation)
    return ()
