"""`reproduction plan`: the jobs are Snakemake's own, and cost what the nearest figure says."""

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
from reproduction.plan import (
    REQUESTS,
    SAME,
    SCALED,
    Figure,
    Graph,
    Job,
    Work,
    estimate,
    evaluation,
    make_plan,
    parameters_at,
    read_figures,
    read_graph,
    to_text,
    wall_time,
    work_of,
)
from reproduction.rules import Inputs
from statecut.errors import InputError
from statecut.files import read_json

ROOT = Path(__file__).parents[1]
COSTS = read_figures(ROOT / "config" / "costs.yaml")
GPUS = [one for one in COSTS if one.gpus]
PAPER = load_config(ROOT / "config" / "paper.yaml")
PROFILES = {
    "two": '{cores: 2, resources: ["gpu=4"], set-resources: {pretrain: {gpu: 2}}}',
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
        return read_graph(COSTS, configfile="config/demo.yaml", profile="profiles/two")


@pytest.fixture(scope="session")
def paper(checkout: Path) -> Graph:
    with contextlib.chdir(checkout):
        return read_graph(COSTS, configfile="config/paper.yaml")


@pytest.fixture
def inside(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(checkout)
    return checkout


def figure(work: str, seconds: float, *, gpus: int = 1, start: bool = True, **more) -> Figure:
    return Figure(machine="a machine", gpus=gpus, command="by hand", includes_start=start,
                  work=work, seconds=seconds, **more)  # fmt: skip


def seconds(costs: list[Figure], rule: str, work: Work | None = None, **more) -> float:
    return estimate(costs, Job(rule, work or Work(), **more)).cost


# The jobs


def test_the_jobs_are_those_of_snakemakes_own_table(paper: Graph, inside: Path) -> None:
    command = [sys.executable, "-m", "snakemake", "-n", "--quiet", "rules", "--cores", "1",
               "--configfile", "config/paper.yaml"]  # fmt: skip
    table = subprocess.run(command, capture_output=True, text=True, check=True)
    counts = re.findall(r"^(\w+) +(\d+)$", table.stdout + table.stderr, flags=re.MULTILINE)
    printed = {rule: int(count) for rule, count in counts}
    assert printed.pop("total") == len(paper.jobs) == sum(printed.values())
    assert Counter(job.rule for job in paper.jobs) == printed
    plan = make_plan(paper, targets=[])
    assert {rule["rule"]: rule["to_run"] for rule in plan["rules"]} == printed


def test_without_its_files_the_lab_has_a_plan_and_says_what_is_missing(inside) -> None:
    targets = ["results/lab/tables/by_model.tex"]
    plan = make_plan(read_graph(COSTS, targets, configfile="config/lab.yaml"), targets=targets)
    assert "data/eval/wikitext2_test.raw" in plan["missing"]
    assert "missing files: data/corpus/" in to_text(plan)


def test_the_profile_says_what_there_is_and_what_jobs_ask_for(demo: Graph, inside) -> None:
    assert (demo.gpus, demo.cores) == (4, 2)
    assert {job.gpus for job in demo.jobs if job.rule == "pretrain"} == {0}  # as measured: a CPU
    assert {job.cores for job in demo.jobs if job.rule == "tokens"} == {2}  # 16, had it so many
    shared = read_graph(GPUS, configfile="config/demo.yaml", profile="profiles/shares")
    asked = {job.rule: job.gpus for job in shared.jobs}
    assert (shared.gpus, asked["evaluate"], asked["measure"], asked["score"]) == (1, 0.25, 1, 0)


def test_every_figure_is_of_a_rule_with_a_script_and_every_task_has_a_size() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "workflow" / "rules").glob("*.smk"))
    blocks = re.split(r"^ *rule (\w+):$", text, flags=re.MULTILINE)
    rules = dict(zip(blocks[1::2], blocks[2::2], strict=True))
    scripted = {name for name, body in rules.items() if "script:" in body}
    assert {one.work for one in COSTS} <= scripted | {"start", "forward", "step"}
    assert {*REQUESTS} == {*TASKS}


# Workload


def test_a_cut_model_has_the_parameters_of_a_model_made_that_small() -> None:
    whole = PAPER.models["gated_deltanet_370M"]
    narrow = whole.model_copy(update={"head_dim": 64, "expand_v": 4.0})
    assert parameters_at(whole, 0.75) == narrow.parameters
    narrow = whole.model_copy(update={"head_dim": 64, "expand_v": 2.0})
    assert parameters_at(whole, "64x128") == narrow.parameters
    for name in ("delta_net_370M", "delta_net_370M_head", "delta_net_370M_all"):
        narrow = PAPER.models[name].model_copy(update={"expand_k": 76 / 128})
        assert parameters_at(PAPER.models[name], 0.4) == narrow.parameters


