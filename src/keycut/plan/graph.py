"""The jobs of a run, as Snakemake's own dry run has them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from keycut.config import Config, load_config, parse_config
from keycut.errors import InputError, nearest
from keycut.running.inputs import Inputs
from keycut.running.paths import Paths

SNAKEFILE = Path("workflow/Snakefile")


@dataclass(frozen=True)
class DagJob:
    """One job of the DAG."""

    rule: str
    wildcards: Mapping[str, str]
    outputs: tuple[str, ...]
    timing: str | None  # where Snakemake writes how long it took
    after: tuple[int, ...]  # places of jobs that must end before it starts
    gpus: float  # less than one where a profile cuts them into shares
    cores: int
    memory_mb: int | None
    limit_s: float | None  # what the rule or the profile allows it
    runs: bool  # False for a target rule, which only gathers files
    wanted: bool  # whether it is still to run


@dataclass(frozen=True)
class Graph:
    """All jobs, each after those that it needs, and what the profile says of the machine."""

    config: Config
    jobs: tuple[DagJob, ...]
    missing: tuple[str, ...]  # files that no rule makes and that are not there yet
    gpus: float | None
    cores: int | None


def read_graph(
    targets: Sequence[str] = (),
    *,
    configfile: Path | str | None = None,
    profile: str | None = None,
) -> Graph:
    """Ask Snakemake for the jobs behind these targets (by default, all), without running any.

    The working directory is the checkout. Without a configuration it is the one that the profile
    names, or else the workflow's own default. Files that a user has still to bring (text, local
    models) count as there: the jobs are the same.
    """
    if not SNAKEFILE.is_file():
        raise InputError(f"there is no {SNAKEFILE} here: run this in the folder of the checkout")
    given = _arguments(configfile, profile)
    for path in given.configfile or ():
        load_config(path)  # says more about a mistake than Snakemake would
    from snakemake import api
    from snakemake.exceptions import RuleException, WorkflowError
    from snakemake.settings import types

    resources = types.ResourceSettings(
        cores=given.cores, nodes=given.jobs, max_threads=given.max_threads,
        resources=given.resources, overwrite_threads=given.set_threads,
        overwrite_resources=given.set_resources, default_resources=given.default_resources,
        overwrite_resource_scopes=given.set_resource_scopes,
    )  # fmt: skip
    quiet = types.OutputSettings(quiet={types.Quietness.ALL}, enable_file_logging=False)
    configured = types.ConfigSettings(configfiles=given.configfile or ())
    wanted = types.DAGSettings(targets=set(targets), rerun_triggers=given.rerun_triggers,
                               force_incomplete=True)  # fmt: skip
    with api.SnakemakeApi(quiet) as snakemake:
        made = snakemake.workflow(resources, configured, snakefile=SNAKEFILE)
        made.dag(wanted)
        # Snakemake's API prints DAGs and gives none away; this is how it makes those it prints.
        workflow = made._workflow
        config = parse_config(workflow.globals["config"], "the configuration")
        try:
            workflow._prepare_dag(forceall=False, ignore_incomplete=False, lock_warn_only=True)
            missing = take_for_granted(workflow, config)
            workflow._build_dag()
        except (RuleException, WorkflowError) as error:
            # What people ask for: target rules, tables and figures.
            known = [rule.name for rule in workflow.rules if not rule.has_wildcards()]
            known += [*map(Paths(config).table, config.tables)]
            known += [*map(Paths(config).figure, config.figures)]
            for name in (name for name in targets if f"No rule to produce {name} " in str(error)):
                said = f"target {name!r}: no rule makes it{nearest(name, known)}"
                raise InputError(said) from None
            raise InputError(f"Snakemake: {error}") from None
        jobs = tuple(_jobs(workflow.dag))
        shares = max(map(_shares, workflow.dag.jobs), default=1)
    gpus = given.resources.get("gpu")
    there = gpus.value / shares if gpus and gpus.value else None
    return Graph(config, jobs, missing, there, given.cores)


def take_for_granted(workflow: Any, config: Config) -> tuple[str, ...]:
    """The files that a user has still to bring: Snakemake is told that they are there."""
    from snakemake.io import Mtime

    missing = tuple(Inputs(config).missing())
    workflow.iocache.exists_local.update(dict.fromkeys(missing, True))
    workflow.iocache.mtime.update(dict.fromkeys(missing, Mtime(local=0, local_target=0)))
    return missing


def _arguments(configfile: Path | str | None, profile: str | None) -> Any:
    """What `snakemake --profile PROFILE --configfile FILE` would be told."""
    from snakemake.cli import get_profile_dir, parse_args

    if profile is not None and get_profile_dir(profile) is None:
        known = [str(path.parent) for path in Path("profiles").glob("*/config.yaml")]
        said = nearest(profile, known)
        raise InputError(f"profile {profile!r}: no folder with a config.yaml{said}")
    asked = {"--snakefile": SNAKEFILE, "--profile": profile, "--configfile": configfile}
    given = [str(one) for pair in asked.items() if pair[1] is not None for one in pair]
    try:
        with redirect_stderr(io.StringIO()) as said_there:
            return parse_args(given)[1]
    except SystemExit:
        raise InputError(f"profile {profile!r}: {said_there.getvalue().strip()}") from None


def _jobs(dag: Any) -> Iterator[DagJob]:
    order = TopologicalSorter({job: list(dag.job_dependencies(job)) for job in dag.jobs})
    places: dict[Any, int] = {}
    for place, job in enumerate(order.static_order()):
        places[job] = place
        gpus = int(job.resources.get("gpu", 0)) / _shares(job)
        # The cores beside its GPUs, where the profile says how many those are.
        beside = int(job.resources.get("cpus_per_gpu", 0))
        runtime = job.resources.get("runtime")
        yield DagJob(
            rule=job.rule.name,
            wildcards=dict(job.wildcards.items()),
            outputs=tuple(map(str, job.output)),
            timing=str(job.benchmark) if job.benchmark else None,
            after=tuple(sorted(places[one] for one in dag.job_dependencies(job))),
            gpus=gpus,
            cores=int(gpus * beside) or int(job.threads),
            memory_mb=job.resources.get("mem_mb"),
            limit_s=60.0 * runtime if runtime is not None else None,
            runs=not job.rule.norun,
            wanted=dag.needrun(job),
        )


def _shares(job: Any) -> int:
    """What the profile cuts a GPU into."""
    return int(job.resources.get("gpu_shares", 1))
