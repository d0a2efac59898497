"""Runs of the workflow that are killed again and again, against one that never was.

    python benchmarks/kills.py                  three runs, six kills each, at random moments
    python benchmarks/kills.py --folder FOLDER  keep the runs and their logs there

A small run (one model, two methods, recovery, one suite, one table) is made undisturbed. Then it is
made again from nothing, while `kill -9` ends snakemake, a job, its working process, or the process
that has the libraries loaded, when a job of a drawn stage has run for a random while. After each
kill the run is started again as the README says. At the end all results have to be those of the
undisturbed run, byte for byte, with no process, no temporary file and no unknown file left.

Not compared: logs/, timings/ and report.html, which hold times; of provenance and preflight the
entries in TIMES.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import psutil
import yaml

from reproduction.running.provenance import PROVENANCE

ROOT = Path(__file__).parents[1]
RUN = "small"
RESULTS = f"results/{RUN}"
PARTS = ("config", "envs", "profiles", "scripts", "src", "workflow")
STEPS, RECOVERY_STEPS = 24, 10
METHODS = ("l1", "grad")

# Two kills are drawn for each of these, and the others from the rest.
STAGES = ("pretrain", "calibrate", "score", "slice", "recover", "evaluate", "table")
SEVERAL_THREADS = {"tokens"}  # its jobs are not handed over to the server
VICTIMS = ("snakemake", "client", "job", "server")

RUNS, KILLS = 3, 6
LIMIT = 600  # seconds until a command counts as hanging
TIMES = {"started", "seconds", "peak_mib"}
NOT_COMPARED = ("logs", "timings", "report.html")
# Empty temporary folders that are not Statecut's: torch makes one for each user, and leaves it;
# Snakemake makes one that it removes at its end, unless that is `kill -9`.
FOREIGN_FOLDERS = ("torchinductor_", "snakemake")


def configuration() -> dict[str, Any]:
    text = (ROOT / "config" / "demo.yaml").read_text().replace("results/demo/", f"{RESULTS}/")
    config: dict[str, Any] = yaml.safe_load(text)
    config["run"] = RUN
    slices = {
        "documentation": {"recovery": 8 * RECOVERY_STEPS, "pretraining": 8 * STEPS},
        "calibration": {"sequences": 16},
        "held_out": {"tasks": 32},
    }
    config["corpora"] = {
        name: {"kind": "local", "files": ["text.jsonl"], "length": 128, "seed": 0, "slices": sizes}
        for name, sizes in slices.items()
    }
    config["recipes"] = {"demo": config["recipes"]["demo"] | {"steps": STEPS, "warmup": 1}}
    config["recovery"] |= {"steps": RECOVERY_STEPS, "warmup": 1, "control": False}
    config["models"] = {"delta_net": config["models"]["delta_net"]}
    config["methods"] = {name: config["methods"][name] for name in METHODS}
    config["evaluation"]["suites"] = {"ppl": config["evaluation"]["suites"]["ppl"]}
    table = config["tables"]["zero_shot"]
    changes = {"methods": [*METHODS], "ratios": [0.5], "columns": {"pre": ["ppl"], "post": ["ppl"]}}
    config["tables"] = {"quality": table | changes}
    config["figures"], config["benchmarks"] = {}, {}
    config["tokenizers"] = {"demo": config["tokenizers"]["demo"]}
    del config["analysis"]
    return config


@dataclass
class Run:
    """One run of the workflow in a copy of the checkout, with a temporary folder of its own."""

    folder: Path
    command: psutil.Popen = field(init=False)

    def __post_init__(self) -> None:
        for name in PARTS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, self.folder / name, ignore=ignored)
        text = yaml.safe_dump(configuration(), sort_keys=False)
        (self.folder / "run.yaml").write_text(text)
        with (self.folder / "text.jsonl").open("w") as file:  # prose that every Python has
            file.writelines(f"{json.dumps({'text': topics[name]})}\n" for name in sorted(topics))
        self.temporary.mkdir()

    @property
    def temporary(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}-temporary")

    @property
    def log(self) -> Path:
        return self.folder / "commands.log"

    def start(self, *options: str, server: bool = True) -> None:
        command = [sys.executable, "-m", "snakemake", "--configfile=run.yaml", "--cores=2"]
        if server:
            command = [sys.executable, "-m", "reproduction.running.preload", *command]
        changes = {"PYTHONPATH": str(self.folder / "src"), "TMPDIR": str(self.temporary)}
        with self.log.open("a") as log:
            self.command = psutil.Popen(
                [*command, *options], cwd=self.folder, env=os.environ | changes,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def wait(self) -> int:
        """The exit code of the command."""
        try:
            return int(self.command.wait(LIMIT))
        except psutil.TimeoutExpired:
            self.fail(f"the command has not ended after {LIMIT} s")

    def finish(self) -> None:
        """Let the command end, and all processes that it or one before it has started."""
        if code := self.wait():
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

    def client(self, stages: Iterable[str]) -> psutil.Process | None:
        """A job of one of the stages as Snakemake started it."""
        endings = tuple(f".{stage}.py" for stage in stages)
        for process, words in self._children(self.command):
            if len(words) > 1 and "/scripts/tmp" in words[1] and words[1].endswith(endings):
                return process
        return None

    def server(self) -> psutil.Process | None:
        """The first of the forks. Without it, those that it has forked are others' children."""
        children = self._children(self.command)
        return next((process for process, words in children if _is_fork(words)), None)

    def job(self, stage: str) -> psutil.Process | None:
        """The fork that does the work of a job of the stage: it writes its log."""
        logs = self.folder / RESULTS / "logs" / stage.removesuffix("_shape")
        for process, words in self._children(self.server()):
            try:
                output = os.readlink(f"/proc/{process.pid}/fd/1")
            except OSError:
                continue  # ended meanwhile
            if _is_fork(words) and output.startswith((f"{logs}/", f"{logs}.log")):
                return process
        return None

    def victim(self, kind: str, stage: str) -> psutil.Process | None:
        if kind == "snakemake":
            return self.command
        if kind == "server":
            return self.server()
        if kind == "client":
            return self.client([stage])
        return self.job(stage)

    @staticmethod
    def _children(of: psutil.Process | None) -> Iterator[tuple[psutil.Process, list[str]]]:
        if of is None:
            return
        try:
            children = of.children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for process in children:
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield process, process.cmdline()
            except psutil.NoSuchProcess:
                continue


