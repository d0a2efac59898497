"""The workflow as Snakemake sees it, before anything runs."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from test_running_job import rules_on_a_gpu

from reproduction.config import JobConfig, Variant, load_config
from reproduction.rules import Inputs
from reproduction.running.paths import Paths
from statecut.errors import InputError
from statecut.files import write_json

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path):
    """A checkout without results."""
    for name in ("workflow", "scripts", "config", "profiles", "envs", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def snakemake(folder, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "--quiet", "host", "--cores", "1", *arguments],
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def counts(said):
    """Jobs by rule, from Snakemake's own statistics."""
    table = said.split("Job stats:")[1].split("total")[0]
    return {rule: int(count) for rule, count in re.findall(r"^(\w+) +(\d+)$", table, re.M)}


def test_the_papers_jobs_are_those_that_the_paper_implies(checkout):
    code, said = snakemake(checkout, "--configfile", "config/paper.yaml")
    assert code == 0, said
    found = counts(said)
    assert found["pretrain"] == 4  # 370M: separate filters, shared in a head, shared by all, gated
    assert found["import_model"] == 2  # the 1.3B models; of the 2.7B only its shape is timed
    seeds = 3
    assert found["calibrate"] == 10 * seeds  # of five models, with gradients and without
    recovered, controls = 4 * 5 * 4, 4  # models x methods x ratios, of one seed
    assert found["recover"] == recovered + controls
    targets = 4 * 4 * 2  # models x methods x keys or queries alone
    rotations = 2 * 2 * 2 + 2  # filters x rotations x ratios, and Grad with shared filters
    pruned = recovered + targets + rotations
    by_l1 = 4 * 4 + 4 * 2  # models x ratios, and x keys or queries: nothing is drawn there
    matched = 4 * 4 * 2 * seeds  # models x ratios x methods
    assert found["slice"] == seeds * (pruned - by_l1) + by_l1 + matched
    # One for all ratios: of four models by five methods, for keys or queries by four of them
    # (L1 draws nothing), and of two by rotations and Grad.
    assert found["score"] == 4 * (4 * seeds + 1) + 4 * 2 * (3 * seeds + 1) + (2 * 2 + 1) * seeds
    assert "refit" not in found  # no table of the paper's asks for it
    assert found["evaluate"] == 890
    assert found["measure"] == 107
    assert found["table"] == 22  # sixteen, and six of ours
    assert sum(found.values()) == 1750
    assert found["figure"] == 9  # six, and three of ours
    assert "demo" not in said
    assert "documentation" not in said


def test_one_table_of_the_paper_needs_only_its_own(checkout):
    code, said = snakemake(
        checkout, "results/paper/tables/adv_vs_non_adv.tex", "--configfile", "config/paper.yaml"
    )
    assert code == 0, said
    found = counts(said)
    assert found["pretrain"] == 2
    assert found["slice"] == 2 * 3 * 2 * 3  # models x methods x ratios x seeds
    assert found["evaluate"] == 36 + 2  # and the two unpruned
    assert not {"recover", "measure", "analyze", "import_model"} & {*found}


def test_what_is_refitted_is_sliced_before_and_recovered_after(checkout):
    target = "results/demo/tables/refit_recovered.tex"
    code, said = snakemake(checkout, target)
    assert code == 0, said
    found = counts(said)
    once = ("calibrate", "score", "slice", "refit")
    assert {rule: found[rule] for rule in once} == dict.fromkeys(once, 1)
    assert found["recover"] == 3  # as sliced, as refitted, and the unpruned model
    inputs = Inputs(load_config(ROOT / "config" / "demo.yaml"))
    cut = "drrqr-kq-0.75-0"
    students = {name: inputs.student("delta_net", name) for name in re.findall(
        r"recovering delta_net, (\S+)", said
    )}  # fmt: skip
    assert students == {
        "baseline": "results/demo/models/delta_net",
        f"{cut}-matched": f"results/demo/sliced/delta_net/{cut}-matched",
        f"{cut}-matched-refitted": f"results/demo/refitted/delta_net/{cut}-matched",
    }


