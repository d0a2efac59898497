"""Which code a result depends on.

The code of a stage is its script with the modules of both packages that this imports, directly or
through others, wherever the import stands: whole modules, without comments, docstrings and
formatting.

Most stages are known by the digest of their code: change it, and their results are made again. What
costs GPU days (pretraining, recovery), and what those depend on, is known by a version
(scripts/versions.json) that its authors raise when results change. The file also has the digest of
the code that a version was last given for; a test fails when the code is another one, until its
authors have decided:

    python -m reproduction.running.code same     # the code changed, not what these stages give
    python -m reproduction.running.code raise    # results change: they are made again
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from statecut.files import digest, read_json, sha256, write_json

SOURCE = Path(__file__).parents[2]
PACKAGES = ("statecut", "reproduction")
DISPLAY = ("label", "about", "colour", "dash")
"""Arguments of a method that only say how it is shown."""
VERSIONS = "versions.json"
"""Beside the scripts: by stage and device a version, and the code that it was given for."""
DEVICES = ("cpu", "cuda")

# Nothing of these reaches a number except through what a rule passes on: the values of the
# configuration are parameters, and downloads are known by their hashes.
APART = (
    "statecut.api", "statecut.cli", "statecut.data.progress", "statecut.errors", "statecut.hub",
    "statecut.logs", "statecut.record", "statecut.version", "reproduction.cli",
    "reproduction.config", "reproduction.download", "reproduction.running",
)  # fmt: skip
# What stands in for kernels where there is no GPU; the preflight compares a GPU's with it.
ON_CPU = "statecut.models.plain_kernels"
ALSO = {"preflight_shape": (ON_CPU,)}
# Its modules are discovered, not imported by name. A rule that names one depends on that one alone,
# any other on all of them.
ADAPTERS = "statecut.models.architectures"
# The settings of stages with a version leave out what is as by default, so that a new option reruns
# nothing; the defaults are then part of their code.
DEFAULTS = tuple(
    f"reproduction/config/{name}"
    for name in ("benchmarks", "models", "pruning", "sources", "training")
)


@dataclass(frozen=True)
class Code:
    """The digest of a script with some modules, and which these are."""

    digest: str
    modules: tuple[str, ...]


def code_of(script: Path | str, *modules: str, device: str = "cpu", source: Path = SOURCE) -> Code:
    """The code behind a script on a device: what it imports, and these modules."""
    digests = _digests(Path(script), modules, device, source)
    return Code(digest(digests), tuple(sorted(digests.keys() - {""})))


def _digests(script: Path, modules: tuple[str, ...], device: str, source: Path) -> dict[str, str]:
    """A digest of the script, under no name, and of every module behind it."""
    named = [*modules, *ALSO.get(script.stem, ())]
    parsed = _read(script, source)
    digests = {"": parsed.digest}
    waiting = [*named, *parsed.imports]
    while waiting:
        module = waiting.pop()
        if module in digests or (module not in named and _apart(module, device)):
            continue
        file = _file(module, source)
        if file is None:
            raise ModuleNotFoundError(f"{module}: there is no such module")
        parsed = _read(file, source)
        digests[module] = parsed.digest
        if file.name == "__init__.py":  # with files that are no modules, such as task files
            for data in sorted(file.parent.rglob("*.yaml")):
                digests[f"{module}/{data.relative_to(file.parent).as_posix()}"] = sha256(data)
        waiting += [*parsed.imports, *_parents(module)]
        if module == ADAPTERS and not any(name.startswith(f"{ADAPTERS}.") for name in named):
            files = file.parent.glob("*.py")
            waiting += [f"{ADAPTERS}.{file.stem}" for file in files if file.stem != "__init__"]
    return digests


@dataclass(frozen=True)
class KnownCode:
    """What identifies the code of a rule, as far as a rerun depends on it.

    A stage with a version has that of its script; what `extra` modules add to it (one method of
    many) is identified by `own`, their digest. Other stages have the `digest` of all their code.
    A record of what was run has `digest` and `modules` always.
    """

    script: str
    extra: list[str]
    device: str = "cpu"
    version: int | None = None
    own: str | None = None
    digest: str | None = None
    modules: list[str] | None = None

    @classmethod
    def of(cls, script: Path | str, *modules: str, device: str, source: Path = SOURCE) -> KnownCode:
        script = Path(script)
        known = cls(str(script), [*modules], device)
        if (versions := _versions(script.parent).get(script.stem)) is None:
            code = code_of(script, *modules, device=device, source=source)
            return replace(known, digest=code.digest)
        known = replace(known, version=versions[device]["version"])
        if not modules:
            return known
        every, shared = (_digests(script, extra, device, source) for extra in (modules, ()))
        own = {name: every[name] for name in every if name not in shared}
        return replace(known, own=digest(own))

    def to_json(self) -> dict[str, Any]:
        """Also as a rule's parameter: Snakemake compares only values of built-in types."""
        return {key: value for key, value in vars(self).items() if value is not None}

    def is_current(self) -> bool:
        """Whether the code is still the same, as far as a rerun depends on it."""
        try:
            now = KnownCode.of(self.script, *self.extra, device=self.device)
        except (FileNotFoundError, ModuleNotFoundError):  # it has another name by now
            return False
        keys = [key for key in ("version", "own", "digest") if getattr(now, key) is not None]
        return all(getattr(self, key) == getattr(now, key) for key in keys)

    def with_modules(self) -> KnownCode:
        """The same with the digest and the modules of the code as it is now; of a stage with a
        version, of what that is for."""
        extra = () if self.version is not None else self.extra
        code = code_of(self.script, *extra, device=self.device)
        return replace(self, digest=code.digest, modules=[*code.modules])