def _is_fork(words: list[str]) -> bool:
    """Forks of the server are called as it was."""
    return "reproduction.running.preload" in words


def timings(run: Run) -> dict[str, list[Path]]:
    """For each stage a file for every job that has ended well."""
    folders = (run.folder / RESULTS / "timings").glob("*")
    return {folder.name: [*folder.rglob("*.tsv")] for folder in folders}


def durations(run: Run) -> dict[str, list[float]]:
    """Seconds of the jobs of each stage."""
    return {
        stage: [float(file.read_text().split("\n")[1].split()[0]) for file in files]
        for stage, files in timings(run).items()
    }


def draw(chance: random.Random, stages: Iterable[str]) -> list[tuple[set[str], list[str]]]:
    """For each run the stages in which it is killed, dealt so that no two are the same, and the
    victims."""
    rest = sorted({*stages} - {*STAGES})
    drawn = [*STAGES, *STAGES, *chance.sample(rest, RUNS * KILLS - 2 * len(STAGES))]
    victims = [VICTIMS[i % len(VICTIMS)] for i in range(RUNS * KILLS)]
    chance.shuffle(victims)
    starts = range(0, RUNS * KILLS, KILLS)
    return [({*drawn[i : i + KILLS]}, victims[i : i + KILLS]) for i in starts]


