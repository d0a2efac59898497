"""Do the pins fit each Python that is named, on Linux x86_64 and aarch64? Run by `make pins-check`.

pip finds the wheels, and what they require. Whether the pins satisfy that is decided here: pip
evaluates markers for the Python and the machine that run it, not for those asked for."""

import json
import subprocess
import sys
from importlib.metadata import metadata
from itertools import product

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pins import CONSTRAINTS

SOURCE = "connection_pool,rouge_score,sqlitedict,word2number"  # plain Python, without wheels
PIP = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--no-deps",
       "--use-feature=fast-deps", "--only-binary=:all:", f"--no-binary={SOURCE}", "--target=unused",
       "--report=-", "-r", str(CONSTRAINTS)]  # fmt: skip
UNPINNED = ("cuda-", "nvidia-", "setuptools")  # torch names the versions of its CUDA
PROJECTS = [{"metadata": metadata(name).json} for name in ("statecut", "statecut-reproduction")]

for python, machine in product(sys.argv[1:], ("x86_64", "aarch64")):
    wheels = [f"--platform=manylinux{one}_{machine}" for one in ("_2_35", "_2_28", "_2_17", "2014")]
    report = subprocess.check_output([*PIP, f"--python-version={python}", *wheels])
    pins = [*PROJECTS, *json.loads(report)["install"]]
    found = {canonicalize_name(one["metadata"]["name"]): one["metadata"] for one in pins}
    target = {"python_version": python, "python_full_version": python, "platform_machine": machine}
    asked, seen = {"statecut[recovery,dev]", "statecut-reproduction"}, set[str]()
    while new := asked - seen:
        seen |= new
        for one in (one for one in map(Requirement, new) if not one.name.startswith(UNPINNED)):
            package = found.get(canonicalize_name(one.name), {"version": None})
            if not package["version"] or package["version"] not in one.specifier:
                sys.exit(f"{python} {machine}: {one} is required, {package['version']} is pinned")
            for line, extra in product(package.get("requires_dist", ()), ("", *one.extras)):
                marker = Requirement(line).marker
                if marker is None or marker.evaluate(target | {"extra": extra}):
                    asked.add(line)
    print(f"{python} {machine}: all {len(found) - len(PROJECTS)} pins fit")
