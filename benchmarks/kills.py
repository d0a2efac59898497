"""Runs of the workflow that are killed again and again, against one that never was.

    python benchmarks/kills.py                  three runs, six kills each, at random moments
    python benchmarks/kills.py --folder FOLDER  keep the runs and their logs there

The demo's table `refit_recovered` is rehearsed undisturbed. Then it is made again from nothing,
while `kill -9` ends at random moments one of its processes: snakemake, a job, or the process that
has the libraries loaded. Whenever the command has ended it is started again as the README says. At
the end all results have to be those of the undisturbed run, byte for byte, with no process, no
temporary file and no unknown file left.

Not compared: logs/, and in provenance and preflight the entries in TIMES.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import psutil

from reproduction.running.provenance import PROVENANCE

ROOT = Path(__file__).parents[1]
RESULTS = "results/rehearsal"
TABLE = f"{RESULTS}/tables/refit_recovered.tex"
REHEARSAL = ("--configfile", "config/demo.yaml", "--config", "rehearsal=true", "--cores", "2")
PARTS = ("config", "envs", "profiles", "scripts", "src", "workflow")

RUNS, KILLS = 3, 6
LIMIT = 1800  # seconds until a run counts as hanging
TIMES = {"started", "seconds", "peak_mib"}
# Empty temporary folders that are not Statecut's: torch makes one for each user, and leaves it;
# Snakemake makes one that it removes at its end, unless that is `kill -9`.
FOREIGN_FOLDERS = ("torchinductor_", "snakemake")


@dataclass
class Run:
    """One run of the workflow in a copy of the checkout, with a temporary folder of its own."""

    folder: Path
    command: psutil.Popen = field(init=False)

    def __post_init__(self) -> None:
        for name in PARTS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, self.folder / name, ignore=ignored)
        self.temporary.mkdir()

    @property
    def temporary(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}-temporary")

    @property
    def log(self) -> Path:
        return self.folder / "commands.log"

    def start(self, *options: str, server: bool = True) -> None:
        command = [sys.executable, "-m", "snakemake", *REHEARSAL]
        if server:
            command = [sys.executable, "-m", "reproduction.running.preload", *command]
        changes = {"PYTHONPATH": str(self.folder / "src"), "TMPDIR": str(self.temporary)}
        with self.log.open("a") as log:
            self.command = psutil.Popen(
                [*command, *options, "--", TABLE], cwd=self.folder, env=os.environ | changes,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def finish(self) -> None:
        """Let the command end, and all processes that it or one before it has started."""
        if code := self.command.wait(LIMIT):
            self.fail(f"the command ended with {code}")
        end = time.monotonic() + LIMIT
        while self.processes():
            if time.monotonic() > end:
                self.fail(f"processes have not ended {LIMIT} s after the command")
            time.sleep(0.1)

    def processes(self) -> list[psutil.Process]:
        """All that run in the temporary folder of this run, killed commands' among them."""
        return [
            process
            for process in psutil.process_iter(["environ", "status"])
            if (process.info["environ"] or {}).get("TMPDIR") == str(self.temporary)
            and process.info["status"] != psutil.STATUS_ZOMBIE
        ]

    def fail(self, message: str) -> NoReturn:
        """End this script and what it has started, with the end of the log."""
        lines = [self.log.read_text()[-5000:]]
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                lines.append(f"{process.pid} {' '.join(process.cmdline())[:150]}")
                process.kill()
        sys.exit("\n".join([*lines, f"{self.folder}: {message}"]))


def disturb(run: Run, kills: int, chance: random.Random, seconds: float) -> None:
    """Make the run with these kills, spread over about the time of an undisturbed one."""
    begin, apart = time.monotonic(), 2 * seconds / kills
    run.start()
    while (code := run.command.poll()) != 0:
        if time.monotonic() > begin + LIMIT:
            run.fail(f"the run has not ended after {LIMIT} s")
        if code is not None:
            run.start("--unlock", server=False)
            if code := run.command.wait(LIMIT):
                run.fail(f"--unlock ended with {code}")
            run.start("--rerun-incomplete")
        time.sleep(chance.uniform(0, apart))
        victims = run.processes()
        if kills and victims and run.command.poll() is None:
            victim = chance.choice(victims)
            with suppress(psutil.NoSuchProcess):  # ended meanwhile
                words = " ".join(victim.cmdline()[1:])[-60:]
                victim.kill()
                kills -= 1
                print(f"{time.monotonic() - begin:6.1f} s  killed {words}", flush=True)
    run.finish()


def differences(run: Run, undisturbed: Run) -> list[str]:
    ours, theirs = contents(run), contents(undisturbed)
    return [
        *(f"{name} is missing" for name in sorted(theirs.keys() - ours.keys())),
        *(f"{name} was left" for name in sorted(ours.keys() - theirs.keys())),
        *(f"{name} differs" for name in sorted(ours.keys() & theirs.keys())
          if ours[name] != theirs[name]),
        *(f"{path} was left" for path in run.temporary.iterdir()
          if not path.name.startswith(FOREIGN_FOLDERS) or path.is_file() or any(path.iterdir())),
    ]  # fmt: skip


def contents(run: Run) -> dict[str, Any]:
    """The bytes of each result, hidden files and empty folders too."""
    root = run.folder / RESULTS
    entries: dict[str, Any] = {}
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        if name.split("/")[0] == "logs":
            continue
        entries[name] = None if path.is_dir() else path.read_bytes()
        if path.is_file() and (name.endswith(PROVENANCE) or name.startswith("preflight/")):
            value = json.loads(path.read_bytes())
            entries[name] = {key: value[key] for key in value.keys() - TIMES}
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="where the runs are, and stay; a new folder")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"that are killed (default: {RUNS})")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the draw")
    arguments = parser.parse_args()
    if arguments.folder and arguments.folder.exists():
        parser.error(f"--folder {arguments.folder}: exists already, give a new folder")
    with TemporaryDirectory() as folder:
        compare(arguments.folder or Path(folder), arguments.runs, arguments.seed)


def compare(folder: Path, runs: int, seed: int) -> None:
    chance = random.Random(seed)
    folder = folder.resolve()
    # All copies at once: whoever works on the checkout meanwhile changes none of them.
    undisturbed = Run(folder / "undisturbed")
    disturbed = [Run(folder / f"run-{number}") for number in range(1, runs + 1)]
    begin = time.monotonic()
    undisturbed.start()
    undisturbed.finish()
    seconds = time.monotonic() - begin
    files = sum(content is not None for content in contents(undisturbed).values())
    print(f"seed {seed}; undisturbed: {seconds:.0f} s, {files} files to compare", flush=True)
    failures = []
    for run in disturbed:
        disturb(run, KILLS, chance, seconds)
        lines = differences(run, undisturbed)
        print("\n".join(lines) or f"{run.folder.name}: all files are the same", flush=True)
        failures += lines
    if failures:
        sys.exit(f"{len(failures)} differences")


if __name__ == "__main__":
    main()
