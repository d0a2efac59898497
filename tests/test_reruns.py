"""What Snakemake would make again, and what it leaves alone: the contract with who has results.

A small run on a GPU is finished in pretence: its files are there, and Snakemake has noted them as
made. Each test looks at a copy of it (`cp -r`), with something changed.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import readme
import yaml

from reproduction.running import digests
from reproduction.running.digests import cached_sha256
from statecut.files import sha256, write_json

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "models",
    "sliced",
    "refitted",
    "recovered",
    "tokenizers",
    "tokens",
    "calibrations",
    "verdict",
}
PARTS = ("workflow", "scripts", "config", "profiles", "envs", "src")
METHODS = ["l1", "grad"]
# What follows when a table or figure is made again, and a frame.
PRINTED = {"page": 1, "document": 1, "pdf": 1}
REPORTED = {"frame", "union", "verdict", "table", "figure", *PRINTED}


def configuration():
    """Two models, trained on a file of the user's; something for every rule but `import_model`."""
    text = (ROOT / "config/demo.yaml").read_text().replace("results/demo/", "results/small/")
    config = yaml.safe_load(text)
    del config["device"]
    config["run"] = "small"
    for corpus in config["corpora"].values():
        del corpus["part"]
        corpus |= {"kind": "local", "files": ["text.jsonl"]}
    for section, names in {
        "models": ["delta_net", "delta_net_head"],
        "methods": METHODS,
        "tables": ["by_ratio", "sharing", "mixer_speed", "model_speed"],
        "figures": ["utilization", "sweep", "filters"],
        "benchmarks": ["mixer", "model"],
    }.items():
        config[section] = {name: config[section][name] for name in names}
    config["tables"]["by_ratio"] |= {"methods": METHODS, "ratios": [0.5]}
    config["tables"]["sharing"]["models"] = ["delta_net", "delta_net_head"]
    config["benchmarks"]["model"]["models"] = ["delta_net"]
    config["figures"]["utilization"] |= {"methods": METHODS, "ratio": 0.5}
    return config


# The PDF is part of `all` only where LaTeX is installed; here it always is a target.
TARGETS = ("all", "results/small/document.pdf")