def digests_now(scripts: Path, *, device: str) -> dict[str, str]:
    """The code of every stage that has a version: an existing result may be of another."""
    stages = _versions(scripts)
    return {stage: code_of(scripts / f"{stage}.py", device=device).digest for stage in stages}


def undecided(scripts: Path) -> list[tuple[str, str, str]]:
    """Stage, device and code of every version that was given for other code."""
    return [
        (stage, device, code)
        for stage, versions in _versions(scripts).items()
        for device in DEVICES
        if (code := _code_with_defaults(scripts / f"{stage}.py", device))
        != versions[device]["code"]
    ]


def _code_with_defaults(script: Path, device: str) -> str:
    # The sections alone: what they import is how methods and architectures enter them.
    defaults = {name: _read(SOURCE / f"{name}.py", SOURCE).digest for name in DEFAULTS}
    return digest(_digests(script, (), device, SOURCE) | defaults)


def decide(scripts: Path, *, raised: bool) -> list[str]:
    """Write the code of all versions, raised where it changed; a line for each of those."""
    versions, lines = _versions(scripts), []
    for stage, device, code in undecided(scripts):
        version = versions[stage][device]["version"] + raised
        versions[stage][device] = {"version": version, "code": code}
        lines.append(f"{stage} on {device}: version {version}")
    write_json(scripts / VERSIONS, versions)
    return lines


def _versions(scripts: Path) -> dict[str, Any]:
    file = scripts / VERSIONS
    return read_json(file) if file.is_file() else {}


@dataclass(frozen=True)
class _Module:
    """The digest of what a file does, and the modules of both packages that it imports."""

    digest: str
    imports: tuple[str, ...]


def _read(file: Path, source: Path) -> _Module:
    return _read_once(file.absolute(), source, file.stat().st_mtime_ns)


@cache
def _read_once(file: Path, source: Path, changed: int) -> _Module:
    # Most scripts share most modules, and Snakemake asks for all scripts each time it starts.
    tree = _parse(file)
    return _Module(_tree_digest(tree), tuple(_imports(tree, file, source)))


def _apart(module: str, device: str = "cpu") -> bool:
    apart = (*APART, ON_CPU) if device == "cuda" else APART
    return any(module == name or module.startswith(f"{name}.") for name in apart)


def _parents(module: str) -> Iterator[str]:
    """Packages above a module: importing it runs them. The top ones only have a version."""
    while (module := module.rpartition(".")[0]) not in (*PACKAGES, ""):
        yield module


def _file(module: str, source: Path) -> Path | None:
    path = source.joinpath(*module.split("."))
    for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), file.name)


def _imports(tree: ast.Module, file: Path, source: Path) -> Iterator[str]:
    """Modules of both packages that are imported anywhere in a file."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inside = [alias.name for alias in node.names]
            if node.level or (_ours(f"{node.module}") and "*" in inside):
                raise ValueError(
                    f"{file}, line {node.lineno}: {ast.unparse(node)}: our own imports are "
                    "absolute and by name, so that they show which code a result depends on"
                )
            # `from package import name`: the name may be a module or something inside one.
            names = [f"{node.module}", *(f"{node.module}.{name}" for name in inside)]
        named = [name for name in names if _ours(name) and name not in PACKAGES]
        yield from (name for name in named if _file(name, source))


def _ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _tree_digest(tree: ast.Module) -> str:
    """The digest of a module's syntax without docstrings and, of methods, without DISPLAY."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [line for line in body if not _is_text(line)]  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Method":
            node.keywords = [keyword for keyword in node.keywords if keyword.arg not in DISPLAY]
    return hashlib.sha256(_dump(tree).encode()).hexdigest()


def _dump(node: object) -> str:
    """Syntax as text. Empty fields are left out: newer Pythons have some that older ones lack, and
    results may be made with one and reported with another."""
    if isinstance(node, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
        inside = ", ".join(f"{name}={_dump(value)}" for name, value in fields)
        return f"{type(node).__name__}({inside})"
    if isinstance(node, list):
        return f"[{', '.join(map(_dump, node))}]"
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
        sys.exit("usage: python -m reproduction.running.code same|raise")
    print("\n".join(decide(Path("scripts"), raised=words[sys.argv[1]]) or ["nothing changed"]))
