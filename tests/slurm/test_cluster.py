"""What the tests leave behind."""

import subprocess
import sys
from pathlib import Path

from cluster import Cluster, alive

WAITS = """
from cluster import Cluster
print(Cluster().start().folder, flush=True)
input()
"""


def test_a_killed_test_leaves_no_slurm(installed):
    here = Path(__file__).parent
    test = subprocess.Popen(
        [sys.executable, "-c", WAITS], cwd=here, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    folder = Path(test.stdout.readline().decode().strip())
    daemons = [int(file.read_text()) for file in folder.glob("*.pid")]
    assert len(daemons) == 4
    test.kill()
    test.communicate()

    Cluster(folder).wait(lambda: not folder.exists(), "a folder that is removed", seconds=60)
    assert not [pid for pid in daemons if alive(pid)]
