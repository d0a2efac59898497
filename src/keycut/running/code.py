"""Which code a result depends on.

A script counts with the modules of Keycut that it imports, wherever the import stands, and with
those that they import: whole modules, without comments, docstrings and formatting.

Most stages are known by the digest of that code: change it, and their results are made again. What
costs GPU days (pretraining, recovery), and what those stand on, is known by a version
(scripts/versions.json) that its authors raise when results change. The file has the digest that
they decided on last, and a test fails when the code is another one, until they have said which:

    python -m keycut.running.code same     # the code changed, and what these stages make did not
    python -m keycut.running.code raise    # results change: they are made again
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from keycut.artefact import digest, read_json, sha256, write_json

SOURCE = Path(__file__).parents[1]
SHOWN = ("label", "about", "colour", "dash")
VERSIONS = "versions.json"
"""Beside the scripts: of each stage that has a version, on which device, for what code."""
DEVICES = ("cpu", "cuda")

# Nothing of these reaches a number but through what a rule passes on: the values of the
# configuration are parameters, and whatever was fetched is known by its hash.
APART = ("cli", "config", "data.progress", "errors", "hub", "models.card", "running")
# What stands in for kernels where there is no GPU; the preflight compares a GPU's with it.
ON_CPU = "models.plain_kernels"
ALSO = {"preflight_shape": (ON_CPU,)}
# Settings of stages with a version leave out what is as by default, so that a new option reruns
# nothing; what the defaults are is then part of their code.
DEFAULTS = tuple(
    f"config/{name}" for name in ("benchmarks", "models", "pruning", "sources", "training")
)


@dataclass(frozen=True)
class Code:
    """The digest of a script with some modules, and which these are."""

    digest: str
    modules: tuple[str, ...]


def code_of(script: Path | str, *modules: str, device: str = "cpu", source: Path = SOURCE) -> Code:
    """The code behind a script on a device: what it imports, and these modules."""
    found = _meanings(Path(script), modules, device, source)
    return Code(digest(found), tuple(sorted(found.keys() - {""})))


def _meanings(script: Path, modules: tuple[str, ...], device: str, source: Path) -> dict[str, str]:
    """What the script does, under no name, and every module behind it."""
    named = [name.removeprefix("keycut.") for name in (*modules, *ALSO.get(script.stem, ()))]
    this = _read(script, source)
    found = {"": this.meaning}
    waiting = [*named, *this.imports]
    while waiting:
        module = waiting.pop()
        if module in found or (module not in named and _apart(module, device)):
            continue
        file = _file(module, source)
        if file is None:
            raise ModuleNotFoundError(f"keycut.{module}: there is no such module")
        read = _read(file, source)
        found[module] = read.meaning
        if file.name == "__init__.py":
            found |= {f"{module}/{name}": hash for name, hash in _data(file.parent)}
        waiting += [*read.imports, *_parents(module)]
    return found


def known_code(
    script: Path | str, *modules: str, device: str, source: Path = SOURCE
) -> dict[str, Any]:
    """What a rule has among its parameters, so that its code decides what is made again.

    The version of a stage is that of its script. What these modules add to it decides by its
    digest: one method of many.
    """
    script = Path(script)
    about = {"script": str(script), "extra": list(modules), "device": device}
    if (version := _versions(script.parent).get(script.stem)) is None:
        return {**about, "digest": code_of(script, *modules, device=device, source=source).digest}
    every, shared = (_meanings(script, extra, device, source) for extra in (modules, ()))
    own = {name: meaning for name, meaning in every.items() if name not in shared}
    about |= {"version": version[device]["version"]}
    return {**about, "own": digest(own)} if modules else about


def code_now(known: dict[str, Any]) -> Code:
    """The code behind what `known_code` said: of a stage with a version, what that is for."""
    extra = () if "version" in known else known["extra"]
    return code_of(known["script"], *extra, device=known.get("device", "cpu"))


def same_code(known: dict[str, Any]) -> bool:
    """Whether the code is still what `known_code` said, as far as a rerun depends on it."""
    try:
        now = known_code(known["script"], *known["extra"], device=known.get("device", "cpu"))
    except ModuleNotFoundError:  # it has another name by now
        return False
    return all(known.get(key) == now[key] for key in ("version", "own", "digest") if key in now)


def digests_now(scripts: Path, *, device: str) -> dict[str, str]:
    """The code of every stage that has a version: what was made before may be of another."""
    stages = _versions(scripts)
    return {stage: code_of(scripts / f"{stage}.py", device=device).digest for stage in stages}


def undecided(scripts: Path) -> list[tuple[str, str, str]]:
    """Stage, device and code of every version whose code is not the one that it was given for."""
    return [
        (stage, device, code)
        for stage, versions in _versions(scripts).items()
        for device in DEVICES
        if (code := _code_with_defaults(scripts / f"{stage}.py", device))
        != versions[device]["code"]
    ]


def _code_with_defaults(script: Path, device: str) -> str:
    # The sections alone: what they import is how methods and architectures enter them.
    defaults = {name: _read(SOURCE / f"{name}.py", SOURCE).meaning for name in DEFAULTS}
    return digest(_meanings(script, (), device, SOURCE) | defaults)


def decide(scripts: Path, *, raised: bool) -> list[str]:
    """Write down the code of all versions, raised where it changed, and say what was done."""
    versions, done = _versions(scripts), []
    for stage, device, code in undecided(scripts):
        version = versions[stage][device]["version"] + raised
        versions[stage][device] = {"version": version, "code": code}
        done.append(f"{stage} on {device}: version {version}")
    write_json(scripts / VERSIONS, versions)
    return done


def _versions(scripts: Path) -> dict[str, Any]:
    file = scripts / VERSIONS
    return read_json(file) if file.is_file() else {}


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
    return _Module(_meaning(tree), tuple(_imports(tree, file, source)))


def _apart(module: str, device: str = "cpu") -> bool:
    apart = (*APART, ON_CPU) if device == "cuda" else APART
    return any(module == name or module.startswith(f"{name}.") for name in apart)


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


def _imports(tree: ast.Module, file: Path, source: Path) -> Iterator[str]:
    """Modules of Keycut that are imported anywhere in a file, named from `keycut.` on."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inside = [alias.name for alias in node.names]
            if node.level or (f"{node.module}.".startswith("keycut.") and "*" in inside):
                raise ValueError(
                    f"{file}, line {node.lineno}: {ast.unparse(node)}: what of Keycut is imported "
                    "is named in full, so that it shows which code a result depends on"
                )
            # `from package import name`: the name may be a module or something inside one.
            names = [f"{node.module}", *(f"{node.module}.{name}" for name in inside)]
        for name in names:
            module = name.removeprefix("keycut.")
            if module != name and _file(module, source):
                yield module


def _meaning(tree: ast.Module) -> str:
    """The digest of what a module does: its syntax without docstrings, and of methods without what
    only says how they are shown."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [line for line in body if not _is_text(line)]  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Method":
            node.keywords = [given for given in node.keywords if given.arg not in SHOWN]
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


if __name__ == "__main__":
    words = {"same": False, "raise": True}
    if sys.argv[1:] not in [[word] for word in words]:
        sys.exit("usage: python -m keycut.running.code same|raise")
    print("\n".join(decide(Path("scripts"), raised=words[sys.argv[1]]) or ["nothing changed"]))
