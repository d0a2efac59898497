"""`python -m snakemake`, in forks of a process that has imported it: most of a start is imports."""

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["snakemake.cli", "snakemake_executor_plugin_slurm"])


def snakemake(folder, *arguments, **environment):
    """Its exit code, and what it said."""
    with tempfile.NamedTemporaryFile() as said:
        given = (folder, arguments, {**os.environ, **environment}, said.name)
        process = CONTEXT.Process(target=_main, args=given)
        process.start()
        process.join()
        return process.exitcode, Path(said.name).read_text()


def _main(folder, arguments, environment, said):
    with open(said, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [str(folder), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv = ["snakemake", *arguments]
    from snakemake.cli import main

    main()
