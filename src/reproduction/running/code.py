"""The code behind a rule, as one of its params: when it changes, Snakemake plans the rule's jobs.

For cheap stages it is the digests of the files that the rule names. For data, pretraining,
calibration, recovery and evaluation it is an integer in their script, `VERSION = 1`: raise it when
a change alters their results.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path

from statecut.errors import InputError
from statecut.files import digest, sha256

ROOT = Path(__file__).parents[3]
PLANNED = "REPRODUCTION_CODE"
"""The variable in which the process that plans a run hands its jobs the code of their rules."""

Code = dict[str, str | int]


def export(*, planning: bool) -> None:
    """Set up what jobs inherit: where the library is, also for those in a conda environment of
    their own; and drop the code of a run before this one."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if planning:
        os.environ.pop(PLANNED, None)


def code(*names: str) -> Code:
    """Files and folders of the checkout with their digests; a script that has a version, with that.

    In a job of a cluster, which reads the rules again: what was found when it was planned.
    """
    planned, key = json.loads(os.environ.get(PLANNED, "{}")), " ".join(names)
    if key not in planned:
        planned[key] = {name: identify(name) for name in names}
        os.environ[PLANNED] = json.dumps(planned)
    return dict(planned[key])


def check_code(rule: str, planned: Code) -> None:
    """An error if the code of a job is not what its run was planned with."""
    if changed := [name for name, known in planned.items() if identify(name) != known]:
        raise InputError(
            f"{changed[0]} was changed after this job of rule {rule} was planned: start snakemake "
            "again"
        )


@cache
def identify(name: str) -> str | int:
    path = ROOT / name
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix not in ("", ".pyc"))
        return digest({str(file.relative_to(path)): sha256(file) for file in files})[:16]
    version = re.search(r"^VERSION = (\d+)", path.read_text(), re.MULTILINE)
    return int(version[1]) if version else sha256(path)[:16]
