"""What the tests leave behind."""

import subprocess
import sys
import time
from pathlib import Path

from cluster import alive

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

    end = time.monotonic() + 60
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not folder.exists()
    assert not [pid for pid in daemons if alive(pid)]
