"""`reproduction plan`: the jobs are Snakemake's own, nothing costs nothing, scaled is said."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reproduction.cli import main
from reproduction.config import BASELINE, TASKS, load_config
from reproduction.plan.after import compare, comparison_text, finished_jobs, write_figures
from reproduction.plan.costs import (
    RULES,
    SAME,
    SCALED,
    Estimate,
    MeasuredCost,
    estimate,
    read_costs,
)
from reproduction.plan.graph import DagJob, Graph, read_graph
from reproduction.plan.planning import (
    Planned,
    duration,
    make_plan,
    price,
    table,
    to_text,
    wall_time,
)
from reproduction.plan.work import REQUESTS, Workload, Workloads, evaluation, parameters_at
from reproduction.running.code import KnownCode
from reproduction.running.provenance import Provenance
from statecut.errors import InputError
from statecut.files import read_json
from statecut.models.shapes import Shape

ROOT = Path(__file__).parents[1]
COSTS = read_costs(ROOT / "config" / "costs.yaml")
PAPER = load_config(ROOT / "config" / "paper.yaml")
PROFILES = {
    "two": '{cores: 2, resources: ["gpu=4"], set-resources: {pretrain: {gpu: 2, runtime: 7}}}',
    "shares": "{cores: 2, resources: {gpu: 4}, default-resources: {gpu_shares: 4}, "
    "set-resources: {measure: {gpu: 4}}}",
}


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the workflow in it, no data and no results."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("workflow", "scripts", "config", "envs", "models"):
        (folder / name).symlink_to(ROOT / name)
    for name, text in PROFILES.items():
        (folder / "profiles" / name).mkdir(parents=True)
        (folder / "profiles" / name / "config.yaml").write_text(text)
    (folder / "profiles" / "default").symlink_to(ROOT / "profiles" / "default")
    return folder


@pytest.fixture(scope="session")
def demo(checkout: Path) -> Graph:
    with contextlib.chdir(checkout):
        return read_graph(configfile="config/demo.yaml", profile="profiles/two")


@pytest.fixture(scope="session")
def paper(checkout: Path) -> Graph:
    with contextlib.chdir(checkout):
        return read_graph(configfile="config/paper.yaml")


@pytest.fixture
def inside(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(checkout)
    return checkout


def figure(work: str, seconds: float, *, gpus: int = 1, bare: bool = False, **more) -> MeasuredCost:
    includes = () if bare else ("start", "tuning")
    return MeasuredCost(
        machine="a machine", gpus=gpus, command="by hand", includes=includes, work=work,
        seconds=seconds, **more,
    )  # fmt: skip


def seconds(costs: list[MeasuredCost], rule: str, work: Workload, **more) -> float:
    return estimate(costs, rule, work, **more).seconds


# The jobs


def test_the_jobs_are_those_of_snakemakes_own_table(paper: Graph, inside: Path) -> None:
    command = [sys.executable, "-m", "snakemake", "-n", "--quiet", "rules", "--cores", "1",
               "--configfile", "config/paper.yaml"]  # fmt: skip
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    counts = re.findall(r"^(\w+) +(\d+)$", said.stdout + said.stderr, flags=re.MULTILINE)
    printed = {rule: int(count) for rule, count in counts}
    assert printed.pop("total") == len(paper.jobs) == sum(printed.values())
    assert Counter(job.rule for job in paper.jobs) == printed
    plan = make_plan(paper, COSTS)
    assert {rule["rule"]: rule["to_run"] for rule in plan["rules"]} == printed


def test_without_its_files_the_lab_has_the_same_jobs_and_says_what_is_missing(inside) -> None:
    targets = ["results/lab/tables/by_model.tex"]
    without = read_graph(targets, configfile="config/lab.yaml")
    assert "data/eval/wikitext2_test.raw" in without.missing
    for name in without.missing:
        path = inside / name.replace("*", "text")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    there = read_graph(targets, configfile="config/lab.yaml")
    assert (there.missing, there.jobs) == ((), without.jobs)
    assert "not there yet: data/corpus/" in to_text(make_plan(without, COSTS))


def test_every_job_stands_after_those_that_it_needs(demo: Graph) -> None:
    assert all(before < place for place, job in enumerate(demo.jobs) for before in job.after)
    slices = [job for job in demo.jobs if job.rule == "slice"]
    rules = [{demo.jobs[i].rule for i in job.after} for job in slices]
    assert all(after in ({"pretrain", "score"}, {"adopt", "score"}) for after in rules)


def test_the_profile_says_what_there_is_and_what_jobs_ask_for(demo: Graph, inside) -> None:
    assert (demo.gpus, demo.cores) == (4, 2)
    assert {(job.gpus, job.limit_s) for job in demo.jobs if job.rule == "pretrain"} == {(2, 420.0)}
    assert {job.cores for job in demo.jobs if job.rule == "tokens"} == {2}  # 16, had it so many
    shared = read_graph(configfile="config/demo.yaml", profile="profiles/shares")
    asked = {job.rule: job.gpus for job in shared.jobs}
    assert (shared.gpus, asked["evaluate"], asked["measure"], asked["score"]) == (1, 0.25, 1, 0)


def test_every_rule_with_a_script_and_every_task_is_known() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "workflow" / "rules").glob("*.smk"))
    blocks = re.split(r"^ *rule (\w+):$", text, flags=re.MULTILINE)
    rules = dict(zip(blocks[1::2], blocks[2::2], strict=True))
    assert {name for name, body in rules.items() if "script:" in body} == {*RULES}
    assert {*REQUESTS} == {*TASKS}


# Workload


def test_a_cut_model_has_the_parameters_of_a_model_made_that_small() -> None:
    whole = PAPER.models["gated_deltanet_370M"]
    narrow = whole.model_copy(update={"head_dim": 64, "expand_v": 4.0})
    assert parameters_at(whole, 0.75) == narrow.parameters
    for name in ("delta_net_370M", "delta_net_370M_head", "delta_net_370M_all"):
        narrow = PAPER.models[name].model_copy(update={"expand_k": 76 / 128})
        assert parameters_at(PAPER.models[name], 0.4) == narrow.parameters


def test_what_jobs_of_the_paper_have_to_do() -> None:
    works, model = Workloads(PAPER), PAPER.models["delta_net_370M"]
    half = works.of("recover", {"model": "delta_net_370M", "cut": "drrqr-kq-0.5-42"})
    assert (half.tokens, half.shape) == (32_000 * 2048, Shape("delta_net", 8, 64, 8, 128))
    assert half.disk == 4 * parameters_at(model, 0.5)
    control = works.of("recover", {"model": "delta_net_370M", "cut": BASELINE})
    assert (control.shape.width, control.disk) == (128, 4 * model.parameters)
    assert works.of("pretrain", {"model": "delta_net_370M"}).tokens == 19064 * 32 * 8 * 2048
    packed = works.of("tokens", {"corpus": "fineweb_edu", "tokenizer": "llama"})
    assert packed.disk == 2 * packed.tokens == 2 * 2048 * (64 + 512 + 32000 + 4880384)


def test_an_evaluation_is_calls_of_the_model_and_tokens_that_it_reads() -> None:
    suites = PAPER.evaluation.suites
    ppl = evaluation(Workload(), suites["ppl"])  # in batches of eight
    assert (ppl.of, ppl.steps) == ("lambada_openai+wikitext", 645 + 8)
    assert ppl.tokens == 5153 * 128 + 62 * 10_000
    retrieval = evaluation(Workload(), suites["retrieval"])  # 64 prompts of 2,048 at a time
    batches = sum(-(-REQUESTS[t] // 64) for t in TASKS if "based" in t)
    # The prompt, the first token, the capture of a graph, and its 46 replays as three calls.
    assert retrieval.steps == 6 * batches
    assert evaluation(Workload(), suites["retrieval"], as_graph=False).steps == 49 * batches


# Costs


def test_the_nearest_size_counts_and_is_scaled() -> None:
    costs = [
        figure("recover", 1.0, gpus=0, parameters=100, tokens=10),
        figure("recover", 7.0, parameters=5000, tokens=10),
    ]
    near = estimate(costs, "recover", Workload(parameters=120, tokens=30), gpus=1, tunes=True)
    assert near == Estimate(pytest.approx(3.6), SAME, 0, (), ("a machine",))
    far = estimate(costs, "recover", Workload(parameters=20_000, tokens=30), gpus=1)
    assert (far.seconds, far.gpus, far.factor) == (84.0, 1, SCALED)
    assert far.scaled == ("0.005M",)


def test_the_other_kernel_serves_where_there_is_none_of_its_own_and_is_said() -> None:
    costs = [figure("recover", 2.0, kernel="delta_net")]
    own = estimate(costs, "recover", Workload(kernel="delta_net"), gpus=1)
    other = estimate(costs, "recover", Workload(kernel="gated_deltanet"), gpus=1)
    assert (own.seconds, own.factor, own.scaled) == (2.0, SAME, ())
    assert (other.seconds, other.factor, other.scaled) == (2.0, SCALED, ("delta_net",))
    costs.append(figure("recover", 3.0, kernel="gated_deltanet"))
    assert seconds(costs, "recover", Workload(kernel="gated_deltanet"), gpus=1) == 3.0


def test_the_most_alike_then_the_later_figure_counts() -> None:
    costs = [figure("measure", 1.0, of="mixer-2048-forward"), figure("measure", 2.0, of="decoding")]
    assert seconds(costs, "measure", Workload("mixer-2048-training"), gpus=1) == 1.0
    assert seconds([*costs, figure("measure", 3.0)], "measure", Workload("model"), gpus=1) == 3.0
    assert seconds([figure("page", 1.0), figure("page", 2.0)], "page", Workload()) == 2.0
    # To time a larger model takes no longer.
    costs = [figure("measure", 5.0, parameters=100)]
    assert seconds(costs, "measure", Workload(parameters=900), gpus=1) == 5.0


def test_start_and_tuning_are_added_where_a_figure_is_without_them() -> None:
    costs = [figure("recover", 100.0, bare=True), figure("start", 10.0), figure("tuning", 1.0)]
    assert seconds(costs, "recover", Workload(), gpus=1, tunes=True) == 111
    assert seconds(costs, "recover", Workload(), gpus=1) == 110
    alone = estimate(costs, "adopt", Workload())
    assert (alone.seconds, alone.scaled) == (10, ("start alone",))
    with pytest.raises(InputError, match="recover: the costs have no figure of 'start'"):
        estimate(costs[:1], "recover", Workload())


def test_more_gpus_and_cores_share_the_work_and_a_share_is_as_fast_as_all() -> None:
    costs = [figure("pretrain", 80.0), figure("tokens", 16.0, gpus=0, cores=1)]
    eight = estimate(costs, "pretrain", Workload(), gpus=8)
    assert (eight.seconds, eight.factor, eight.scaled) == (10.0, SAME, ("1 GPU",))
    assert seconds(costs, "pretrain", Workload(), gpus=0.25) == 80.0
    assert seconds(costs, "tokens", Workload(), cores=8) == 2.0


def test_an_evaluation_that_nobody_measured_is_made_of_steps_and_tokens() -> None:
    costs = [figure("evaluate", 5.0, of="piqa", parameters=10), figure("start", 1.0),
             figure("step", 0.5, tokens=1, bare=True),
             figure("forward", 1.0, tokens=100, parameters=10, bare=True)]  # fmt: skip
    same = Workload("piqa", parameters=12, tokens=1000, steps=8)
    assert seconds(costs, "evaluate", same, gpus=1) == 6.0
    other = estimate(costs, "evaluate", replace(same, parameters=40), gpus=1)
    assert other.seconds == 8 * 0.5 + 10 * 4 + 1
    assert other.scaled == ("step", "forward 1e-05M")


def test_a_refit_that_nobody_measured_is_made_of_four_passes_over_its_text() -> None:
    demo = load_config(ROOT / "config" / "demo.yaml")
    wildcards = {"model": "delta_net", "method": "fisher", "target": "kq", "ratio": "0.75"}
    work = Workloads(demo).of("refit", wildcards)
    assert (work.tokens, work.steps) == (4 * 16 * 128, 4 * 2)
    assert work.disk == 4 * parameters_at(demo.models["delta_net"], 0.75)
    costs = [figure("refit", 2.0, gpus=0, parameters=1), figure("start", 1.0),
             figure("step", 0.5, tokens=1, bare=True),
             figure("forward", 1.0, tokens=work.tokens, bare=True)]  # fmt: skip
    assert seconds(costs, "refit", work, gpus=1) == 8 * 0.5 + 1 + 1


def test_nothing_of_the_paper_is_free_and_gated_recoveries_count_like_the_others(paper) -> None:
    planned = [one for one in price(paper, COSTS) if one.job.runs]
    assert min(one.cost.seconds for one in planned) > 0.5
    recovered = {one.work.kernel: one for one in planned if one.job.rule == "recover"}
    plain, gated = recovered["delta_net"], recovered["gated_deltanet"]
    sizes = plain.work.parameters / gated.work.parameters
    assert plain.cost.seconds == pytest.approx(gated.cost.seconds * sizes, rel=0.05)
    evaluated = [one.cost for one in planned if one.job.rule == "evaluate"]
    assert all(40 < cost.seconds < 3600 and cost.scaled for cost in evaluated)


def test_the_lab_estimated_by_figures_of_other_models_is_within_the_range() -> None:
    """What the range of scaled figures promises: models nine times smaller than those measured."""
    lab = [f for f in COSTS if f.gpus and "profiles/lab" in f.command and f.work != "measure"]
    others = [f for f in COSTS if "profiles/lab" not in f.command]
    suites = load_config(ROOT / "config" / "lab.yaml").evaluation.suites
    for one in (f for f in lab if f.work in ("pretrain", "calibrate", "recover", "analyze")):
        work = Workload(one.of, one.kernel, one.parameters, one.tokens)
        tuned, later = (
            estimate(others, one.work, work, gpus=1, tunes=tunes).seconds
            for tunes in (one.work != "analyze", False)
        )  # a figure is the mean of jobs of which some were the first of their shape
        assert later / SCALED < one.seconds < tuned * SCALED, one
    start = next(f.seconds for f in others if f.work == "start")
    by_tasks = {evaluation(Workload(), suite).of: suite for suite in suites.values()}
    for one in (f for f in lab if f.work == "evaluate"):
        work = evaluation(Workload("", one.kernel, one.parameters), by_tasks[one.of])
        found = estimate(others, "evaluate", work, gpus=1)
        # They ran in processes that had started long before.
        assert 1 / SCALED < (start + one.seconds) / found.seconds < SCALED, one


def test_the_commands_behind_the_figures_exist() -> None:
    scripts = {script for one in COSTS for script in re.findall(r"\S+\.py", one.command)}
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("measured: [{machine: a, gpus: 0, figures: [{work: page, seconds: 1}]}]", "command: Fiel"),
        ("measured: 3", "cannot be read as measured figures"),
        ("{", "cannot be read"),
        ("measured: [{machine: a, gpus: 0, command: b, figures: [{work: slise, seconds: 1}]}]",
         "work: Input should be 'download'"),
        ("measured: [{machine: a, gpus: 0, command: b, figures: [{work: page, seconds: 0}]}]",
         "seconds: Input should be greater than 0"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_figures_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "costs.yaml").write_text(text)
    with pytest.raises(InputError, match=re.escape(said)):
        read_costs(tmp_path / "costs.yaml")


# Plans


@st.composite
def graphs(draw: st.DrawFn) -> list[Planned]:
    return [
        Planned(
            DagJob("page", {}, (), None, tuple(draw(st.sets(st.integers(0, i - 1), max_size=3)))
                if i else (), 1, 1, None, None, True, draw(st.booleans())),
            Workload(), Estimate(draw(st.integers(0, 20)), draw(st.sampled_from([2, 4])), 1),
        )
        for i in range(draw(st.integers(1, 12)))
    ]  # fmt: skip


@given(graphs(), st.integers(1, 5))
def test_the_wall_time_is_the_longest_chain_or_the_work_over_all_gpus(planned, gpus) -> None:
    def longest(place: int, power: int) -> float:
        """The obvious way: every chain that ends in a job."""
        before = (longest(one, power) for one in planned[place].job.after)
        return planned[place].seconds(power) + max(before, default=0)

    for found, power in zip(wall_time(planned, gpus, True), (0, -1, 1), strict=True):
        chain = max(longest(place, power) for place in range(len(planned)))
        assert found == max(chain, sum(one.seconds(power) for one in planned) / gpus)


def test_the_table_adds_up_and_fits_on_a_screen(paper: Graph) -> None:
    plan = make_plan(paper, COSTS, gpus=16)
    planned = price(paper, COSTS)
    hours = sum(one.cost.seconds * one.cost.gpus for one in planned)
    low = sum(one.cost.seconds * one.cost.gpus / one.cost.factor for one in planned)
    total = plan["total"]
    assert total["gpu_seconds"][:2] == pytest.approx([hours, low])
    for key in ("jobs", "to_run", "disk"):
        assert total[key] == sum(rule[key] for rule in plan["rules"])
    assert plan["walls"]["on 16 GPUs"][0] == max(plan["walls"]["however many"][0], hours / 16)
    lines = to_text(plan).splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100
    assert re.search(r"recover: \d+ of \d+ jobs \(x/ 4\) from delta_net", to_text(plan))
    with pytest.raises(InputError, match="--gpus 4: one job alone asks for 8"):
        make_plan(paper, COSTS, gpus=4)
    assert [*make_plan(paper, COSTS)["walls"]][:3] == ["on 8 GPUs", "on 16 GPUs", "on 32 GPUs"]


def test_a_machine_without_gpus_has_no_gpu_hours_and_what_is_done_costs_only_disk(demo) -> None:
    plan = make_plan(demo, COSTS)
    assert plan["total"]["gpu_seconds"] == [0, 0, 0]
    assert [*plan["walls"]] == ["on 2 cores", "however many"]
    done = replace(demo, jobs=tuple(replace(job, wanted=False) for job in demo.jobs))
    after = make_plan(done, COSTS)
    assert (after["total"]["to_run"], after["total"]["seconds"][0], after["scaled"]) == (0, 0, {})
    assert after["total"]["disk"] == plan["total"]["disk"] > 0
    assert "wall time" not in to_text(after)


def test_words() -> None:
    said = ["", "2.5 s", "89 s", "10 min", "2.0 h", "111 h"]
    assert [duration(s) for s in (0, 2.5, 89, 600, 7200, 400_000)] == said
    assert table([["a", "1"], ["bcd", "22"]]) == ["a     1", "bcd  22"]


# After a run


@pytest.fixture
def finished(demo: Graph, tmp_path, monkeypatch) -> Graph:
    """Timings as Snakemake leaves them: every score took 3 s, two evaluations two hours each."""
    monkeypatch.chdir(tmp_path)
    scored = [job for job in demo.jobs if job.rule == "score"]
    evaluated = [job for job in demo.jobs if job.rule == "evaluate"][:2]
    for second, job in enumerate([*scored, *evaluated]):
        for path in map(Path, (job.timing, job.outputs[0])):
            path.parent.mkdir(parents=True, exist_ok=True)
        took = 3 if job.rule == "score" else 7200
        params = "x" * 200_000  # as the report's, with `benchmark-extended`
        Path(job.timing).write_text(
            f"s\th:m:s\tmax_rss\tparams\n{took}\t0:00:03\t100.0\t{params}\n"
        )
        Path(job.outputs[0]).write_bytes(b"x" * 1000)
        record = Provenance(
            rule=job.rule, wildcards={}, inputs=[], code=KnownCode("score.py", []), commit=None,
            versions={}, machine="", slurm_job=None, threads=1, seconds=took,
            gpus=["a GPU", "another that it did not ask for"],
            started=f"2026-01-01T00:00:{second:02d}Z",
        )  # fmt: skip
        record.write(job.outputs[0])
    return demo


def test_after_a_run_planned_and_real_stand_side_by_side(finished: Graph) -> None:
    costs = [figure("score", 2.0, gpus=0), figure("evaluate", 3600.0), figure("start", 1.0),
             figure("tuning", 1.0)]  # fmt: skip
    found = finished_jobs("demo", price(finished, costs))
    score, evaluated, total = compare(found)
    assert (score["rule"], score["took_s"]) == ("score", 1.5 * score["planned_s"])
    assert (score["took_gpu_s"], evaluated["took_gpu_s"]) == (0, 2 * 7200)
    assert score["disk"] > 1000 * score["jobs"]  # its provenance too
    assert total["jobs"] == len(found)
    text = comparison_text("demo", found)
    assert re.search(r"score +41 +82 s +2.[01] min +1.50", text)
    assert re.search(r"evaluate +2 +2.0 h +4.0 h +2.00 +2.0 h +4.0 h", text)
    assert "from the first start to the last end: 2.0 h" in text


def test_the_figures_of_a_run_plan_the_next_one(finished: Graph, tmp_path: Path) -> None:
    found = finished_jobs("demo", price(finished, COSTS))
    write_figures(tmp_path / "costs.yaml", "demo", found)
    costs = read_costs(tmp_path / "costs.yaml")
    assert {(one.machine, one.gpus) for one in costs} >= {("a GPU", 1)}
    again = compare(finished_jobs("demo", price(finished, [*COSTS, *costs])))
    assert all(row["took_s"] == pytest.approx(row["planned_s"], rel=1e-3) for row in again)
    with pytest.raises(InputError, match="no job of demo has left a timing"):
        finished_jobs("demo", price(finished, COSTS)[:3])


# The command line


def test_a_plan_from_the_command_line(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, out = "results/demo/tables/mixer_speed.tex", inside / "plan.json"
    assert main(["plan", target, "--configfile", "config/demo.yaml", "--json", str(out)]) == 0
    assert f"demo: {target}, " in capsys.readouterr().out
    found = {rule["rule"]: rule["jobs"] for rule in read_json(out)["rules"]}
    cells = load_config(ROOT / "config" / "demo.yaml").measurements("mixer")
    assert found == {"measure": len(cells), "frame": 1, "table": 1}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tabels"], "target 'tabels': no rule makes it; did you mean 'tables'?"),
        (["--configfile", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["--profile", "profiles/tow"], "did you mean 'profiles/two'?"),
        (["--gpus", "0"], "--gpus 0: must be 1 or more"),
        (["--figures", "x.yaml"], "give --after with it"),
        (["--costs", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_what_is_unknown_is_refused(inside, capsys, arguments, said) -> None:
    assert main(["plan", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_elsewhere_than_in_the_checkout_it_is_refused(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--costs", str(ROOT / "config" / "costs.yaml")]) == 2
    assert "run this in the folder of the checkout" in capsys.readouterr().err


def test_compare_prints_the_verdict_of_a_run(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results" / "demo"
    folder.mkdir(parents=True)
    assert main(["compare", "demo"]) == 2
    assert "results/demo/verdict is not there yet" in capsys.readouterr().err
    assert main(["compare", "dmo"]) == 2
    assert "did you mean 'demo'?" in capsys.readouterr().err
    (folder / "verdict").mkdir()
    (folder / "verdict" / "verdict.txt").write_text("holds        a claim\n")
    assert main(["compare", "demo"]) == 0
    assert capsys.readouterr().out == "holds        a claim\n"
