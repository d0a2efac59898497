"""What a run costs, before anything runs: jobs, GPU hours, wall time and disk, rule by rule.

Snakemake's dry run gives the jobs, the configuration the work of each, and config/costs.yaml how
long that takes: the nearest measured figure, scaled by tokens and parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from math import ceil, log
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import Field, PositiveFloat, PositiveInt

from reproduction.config import TASKS, Cut, MixerBenchmark, Model, Suite
from reproduction.config.evaluation import REQUESTS
from reproduction.config.models import SECTIONS, cut_shape
from reproduction.config.section import Section
from reproduction.dag import build_dag, parse_arguments
from reproduction.rules import Inputs, read_cut
from statecut.errors import InputError
from statecut.models.shapes import Kernel, MixerShape

WEIGHT = 4  # bytes: models are kept in float32, and those of the hub are no wider
TRAINED = 3 * 12  # bytes: three checkpoints, each with a parameter and AdamW's two moments
# Of an evaluation: tokens of a batch whose size is not set, and of a choice with its context. An
# answer of 48 tokens takes as long as five calls of the model: the first token, the capture of a
# graph, and 46 replays, 20 to a call (16 sequences of a 1.3B: benchmarks/h200/speed.json).
BATCH, CHOICE, CALLS_PER_ANSWER = 1 << 17, 128, 5
CHOICES = 4  # of a document, at most
# Of a refit: once through the unpruned model, three times through the pruned; sequences per call.
PASSES, REFIT_BATCH = 4, 8

CLOSE = log(2)
SAME, SCALED = 2.0, 4.0
"""A job may take so many times more or less than estimated: by a figure of the same work, kernel
and, up to a factor of two, size; and by another. The rules of the lab took 0.1 to 2.1 times their
estimates, by minutes of an H200 (2026-11-17)."""
POWERS = (0, -1, 1)  # of this factor: the estimate, the least and the most


class Figure(Section):
    """One measurement; config/costs.yaml says at its top what each key means."""

    machine: str
    gpus: int = Field(ge=0)
    cores: PositiveInt | None = None
    command: str
    includes_start: bool = False
    work: str
    of: str = ""
    kernel: Kernel | None = None
    parameters: PositiveInt | None = None
    tokens: PositiveInt | None = None
    seconds: PositiveFloat


@dataclass(frozen=True)
class Work:
    """What one job does. What its rule does not depend on is absent."""

    of: str = ""  # which kind of the rule's work
    kernel: Kernel | None = None
    parameters: int | None = None
    tokens: int | None = None
    steps: int = 0  # of an evaluation or a refit: calls of the model
    disk: int = 0  # bytes of models and tokens; the rest is small


@dataclass(frozen=True)
class Job:
    rule: str
    work: Work = Work()
    after: tuple[int, ...] = ()  # places of jobs that must end before it starts
    gpus: float = 0  # less than one where a profile divides them into shares
    cores: int = 1
    wanted: bool = True  # whether it is still to run
    cost: float = 0.0  # seconds
    factor: float = 1.0

    def seconds(self, power: int = 0) -> float:
        """What it still takes."""
        return self.wanted * self.cost * self.factor**power


class Graph(NamedTuple):
    """All jobs, each after those that it needs."""

    run: str
    rules: list[str]
    jobs: list[Job]
    missing: list[str]  # files that no rule makes and that are not there yet
    gpus: float | None  # of the machine, as the profile says


def read_graph(
    figures: Sequence[Figure], targets: Sequence[str] = (), *,
    configfile: Path | str | None = None, profile: str | None = None, rehearsal: bool = False,
) -> Graph:  # fmt: skip
    """The jobs behind these targets (default: all) and their costs, without running any."""
    arguments = parse_arguments(profile, configfile, rehearsal=rehearsal)
    jobs: list[Job] = []
    places: dict[Any, int] = {}
    with build_dag(arguments, targets) as built:
        inputs, rules = built.inputs, [rule.name for rule in built.dag.workflow.rules]
        needs = {job: [*built.dag.job_dependencies(job)] for job in built.dag.jobs}
        shares = max((job.resources.get("gpu_slots", 1) for job in needs), default=1)
        for place, job in enumerate(TopologicalSorter(needs).static_order()):
            places[job] = place
            rule, gpus = job.rule.name, job.resources.get("gpu", 0) / shares
            cores = int(gpus * job.resources.get("cpus_per_gpu", 0)) or int(job.threads)
            after = tuple(sorted(places[needed] for needed in needs[job]))
            work = work_of(inputs, rule, job.wildcards)
            planned = Job(rule, work, after, gpus, cores, built.dag.needrun(job))
            jobs.append(planned if job.rule.norun else estimate(figures, planned))
    machine = arguments.resources.get("gpu")
    gpus = machine.value / shares if machine and machine.value else None
    return Graph(inputs.config.run, rules, jobs, built.missing, gpus)


def work_of(inputs: Inputs, rule: str, wildcards: Any) -> Work:
    """What a job of this rule does."""
    config = inputs.config

    def tokens(settings: Any) -> int:
        return settings.sequences * config.corpora[settings.data.split("/")[0]].length

    match rule:
        case "tokens":
            corpus = config.corpora[wildcards["corpus"]]
            count = sum(corpus.slices.values()) * corpus.length
            wide = any(model.vocab_size > 1 << 16 for model in config.models.values())
            return Work(corpus.kind, tokens=count, disk=count * (4 if wide else 2))
        case "preflight_shape":
            return Work(wildcards["shape"], inputs.shapes[wildcards["shape"]].kernel)
        case "measure":
            cell = inputs.cell(wildcards["benchmark"], wildcards["measured"])
            benchmark = config.benchmarks[cell.benchmark]
            if isinstance(benchmark, MixerBenchmark):
                return Work(f"mixer-{benchmark.hidden_size}-{cell.mode}", cell.kernel)
            of = cell.mode if cell.mode == benchmark.kind else f"{benchmark.kind}-{cell.mode}"
            return Work(of, cell.kernel, config.models[cell.subject].parameters)
    name = wildcards.get("model") or wildcards.get("subject", "/").split("/")[1]
    if not name:
        return Work()
    model, cut = config.models[name], read_cut(wildcards.get("ratio", "0"))
    if rule == "recover":
        cut = inputs.recoveries[f"recovered/{name}/{wildcards['cut']}"].ratio
    work, kept = Work("", model.kernel, model.parameters), WEIGHT * parameters_at(model, cut)
    match rule:
        case "pretrain":
            recipe, disk = config.recipe_of(name), TRAINED * model.parameters + kept
            return replace(work, of=recipe.trainer, tokens=tokens(recipe), disk=disk)
        case "calibrate":
            return replace(work, tokens=tokens(config.calibration))
        case "score":
            return replace(work, of=config.methods[wildcards["method"]].algorithm)
        case "slice":
            return replace(work, disk=WEIGHT * changed_parameters(model, cut))
        case "refit":
            assert config.calibration
            count = PASSES * tokens(config.calibration)
            calls = PASSES * ceil(config.calibration.sequences / REFIT_BATCH)
            return replace(work, tokens=count, steps=calls, disk=kept)
        case "recover":
            disk = WEIGHT * changed_parameters(model, cut, recovered=True)
            return replace(work, tokens=tokens(config.recovery), disk=disk)
        case "import_model":
            return replace(work, disk=kept)
        case "evaluate":
            return evaluation(work, config.evaluation.suites[wildcards["suite"]])
        case "analyze":
            return replace(work, tokens=inputs.length(wildcards["subject"]))
    return work


def evaluation(work: Work, suite: Suite) -> Work:
    """All tasks of a suite: tokens that are read, and calls of the model."""
    tasks = sorted({task.task for task in suite.tasks.values() if not task.not_attempted})
    tokens = steps = 0
    for task in tasks:
        answers = "contains" in TASKS[task]
        length = suite.window if answers or "word_perplexity" in TASKS[task] else CHOICE
        requests = min(REQUESTS[task], CHOICES * (suite.documents or REQUESTS[task]))
        tokens += requests * length
        batches = ceil(requests / (suite.batch or max(1, BATCH // length)))
        steps += batches * (1 + CALLS_PER_ANSWER * answers)
    return replace(work, of="+".join(tasks), tokens=tokens, steps=steps)


def parameters_at(model: Model, cut: Cut) -> int:
    """Parameters of a model after a cut."""
    cut_off = mixer_parameters(model, model.mixer_shape) - mixer_parameters(
        model, cut_shape(model, cut)
    )
    return model.parameters - cut_off


def changed_parameters(model: Model, cut: Cut, *, recovered: bool = False) -> int:
    """Those in files of their own; all else is linked to the unpruned model's."""
    left = cut_shape(model, cut)
    if left.value_width < model.head_v_dim:
        return mixer_parameters(model, left)
    keys = mixer_parameters(model, left) - mixer_parameters(model, replace(left, width=0))
    values = len(left.layers) * model.hidden_size * left.value_heads * left.value_width
    return keys + values * recovered


