"""What Snakemake would make again, and what it leaves alone: the contract with who has results.

A small run on a GPU is finished in pretence: its files are there, each with its provenance, and
Snakemake has noted them as made. Each test looks at a copy of it (`cp -a`), with something changed.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import readme
import yaml

from reproduction.running.code import PLANNED, ROOT

FOLDERS = ("models", "sliced", "refitted", "recovered", "tokenizers", "tokens", "calibrations")
PARTS = ("workflow", "scripts", "config", "profiles", "envs", "src")
METHODS = ["l1", "grad"]
# What follows when a table is printed, or a figure drawn again.
PRINTED = {"page": 1, "document": 1}
REPORTED = {"table", "figure", "verdict", *PRINTED}
TARGETS = ("all",)
# In the checkout under test: what each job would have noted of its parameters.
NOTE = """
import json
from pathlib import Path
from reproduction.dag import build_dag, parse_arguments
from reproduction.running.provenance import params_digest, provenance_path
with build_dag(parse_arguments(None, "small.yaml"), {targets}) as built:
    for job in built.dag.jobs:
        if job.output:
            record = {{"rule": job.rule.name, "params": params_digest(job.params)}}
            provenance_path(job.output[0]).write_text(json.dumps(record))
"""


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


def run(folder, *command):
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, env=environment
    )
    return done.returncode, done.stdout + done.stderr


def snakemake(folder, *arguments, targets=TARGETS):
    command = ("-m", "snakemake", *targets, "--cores", "1", "--configfile", "small.yaml")
    code, message = run(folder, *command, *arguments)
    assert code == 0, message
    return message


def jobs(message):
    """Jobs that would run, by rule."""
    if "Nothing to be done" in message:
        return {}
    table = message.split("Job stats:")[1].split("total")[0]
    counts = {rule: int(count) for rule, count in re.findall(r"^(\w+) +(\d+)$", table, re.M)}
    return {rule: count for rule, count in counts.items() if rule != "all"}


def planned(folder, targets=TARGETS):
    return jobs(snakemake(folder, "-n", targets=targets))


def computed(folder):
    """Of these, what does not only show results."""
    return {rule: count for rule, count in planned(folder).items() if rule not in REPORTED}


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
        if line.startswith("results/"):
            path = folder / line.split("\t")[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.relative_to(folder).parts[2] in FOLDERS or path.name == "verdict":
                path.mkdir(exist_ok=True)
                (path / "model.safetensors").touch()
            else:  # some are larger than what Snakemake compares
                large = path.suffix in (".safetensors", ".npz")
                path.write_bytes(b"0" * (1_100_000 if large else 9))
    snakemake(folder, "--touch", "--forceall")
    code, message = run(folder, "-c", NOTE.format(targets=TARGETS))
    assert code == 0, message


@pytest.fixture
def copy(finished, tmp_path):
    for name in (*PARTS, "results", ".snakemake", "text.jsonl", "small.yaml"):
        subprocess.run(["cp", "-a", finished / name, tmp_path / name], check=True)
    return tmp_path


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def append(path, text="\nprint()\n"):
    path.write_text(path.read_text() + text)


def configure(folder, change):
    config = configuration()
    change(config)
    (folder / "small.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def git(folder, *arguments):
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", *arguments], cwd=folder,
                   check=True, capture_output=True)  # fmt: skip


def test_touched_code_reruns_nothing_and_neither_does_another_commit_and_back(copy):
    for name in ("workflow", "scripts", "config", "src"):
        for path in (copy / name).rglob("*.*"):
            path.touch()
    assert planned(copy) == {}
    (copy / ".gitignore").write_text("results\n.snakemake\n__pycache__\n")
    git(copy, "init", "-b", "main")
    git(copy, "add", ".")
    git(copy, "commit", "-m", "one")
    git(copy, "checkout", "-b", "other")
    for path in [*copy.glob("scripts/*.py"), *copy.glob("workflow/templates/*"),
                 *copy.glob("src/statecut/**/*.py"), copy / "config/claims.yaml"]:  # fmt: skip
        append(path, "\nx = 1\n")
    git(copy, "commit", "-am", "two")
    git(copy, "checkout", "main")
    assert planned(copy) == {}


@pytest.mark.parametrize("latex", [False, True])
def test_where_latex_comes_later_the_document_alone_is_made(copy, monkeypatch, latex):
    for path in copy.glob("results/small/document.pdf*"):
        path.unlink()
    programs = copy / "bin"
    programs.mkdir()
    (programs / "which").symlink_to(shutil.which("which"))  # by which Snakemake looks for Slurm
    if latex:
        (programs / "pdflatex").touch(0o755)
    monkeypatch.setenv("PATH", str(programs))  # whatever else this machine has
    assert planned(copy, targets=()) == ({"document": 1} if latex else {})


def label(*path):
    def change(config):
        for part in path[:-1]:
            config = config[part]
        config[path[-1]] = "other"

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (label("methods", "grad", "label"), {"table": 1, "figure": 1}),
        (label("models", "delta_net_head", "label"), {"table": 1}),
        (label("benchmarks", "mixer", "mixers", "delta_net_mixer", "label"),
         {"table": 1, "figure": 1}),
        (label("tables", "sharing", "caption"), {"table": 1}),
        (lambda config: config["methods"]["grad"].update(colour="#d37e18"), {"figure": 1}),
    ],
)  # fmt: skip
def test_a_caption_label_or_colour_reprints_what_shows_it(copy, change, expected):
    configure(copy, change)
    follow = PRINTED | ({"verdict": 1} if "table" in expected else {})
    assert planned(copy) == expected | follow


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("config/claims.yaml", {"verdict", "page"}),
        ("config/published/errata.csv", {"verdict", "page"}),
        ("workflow/templates/table.tex.j2", REPORTED),
        ("src/reproduction/reporting/grid.py", REPORTED),
    ],
)
def test_templates_claims_and_published_values_count_by_content(copy, file, expected):
    path = copy / file
    text = path.read_text()
    append(path, "\n# other\n")
    assert {*planned(copy)} == expected
    path.write_text(text)
    assert planned(copy) == {}


def test_a_new_ratio_chooses_nothing_again(copy):
    configure(copy, lambda config: config["tables"]["by_ratio"]["ratios"].append(0.75))
    new = len(METHODS)
    assert computed(copy) == {"slice": new, "recover": new, "evaluate": 2 * new,
                              "preflight_shape": 1}  # fmt: skip


def test_widths_of_keys_and_values_are_cut_like_a_ratio(copy):
    def use(config):
        config["methods"]["drrqr"] = {"algorithm": "drrqr"}
        table = {**config["tables"]["by_ratio"], "kind": "stages", "methods": ["l1", "drrqr"]}
        config["tables"]["both"] = {**table, "ratios": ["16x24", "16x32", "32x16"]}

    configure(copy, use)
    # A calibration of keys and one of values for DRRQR; each side is chosen once.
    assert computed(copy) == {"calibrate": 2, "score": 3, "slice": 6, "recover": 6,
                              "evaluate": 12, "preflight_shape": 2}  # fmt: skip
    message = snakemake(copy, "-n")
    assert "choosing channels of delta_net: l1, v, seed 0" in message
    assert "choosing channels of delta_net: l1, kq" not in message  # those of a ratio serve


def test_a_new_model_plans_only_its_own(copy):
    def add(config):
        model = {**config["models"]["delta_net"], "label": "third"}
        config["models"]["delta_net.40M"] = model
        config["tables"]["by_ratio"]["models"] = ["delta_net"]
        config["tables"]["third"] = {**config["tables"]["sharing"], "caption": "third"}
        config["tables"]["third"]["models"] = ["delta_net.40M"]

    configure(copy, add)  # beside one that its name begins with
    assert computed(copy) == {"pretrain": 1, "evaluate": 2}
    message = snakemake(copy, "-n")
    assert message.count("delta_net.40M on ") == 2
    assert "training delta_net.40M" in message


def test_another_training_plans_only_its_own(copy):
    def train(config, times):
        config["models"]["delta_net"]["source"]["trainings"] = times

    configure(copy, lambda config: train(config, 2))
    assert computed(copy) == {}  # no table averages it

    def average(config):
        train(config, 3)
        config["tables"]["by_ratio"]["trainings"] = 2

    configure(copy, average)
    # L1 and Grad are sliced and recovered, and the model left whole is recovered.
    new = {"pretrain": 1, "calibrate": 1, "score": 2, "slice": 2, "recover": 3, "evaluate": 2 * 4}
    assert computed(copy) == new
    message = snakemake(copy, "-n")
    assert "training delta_net-training1" in message
    assert "delta_net-training2" not in message
    for name, wanted in (("delta_net", {}), ("delta_net-training1", new)):
        of_one = planned(copy, targets=(f"all_{name}",))
        assert {rule: n for rule, n in of_one.items() if rule in new} == wanted


def test_a_method_more_or_less_plans_no_other(copy):
    (copy / "src/statecut/pruning/methods/ghost.py").write_text(readme.method_file())
    assert planned(copy) == {}

    def use(config):
        config["methods"]["ghost"] = {"algorithm": "ghost"}
        config["tables"]["by_ratio"]["methods"] = ["l1", "ghost"]  # and no longer Grad
        config["figures"]["utilization"]["methods"] = ["l1"]

    configure(copy, use)
    message = snakemake(copy, "-n")
    shown = [line for line in message.splitlines() if line.startswith("Job ")]
    work = [job for job in shown if re.search("choosing|slicing|recovering|evaluating", job)]
    assert len(work) == 5
    assert all("ghost" in job for job in work)
    # It needs no gradients, so Grad's calibration is not its own.
    assert sum("calibrating" in job for job in shown) == 1
    assert not any(re.search("training|analysing|measuring", job) for job in shown)


def test_a_changed_method_file_plans_its_own_results(copy):
    edit(copy / "src/statecut/pruning/methods/grad.py", "return model", "return 2 * model")
    assert computed(copy) == {"score": 1, "slice": 1, "recover": 1, "evaluate": 2, "analyze": 1}


def test_a_changed_setting_of_recovery_plans_recoveries_and_what_follows(copy):
    configure(copy, lambda config: config["recovery"].update(steps=19))
    assert computed(copy) == {"recover": 3, "evaluate": 2 * 3}
    # How a batch fits into a GPU changes no result.
    configure(copy, lambda config: config["recovery"].update(gradient_accumulation_steps=2))
    assert planned(copy) == {}


def test_code_that_a_rule_names_makes_its_results_again(copy):
    append(copy / "src/statecut/pruning/slicing.py", "\n# A comment counts, too.\n")
    assert computed(copy) == {"slice": 2, "recover": 2, "evaluate": 4, "analyze": 2}


def test_a_raised_version_makes_a_stage_again_and_what_hangs_on_it(copy):
    append(copy / "src/statecut/recovery/loop.py")
    append(copy / "src/reproduction/suites/suite.py")
    append(copy / "scripts/recover.py")
    assert planned(copy) == {}
    edit(copy / "scripts/recover.py", "VERSION = 1", "VERSION = 2")
    assert computed(copy) == {"recover": 3, "evaluate": 2 * 3}


def test_a_width_more_is_timed_alone_and_code_of_timing_times_again(copy):
    configure(copy, lambda config: config["benchmarks"]["mixer"]["widths"].append(8))
    assert computed(copy) == {"measure": 2}  # of both mixers
    append(copy / "src/statecut/models/architectures/gated_deltanet.py")
    assert computed(copy) == {"measure": 2 + 2}
    append(copy / "src/reproduction/generation.py")  # which decodes
    assert computed(copy) == {"measure": 2 + 6}


def test_another_eps_cuts_the_same_channels_again(copy):
    configure(copy, lambda config: config.update(eps="kept"))
    assert computed(copy) == {"slice": 2, "recover": 2, "evaluate": 4, "analyze": 2}


def test_a_refitted_table_refits_and_the_code_of_refit_does_so_again(copy):
    def use(config):
        table = {**config["tables"]["by_ratio"], "kind": "stages", "methods": ["grad"]}
        columns = {stage: ["ppl"] for stage in ("pre", "refit", "post", "refit_post")}
        config["tables"]["refit"] = {**table, "columns": columns}

    configure(copy, use)
    assert computed(copy) == {"refit": 1, "recover": 1, "evaluate": 3}
    pretend_finished(copy)
    append(copy / "src/statecut/pruning/refit.py")
    assert computed(copy) == {"refit": 1, "recover": 1, "evaluate": 2}


def test_other_text_is_packed_and_trained_on_again(copy):
    (copy / "text.jsonl").write_text('{"text": "none"}\n')
    rules = {*planned(copy)}
    assert {"tokenizer", "tokens", "pretrain"} <= rules
    assert not {"measure", "preflight_shape"} & rules


def test_stale_results_without_a_record_stop_the_run_and_the_command_makes_them_again(copy):
    shutil.rmtree(copy / ".snakemake")
    assert planned(copy) == {}
    configure(copy, lambda config: config["recovery"].update(steps=19))
    edit(copy / "src/statecut/pruning/methods/grad.py", "return model", "return 2 * model")
    command = ("-m", "snakemake", *TARGETS, "--cores", "1", "--configfile", "small.yaml")
    selection = "results/small/selections/delta_net/grad-kq-0.safetensors"
    for dry in (("-n",), ()):
        code, message = run(copy, *command, *dry)
        assert code == 1
        stale = re.findall(r"^  (results/small/\S+)$", message, re.M)
        assert selection in stale
        assert sum("/recovered/delta_net/" in path for path in stale) == 3
        assert not any(part in path for path in stale for part in ("evaluations", "sharing"))
    _, *again = shlex.split(message.split("hangs on them:\n")[1].splitlines()[0])
    assert "recover" in again  # a rule, where all its results are stale
    rules = jobs(run(copy, "-m", "snakemake", *again, "-n")[1])
    assert {"score": 1, "slice": 1, "recover": 3, "evaluate": 2 * 3}.items() <= rules.items()


def test_a_stale_result_that_is_made_again_anyway_stops_nothing(copy):
    shutil.rmtree(copy / ".snakemake")
    (copy / "text.jsonl").touch()  # newer than all that was made of it
    configure(copy, lambda config: config["recovery"].update(steps=19))
    assert computed(copy)["recover"] == 3


def test_a_job_fails_if_its_code_was_edited_while_it_was_queued(copy, monkeypatch):
    """As Slurm starts it: with the variables of the process that planned it."""
    check = "from reproduction.running.code import check_code, code\n"
    check += "check_code('score', code('scripts/score.py'))"
    found = "from reproduction.running.code import PLANNED, code\nimport os\n"
    found += "code('scripts/score.py'); print(os.environ[PLANNED])"
    monkeypatch.delenv(PLANNED, raising=False)
    planned_code = run(copy, "-c", found)[1].strip()
    assert [*json.loads(planned_code)] == ["scripts/score.py"]
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), PLANNED: planned_code}

    def start():
        command = [sys.executable, "-c", check]
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)

    assert start().returncode == 0
    append(copy / "scripts/score.py")
    late = start()
    assert late.returncode
    assert "scripts/score.py was changed after this job of rule score was planned" in late.stderr
