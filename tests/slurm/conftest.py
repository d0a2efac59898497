"""A Slurm for the tests in this folder, or a line that says why there is none."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, missing
from runs import SlurmRun, checkout, results, run_here
from small import DATA, RUN, TARGET, small


@pytest.fixture(scope="session")
def installed():
    absent = missing()
    if absent and os.environ.get("CI"):
        pytest.fail(f"Slurm is not installed here: no {', '.join(absent)}")
    if absent:
        pytest.skip(f"needs Slurm (Debian: slurm-wlm munge slurm-client): no {', '.join(absent)}")


@pytest.fixture(scope="session")
def cluster(installed):
    slurm = Cluster().start()
    yield slurm
    slurm.stop()


class Prepared:
    """Checkouts whose data are ready, and what the rest of the run gives without Slurm."""

    def __init__(self, folder: Path, **sizes: Any) -> None:
        self.folder = checkout(folder, small(**sizes))
        run_here(self.folder, *DATA)
        self.copies = 0

    def on(self, cluster: Cluster, **options) -> SlurmRun:
        self.copies += 1
        copy = self.folder.with_name(f"{self.folder.name}-{self.copies}")
        shutil.copytree(self.folder, copy, symlinks=True)
        return SlurmRun(copy, cluster, **options)

    def undisturbed(self) -> dict[str, str]:
        run_here(self.folder, TARGET)
        return results(self.folder, RUN)


@pytest.fixture
def short(cluster, tmp_path):
    """Two steps of training, one method."""
    return Prepared(tmp_path / RUN, steps=2, recovery=40, methods=("l1",))


@pytest.fixture(scope="session")
def prepared(cluster, tmp_path_factory):
    """Training long enough to be disturbed while it goes on."""
    return Prepared(tmp_path_factory.mktemp("prepared") / RUN, steps=200, recovery=40)
