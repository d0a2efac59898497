"""config/schema.json and config/README.md, written from the models."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from reproduction.config.run import Config
from reproduction.config.section import alternatives

INTRODUCTION = """\
# Configurations

| file | run |
|---|---|
| `demo.yaml` | the whole workflow at toy size: two CPU cores, minutes, no network |
| `lab.yaml` | the paper's head widths in small models, and a hybrid: one GPU, local text |
| `small.yaml` | the demo's two models that are not trained on the spot: one GPU, local text |
| `qwen3_5.yaml` | a public hybrid, pruned and refitted: one GPU, a download |
| `paper.yaml` | everything the paper reports |

One file describes one run: `snakemake --configfile config/lab.yaml`. Files are never merged, so \
what is not in the file is not in the run. To make your own, copy one and change it; a mistake \
(an unknown key, a name that refers to nothing, a width that does not divide) is an error before \
any work starts. Editors that speak the YAML language server complete and check keys by \
`schema.json`.

In `paper.yaml`, `[P]` marks what the paper states and `[R]` what only the authors' repository \
does, with the place. `published/` holds the numbers that the paper prints. GPUs, memory and time \
belong to rules and profiles, never here.

Slices of a corpus, and which cells a table needs, are worked out by `reproduction.config`: \
`load_config(path).variants("table")` lists the models that a table compares.

# Reference

Written by `python -m reproduction.config`; do not edit.
"""


def reference() -> str:
    """config/README.md: what every key means."""
    seen: list[type[BaseModel]] = []
    _collect(Config, seen)
    return INTRODUCTION + "".join(_describe(section) for section in seen)


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