def snakemake(folder, *arguments, targets=TARGETS):
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", *targets, "--cores", "1", "--configfile", "small.yaml",
         *arguments],
        cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(folder / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def planned(folder, targets=TARGETS):
    """Jobs that would run, by rule."""
    said = snakemake(folder, "-n", targets=targets)
    if "Nothing to be done" in said:
        return {}
    table = said.split("Job stats:")[1].split("total")[0]
    counts = {rule: int(count) for rule, count in re.findall(r"^(\w+) +(\d+)$", table, re.M)}
    return {rule: count for rule, count in counts.items() if rule != "all"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    for name in PARTS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "text.jsonl").write_text('{"text": "some"}\n')
    (folder / "small.yaml").write_text(yaml.safe_dump(configuration(), sort_keys=False))
    pretend_finished(folder)
    return folder


def pretend_finished(folder):
    for line in snakemake(folder, "--summary").splitlines():
        if not line.startswith("results/"):
            continue
        path = folder / line.split("\t")[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.relative_to(folder).parts[2] in FOLDERS and path.suffix != ".json":
            path.mkdir(exist_ok=True)
            (path / "model.safetensors").touch()
        else:
            # Larger than what Snakemake compares.
            path.write_bytes(b"0" * (1_100_000 if path.suffix in (".safetensors", ".npz") else 9))
    snakemake(folder, "--touch", "--forceall")


@pytest.fixture
def copy(finished, tmp_path):
    """Elsewhere, with other times."""
    for name in (*PARTS, "results", ".snakemake", "text.jsonl", "small.yaml"):
        subprocess.run(["cp", "-r", finished / name, tmp_path / name], check=True)
    return tmp_path


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def configure(folder, change):
    config = configuration()
    change(config)
    (folder / "small.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def git(folder, *arguments):
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", *arguments], cwd=folder,
                   check=True, capture_output=True)  # fmt: skip


def test_a_copy_of_a_finished_run_is_finished(copy):
    assert planned(copy) == {}


@pytest.mark.parametrize("latex", [False, True])
def test_where_latex_comes_later_the_pdf_alone_is_made(copy, monkeypatch, latex):
    for path in copy.glob("results/small/document.pdf*"):
        path.unlink()
    programs = copy / "bin"
    programs.mkdir()
    (programs / "which").symlink_to(shutil.which("which"))  # by which Snakemake looks for Slurm
    if latex:
        (programs / "pdflatex").touch(0o755)
    monkeypatch.setenv("PATH", str(programs))  # whatever else this machine has
    assert planned(copy, targets=()) == ({"pdf": 1} if latex else {})


def test_touched_files_rerun_nothing(copy):
    for path in copy.rglob("*"):
        if path.is_file() and ".snakemake/" not in str(path):
            path.touch()
    assert planned(copy) == {}


def test_another_commit_and_back_reruns_nothing(copy):
    (copy / ".gitignore").write_text("results\n.snakemake\n__pycache__\n")
    git(copy, "init", "-b", "main")
    git(copy, "add", ".")
    git(copy, "commit", "-m", "one")
    git(copy, "checkout", "-b", "other")
    for path in [*copy.glob("scripts/*.py"), *copy.glob("workflow/templates/*"),
                 *copy.glob("src/statecut/**/*.py"), copy / "text.jsonl"]:  # fmt: skip
        path.write_text(path.read_text() + "\nx = 1\n")
    git(copy, "commit", "-am", "two")
    git(copy, "checkout", "main")
    assert planned(copy) == {}


def test_comments_and_planning_rerun_nothing(copy):
    for path in (*copy.glob("scripts/*.py"), *copy.glob("src/*/**/*.py")):
        path.write_text("# A comment.\n" + path.read_text())
    for name in ("reproduction/plan.py", "statecut/cli.py", "statecut/pruning/prune.py"):
        path = copy / "src" / name
        path.write_text(path.read_text() + "\nprint()\n")
    assert planned(copy) == {}


def test_what_stands_in_for_kernels_computes_nothing_again_on_a_gpu(copy):
    path = copy / "src/statecut/models/plain_kernels.py"
    path.write_text(path.read_text() + "\nprint()\n")
    # But the report marks the preflight, which compares kernels with it.
    assert planned(copy) == {"page": 1}


def test_a_new_option_with_a_default_computes_nothing_again(copy):
    for module, section in [("benchmarks", "Preflight"), ("pruning", "CalibrationText"),
                            ("pruning", "MethodBase"), ("training", "Training"),
                            ("training", "Lora"), ("sources", "CorpusBase")]:  # fmt: skip
        path = copy / f"src/reproduction/config/{module}.py"
        head = rf'(class {section}\(Section\):\n(?:    """[^"]*"""\n\n)?)'
        text, count = re.subn(head, r"\1    added: int = 0\n", path.read_text())
        assert count == 1
        path.write_text(text)
    assert {*planned(copy)} <= REPORTED  # tables hold the settings of what they show


@pytest.mark.parametrize(
    ("module", "expected"),
    [("curves", {"page": 1}), ("figures/sweep", {"figure": 3, **PRINTED}), ("frame", REPORTED)],
)
def test_a_change_of_reporting_reports_again(copy, module, expected):
    path = copy / f"src/reproduction/reporting/{module}.py"
    path.write_text(path.read_text() + "\nprint()\n")
    jobs = planned(copy)
    assert jobs == expected if isinstance(expected, dict) else {*jobs} == expected


def label(*path):
    def change(config):
        for part in path[:-1]:
            config = config[part]
        config[path[-1]] = "other"

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (label("methods", "grad", "label"), {"table": 1, "figure": 1, **PRINTED}),
        (label("models", "delta_net_head", "label"), {"table": 1, **PRINTED}),
        (
            label("evaluation", "suites", "ppl", "tasks", "prose_word_ppl", "label"),
            {"table": 2, **PRINTED},
        ),
        (
            label("benchmarks", "mixer", "mixers", "delta_net_mixer", "label"),
            {"table": 1, "figure": 1, **PRINTED},
        ),
        (label("tables", "sharing", "caption"), {"table": 1, **PRINTED}),
        (label("figures", "filters", "caption"), PRINTED),
        (
            label("models", "delta_net_head", "published_as"),
            {"frame": 1, "union": 1, "verdict": 1, "table": 1, **PRINTED},
        ),
    ],
)
def test_what_is_only_shown_is_shown_again_and_nothing_is_computed(copy, change, expected):
    configure(copy, change)
    assert planned(copy) == expected