def test_what_jobs_of_the_paper_have_to_do() -> None:
    inputs, model = Inputs(PAPER), PAPER.models["delta_net_370M"]
    half = work_of(inputs, "recover", {"model": "delta_net_370M", "cut": "drrqr-kq-0.5-42"})
    assert half.tokens == 32_000 * 2048
    assert half.disk == 4 * parameters_at(model, 0.5)
    control = work_of(inputs, "recover", {"model": "delta_net_370M", "cut": BASELINE})
    assert control.disk == 4 * model.parameters
    trained = work_of(inputs, "pretrain", {"model": "delta_net_370M"})
    assert trained.tokens == 19064 * 32 * 8 * 2048
    packed = work_of(inputs, "tokens", {"corpus": "fineweb_edu", "tokenizer": "llama"})
    assert packed.disk == 2 * packed.tokens == 2 * 2048 * (64 + 512 + 32000 + 4880384)


def test_an_evaluation_is_calls_of_the_model_and_tokens_that_it_reads() -> None:
    suites = PAPER.evaluation.suites
    ppl = evaluation(Work(), suites["ppl"])  # in batches of eight
    assert (ppl.of, ppl.steps) == ("lambada_openai+wikitext", 645 + 8)
    assert ppl.tokens == 5153 * 128 + 62 * 10_000
    retrieval = evaluation(Work(), suites["retrieval"])  # 64 prompts of 2,048 at a time
    batches = sum(-(-REQUESTS[t] // 64) for t in TASKS if "based" in t)
    # The prompt, the first token, the capture of a graph, and its 46 replays as three calls.
    assert retrieval.steps == 6 * batches


# Costs


def test_the_nearest_size_counts_and_is_scaled() -> None:
    costs = [
        figure("recover", 1.0, gpus=0, parameters=100, tokens=10),
        figure("recover", 7.0, parameters=5000, tokens=10),
    ]
    near = estimate(costs, Job("recover", Work(parameters=120, tokens=30), gpus=1))
    assert (near.cost, near.factor, near.gpus) == (pytest.approx(3.6), SAME, 0)
    far = estimate(costs, Job("recover", Work(parameters=20_000, tokens=30), gpus=1))
    assert (far.cost, far.factor, far.gpus) == (84.0, SCALED, 1)


def test_the_most_alike_then_the_later_figure_counts() -> None:
    costs = [figure("measure", 1.0, of="mixer-2048-forward"), figure("measure", 2.0, of="decoding")]
    assert seconds(costs, "measure", Work("mixer-2048-training"), gpus=1) == 1.0
    assert seconds([*costs, figure("measure", 3.0)], "measure", Work("model"), gpus=1) == 3.0
    assert seconds([figure("page", 1.0), figure("page", 2.0)], "page") == 2.0


def test_the_start_is_added_and_gpus_and_cores_share_the_work() -> None:
    costs = [figure("pretrain", 80.0, start=False), figure("start", 10.0),
             figure("tokens", 16.0, gpus=0, cores=1)]  # fmt: skip
    # A share of a GPU is as fast as all of it.
    assert [seconds(costs, "pretrain", gpus=n) for n in (0.25, 1, 8)] == [90, 90, 20]
    assert seconds(costs, "tokens", cores=8) == 2.0
    unknown = estimate(costs, Job("import_model"))
    assert (unknown.cost, unknown.factor) == (10, SCALED)


def test_an_evaluation_that_nobody_measured_is_made_of_steps_and_tokens() -> None:
    costs = [figure("evaluate", 5.0, of="piqa", parameters=10), figure("start", 1.0),
             figure("step", 0.5, tokens=1, start=False),
             figure("forward", 1.0, tokens=100, parameters=10, start=False)]  # fmt: skip
    same = Work("piqa", parameters=12, tokens=1000, steps=8)
    assert seconds(costs, "evaluate", same, gpus=1) == 6.0
    other = estimate(costs, Job("evaluate", replace(same, parameters=40), gpus=1))
    assert (other.cost, other.factor) == (8 * 0.5 + 10 * 4 + 1, SCALED)


def test_the_lab_estimated_by_figures_of_other_models_is_within_the_range() -> None:
    """What the range of scaled figures promises: models nine times smaller than those measured."""
    hybrid = 40_572_720  # its recovery is the one figure outside: 4.1 times
    lab = [f for f in COSTS if f.gpus and "profiles/lab" in f.command]
    others = [f for f in COSTS if "profiles/lab" not in f.command]
    outside = []
    for one in (f for f in lab if f.work in ("pretrain", "calibrate", "recover", "analyze")):
        work = Work(one.of, one.kernel, one.parameters, one.tokens)
        if not 1 / SCALED < one.seconds / seconds(others, one.work, work, gpus=1) < SCALED:
            outside.append((one.work, one.parameters))
    assert outside == [("recover", hybrid)]
    suites = load_config(ROOT / "config" / "lab.yaml").evaluation.suites
    start = next(f.seconds for f in others if f.work == "start")
    by_tasks = {evaluation(Work(), suite).of: suite for suite in suites.values()}
    for one in (f for f in lab if f.work == "evaluate"):
        work = evaluation(Work("", one.kernel, one.parameters), by_tasks[one.of])
        # They ran in processes that had started long before.
        ratio = (start + one.seconds) / seconds(others, "evaluate", work, gpus=1)
        assert 1 / SCALED < ratio < SCALED, one


# Plans


@st.composite
def graphs(draw: st.DrawFn) -> list[Job]:
    return [
        Job("page", after=tuple(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else (),
            gpus=1, wanted=draw(st.booleans()), cost=draw(st.integers(0, 20)),
            factor=draw(st.sampled_from([2, 4])))
        for i in range(draw(st.integers(1, 12)))
    ]  # fmt: skip


@given(graphs(), st.integers(1, 5))
def test_the_wall_time_is_the_longest_chain_or_the_work_over_all_gpus(jobs, gpus) -> None:
    def longest(place: int, power: int) -> float:
        """The obvious way: every chain that ends in a job."""
        before = (longest(one, power) for one in jobs[place].after)
        return jobs[place].seconds(power) + max(before, default=0)

    for wall, power in zip(wall_time(jobs, gpus, True), (0, -1, 1), strict=True):
        chain = max(longest(place, power) for place in range(len(jobs)))
        assert wall == max(chain, sum(job.seconds(power) for job in jobs) / gpus)


def test_the_table_adds_up_and_fits_on_a_screen(paper: Graph) -> None:
    plan = make_plan(paper, targets=[], gpus=16)
    hours = sum(job.cost * job.gpus for job in paper.jobs)
    low = sum(job.cost * job.gpus / job.factor for job in paper.jobs)
    total = plan["total"]
    assert total["gpu_seconds"][:2] == pytest.approx([hours, low])
    for key in ("jobs", "to_run", "disk"):
        assert total[key] == sum(rule[key] for rule in plan["rules"])
    assert plan["walls"]["on 16 GPUs"][0] == max(plan["walls"]["however many"][0], hours / 16)
    lines = to_text(plan).splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100
    assert re.search(r"recover \(\d+ of \d+\)", to_text(plan))
    with pytest.raises(InputError, match="--gpus 4: one job needs 8"):
        make_plan(paper, targets=[], gpus=4)
    walls = make_plan(paper, targets=[])["walls"]
    assert [*walls][:3] == ["on 8 GPUs", "on 16 GPUs", "on 32 GPUs"]


def test_the_documents_quote_the_plan_of_the_paper(paper: Graph) -> None:
    plan = make_plan(paper, targets=[], gpus=16)
    hours = [round(seconds / 3600) for seconds in plan["total"]["gpu_seconds"]]
    quoted = "{} hours of an H200 ({} to {};".format(*hours)
    assert quoted in (ROOT / "docs/workflow.md").read_text()


def test_a_machine_without_gpus_has_no_gpu_hours_and_what_is_done_costs_only_disk(demo) -> None:
    plan = make_plan(demo, targets=[])
    assert plan["total"]["gpu_seconds"] == [0, 0, 0]
    assert [*plan["walls"]] == ["on 2 cores", "however many"]
    done = demo._replace(jobs=[replace(job, wanted=False) for job in demo.jobs])
    after = make_plan(done, targets=[])
    assert (after["total"]["to_run"], after["total"]["seconds"][0]) == (0, 0)
    assert after["total"]["disk"] == plan["total"]["disk"] > 0
    assert "wall time" not in to_text(after)


# The command line


def test_a_plan_from_the_command_line(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, out = "results/demo/tables/mixer_speed.tex", inside / "plan.json"
    assert main(["plan", "config/demo.yaml", target, "--json", str(out)]) == 0
    assert f"demo: {target}, " in capsys.readouterr().out
    jobs = {rule["rule"]: rule["jobs"] for rule in read_json(out)["rules"]}
    cells = load_config(ROOT / "config" / "demo.yaml").measurements("mixer")
    assert jobs == {"measure": len(cells), "table": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tabels"], "target 'tabels': no rule makes it; did you mean 'tables'?"),
        (["nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["--gpus", "0"], "--gpus 0: must be 1 or more"),
        (["--costs", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_what_is_unknown_is_refused(inside, capsys, arguments, message) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_compare_prints_the_verdict_of_a_run(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results" / "demo" / "verdict"
    folder.mkdir(parents=True)
    (folder / "verdict.txt").write_text("holds        a claim\n")
    assert main(["compare", "demo"]) == 0
    assert capsys.readouterr().out == "holds        a claim\n"
    assert main(["compare", "dmo"]) == 2
    assert "there is no results/dmo/verdict; did you mean 'demo'?" in capsys.readouterr().err
