"""Which code a result depends on.

A script counts with what it imports from Keycut, wherever the import stands, and with what that
uses in turn: functions, classes and values, one by one, and the statements that run whenever a
module is loaded. Comments, docstrings and formatting do not count, nor does what is not used.

Most stages are known by the digest of that code: change it, and their results are made again. What
costs GPU days (pretraining, recovery), and what those stand on, is known by a version
(scripts/versions.json) that its authors raise when results change. The file has the digest that
they decided on last, and a test fails when the code is another one, until they have said which:

    python -m keycut.code same     # the code of these stages changed, and their results did not
    python -m keycut.code raise    # results change: they are made again
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from keycut.artefact import digest, read_json, sha256, write_json

SOURCE = Path(__file__).parent
VERSIONS = "versions.json"
"""Beside the scripts: of each stage that has a version, on which device, for what code."""
DEVICES = ("cpu", "cuda")

# Nothing of these reaches a number but through what a rule passes on: the values of the
# configuration are parameters, and whatever was fetched is known by its hash.
APART = (
    "alone", "card", "cli", "code", "config", "data.progress", "errors", "forkserver", "gpus",
    "hub", "inputs", "job", "layout", "slurm",
)  # fmt: skip
# What stands in for kernels where there is no GPU.
ON_CPU = "models.cpu"
# Settings of stages with a version leave out what is as by default, so that a new option reruns
# nothing; what the defaults are is then part of their code.
DEFAULTS = ("keycut.config.training", "keycut.config.models", "keycut.config.sources")


@dataclass(frozen=True)
class Code:
    """The digest of some code, and its parts, as module:name."""

    digest: str
    parts: tuple[str, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.partition(":")[0] for part in self.parts))


def code_of(script: Path | str, *modules: str, device: str = "cpu", source: Path = SOURCE) -> Code:
    """The code behind a script: all of it, what it uses on a device, and all of these modules."""
    named = {module.removeprefix("keycut.") for module in modules}
    this = _read(Path(script), source)
    found = {"": this.meaning}
    waiting = [*this.loads, *((module, ALL) for module in named)]
    for part in this.parts:
        waiting += part.targets(this.imports)
    seen: set[Target] = set()
    while waiting:
        target = module, name = waiting.pop()
        if target in seen or (module not in named and _apart(module, device)):
            continue
        seen.add(target)
        file = _file(module, source)
        if file is None:
            raise ValueError(f"keycut.{module}: there is no such module")
        read = _read(file, source)
        if name == LOADED:  # which loads what it imports too, and the packages above it
            waiting += [*read.loads, *((package, LOADED) for package in _parents(module))]
            if file.name == "__init__.py":
                found |= {f"{module}/{data}": hash for data, hash in _data(file.parent)}
        else:
            waiting.append((module, LOADED))
        if name in read.imports:
            waiting.append(read.imports[name])
        beside = {**{one: (module, one) for one in read.names}, **read.imports}
        for part in read.named(name):
            found[f"{module}:{part.name}"] = read.meanings[part.name]
            waiting += part.targets(beside)
    return Code(digest(found), tuple(sorted(found.keys() - {""})))


def known_code(script: Path | str, *modules: str, device: str) -> dict[str, Any]:
    """What a rule has among its parameters, so that its code decides what is made again."""
    about = {"script": str(script), "extra": list(modules), "device": device}
    if (version := _versions(Path(script).parent).get(Path(script).stem)) is not None:
        return {**about, "version": version[device]["version"]}
    return {**about, "digest": code_of(script, *modules, device=device).digest}


def code_now(known: dict[str, Any]) -> Code:
    """The code behind what `known_code` said at another time."""
    return code_of(known["script"], *known["extra"], device=known.get("device", "cpu"))


def same_code(known: dict[str, Any]) -> bool:
    """Whether the code is still what `known_code` said, as far as a rerun depends on it."""
    now = known_code(known["script"], *known["extra"], device=known.get("device", "cpu"))
    return all(known.get(key) == now[key] for key in ("version", "digest") if key in now)


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
        if (code := code_of(scripts / f"{stage}.py", *DEFAULTS, device=device).digest)
        != versions[device]["code"]
    ]


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


Target = tuple[str, str]
"""Something of a module: a name in it, or one of these: all of it, or what runs as it is loaded."""
ALL, LOADED = "*", "-"
# Decorators that only wrap what they stand on; another may note it somewhere.
WRAPPERS = (
    "dataclass", "contextmanager", "cache", "lru_cache", "torch.no_grad", "torch.inference_mode",
    "_one_thread",
)  # fmt: skip


@dataclass(frozen=True)
class _Part:
    """A statement of a module: what it does, as a digest, and what it uses."""

    name: str  # what it defines, or its place among the statements
    defines: frozenset[str]
    runs: bool  # whenever the module is loaded
    meaning: str
    uses: frozenset[str]  # names
    attributes: frozenset[tuple[str, str]]  # of names: name.attribute
    imports: Mapping[str, Target]  # inside it

    def targets(self, beside: Mapping[str, Target]) -> Iterator[Target]:
        """What it uses, given what is defined and imported beside it."""
        known = {**beside, **self.imports}
        yield from ((module, LOADED) for module, _ in self.imports.values())
        yield from (known[name] for name in self.uses if name in known)
        for name, attribute in self.attributes:
            if name in known:
                module, inside = known[name]
                yield module, attribute if inside == ALL else inside


@dataclass(frozen=True)
class _Module:
    """A file: what all of it does, its statements, what its imports name, and what they load."""

    meaning: str
    parts: tuple[_Part, ...]
    imports: Mapping[str, Target]
    loads: tuple[Target, ...]

    @cached_property
    def names(self) -> set[str]:
        return {name for part in self.parts for name in part.defines}

    @cached_property
    def meanings(self) -> dict[str, str]:
        """By the names of statements; something defined twice is both."""
        found: dict[str, str] = {}
        for part in self.parts:
            found[part.name] = found.get(part.name, "") + part.meaning
        return found

    def named(self, name: str) -> list[_Part]:
        """The statements behind a name; all of them behind one that only running it would show."""
        if name == LOADED:
            return [part for part in self.parts if part.runs]
        if name in self.imports:
            return [part for part in self.parts if "__getattr__" in part.defines]
        return [part for part in self.parts if name in part.defines] or [*self.parts]


def _read(file: Path, source: Path) -> _Module:
    return _read_once(file.absolute(), source, file.stat().st_mtime_ns)


@cache
def _read_once(file: Path, source: Path, changed: int) -> _Module:
    # Most scripts share most modules, and Snakemake asks for all scripts each time it starts.
    tree = _parsed(file)
    lines = [line for line in tree.body if isinstance(line, (ast.Import, ast.ImportFrom))]
    types = [line for line in tree.body if _is_if(line, "TYPE_CHECKING")]
    rest = [line for line in tree.body if line not in (*lines, *types) and not _is_text(line)]
    named = [*lines, *(line for block in types for line in ast.walk(block))]
    return _Module(
        meaning=_meaning(tree),
        parts=tuple(_part(line, place, source) for place, line in enumerate(rest)),
        imports=dict(pair for line in named for pair in _imports(line, source)),
        # Of `import keycut.x` it does not show what is used of it.
        loads=tuple(
            (module, ALL if isinstance(line, ast.Import) else LOADED)
            for line in lines
            for _, (module, _) in _imports(line, source)
        ),
    )


def _part(line: ast.stmt, place: int, source: Path) -> _Part:
    nodes = [*ast.walk(line)]
    attributes = [
        (node.value, node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    holders = {id(holder) for holder, _ in attributes}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    defines = frozenset(_defined(line))
    waits = _is_if(line, "__name__ == '__main__'") or bool(defines and _waits(line))
    return _Part(
        name=",".join(sorted(defines)) if waits and defines else str(place),
        defines=defines,
        runs=not waits,
        meaning=_meaning(line),
        uses=frozenset(node.id for node in names if id(node) not in holders),
        attributes=frozenset((holder.id, attribute) for holder, attribute in attributes),
        imports=dict(pair for node in nodes for pair in _imports(node, source)),
    )


def _defined(line: ast.stmt) -> Iterator[str]:
    """Names that a statement gives to its module."""
    inside = [line] if isinstance(line, (ast.FunctionDef, ast.ClassDef)) else ast.walk(line)
    for node in inside:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _waits(line: ast.stmt) -> bool:
    """Whether a statement does nothing until what it defines is used."""
    if isinstance(line, (ast.FunctionDef, ast.ClassDef)):
        decorators = (ast.unparse(one).partition("(")[0] for one in line.decorator_list)
        return all(name in WRAPPERS for name in decorators)
    return isinstance(line, (ast.Assign, ast.AnnAssign))


def _is_if(line: ast.stmt, test: str) -> bool:
    return isinstance(line, ast.If) and ast.unparse(line.test) == test


def _imports(node: ast.AST, source: Path) -> Iterator[tuple[str, Target]]:
    """What an import of Keycut's names: modules (all of them), or something inside one."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.startswith("keycut."):
                yield alias.asname or alias.name, (alias.name.removeprefix("keycut."), ALL)
    elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("keycut."):
        package = f"{node.module}.".removeprefix("keycut.")
        for alias in node.names:
            if _file(f"{package}{alias.name}", source):
                yield alias.asname or alias.name, (f"{package}{alias.name}", ALL)
            elif package:
                yield alias.asname or alias.name, (package[:-1], alias.name)


def _meaning(tree: ast.AST) -> str:
    """The digest of what a module or a statement does: its syntax without docstrings."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [line for line in body if not _is_text(line)]  # type: ignore[attr-defined]
    return hashlib.sha256(_written(tree).encode()).hexdigest()


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
        sys.exit("usage: python -m keycut.code same|raise")
    print("\n".join(decide(Path("scripts"), raised=words[sys.argv[1]]) or ["nothing changed"]))
