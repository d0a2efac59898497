"""`python -m reproduction.config` writes config/schema.json, and in config/README.md what follows
its heading "Reference", from the models."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from reproduction.config.run import Config

SCHEMA, README = Path("config/schema.json"), Path("config/README.md")


def reference() -> str:
    """config/README.md with what every key means."""
    written, heading, _ = README.read_text().partition("# Reference\n")
    seen: list[type[BaseModel]] = []
    _collect(Config, seen)
    how = "\nWritten by `python -m reproduction.config`; do not edit.\n"
    return written + heading + how + "".join(map(_describe, seen))


def schema() -> str:
    """config/schema.json."""
    return json.dumps(Config.model_json_schema(), indent=1) + "\n"


def _collect(annotation: Any, seen: list[type[BaseModel]]) -> None:
    for member in alternatives(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            if member not in seen:
                seen.append(member)
                for field in member.model_fields.values():
                    _collect(field.annotation, seen)
        else:
            for inner in get_args(member):
                _collect(inner, seen)


def _describe(section: type[BaseModel]) -> str:
    rows = [
        f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {field.description} |\n"
        for name, field in section.model_fields.items()
    ]
    about = " ".join((section.__doc__ or "").split())
    head = "| key | type | default | meaning |\n|---|---|---|---|\n"
    return f"\n## {section.__name__}\n\n{about}\n\n{head}" + "".join(rows)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return f"`{json.dumps(field.default)}`" if field.default not in (None, {}, ()) else "none"


def _type(annotation: Any) -> str:
    return " or ".join(_type_of(member) for member in alternatives(annotation))


def _type_of(member: Any) -> str:
    arguments = get_args(member)
    match get_origin(member):
        case origin if origin is Literal:
            return ", ".join(f"`{value}`" for value in arguments)
        case origin if origin is dict:
            return f"by name: {_type(arguments[1])}"
        case origin if origin is tuple:
            return f"list: {_type(arguments[0])}"
    if issubclass(member, BaseModel):
        return f"[{member.__name__}](#{member.__name__.lower()})"
    return {int: "integer", float: "number", bool: "true or false", str: "text"}[member]


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types that a value may have beside None, stripped of what Annotated adds."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return tuple(chain(*map(alternatives, get_args(annotation))))
    return () if annotation is NoneType else (annotation,)


if __name__ == "__main__":
    SCHEMA.write_text(schema())
    README.write_text(reference())