def test_how_a_batch_fits_into_a_gpu_reruns_nothing(copy):
    configure(copy, lambda config: config["recovery"].update(gradient_accumulation_steps=2))
    assert planned(copy) == {}


def test_a_width_more_is_timed_alone(copy):
    configure(copy, lambda config: config["benchmarks"]["mixer"]["widths"].append(8))
    assert planned(copy)["measure"] == 2  # of both mixers


def test_another_eps_cuts_the_same_channels_again(copy):
    configure(copy, lambda config: config.update(eps="kept"))
    jobs = {rule: count for rule, count in planned(copy).items() if rule not in REPORTED}
    assert jobs == {"slice": 2, "recover": 2, "evaluate": 4, "analyze": 2}


def test_a_method_more_reruns_no_other(copy):
    (copy / "src/statecut/pruning/methods/ghost.py").write_text(readme.method_file())
    assert planned(copy) == {}

    def use(config):
        config["methods"]["ghost"] = {"algorithm": "ghost"}
        config["tables"]["by_ratio"]["methods"] = [*METHODS, "ghost"]

    configure(copy, use)
    jobs = [line for line in snakemake(copy, "-n").splitlines() if line.startswith("Job ")]
    computed = [job for job in jobs if re.search("choosing|slicing|recovering|evaluating", job)]
    assert len(computed) == 5
    assert all("ghost" in job for job in computed)
    # It needs no gradients, so Grad's calibration is not its own.
    assert sum("calibrating" in job for job in jobs) == 1
    assert not any(re.search("training|analysing|measuring", job) for job in jobs)


def test_a_method_less_reruns_no_other(copy):
    def use(methods):
        def change(config):
            config["methods"]["drrqr"] = {"algorithm": "drrqr"}
            config["tables"]["by_ratio"]["methods"] = methods

        configure(copy, change)

    use([*METHODS, "drrqr"])
    pretend_finished(copy)
    use(["l1", "drrqr"])  # without Grad, no calibration needs gradients
    assert planned(copy).keys() <= REPORTED


def test_an_architecture_more_reruns_no_other(copy):
    (copy / "src/statecut/models/architectures/other.py").write_text(
        "from dataclasses import replace\n\nfrom statecut.models.architectures import delta_net\n\n"
        'ARCHITECTURE = replace(delta_net.ARCHITECTURE, model_type="other")\n'
    )
    assert {*planned(copy)} == {"figure", *PRINTED}


def test_code_of_an_architecture_evaluates_its_models_again(copy):
    adapter = copy / "src/statecut/models/architectures/gated_deltanet.py"
    adapter.write_text(adapter.read_text() + "\nunused = True\n")
    jobs = [line for line in snakemake(copy, "-n").splitlines() if line.startswith("Job ")]
    measured = [job for job in jobs if "measuring" in job]
    assert measured
    assert all("measuring mixer: gated_deltanet" in job for job in measured)
    assert not any(re.search("evaluating|analysing", job) for job in jobs)  # no model is of it


def test_another_colour_of_a_method_draws_figures_again(copy):
    edit(copy / "src/statecut/pruning/methods/grad.py", "#d37e17", "#d37e18")
    assert planned(copy) == {"figure": 1, **PRINTED}


def test_code_that_computes_a_result_reruns_it(copy):
    edit(copy / "scripts/evaluate.py", "    evaluate(\n", "    print()\n    evaluate(\n")
    evaluated = planned(copy)
    assert {*evaluated} == {"evaluate", *REPORTED} - {"figure"}
    edit(copy / "src/statecut/pruning/methods/grad.py", "return model", "return 2 * model")
    jobs = planned(copy)
    assert {rule: jobs[rule] for rule in ("score", "slice", "recover")} == {
        "score": 1, "slice": 1, "recover": 1,
    }  # fmt: skip
    assert not {"pretrain", "calibrate", "measure", "tokens"} & {*jobs}


