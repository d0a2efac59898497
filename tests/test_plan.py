"""`reproduction plan`: the jobs are Snakemake's own, and cost what the nearest figure says."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reproduction.cli import main
from reproduction.config import TASKS, load_config
from reproduction.plan import (
    REQUESTS,
    SAME,
    SCALED,
    Figure,
    Graph,
    Job,
    Work,
    changed_parameters,
    duration,
    estimate,
    evaluation,
    parameters_at,
    read_figures,
    read_graph,
    row,
    spent,
    to_text,
    wall_time,
    work_of,
)
from reproduction.rules import Inputs
from statecut.errors import InputError
from statecut.models.checkpoint import Checkpoint, create, divide, save
from statecut.pruning.slicing import cut_back, slice_model

ROOT = Path(__file__).parents[1]
COSTS = read_figures(ROOT / "config" / "costs.yaml")
GPUS = [one for one in COSTS if one.gpus]
PAPER = load_config(ROOT / "config" / "paper.yaml")
SHARES = """{cores: 2, resources: {gpu: 4}, default-resources: {gpu_slots: 4},
             set-resources: {measure: {gpu: 4}}}"""


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the workflow in it, no data and no results."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("workflow", "scripts", "config", "envs", "models"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "profiles" / "shares").mkdir(parents=True)
    (folder / "profiles" / "shares" / "config.yaml").write_text(SHARES)
    (folder / "profiles" / "default").symlink_to(ROOT / "profiles" / "default")
    return folder


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


def test_the_profile_says_what_there_is_and_what_jobs_ask_for(checkout, inside) -> None:
    shared = read_graph(GPUS, configfile="config/demo.yaml", profile="profiles/shares")
    asked = {job.rule: job.gpus for job in shared.jobs}
    assert (shared.gpus, asked["evaluate"], asked["measure"], asked["score"]) == (1, 0.25, 1, 0)


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


@pytest.mark.parametrize("name", ["delta_net", "gated_deltanet"])
def test_a_sliced_model_takes_the_disk_that_is_planned(name: str, tmp_path: Path) -> None:
    model = load_config(ROOT / "config" / "demo.yaml").models[name]
    save(create(model.fla_config(), seed=0), tmp_path / "whole")
    divide(tmp_path / "whole")
    whole = Checkpoint(tmp_path / "whole")
    slice_model(whole, cut_back(whole.shape, 16), tmp_path / "cut", dtype=None, links=True)
    cut = Checkpoint(tmp_path / "cut")
    own = {shard for shard in cut.shards() if (cut.folder / shard).stat().st_nlink == 1}
    size = sum(tensor.nbytes for n, tensor in cut.headers() if cut.files[n] in own)
    assert size == 4 * changed_parameters(model, 0.5)


def test_what_jobs_of_the_paper_have_to_do() -> None:
    inputs, model = Inputs(PAPER), PAPER.models["delta_net_370M"]
    half = work_of(inputs, "recover", {"model": "delta_net_370M", "cut": "drrqr-kq-0.5-42"})
    assert half.tokens == 32_000 * 2048
    assert half.disk == 4 * changed_parameters(model, 0.5, recovered=True)
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

    for wall, power in zip(wall_time(jobs, gpus), (0, -1, 1), strict=True):
        chain = max(longest(place, power) for place in range(len(jobs)))
        assert wall == max(chain, sum(job.seconds(power) for job in jobs) / gpus)


def test_the_documents_quote_the_plan_of_the_paper(paper: Graph) -> None:
    hours = [round(seconds / 3600) for seconds in spent(paper.jobs, gpus=True)]
    walls = [duration(seconds) for seconds in wall_time(paper.jobs, 16)]
    text = (ROOT / "docs/workflow/run.md").read_text()
    assert "{} hours of an H200 ({} to {};".format(*hours) in text
    assert walls == ["11 h", "4.7 h", "29 h"]
    disk = round(sum(job.work.disk for job in paper.jobs) / 1e9)
    assert re.search(rf"11\s+hours on sixteen \(4\.7 to 29\), and {disk} GB of disk", text)


def test_the_documents_quote_the_plan_of_its_rehearsal(checkout: Path) -> None:
    with contextlib.chdir(checkout):
        jobs = read_graph(COSTS, configfile="config/paper.yaml", rehearsal=True).jobs
    hours = [duration(seconds).removesuffix(" h") for seconds in spent(jobs, gpus=True)]
    minutes = [duration(seconds).removesuffix(" min") for seconds in wall_time(jobs, 16)]
    text = " ".join((ROOT / "docs/workflow/run.md").read_text().split())
    assert "{} jobs, {} hours of an H200 ({} to {})".format(len(jobs), *hours) in text
    assert "{} minutes on sixteen ({} to {})".format(*minutes) in text
    assert f"and {sum(job.work.disk for job in jobs) / 1e9:.0f} GB of disk" in text


def test_the_plan_fits_on_a_screen_and_adds_up(paper: Graph) -> None:
    lines = to_text(paper, gpus=16).splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100
    rows = [line.split() for line in lines if re.match(r"\w+ +[\d,]+ +[\d,]+ ", line)]
    *rules, total = (int(row[1].replace(",", "")) for row in rows)
    assert sum(rules) == total == len(paper.jobs) == 1750  # as Snakemake's own table says
    with pytest.raises(InputError, match="--gpus 4: one job needs 8"):
        to_text(paper, gpus=4)


def test_what_is_done_costs_only_disk(paper: Graph) -> None:
    done = [replace(job, wanted=False) for job in paper.jobs]
    _, jobs, to_run, _, *times, disk = row("total", done)
    assert (jobs, to_run, times) == ("1,750", "0", [""] * 4)
    assert disk == row("total", paper.jobs)[-1]


# The command line


def test_a_plan_from_the_command_line(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = "results/demo/tables/mixer_speed.tex"
    assert main(["plan", "config/demo.yaml", target]) == 0
    printed = capsys.readouterr().out
    assert f"demo: {target}\n" in printed
    cells = load_config(ROOT / "config" / "demo.yaml").measurements("mixer")
    assert re.search(rf"^measure +{len(cells)} ", printed, flags=re.MULTILINE)
    assert main(["plan", "tabels"]) == 2
    assert "No rule to produce tabels" in capsys.readouterr().err
