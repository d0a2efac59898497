"""The demo's results, and what runs again when something changes.

`make test` makes the demo first; these tests look at what it left. Changes are tried on a copy.
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

import pandas as pd
import psutil
import pytest
import yaml

import statecut
from reproduction.config import load_config
from reproduction.documentation import word_runs
from reproduction.reporting.archive import write_archive
from statecut.data.sources import read
from statecut.models.checkpoint import Checkpoint

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "results" / "demo"
METHODS = ("l1", "rand", "s_wanda", "grad", "drrqr")
TARGET = "results/demo/report.html"


@pytest.fixture(scope="module", autouse=True)
def made():
    assert (DEMO / "report.html").is_file(), "the demo is not there: run `make demo` first"


@pytest.fixture
def copy(tmp_path):
    """The checkout with its results, to be changed at will."""
    names = ("workflow", "scripts", "config", "profiles", "envs", "src", "models", "results/demo")
    (tmp_path / ".snakemake").mkdir()
    (tmp_path / "results").mkdir()
    for name in (*names, ".snakemake/metadata"):
        subprocess.run(["cp", "-a", ROOT / name, tmp_path / name], check=True)
    return tmp_path


def command(*arguments):
    return [sys.executable, "-m", "snakemake", "--profile", "profiles/demo", *arguments]


def environment(folder):
    return {**os.environ, "PYTHONPATH": str(folder / "src")}


def planned(folder, *arguments):
    """What would run, as the messages of its jobs."""
    done = subprocess.run(
        command("-n", *arguments), cwd=folder, env=environment(folder),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return Counter(re.findall(r"^Job \d+: (.+)$", done.stdout + done.stderr, re.M))


def summary(jobs):
    """Jobs by the word that begins their message."""
    return dict(Counter(job.split(" ", 1)[0] for job in jobs.elements()))


def test_an_archive_gives_the_same_report_and_tables_in_another_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    archive = tmp_path / "archive.tar.xz"
    write_archive(load_config("config/demo.yaml"), archive)
    for name in ("workflow", "scripts", "config", "profiles", "envs", "src", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    with tarfile.open(archive) as files:
        assert not [name for name in files.getnames() if name.endswith("model.safetensors")]
        files.extractall(tmp_path, filter="data")
    outs = [TARGET, "results/demo/tables/summary.tex"]
    done = subprocess.run(
        [sys.executable, "-m", "reproduction.running.preload",
         *command(*outs, "--config", "partial=archived")],
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for out in outs:
        assert (tmp_path / out).read_bytes() == (ROOT / out).read_bytes()


def configure(folder, change):
    path = folder / "config/demo.yaml"
    config = yaml.safe_load(path.read_text())
    change(config)
    path.write_text(yaml.safe_dump(config, sort_keys=False))


# What ends every run that changed a number of a table.
LAST = {"joining": 1, "comparing": 1, "writing": 1}


@pytest.fixture
def perplexities():
    """Of the larger models, by model, ratio and method, for each stage, on text that they have not
    seen."""
    numbers = pd.read_parquet(DEMO / "frames/small.parquet").query("method != 'baseline'")
    return numbers.set_index(["model", "compression", "method", "rft"])["value"].unstack()


def test_refitted_models_are_better_than_sliced_ones_and_far_better_the_more_is_cut(perplexities):
    assert len(perplexities) == 2 * 2 * 3  # models x ratios x methods
    repaired = perplexities["refit"] / perplexities["pre"]
    assert (repaired < 1).all()
    assert (repaired.xs(0.75, level="compression") < 0.9).all()


def test_cuts_that_match_eps_are_better_than_those_that_keep_it():
    numbers = pd.read_parquet(DEMO / "frames/small_eps.parquet").query("method != 'baseline'")
    cut = ["model", "compression", "method", "rft"]
    both = numbers.set_index([*cut, "eps"])["value"].unstack()
    assert len(both) == 2 * 2  # models x stages
    assert (both["matched"] < both["kept"]).all()


def test_drrqr_is_far_better_than_magnitude(perplexities):
    for stage, margin in (("pre", 0.7), ("refit", 0.9)):
        methods = perplexities[stage].unstack()
        assert (methods["drrqr"] < margin * methods["l1"]).all()


def test_keys_and_values_are_cut_together_and_refitted():
    numbers = pd.read_parquet(DEMO / "frames/small_values.parquet").query("method != 'baseline'")
    assert numbers["compression"].isna().all()
    both = numbers.set_index(["head_k_dim", "head_v_dim", "rft"])["value"].unstack()
    assert [*both.index] == [(16, 64), (32, 32), (64, 16)]
    assert (both["refit"] < both["pre"]).all()
    # Keys alone are the ratio that leaves as many.
    ratios = pd.read_parquet(DEMO / "frames/small.parquet").query(
        "method == 'fisher' and model == 'delta_net_3M' and compression == 0.75"
    )
    assert [*both.loc[16, 64]] == [*ratios.set_index("rft")["value"][["pre", "refit"]]]


def test_no_text_serves_two_uses():
    """Whatever the tokenizer, a sentence is in one part."""
    parts = {}
    for name in ("training", "calibration", "held_out"):
        texts = read(DEMO / f"text/{name}.jsonl")
        parts[name] = {
            run for text in texts for part in text.split("\n\n") for run in word_runs(part)
        }
    assert all(parts.values())
    assert not any(one & other for one, other in itertools.combinations(parts.values(), 2))


@pytest.mark.parametrize("name", ["delta_net_3M", "gated_deltanet_3M"])
def test_a_quarter_of_the_state_is_left_by_the_best_of_three_splits(name, tmp_path):
    text = {"text": DEMO / "text/calibration.jsonl", "sequences": 16, "length": 128}
    pruned = statecut.prune(ROOT / "models" / name, tmp_path / "out", state=0.25, **text)
    _, *rows = [row.split() for row in pruned.record.last["compared"]]
    assert [row[:3] for row in rows] == [
        ["16", "64", "49,152"], ["32", "32", "49,152"], ["64", "16", "49,152"],
    ]  # fmt: skip
    cut, refitted = ([float(row[column]) for row in rows] for column in (4, 5))
    assert all(after < before for before, after in zip(cut, refitted, strict=True))
    (written,) = (row for row in rows if row[-1] == "written")
    assert rows.index(written) == refitted.index(min(refitted))
    shape = Checkpoint(tmp_path / "out").shape
    assert [str(shape.width), str(shape.value_width)] == written[:2]


def test_the_pdf_is_there_where_latex_is():
    if os.environ.get("CI") or shutil.which("pdflatex"):
        assert (DEMO / "document.pdf").read_bytes().startswith(b"%PDF")


def test_a_second_run_does_nothing():
    """So every table and figure is there."""
    assert planned(ROOT) == Counter()


def test_a_forced_selection_reruns_its_descendants(copy):
    jobs = planned(copy, "-R", "results/demo/selections/delta_net/drrqr-kq-0.safetensors")
    descendants = {"choosing": 1, "slicing": 2, "refitting": 2, "recovering": 3, "analysing": 2,
                   "drawing": 4}  # fmt: skip
    assert {word: n for word, n in summary(jobs).items() if word in descendants} == descendants
    of_models = [job for job in jobs if job.startswith(("evaluating", "recovering"))]
    assert all("drrqr-kq-" in job for job in of_models)
    cut = "delta_net/drrqr-kq-0.75-0-matched"
    assert {job.split()[1] for job in of_models if "0.75" in job and "evaluating" in job} == {
        f"sliced/{cut}", f"refitted/{cut}", f"recovered/{cut}", f"recovered/{cut}-refitted",
    }  # fmt: skip


def test_an_added_suite_runs_only_what_is_new(copy):
    def change(config):
        config["tables"]["by_model"]["columns"]["pre"].append("retrieval")

    configure(copy, change)
    jobs = planned(copy)
    # The unpruned models have been evaluated on it for other tables.
    assert summary(jobs) == LAST | {"evaluating": 2 * len(METHODS), "printing": 1}
    assert all("retrieval" in job for job in jobs if job.startswith("evaluating"))


def test_another_seed_reruns_what_is_drawn(copy):
    configure(copy, lambda config: config.update(seeds=[1]))
    jobs = planned(copy)
    assert not any(job.startswith(("training", "packing", "measuring")) for job in jobs)
    assert not any("l1" in job for job in jobs if job.startswith(("choosing", "slicing")))
    assert any("l1" in job for job in jobs if job.startswith("recovering"))  # which draws too
    assert jobs["calibrating delta_net, seed 1"] == jobs["calibrating delta_net, seed 1-gradients"]
    assert jobs["choosing channels of delta_net: rand, kq, seed 1"] == 1


def test_a_killed_run_goes_on_and_ends_with_the_same_table(copy):
    """Interrupted while a model is recovered, started again and killed, and again."""
    cut, demo = "drrqr-kq-0.75-0-matched", copy / "results/demo"
    table, log = demo / "tables/retrieval.csv", demo / f"logs/recover/delta_net/{cut}.log"
    before = table.read_bytes()
    for folder in (f"recovered/delta_net/{cut}", f"evaluations/recovered/delta_net/{cut}"):
        shutil.rmtree(demo / folder)
    for file in (demo / "frames/retrieval.parquet", table):
        file.unlink()
    again = command("results/demo/tables/retrieval.csv", "--nocolor", "--rerun-incomplete")
    # Ctrl-C reaches the whole group, a kill the one that it names.
    for number, end in ((signal.SIGINT, os.killpg), (signal.SIGKILL, os.kill)):
        log.unlink()
        running = subprocess.Popen(
            again, cwd=copy, env=environment(copy), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        wait_until(lambda: log.is_file() and "recovery" in log.read_text())
        end(running.pid, number)
        assert running.wait(60) != 0
        wait_until(lambda: not survivors(copy))
        subprocess.run(command("--unlock"), cwd=copy, env=environment(copy), capture_output=True)
    done = subprocess.run(again, cwd=copy, env=environment(copy), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert table.read_bytes() == before


def survivors(folder):
    """Jobs of this folder that still run."""
    scripts = f"{folder}/.snakemake/scripts"
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [words for words in commands if any(word.startswith(scripts) for word in words)]


def wait_until(true, seconds=300):
    for _ in range(int(seconds / 0.1)):
        if true():
            return
        time.sleep(0.1)
    raise AssertionError("it never happened")
