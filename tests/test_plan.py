"""`keycut plan`: the jobs are Snakemake's own, what is not measured is said, schedules add up."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from snakemake.exceptions import RuleException, WorkflowError

from keycut.artefact import read_json, write_json
from keycut.cli import main
from keycut.config import BASELINE, Shape, load_config, width
from keycut.errors import InputError
from keycut.plan.after import after_text, look_back, ran, write_figures
from keycut.plan.costs import Costs, Figure, Measured, Missing, estimate, read_costs
from keycut.plan.graph import Graph, _explained, read_graph
from keycut.plan.planning import Plan, afresh, make_plan, price
from keycut.plan.schedule import Capacity, Schedule, Task, critical_path, list_schedule
from keycut.plan.words import duration, size, table, to_text
from keycut.plan.work import RULES, Work, Works, parameters_at

ROOT = Path(__file__).parents[1]
NOTHING = Costs(measured=())

PROFILE = """
cores: 2
resources: ["gpu=4"]
set-resources:
  pretrain: {gpu: 2, runtime: 7}
"""

SHARES = """
cores: 2
resources: {gpu: 4}
default-resources: {gpu_shares: 4}
set-resources:
  measure: {gpu: 4}
"""


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the workflow in it and no results."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("workflow", "scripts", "config", "envs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "profiles" / "two").mkdir(parents=True)
    (folder / "profiles" / "two" / "config.yaml").write_text(PROFILE)
    return folder


@pytest.fixture(scope="session")
def demo(checkout: Path) -> Graph:
    with contextlib.chdir(checkout):
        return read_graph(configfile="config/demo.yaml", profile="profiles/two")


@pytest.fixture
def inside(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(checkout)
    return checkout


def figures(*found: Figure, gpus: int = 1, includes: tuple[str, ...] = ("start", "tuning")):
    return Measured(
        machine="a GPU" if gpus else "a CPU", gpus=gpus, command="by hand",
        includes=includes, figures=found,
    )  # fmt: skip


def a_second_each(*, gpus: int) -> Costs:
    """Every job takes a second, as if measured."""
    return Costs(
        measured=(figures(*(Figure(work=rule, seconds=1.0) for rule in RULES), gpus=gpus),)
    )


# The jobs


def test_the_jobs_are_those_that_the_configuration_needs(demo: Graph) -> None:
    config, counts = demo.config, Counter(job.rule for job in demo.jobs)
    recovered = {v for v in config.variants() if v.rft == "post"}
    assert config == load_config(ROOT / "config" / "demo.yaml")
    assert counts["pretrain"] == len(config.models)
    assert counts["evaluate"] == len(config.evaluations())
    assert counts["recover"] == len(recovered)
    assert counts["measure"] == len(config.measurements())
    assert counts["table"] == counts["frame"] == len(config.tables)
    assert counts["figure"] == len(config.figures)
    plan = make_plan(demo, NOTHING)
    assert {rule.rule: rule.jobs for rule in plan.rules} == counts
    assert plan.jobs == plan.to_run == len(demo.jobs)
    assert plan.submitted == plan.jobs - 1  # `all` only gathers files


def test_every_job_stands_after_those_that_it_needs(demo: Graph) -> None:
    assert all(before < place for place, job in enumerate(demo.jobs) for before in job.after)
    slices = [job for job in demo.jobs if job.rule == "slice"]
    assert all({demo.jobs[i].rule for i in job.after} == {"pretrain", "score"} for job in slices)


def test_the_profile_says_what_there_is_and_what_jobs_ask_for(demo: Graph) -> None:
    assert demo.capacity == Capacity(gpus=4, cores=2)
    assert {(job.gpus, job.limit_s) for job in demo.jobs if job.rule == "pretrain"} == {(2, 420.0)}
    assert {job.gpus for job in demo.jobs if job.rule == "score"} == {0}
    assert {job.cores for job in demo.jobs if job.rule == "tokens"} == {2}  # 16, had it so many


def test_the_work_of_every_rule_is_known() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "workflow" / "rules").glob("*.smk"))
    blocks = re.split(r"^ *rule (\w+):$", text, flags=re.MULTILINE)
    rules = dict(zip(blocks[1::2], blocks[2::2], strict=True))
    assert {name for name, body in rules.items() if "script:" in body} == set(RULES)


@pytest.mark.parametrize("kind", [RuleException, WorkflowError])
def test_what_snakemake_says_reaches_the_user(kind: type[Exception]) -> None:
    with pytest.raises(InputError, match="Snakemake: Missing input"), _explained([], None, None):
        raise kind("Missing input files for rule evaluate")


# Work


def test_a_cut_model_has_the_parameters_of_a_model_made_that_small() -> None:
    models = load_config(ROOT / "config" / "paper.yaml").models
    whole = models["gated_deltanet_370M"]
    narrow = whole.model_copy(update={"head_dim": 64, "expand_v": 4.0})
    assert parameters_at(whole, 64) == narrow.parameters
    for name in ("delta_net_370M", "delta_net_370M_head", "delta_net_370M_all"):
        narrow = models[name].model_copy(update={"expand_k": 76 / 128})
        assert parameters_at(models[name], 76) == narrow.parameters


def test_the_disk_of_a_calibration_is_that_of_its_tensors(demo: Graph) -> None:
    import torch

    from keycut.calibration import calibrate
    from keycut.models import create

    spec = demo.config.models["delta_net"]
    ids = torch.arange(16).view(1, 16)
    found = calibrate(create(spec.fla_config(), seed=0), [ids], tokens=16, sample_rows=4)
    work = Works(demo.config).of("calibrate", {"model": "delta_net", "seed": "0"})
    assert work.disk == sum(tensor.nbytes for tensor in found.tensors.values())


def test_what_a_recovery_of_the_paper_has_to_do() -> None:
    config = load_config(ROOT / "config" / "paper.yaml")
    works, model = Works(config), config.models["delta_net_370M"]
    half = works.of("recover", {"model": "delta_net_370M", "cut": "drrqr-kq-0.5-42"})
    assert half.tokens == 32_000 * 2048
    assert half.shape == Shape("delta_net", 8, 64, 8, 128)
    assert half.disk == 4 * parameters_at(model, 64)
    control = works.of("recover", {"model": "delta_net_370M", "cut": BASELINE})
    assert control.shape == Shape("delta_net", 8, 128, 8, 128)
    assert control.disk == 4 * model.parameters


def test_what_a_pretraining_and_packing_of_the_paper_have_to_do() -> None:
    config = load_config(ROOT / "config" / "paper.yaml")
    works = Works(config)
    assert works.of("pretrain", {"model": "delta_net_370M"}).tokens == 19064 * 32 * 8 * 2048
    packed = works.of("tokens", {"corpus": "fineweb_edu", "tokenizer": "llama"})
    assert packed.disk == 2 * packed.tokens == 2 * 2048 * (64 + 512 + 32000 + 4880384)


def test_all_jobs_of_a_configuration_have_a_width_that_exists(demo: Graph) -> None:
    works, models = Works(demo.config), demo.config.models
    widths = {width(models["delta_net"].head_k_dim, ratio) for ratio in (0.0, 0.5, 0.75)}
    shapes = {works.of(job.rule, job.wildcards).shape for job in demo.jobs} - {None}
    assert {shape.width for shape in shapes} == widths


# Costs


def test_the_nearest_size_counts_and_is_scaled() -> None:
    costs = Costs(
        measured=(
            figures(Figure(work="recover", parameters=100, tokens=10, seconds=1.0), gpus=0),
            figures(Figure(work="recover", parameters=5000, tokens=10, seconds=7.0)),
        )
    )
    near = estimate(costs, "recover", Work(parameters=200, tokens=30), 1, tunes=True)
    assert (near.seconds, near.gpus, near.missing) == (6.0, 0, ())
    far = estimate(costs, "recover", Work(parameters=10_000, tokens=30), 1, tunes=True)
    assert (far.seconds, far.gpus) == (42.0, 1)


def test_a_figure_does_not_reach_beyond_ten_times_its_size() -> None:
    costs = Costs(measured=(figures(Figure(work="slice", parameters=100, seconds=1.0)),))
    assert not estimate(costs, "slice", Work(parameters=1000), 0, tunes=False).missing
    beyond = estimate(costs, "slice", Work(parameters=1001), 0, tunes=False)
    assert beyond.missing == (Missing("slice", parameters=1001),)
    assert beyond.seconds == 0


def test_to_time_a_larger_model_takes_no_longer() -> None:
    costs = Costs(measured=(figures(Figure(work="measure", parameters=100, seconds=5.0)),))
    assert estimate(costs, "measure", Work(parameters=900), 1, tunes=False).seconds == 5.0


def test_a_figure_of_one_delta_rule_is_none_of_the_other() -> None:
    costs = Costs(
        measured=(
            figures(
                Figure(work="calibrate", seconds=1.0),
                Figure(work="calibrate", kernel="delta_net", seconds=2.0),
            ),
        )
    )
    assert estimate(costs, "calibrate", Work(kernel="delta_net"), 1, tunes=False).seconds == 2
    assert estimate(costs, "calibrate", Work(kernel="gated_deltanet"), 1, tunes=False).seconds == 1


def test_of_two_figures_for_the_same_the_later_counts() -> None:
    first, second = (figures(Figure(work="page", seconds=seconds)) for seconds in (1.0, 2.0))
    assert estimate(Costs(measured=(first, second)), "page", Work(), 0, tunes=False).seconds == 2


def test_a_suite_takes_as_long_as_its_tasks_and_misses_those_without_a_figure() -> None:
    tasks = [Figure(work="evaluate", of=name, seconds=3.0) for name in ("piqa", "wikitext")]
    costs = Costs(measured=(figures(*tasks),))
    known = estimate(costs, "evaluate", Work(of=("piqa", "wikitext")), 1, tunes=False)
    assert (known.seconds, known.missing) == (6.0, ())
    partly = estimate(costs, "evaluate", Work(of=("arc_easy", "piqa")), 1, tunes=False)
    assert (partly.seconds, partly.missing) == (3.0, (Missing("evaluate", "arc_easy"),))
    together = figures(Figure(work="evaluate", of="piqa+wikitext", seconds=4.0))
    costs = Costs(measured=(*costs.measured, together))
    whole = estimate(costs, "evaluate", Work(of=("piqa", "wikitext")), 1, tunes=False)
    assert whole.seconds == 4.0


def test_start_and_tuning_are_added_where_a_figure_is_without_them() -> None:
    bare = figures(
        Figure(work="recover", seconds=100.0),
        Figure(work="start", seconds=10.0),
        Figure(work="tuning", kernel="delta_net", seconds=1.0),
        includes=(),
    )
    work = Work(kernel="delta_net")
    costs = Costs(measured=(bare,))
    assert estimate(costs, "recover", work, 1, tunes=True).seconds == 111
    assert estimate(costs, "recover", work, 1, tunes=False).seconds == 110
    gated = estimate(costs, "recover", Work(kernel="gated_deltanet"), 1, tunes=True)
    assert gated.missing == (Missing("tuning", kernel="gated_deltanet"),)
    alone = Costs(measured=(bare.model_copy(update={"figures": bare.figures[:1]}),))
    assert Missing("start") in estimate(alone, "recover", work, 1, tunes=False).missing


def test_eight_gpus_take_an_eighth_of_the_time() -> None:
    costs = Costs(measured=(figures(Figure(work="pretrain", seconds=80.0)),))
    shared = estimate(costs, "pretrain", Work(), 8, tunes=False)
    assert (shared.seconds, shared.gpus) == (10.0, 8)


def test_a_share_of_a_gpu_is_as_fast_and_costs_a_part_of_its_hours() -> None:
    costs = Costs(measured=(figures(Figure(work="evaluate", seconds=80.0)),))
    shared = estimate(costs, "evaluate", Work(), 0.25, tunes=False)
    assert (shared.seconds, shared.gpus) == (80.0, 0.25)


def test_a_profile_with_shares_has_jobs_side_by_side_on_its_gpu(checkout: Path) -> None:
    profile = checkout / "profiles" / "shares"
    profile.mkdir()
    (profile / "config.yaml").write_text(SHARES)
    with contextlib.chdir(checkout):
        graph = read_graph(configfile="config/demo.yaml", profile="profiles/shares")
    assert graph.capacity == Capacity(gpus=1, cores=2)
    asked = {job.rule: job.gpus for job in graph.jobs}
    assert (asked["evaluate"], asked["measure"], asked["score"]) == (0.25, 1, 0)


def test_kernels_of_a_shape_are_tuned_once(demo: Graph) -> None:
    known = [Figure(work=rule, seconds=1.0) for rule in RULES]
    tuning = [*known, Figure(work="start", seconds=1e-9), Figure(work="tuning", seconds=1000.0)]
    costs = Costs(measured=(figures(*tuning, includes=()),))
    works = Works(demo.config)
    shapes = {works.of(job.rule, job.wildcards).shape for job in demo.jobs} - {None}
    tuned = [one for one in price(demo, costs) if one.cost.seconds > 1000]
    assert Counter(one.work.shape for one in tuned) == dict.fromkeys(shapes, 1)


def test_the_figures_of_the_repository_can_be_read_and_their_commands_exist() -> None:
    costs = read_costs(ROOT / "config" / "costs.yaml")
    assert costs.measured
    for measured in costs.measured:
        for script in re.findall(r"\S+\.py", measured.command):
            assert (ROOT / script).is_file()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("measured: [{machine: a}]", "measured.0.command: Field required"),
        ("measured: 3", "measured"),
        ("{", "cannot be read"),
        (
            "measured: [{machine: a, gpus: 0, command: b, figures: [{work: slise, seconds: 1}]}]",
            "work 'slise'; did you mean 'slice'?",
        ),
        (
            "measured: [{machine: a, gpus: 0, command: b, figures: [{work: page, seconds: 0}]}]",
            "greater than 0",
        ),
    ],
)
def test_a_mistake_in_the_figures_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "costs.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=re.escape(said)):
        read_costs(file)


# Schedules


@st.composite
def graphs(draw: st.DrawFn, most_gpus: int = 1) -> list[Task]:
    count = draw(st.integers(1, 12))
    return [
        Task(
            seconds=draw(st.integers(0, 20)),
            gpus=draw(st.integers(1, most_gpus)),
            after=tuple(draw(st.sets(st.integers(0, place - 1), max_size=3))) if place else (),
        )
        for place in range(count)
    ]


def in_use(schedule: Schedule, tasks: list[Task], when: float) -> int:
    running = zip(tasks, schedule.starts, schedule.ends, strict=True)
    return sum(task.gpus for task, start, end in running if start <= when < end)


def longest_chain(tasks: list[Task], place: int) -> float:
    """The obvious way: every chain that ends in a task."""
    before = (longest_chain(tasks, one) for one in tasks[place].after)
    return tasks[place].seconds + max(before, default=0)


@given(graphs(most_gpus=4), st.integers(4, 6))
def test_a_schedule_holds_back_what_must_wait_and_uses_no_more_than_there_is(tasks, gpus) -> None:
    schedule = list_schedule(tasks, Capacity(gpus=gpus))
    for place, task in enumerate(tasks):
        assert all(schedule.ends[before] <= schedule.starts[place] for before in task.after)
        assert schedule.ends[place] == schedule.starts[place] + task.seconds
        assert in_use(schedule, tasks, schedule.starts[place]) <= gpus
    used = sum(task.seconds * task.gpus for task in tasks)
    assert schedule.makespan >= critical_path(tasks)
    assert schedule.makespan >= used / gpus


@given(graphs(), st.integers(1, 5))
def test_a_schedule_is_no_longer_than_graham_allows(tasks, gpus) -> None:
    total, path = sum(task.seconds for task in tasks), critical_path(tasks)
    made = list_schedule(tasks, Capacity(gpus=gpus)).makespan
    assert made <= total / gpus + (1 - 1 / gpus) * path + 1e-9
    if gpus == 1:
        assert made == total


@given(graphs(most_gpus=4))
def test_without_a_limit_only_the_longest_chain_counts(tasks) -> None:
    longest = max(longest_chain(tasks, place) for place in range(len(tasks)))
    assert critical_path(tasks) == longest
    assert list_schedule(tasks, Capacity()).makespan == longest


def test_cores_and_jobs_are_limits_too() -> None:
    tasks = [Task(1.0, cores=16)] * 3
    assert list_schedule(tasks, Capacity(cores=2)).makespan == 3  # a job takes what there is
    assert list_schedule(tasks, Capacity(cores=32)).makespan == 2
    assert list_schedule(tasks, Capacity(jobs=3)).makespan == 1


@pytest.mark.parametrize("shares", [3, 5, 6, 7, 9, 10, 12, 16])
def test_shares_of_a_gpu_add_up_to_it(shares: int) -> None:
    tasks = [Task(1.0, gpus=1 / shares)] * 2 * shares
    # The whole of it is free again after them, which sums of floats may miss.
    tasks.append(Task(1.0, gpus=1.0, after=tuple(range(2 * shares))))
    assert list_schedule(tasks, Capacity(gpus=1)).makespan == 3


def test_a_job_with_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(InputError, match="4 GPUs: one job alone asks for 8"):
        list_schedule([Task(1.0, gpus=8)], Capacity(gpus=4))


# Plans


def test_without_figures_every_rule_is_named_and_nothing_is_guessed(demo: Graph) -> None:
    plan = make_plan(demo, NOTHING)
    assert {one.work for one in plan.missing} == {job.rule for job in demo.jobs if job.runs}
    assert plan.seconds == plan.gpu_seconds == 0
    text = to_text(plan)
    assert "wall time  not measured" in text
    assert "pretrain: builtin (delta_net 0.14M, gated_deltanet 0.15M)" in text
    assert "evaluate: demo_last_word, demo_prose, demo_choice, demo_recall" in text


def test_a_total_with_unknown_parts_says_so(demo: Graph) -> None:
    costs = Costs(measured=(figures(Figure(work="evaluate", seconds=36.0), gpus=1),))
    plan = make_plan(demo, costs)
    evaluated = next(rule for rule in plan.rules if rule.rule == "evaluate")
    assert evaluated.complete
    assert plan.gpu_seconds == evaluated.gpu_seconds == 36 * evaluated.jobs
    total = next(line for line in to_text(plan).splitlines() if line.startswith("total"))
    assert total.count(">=") == 2


def test_a_plan_with_all_figures_is_complete(demo: Graph) -> None:
    plan = make_plan(demo, a_second_each(gpus=1))
    assert plan.complete
    pretrained = len(demo.config.models)  # each on two GPUs, so in half a second
    assert plan.seconds == plan.submitted - pretrained / 2
    text = to_text(plan)
    assert ">=" not in text
    assert "not measured" not in text
    assert "measured on a GPU: by hand" in text
    (wall,) = plan.walls
    assert wall.capacity == Capacity(gpus=4, cores=2)
    assert wall.seconds >= max(plan.critical_path, plan.seconds / 2)


def test_a_machine_without_gpus_has_no_gpu_hours(demo: Graph) -> None:
    plan = make_plan(replace(demo, capacity=Capacity()), a_second_each(gpus=0))
    assert plan.gpu_seconds == 0
    assert [wall.capacity.cores for wall in plan.walls] == [1, 2, 4, 8, 16]
    assert plan.walls[0].seconds == plan.seconds
    for wall in plan.walls:
        assert wall.seconds >= max(plan.critical_path, plan.seconds / wall.capacity.cores)


def test_gpus_asked_for_or_several_to_choose_from(demo: Graph) -> None:
    free = replace(demo, capacity=Capacity(jobs=7))
    costs = a_second_each(gpus=1)
    assert [w.capacity for w in make_plan(free, costs, gpus=3).walls] == [Capacity(3, None, 7)]
    assert [w.capacity.gpus for w in make_plan(free, costs).walls] == [2, 4, 8, 16, 32]


def test_what_is_done_costs_nothing_but_disk(demo: Graph) -> None:
    done = replace(demo, jobs=tuple(replace(job, wanted=False) for job in demo.jobs))
    plan = make_plan(done, NOTHING)
    assert (plan.to_run, plan.submitted, plan.seconds, plan.missing) == (0, 0, 0, ())
    assert plan.disk == make_plan(demo, NOTHING).disk > 0
    assert "nothing is left to run" in to_text(plan)
    assert make_plan(afresh(done), NOTHING).to_run == len(demo.jobs)


def test_a_job_longer_than_its_limit_needs_several_attempts(demo: Graph) -> None:
    costs = Costs(measured=(figures(Figure(work="pretrain", seconds=2000.0)),))  # on 2 GPUs: 1000
    slurm = replace(demo, executor="slurm", retries=1)
    plan = make_plan(slurm, costs)
    pretrain = next(rule for rule in plan.rules if rule.rule == "pretrain")
    assert (pretrain.longest, pretrain.attempts) == (1000.0, 3)
    text = to_text(plan)
    assert "its limit is 7.0 min: 3 attempts, of which the profile allows 2" in text
    assert f"{plan.submitted} of them by slurm" in text
    local = make_plan(demo, costs)
    assert all(rule.attempts == 1 for rule in local.rules)  # nobody ends them


def test_the_plan_as_json_holds_what_the_text_says(demo: Graph, tmp_path: Path) -> None:
    plan: Plan = make_plan(demo, a_second_each(gpus=1), targets=["tables"])
    write_json(tmp_path / "plan.json", plan.as_json())
    found = read_json(tmp_path / "plan.json")
    assert found["jobs"] == plan.jobs
    assert found["gpu_seconds"] == plan.gpu_seconds
    assert sum(rule["disk"] for rule in found["rules"]) == found["disk"] == plan.disk
    assert found["measured"][0]["command"] == "by hand"
    assert found["walls"][0]["capacity"] == {"gpus": 4, "cores": 2, "jobs": None}


def test_words() -> None:
    assert [duration(s) for s in (0, 2.5, 89, 600, 7200, 400_000)] == [
        "0 s", "2.5 s", "89 s", "10 min", "2.0 h", "4.6 d",
    ]  # fmt: skip
    assert [size(b) for b in (0, 999, 1000, 2.5e9, 3e15)] == [
        "0 B", "999 B", "1.0 kB", "2.5 GB", "3,000 TB",
    ]  # fmt: skip
    assert table([["a", "1"], ["bcd", "22"]]) == ["a     1", "bcd  22"]


# After a run


@pytest.fixture
def finished(demo: Graph, inside: Path) -> Graph:
    """Timings as Snakemake leaves them: every score took 3 s, two evaluations two hours each."""
    scored = [job for job in demo.jobs if job.rule == "score"]
    evaluated = [job for job in demo.jobs if job.rule == "evaluate"][:2]
    for second, job in enumerate([*scored, *evaluated]):
        assert job.timing is not None
        seconds = 3 if job.rule == "score" else 7200
        Path(job.timing).parent.mkdir(parents=True, exist_ok=True)
        Path(job.timing).write_text(f"s\th:m:s\tmax_rss\n{seconds}\t0:00:03\t100.0\n")
        Path(job.outputs[0]).parent.mkdir(parents=True, exist_ok=True)
        Path(job.outputs[0]).write_bytes(b"x" * 1000)
        write_json(
            f"{job.outputs[0]}.provenance.json",
            {
                "gpus": ["a GPU", "another that it did not ask for"],
                "started": f"2026-01-01T00:00:{second:02d}Z",
            },
        )
    return demo


def test_after_a_run_planned_and_real_stand_side_by_side(finished: Graph) -> None:
    costs = Costs(measured=(figures(Figure(work="score", seconds=2.0), gpus=0),))
    found = ran("demo", price(afresh(finished), costs))
    after = look_back("demo", found)
    score, evaluated = after.rules
    assert (score.rule, score.ratio) == ("score", 1.5)
    assert score.took_s == 3 * score.jobs
    assert score.took_gpu_s == 0
    assert (evaluated.rule, evaluated.jobs, evaluated.ratio) == ("evaluate", 2, None)
    assert evaluated.took_gpu_s == 2 * 7200
    assert after.ratio == 1.5  # of what had a plan
    assert after.wall_s == score.jobs + 1 + 7200
    assert score.disk > 1000 * score.jobs  # its provenance too
    text = after_text(after)
    assert re.search(r"score +33 +66 s +1.6 min +1.50", text)
    assert re.search(r"evaluate +2 +not measured +4.0 h", text)


def test_the_figures_of_a_run_plan_the_next_one(finished: Graph, tmp_path: Path) -> None:
    found = ran("demo", price(afresh(finished), NOTHING))
    write_figures(tmp_path / "costs.yaml", "demo", found)
    costs = read_costs(tmp_path / "costs.yaml")
    assert {(m.machine, m.gpus) for m in costs.measured} >= {("a GPU", 1)}
    after = look_back("demo", ran("demo", price(afresh(finished), costs)))
    assert all(rule.complete for rule in after.rules)
    assert after.ratio == pytest.approx(1, rel=1e-3)
    assert {m.machine for one in price(finished, costs) for m in one.cost.by} == {
        m.machine for m in costs.measured
    }


def test_a_run_without_timings_is_refused(demo: Graph, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no job of demo has left a timing"):
        ran("demo", price(demo, NOTHING))


# The command line


def test_a_plan_from_the_command_line(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = "results/demo/tables/mixer_speed.tex"
    costs = {"measured": []}
    (inside / "costs.yaml").write_text(yaml.safe_dump(costs))
    out = inside / "plan.json"
    given = ["plan", target, "--configfile", "config/demo.yaml", "--costs", "costs.yaml"]
    assert main([*given, "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"demo: {target}, " in said
    found = read_json(out)
    mixers = len(load_config(ROOT / "config" / "demo.yaml").measurements("mixer"))
    assert {rule["rule"]: rule["jobs"] for rule in found["rules"]} == {
        "measure": mixers, "frame": 1, "table": 1,
    }  # fmt: skip


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
    (tmp_path / "costs.yaml").write_text("measured: []")
    assert main(["plan", "--costs", "costs.yaml"]) == 2
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