def mixer_parameters(model: Model, shape: MixerShape) -> int:
    """Those of all layers with a delta rule."""
    of_one = SECTIONS[model.architecture].mixer_parameters(model.fla_config(), shape)
    return len(shape.layers) * of_one


def read_figures(path: Path | str) -> list[Figure]:
    """Every figure, with the keys that all figures of a command share."""
    blocks = yaml.safe_load(Path(path).read_text(encoding="utf-8"))["measured"]
    figures = [{**block, **figure} for block in blocks for figure in block.pop("figures")]
    return [Figure.model_validate(figure) for figure in figures]


def estimate(figures: Sequence[Figure], job: Job) -> Job:
    """A job with its cost. What two jobs share (a task in two suites of a model) counts twice."""
    work, own = job.work, nearest_figure(figures, job.rule, job.work)
    basis = [(work, own)] if own else []
    if job.rule in ("evaluate", "refit") and not (own and distance(own, work) < CLOSE):
        # Nothing like it was measured: so many calls, and so many tokens through the model.
        parts = {"step": replace(work, of="", tokens=work.steps), "forward": replace(work, of="")}
        pairs = [(part, nearest_figure(figures, name, part)) for name, part in parts.items()]
        basis = [(part, figure) for part, figure in pairs if figure] or basis
    gpus = job.gpus if any(figure.gpus for _, figure in basis) else 0
    seconds, factor = 0.0, SAME if basis else SCALED
    for part, figure in basis:
        # On more GPUs or cores it takes less time, as if none were wasted. A share of a GPU is as
        # fast as all of it: shares are for work that leaves a GPU idle.
        used, held = (figure.gpus, max(1, gpus)) if gpus else (figure.cores or job.cores, job.cores)
        seconds += scale(figure, part) * used / held
        if figure.work != job.rule or distance(figure, part) >= CLOSE:
            factor = SCALED
    if not any(figure.includes_start for _, figure in basis):
        seconds += next((f.seconds for f in reversed(figures) if f.work == "start"), 0.0)
    return replace(job, gpus=gpus, cost=seconds, factor=factor)


