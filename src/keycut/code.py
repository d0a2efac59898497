"""Which code a result depends on, as a digest.

A script counts with the modules of Keycut that it imports, wherever the import stands, and with
those that they import. Comments and docstrings do not count: rewording one reruns nothing.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from keycut.artefact import digest, sha256

SOURCE = Path(__file__).parent

# Nothing of these reaches a number but through what a rule passes on: the values of the
# configuration are parameters, and whatever was fetched is known by its hash.
APART = (
    "alone", "card", "cli", "code", "config", "data.progress", "errors", "forkserver", "gpus",
    "hub", "inputs", "job", "layout", "slurm",
)  # fmt: skip


@dataclass(frozen=True)
class Code:
    """The digest of some modules and of all that they import."""

    digest: str
    modules: tuple[str, ...]


def code_of(script: Path | str, *modules: str, source: Path = SOURCE) -> Code:
    """The code behind a script: what it imports, and these modules."""
    found: dict[str, str] = {}
    waiting = [*_read(Path(script), source).imports]
    waiting += [module.removeprefix("keycut.") for module in modules]
    while waiting:
        module = waiting.pop()
        if module in found or _apart(module):
            continue
        file = _file(module, source)
        if file is None:
            raise ValueError(f"keycut.{module}: there is no such module")
        read = _read(file, source)
        found[module] = read.meaning
        if file.name == "__init__.py":
            found |= {f"{module}/{name}": hash for name, hash in _data(file.parent)}
        waiting += [*read.imports, *_parents(module)]
    return Code(digest(found), tuple(sorted(found)))


@dataclass(frozen=True)
class _Module:
    """What a file does, as a digest, and the modules of Keycut that it imports."""

    meaning: str
    imports: tuple[str, ...]


def _read(file: Path, source: Path) -> _Module:
    return _read_once(file.absolute(), source, file.stat().st_mtime_ns)


@cache
def _read_once(file: Path, source: Path, changed: int) -> _Module:
    # Most scripts share most modules, and Snakemake asks for all scripts each time it starts.
    tree = _parsed(file)
    return _Module(_meaning(tree), tuple(_imports(tree, source)))


def _apart(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in APART)


def _parents(module: str) -> Iterator[str]:
    """Packages above a module: importing it runs them."""
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def _file(module: str, source: Path) -> Path | None:
    path = source.joinpath(*module.split("."))
    for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def _data(package: Path) -> Iterator[tuple[str, str]]:
    """Files in a package that are no modules, such as task files."""
    for file in sorted(package.rglob("*.yaml")):
        yield file.relative_to(package).as_posix(), sha256(file)


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), file.name)


def _imports(tree: ast.Module, source: Path) -> Iterator[str]:
    """Modules of Keycut that are imported anywhere in a file, named from `keycut.` on."""
    for node in ast.walk(tree):
        names: Iterable[str] = ()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import name`: the name may be a module or something inside one.
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            module = name.removeprefix("keycut.")
            if module != name and _file(module, source):
                yield module


def _meaning(tree: ast.Module) -> str:
    """The digest of what a module does: its syntax without docstrings."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [line for line in body if not _is_text(line)]  # type: ignore[attr-defined]
    return hashlib.sha256(_written(tree).encode()).hexdigest()


def _written(node: object) -> str:
    """Syntax as text. Empty fields are left out: newer Pythons have some that older ones lack, and
    results may be made with one and reported with another."""
    if isinstance(node, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
        inside = ", ".join(f"{name}={_written(value)}" for name, value in fields)
        return f"{type(node).__name__}({inside})"
    if isinstance(node, list):
        return f"[{', '.join(map(_written, node))}]"
    return repr(node)


def _is_text(line: ast.AST) -> bool:
    return (
        isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    )