def test_code_that_all_stages_share_evaluates_again_and_trains_nothing(copy):
    path = copy / "src/statecut/models/kernels.py"
    path.write_text(path.read_text() + "\nprint()\n")
    jobs = planned(copy)
    assert {"evaluate", "measure", "analyze"} <= {*jobs}
    assert not {"pretrain", "recover", "calibrate", "score", "slice"} & {*jobs}


def test_training_reruns_when_its_authors_say_so_and_until_then_the_report_marks_it(copy):
    path = copy / "src/statecut/recovery/loop.py"
    path.write_text(path.read_text() + "\nprint()\n")
    for name in ("pruning/slicing.py", "pruning/statistics.py"):
        path = copy / "src/statecut" / name
        path.write_text(path.read_text() + "\nunused = True\n")
    assert planned(copy) == {"page": 1}
    command = [sys.executable, "-m", "reproduction.running.code", "raise"]
    environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert "pretrain on cuda: version 2\nrecover on cpu: version 2" in done.stdout
    assert "score on cuda: version 2" in done.stdout
    assert "token" not in done.stdout
    jobs = planned(copy)
    assert jobs["pretrain"] == 2
    assert jobs["score"] == 2
    assert not {"tokens", "tokenizer", "text"} & {*jobs}


def test_a_table_of_refitted_models_refits_and_the_code_of_refit_does_so_again(copy):
    def use(config):
        table = {**config["tables"]["by_ratio"], "kind": "stages", "methods": ["grad"]}
        columns = {stage: ["ppl"] for stage in ("pre", "refit", "post", "refit_post")}
        config["tables"]["refit"] = {**table, "columns": columns}

    configure(copy, use)
    jobs = planned(copy)
    computed = {"refit": 1, "recover": 1}
    assert {rule: count for rule, count in jobs.items() if rule not in REPORTED} == {
        **computed, "evaluate": 3,
    }  # fmt: skip
    pretend_finished(copy)
    assert planned(copy) == {}
    path = copy / "src/statecut/pruning/refit.py"
    path.write_text(path.read_text() + "\nunused = True\n")
    assert {rule: count for rule, count in planned(copy).items() if rule not in REPORTED} == {
        **computed, "evaluate": 2,
    }  # fmt: skip


def test_other_text_counts_whatever_its_time(copy):
    text = copy / "text.jsonl"
    text.write_text('{"text": "none"}\n')
    os.utime(text, (0, 0))
    jobs = planned(copy)
    assert {"tokenizer", "tokens", "pretrain"} <= {*jobs}
    assert not {"measure", "preflight_shape"} & {*jobs}


def test_a_file_is_read_again_only_when_size_or_time_changed(tmp_path):
    path, notes = tmp_path / "text", tmp_path / "notes.json"
    path.write_text("one")
    os.utime(path, (1, 1))
    first = cached_sha256([path], notes)
    path.write_text("two")
    os.utime(path, (1, 1))
    assert cached_sha256([path], notes) == first
    path.touch()
    assert cached_sha256([path], notes) != first


def test_notes_of_many_files_are_written_once_and_only_if_something_is_new(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO")
    paths, notes = [tmp_path / str(i) for i in range(100)], tmp_path / "notes.json"
    for path in paths:
        path.write_text(path.name)
    written = []
    monkeypatch.setattr(digests, "write_json", lambda *one: written.append(write_json(*one)))
    found = cached_sha256(paths, notes)
    assert found == {str(path): sha256(path) for path in paths}
    assert cached_sha256(paths, notes) == found
    assert len(written) == 1
    assert caplog.text == ""
    monkeypatch.setattr(digests, "ANNOUNCE_FROM", 1)
    paths[7].write_text("other")
    paths[8].write_text("other")
    assert cached_sha256(paths, notes) != found
    assert caplog.messages == ["reading 2 new or changed files, 0.0 GB"]