def test_kept_cuts_have_the_paths_that_all_had_and_matched_ones_a_suffix():
    paths = Paths(load_config(ROOT / "config" / "demo.yaml"))
    folders = {"pre": "sliced", "refit": "refitted", "post": "recovered", "refit_post": "recovered"}
    for stage, folder in folders.items():
        kept = Variant("delta_net", "fisher", "kq", 0.5, 0, stage)
        matched = replace(kept, eps="matched")
        cut, end = f"{folder}/delta_net/fisher-kq-0.5-0", "-refitted" * (stage == "refit_post")
        assert (paths.subject(kept), paths.subject(matched)) == (cut + end, f"{cut}-matched{end}")
    both = Variant("delta_net", "fisher", "kq", "16x8", 0, "pre", "matched")
    assert paths.subject(both) == "sliced/delta_net/fisher-kq-16x8-0-matched"
    assert [Path(step).name for step in paths.steps(both)[2:-1]] == [
        "fisher-kq-0.safetensors", "fisher-v-0.safetensors",
    ]  # fmt: skip


def test_methods_with_gradients_have_a_calibration_of_their_own():
    inputs = Inputs(load_config(ROOT / "config" / "demo.yaml"))
    folders = {
        m: inputs.calibration("delta_net", m, "kq", "0") for m in ("drrqr", "grad", "fisher", "l1")
    }
    backward = "results/demo/calibrations/delta_net/0-gradients"
    assert folders == {
        "drrqr": "results/demo/calibrations/delta_net/0", "grad": backward, "fisher": backward,
        "l1": [],
    }  # fmt: skip
    assert inputs.calibration("delta_net", "fisher", "v", "0") == f"{backward}-values"


MODULE = """
configfile: "mine.yaml"

module statecut:
    snakefile: "{root}/workflow/Snakefile"
    config: config

use rule * from statecut as statecut_*
"""


def test_another_workflow_uses_it_as_a_module(tmp_path):
    (tmp_path / "Snakefile").write_text(MODULE.format(root=ROOT))
    text = (ROOT / "config/demo.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("run: demo", "run: mine").replace(
        "results/demo/", "results/mine/"))  # fmt: skip
    (tmp_path / "models").symlink_to(ROOT / "models")
    tokenizer = "results/mine/tokenizers/small"
    triggers = ("--cores", "1", "--rerun-triggers", "mtime", "params", "--")
    code, said = snakemake(tmp_path, *triggers, "results/mine/tables/small.tex")
    assert code == 0, said
    command = [sys.executable, "-m", "snakemake", *triggers, tokenizer]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / tokenizer / "tokenizer.json").stat().st_size


CAPS = {"recover": "recoveries", "evaluate": "evaluations"}


def test_in_the_lab_every_rule_on_a_gpu_has_shares_and_what_is_timed_has_all():
    profile = yaml.safe_load((ROOT / "profiles/lab/config.yaml").read_text())
    whole = profile["default-resources"]["gpu_slots"]
    assert profile["resources"]["gpu"] == whole
    shares = {rule: asked["gpu"] for rule, asked in profile["set-resources"].items()}
    assert {*shares} == {*rules_on_a_gpu()}
    assert shares["measure"] == whole
    assert all(0 < share <= whole for share in shares.values())
    # However many evaluations are ready, there is room for the recoveries, which take more.
    most = {rule: profile["resources"][name] for rule, name in CAPS.items()}
    assert all(profile["set-resources"][rule][name] == 1 for rule, name in CAPS.items())
    assert sum(count * shares[rule] for rule, count in most.items()) <= whole


def test_a_mistake_in_a_configuration_ends_the_dry_run(checkout):
    text = (ROOT / "config/paper.yaml").read_text()
    (checkout / "bad.yaml").write_text(text.replace("window: 10000", "window: 4096"))
    code, said = snakemake(checkout, "--configfile", "bad.yaml")
    assert code != 0
    assert "window: 4096, the paper's is 10000" in said


@pytest.mark.parametrize(
    "target",
    ["results/demo/tables/by_rato.tex", "results/demo/sliced/delta_net/drrqr-kq-0.6-0"],
)
def test_what_the_configuration_does_not_name_is_no_target(checkout, target):
    code, said = snakemake(checkout, target)
    assert code != 0
    assert "MissingRuleException" in said