def kill(run: Run, stages: set[str], kind: str, chance: random.Random,
         seconds: dict[str, list[float]]) -> tuple[str, str, float] | None:  # fmt: skip
    """Kill the victim at a random moment of the next job of these stages. Where that job has ended
    before, or no more of them come, it is the next job of any stage. Gives the stage, the victim
    and the moment; None if the run has ended."""
    end = time.monotonic() + LIMIT
    while run.command.poll() is None:
        if time.monotonic() > end:
            run.fail(f"no job to kill in {LIMIT} s")
        if (client := run.client(stages)) is None:
            done = timings(run)
            if all(len(done.get(stage, ())) == len(seconds[stage]) for stage in stages):
                stages |= seconds.keys()
            time.sleep(0.02)
            continue
        with suppress(psutil.NoSuchProcess):  # ended meanwhile
            stage = client.cmdline()[1].split(".")[-2]
            begin = time.monotonic()
            time.sleep(chance.uniform(0, 0.6 * min(seconds[stage])))
            while client.is_running():
                if kind != "snakemake" and (run.server() is None or stage in SEVERAL_THREADS):
                    kind = "client"  # which does its work itself
                if victim := run.victim(kind, stage):
                    victim.kill()
                    stages.discard(stage)
                    return stage, kind, time.monotonic() - begin
                time.sleep(0.02)
        stages |= seconds.keys()
    return None


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
        if name.split("/")[0] in NOT_COMPARED:
            continue
        entries[name] = None if path.is_dir() else path.read_bytes()
        if path.is_file() and (name.endswith(PROVENANCE) or name.startswith("preflight/")):
            value = json.loads(path.read_bytes())
            entries[name] = {key: value[key] for key in value.keys() - TIMES}
    return entries


def disturb(run: Run, stages: set[str], victims: list[str], chance: random.Random,
            seconds: dict[str, list[float]]) -> set[str]:  # fmt: skip
    """Make the run with these kills. Gives the stages and victims that were really hit."""
    print("| kill | stage | victim | s after the job began | the command | s until restart |")
    print("|---|---|---|---|---|---|", flush=True)
    run.start()
    hit = set()
    for number, drawn in enumerate(victims, start=1):
        struck = kill(run, stages, drawn, chance, seconds)
        if struck is None:
            run.fail(f"the command ended with {run.wait()} before kill {number}")
        stage, kind, moment = struck
        begin = time.monotonic()
        outcome, waited = "goes on", "-"  # or the next kill, or the end of the run, would fail
        if kind != "server":
            outcome = f"ends with {run.wait()}"
            waited = f"{time.monotonic() - begin:.1f}"
        row = (number, stage, kind, f"{moment:.1f}", outcome, waited)
        print(f"| {' | '.join(map(str, row))} |", flush=True)
        hit |= {stage, kind}
        if kind == "snakemake":
            run.start("--unlock", server=False)
            if code := run.wait():
                run.fail(f"--unlock ended with {code}")
        if kind != "server":
            run.start("--rerun-incomplete")
    run.finish()
    return hit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="where the runs are, and stay; a new folder")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the draw")
    arguments = parser.parse_args()
    if arguments.folder and arguments.folder.exists():
        parser.error(f"--folder {arguments.folder}: exists already, give a new folder")
    with TemporaryDirectory() as folder:
        compare(arguments.folder or Path(folder), arguments.seed)


def compare(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    folder = folder.resolve()
    # All copies at once: whoever works on the checkout meanwhile changes none of them.
    undisturbed = Run(folder / "undisturbed")
    disturbed = [Run(folder / f"run-{number}") for number in range(1, RUNS + 1)]
    begin = time.monotonic()
    undisturbed.start()
    undisturbed.finish()
    files = sum(content is not None for content in contents(undisturbed).values())
    print(f"seed {seed}; undisturbed: {time.monotonic() - begin:.0f} s, {files} files to compare")
    seconds = durations(undisturbed)
    hit: set[str] = set()
    failures = []
    for run, (stages, victims) in zip(disturbed, draw(chance, seconds), strict=True):
        print(f"\n{run.folder.name}\n")
        begin = time.monotonic()
        hit |= disturb(run, stages, victims, chance, seconds)
        lines = differences(run, undisturbed)
        temporary = ", ".join(sorted(path.name for path in run.temporary.iterdir()))
        print(f"\n{time.monotonic() - begin:.0f} s; in the temporary folder: {temporary}")
        print("\n".join(lines) or "all files are those of the undisturbed run", flush=True)
        failures += lines
    failures += [f"no kill hit {name}" for name in (*STAGES, *VICTIMS) if name not in hit]
    if failures:
        sys.exit("\n".join(["", *failures]))


if __name__ == "__main__":
    main()
