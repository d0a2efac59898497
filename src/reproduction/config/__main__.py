"""`python -m reproduction.config` writes config/schema.json, and in config/README.md what follows
its heading "Reference", from the models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reproduction.config.run import Config

SCHEMA, README = Path("config/schema.json"), Path("config/README.md")
WORDS = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text"}


def schema() -> str:
    """config/schema.json."""
    return json.dumps(Config.model_json_schema(), indent=1) + "\n"


def reference() -> str:
    """config/README.md with what every key means."""
    written, heading, _ = README.read_text().partition("# Reference\n")
    whole = json.loads(schema())
    sections = {"Config": whole} | whole.pop("$defs")
    how = "\nWritten by `python -m reproduction.config`; do not edit.\n"
    return written + heading + how + "".join(_describe(*section) for section in sections.items())


def _describe(name: str, section: dict[str, Any]) -> str:
    rows = []
    for key, field in section["properties"].items():
        empty = field.get("default") in (None, {}, [])
        default = "none" if empty else f"`{json.dumps(field['default'])}`"
        default = "required" if key in section["required"] else default
        rows.append(f"| `{key}` | {_type(field)} | {default} | {field['description']} |\n")
    head = "| key | type | default | meaning |\n|---|---|---|---|\n"
    about = " ".join(section.get("description", "").split())
    return f"\n## {name}\n\n{about}\n\n{head}" + "".join(rows)


def _type(field: dict[str, Any]) -> str:
    match field:
        case {"$ref": ref}:
            name = ref.rpartition("/")[2]
            return f"[{name}](#{name.lower()})"
        case {"anyOf": members} | {"oneOf": members}:
            return " or ".join(_type(member) for member in members if member != {"type": "null"})
        case {"enum": values}:
            return ", ".join(f"`{value}`" for value in values)
        case {"const": value}:
            return f"`{value}`"
        case {"prefixItems": [item, *_]} | {"items": item}:
            return f"list: {_type(item)}"
        case {"additionalProperties": value}:
            return f"by name: {_type(value)}"
        case {"patternProperties": values}:
            return f"by name: {_type(*values.values())}"
    return WORDS[field["type"]]


if __name__ == "__main__":
    SCHEMA.write_text(schema())
    README.write_text(reference())