def test_results_of_another_configuration_are_refused(checkout, monkeypatch):
    shutil.copy(ROOT / "config/demo.yaml", checkout / "mine.yaml")
    (checkout / "results/demo").mkdir(parents=True)
    (checkout / "results/demo/configuration.txt").write_text("config/demo.yaml\n")
    code, said = snakemake(checkout, "--configfile", "mine.yaml")
    assert code != 0
    assert (
        "results/demo holds the results of config/demo.yaml: give the run of mine.yaml another name"
    ) in said
    rehearsal = Paths(load_config(ROOT / "config/demo.yaml", rehearsal=True))
    monkeypatch.chdir(checkout)
    rehearsal.record_owner("config/paper.yaml")
    with pytest.raises(InputError, match=r"delete results/rehearsal to rehearse config"):
        rehearsal.check_owner("config/demo.yaml")


def test_every_rule_has_what_a_rule_must_have():
    """Log, resources, environment, code digest and message."""
    for file in sorted((ROOT / "workflow/rules").glob("*.smk")):
        for name, body in re.findall(r"^ *rule (\w+):\n((?: .*\n|\n)+)", file.read_text(), re.M):
            if "script:" not in body:
                continue  # a target
            wanted = ["log:", "conda:", "code=", "message:"]
            if file.name == "report.smk":
                wanted.append("settings=")  # which says whether the run is partial
            if "output:" in body and "localrule" not in body:
                wanted += ["resources:", "mem_mb=", "runtime="]
            body = body.replace("**LIGHT", "mem_mb= runtime=")
            missing = [word for word in wanted if word not in body]
            assert not missing, f"{file.name}, rule {name}: {missing}"
            assert (ROOT / f"scripts/{name}.py").is_file()


def test_a_trigger_that_would_train_again_for_a_touched_script_is_refused(checkout):
    code, said = snakemake(checkout, "--rerun-triggers", "code")
    assert code == 1
    assert "the rerun trigger `code` compares the times of scripts" in said


def test_every_profile_can_stand_in_for_the_default_one():
    for name in ("default", "demo", "lab", "slurm"):
        profile = yaml.safe_load((ROOT / "profiles" / name / "config.yaml").read_text())
        assert profile["rerun-triggers"] == ["mtime", "input", "params", "software-env"]


def test_linters_have_nothing_to_say(checkout):
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--lint"], cwd=checkout, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert "Congratulations" in done.stderr + done.stdout, done.stderr


def test_a_partial_run_reports_what_is_there_and_computes_nothing(checkout):
    code, said = snakemake(
        checkout, "--config", "partial=no time", "eps=kept", "--configfile", "config/lab.yaml"
    )
    assert code == 0, said
    found = counts(said)
    assert {*found} <= {"all", "document", "figure", "page", "table", "verdict"}
    assert found["figure"] == 2  # of the frames, which have a reason for every gap


def test_the_figures_of_a_partial_run_are_those_with_sources_or_drawn_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(ROOT / "config" / "demo.yaml")
    inputs = Inputs(config.model_copy(update={"partial": "no time"}))
    frames = {"quality", "state", "state_recovered"}  # whose gaps have their reasons
    assert {*inputs.figures()} == frames
    others = [Path(path) for path in Inputs(config).figure_sources("utilization")[1:]]
    drawn = [Path(inputs.paths.figure("filters", ending)) for ending in ("pdf", "svg")]
    shared = Path(Inputs(config).figure_sources("filters_shared")[0])
    for path in [*others, *drawn, shared / "loss.csv"]:  # a curve is no model
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    # Curves are drawn of the models that are there; two figures show the same ones.
    assert {*inputs.shown().figures} == {*frames, "utilization", "spectrum", "filters"}
    assert inputs.figure_sources("utilization") == [None, *map(str, others)]
    (shared / "model.safetensors").touch()
    assert {*inputs.drawable()} == {*frames, "utilization", "spectrum", "filters_shared"}
    assert Inputs(config).figures() == config.figures