def nearest_figure(figures: Sequence[Figure], name: str, work: Work) -> Figure | None:
    """The nearest figure, the latest of equals: min() takes the first."""
    named = [figure for figure in reversed(figures) if figure.work == name]
    return min(named, key=lambda figure: distance(figure, work), default=None)


def distance(figure: Figure, work: Work) -> float:
    """e times the parameters count 1, the other kernel 1, another work 2 to 3."""
    far = 0.01 * (not figure.of) + 0.01 * (not figure.kernel)  # what says more is nearer
    if figure.parameters and work.parameters:
        far += abs(log(work.parameters / figure.parameters))
    if figure.kernel and work.kernel:
        far += figure.kernel != work.kernel
    if figure.of and figure.of != work.of:
        mine, other = {*work.of.split("-")}, {*figure.of.split("-")}
        far += 3 - len(mine & other) / len(mine | other)
    return far


def scale(figure: Figure, work: Work) -> float:
    """n times the tokens, or n times the parameters, take n times as long; but to time a larger
    model takes no longer."""
    seconds = figure.seconds
    if figure.tokens and work.tokens is not None:
        seconds *= work.tokens / figure.tokens
    if figure.parameters and work.parameters and figure.work != "measure":
        seconds *= work.parameters / figure.parameters
    return seconds


def spent(jobs: Sequence[Job], *, gpus: bool) -> list[float]:
    """Seconds of all jobs, or of all GPUs: estimated, least and most."""
    return [sum(j.seconds(power) * (j.gpus if gpus else 1) for j in jobs) for power in POWERS]


def row(rule: str, jobs: Sequence[Job]) -> list[str]:
    """All jobs of one rule: times are of those that are still to run, disk is of all."""
    to_run, gpus = sum(job.wanted for job in jobs), max((job.gpus for job in jobs), default=0)
    seconds, gpu_seconds = spent(jobs, gpus=False), spent(jobs, gpus=True)
    times = (max((job.seconds() for job in jobs), default=0), seconds[0], gpu_seconds[0])
    disk = sum(job.work.disk for job in jobs) / 1e9
    return [
        rule, f"{len(jobs):,}", f"{to_run:,}", f"{gpus:.3g}", *map(duration, times),
        between(gpu_seconds if gpu_seconds[0] else seconds),
        f"{disk:,.{int(disk < 9.95)}f} GB" if disk else "",
    ]  # fmt: skip


def wall_time(jobs: Sequence[Job], gpus: float | None = None) -> list[float]:
    """On so many GPUs: no less than the longest chain of jobs, nor than all work over all of them;
    and if jobs never wait for a GPU, no more."""
    walls = []
    for power in POWERS:
        ends, work = [0.0], 0.0
        for job in jobs:
            ends.append(max(ends[place + 1] for place in [-1, *job.after]) + job.seconds(power))
            work += job.seconds(power) * job.gpus
        walls.append(max(*ends, work / gpus if gpus else 0))
    return walls


def to_text(graph: Graph, *, targets: Sequence[str] = (), gpus: float | None = None) -> str:
    jobs, largest = graph.jobs, ceil(max((job.gpus for job in graph.jobs), default=0))
    if gpus is not None and gpus < largest:
        raise InputError(f"--gpus {gpus:g}: one job needs {largest}; give at least {largest}")
    rows = [["rule", "jobs", "to run", "GPUs", "longest", "all", "GPU time", "range", "disk"]]
    for rule in graph.rules:
        if members := [job for job in jobs if job.rule == rule]:
            rows.append(row(rule, members))
    rows.append(row("total", jobs))
    lines = [f"{graph.run}: {' '.join(targets) or 'everything'}", "", *table(rows), ""]
    for count in dict.fromkeys((gpus or graph.gpus, None)) if largest else ():
        if (wall := wall_time(jobs, count))[0]:
            on = f"{count:g}" if count else "enough"
            lines.append(f"wall time on {on} GPUs: {duration(wall[0])}, {between(wall)}")
    lines.append(f"range: by {SAME:g} where the same work was measured, by {SCALED:g} elsewhere")
    lines += [f"missing: {file}" for file in graph.missing]
    return "\n".join(lines) + "\n"


def between(span: Sequence[float]) -> str:
    return f"{duration(span[1])} to {duration(span[2])}" if span[0] else ""


def duration(seconds: float) -> str:
    unit, size = ("s", 1) if seconds < 90 else ("min", 60) if seconds < 5400 else ("h", 3600)
    count = seconds / size
    return f"{count:,.{int(count < 9.95)}f} {unit}" if seconds else ""


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([r[0].ljust(widths[0]), *map(str.rjust, r[1:], widths[1:])]) for r in rows]