@pytest.mark.parametrize("name", ["demo", "lab", "paper"])
def test_the_part_of_a_run_that_a_job_uses_is_enough_for_it(name):
    config = load_config(ROOT / "config" / f"{name}.yaml")
    inputs = Inputs(config)
    for table, spec in config.tables.items():
        part = JobConfig.model_validate(inputs.table_settings(table))
        shows = "cells" if hasattr(spec, "columns") else "timings"
        assert getattr(part, shows)(table) == getattr(config, shows)(table)
    for figure, spec in config.figures.items():
        part = JobConfig.model_validate(inputs.table_settings(figures=[figure]))
        shown = config.evaluations(*spec.tables) if hasattr(spec, "tables") else ()
        assert {*part.evaluations()} == {*shown}
        assert part.analyses() == config.analyses(figure)
    for cell in config.measurements():
        uses = inputs.cell_settings(cell.benchmark, Path(inputs.paths.measurement(cell)).stem)
        assert cell in JobConfig.model_validate(uses).measurements()
    for model in inputs.trained:
        part = JobConfig.model_validate(inputs.pretraining_settings(model))
        assert part.models[model].fla_config() == config.models[model].fla_config()
        (recipe,) = part.recipes.values()
        assert recipe.defining() == config.recipe_of(model).defining()
    for tokenizer in config.tokenizers:
        uses = JobConfig.model_validate(inputs.tokenizer_settings(tokenizer))
        assert uses.tokenizers[tokenizer] == config.tokenizers[tokenizer]
    for corpus, spec in config.corpora.items():
        assert JobConfig.model_validate(inputs.corpus_settings(corpus)).corpora[corpus] == spec
    for section in ("calibration", "preflight"):
        part = JobConfig.model_validate(inputs.section_settings(section))
        assert getattr(part, section) == getattr(config, section)
    for method, spec in config.methods.items():
        found = JobConfig.model_validate(inputs.method_settings(method)).methods[method]
        shown = {"label", "target", "colour", "dash"}
        assert found.model_dump(exclude=shown) == spec.model_dump(exclude=shown)
    for variant in inputs.recoveries.values():
        cut = Path(inputs.paths.subject(variant)).name
        part = JobConfig.model_validate(inputs.recovery_settings(variant.model, cut))
        assert part.recovery == config.recovery_of(variant).model_copy(
            update={"gradient_accumulation_steps": 1, "control": True, "seeds": None}
        )


def test_every_seed_of_a_run_recovers_with_a_draw_of_its_own():
    whole = load_config(ROOT / "config" / "paper.yaml")
    config = whole.model_copy(
        update={"recovery": whole.recovery.model_copy(update={"seeds": None})}
    )
    inputs = Inputs(config)

    def recovery(cut):
        settings = inputs.recovery_settings("delta_net_1.3B", cut)["recovery"]
        return settings["seed"], inputs.student("delta_net_1.3B", cut).rpartition("/")[2]

    assert [recovery(f"drrqr-kq-0.5-{seed}") for seed in (42, 43, 44)] == [
        (42, "drrqr-kq-0.5-42"), (43, "drrqr-kq-0.5-43"), (44, "drrqr-kq-0.5-44"),
    ]  # fmt: skip
    # L1 draws nothing: one student, three recoveries. The control is recovered once.
    assert [recovery(f"l1-kq-0.5-{seed}") for seed in (42, 43, 44)] == [
        (42, "l1-kq-0.5-0"), (43, "l1-kq-0.5-0"), (44, "l1-kq-0.5-0"),
    ]  # fmt: skip
    assert recovery("baseline") == (42, "delta_net_1.3B")


def test_another_commit_of_what_was_downloaded_is_another_input(tmp_path, monkeypatch):
    config = load_config(ROOT / "config" / "paper.yaml")
    monkeypatch.chdir(tmp_path)
    pin = {"revision": "main", "commit": "a" * 40, "patterns": [], "files": {}}
    models = {"fla-hub/transformer-1.3B-100B": pin}
    data = {"EleutherAI/lambada_openai": pin, "HuggingFaceFW/fineweb-edu": pin}
    write_json(tmp_path / "config" / "revisions.lock", {"models": models, "datasets": data})
    inputs = Inputs(config)
    assert inputs.commit("model", config.tokenizers["llama"]) == "a" * 40
    assert inputs.commit("dataset", config.corpora["fineweb_edu"]) == "a" * 40
    assert inputs.task_data("ppl") == {
        "wikitext_word_ppl": [
            "EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test", None,
        ],
        "lambada_ppl": ["EleutherAI/lambada_openai", "default", "test", "a" * 40],
    }  # fmt: skip
