"""The jobs of a run, as Snakemake itself plans them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from keycut.config import Config, load_config, parse_config
from keycut.errors import InputError, nearest
from keycut.layout import Layout
from keycut.plan.schedule import Capacity

SNAKEFILE = Path("workflow/Snakefile")


@dataclass(frozen=True)
class Job:
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
    jobs: tuple[Job, ...]
    executor: str
    capacity: Capacity
    retries: int


def read_graph(
    targets: Sequence[str] = (),
    *,
    configfile: Path | str | None = None,
    profile: str | None = None,
) -> Graph:
    """Ask Snakemake for the jobs behind these targets (by default, all), without running any.

    The working directory is the checkout. Without a configuration it is the one that the profile
    names, or else the workflow's own default.
    """
    if not SNAKEFILE.is_file():
        raise InputError(f"there is no {SNAKEFILE} here: run this in the folder of the checkout")
    given = _arguments(configfile, profile)
    for path in given.configfile or ():
        load_config(path)  # says more about a mistake than Snakemake would
    from snakemake.api import SnakemakeApi
    from snakemake.settings.types import (
        ConfigSettings,
        DAGSettings,
        OutputSettings,
        Quietness,
        ResourceSettings,
    )

    quiet = OutputSettings(quiet={Quietness.ALL}, enable_file_logging=False)
    with SnakemakeApi(quiet) as api:
        workflow_api = api.workflow(
            snakefile=SNAKEFILE,
            config_settings=ConfigSettings(configfiles=given.configfile or ()),
            resource_settings=ResourceSettings(
                cores=given.cores,
                nodes=given.jobs,
                max_threads=given.max_threads,
                resources=given.resources,
                overwrite_threads=given.set_threads,
                overwrite_resources=given.set_resources,
                overwrite_resource_scopes=given.set_resource_scopes,
                default_resources=given.default_resources,
            ),
        )
        workflow_api.dag(
            DAGSettings(
                targets=set(targets),
                rerun_triggers=given.rerun_triggers,
                force_incomplete=True,  # what a killed job left half done runs again
            )
        )
        # Snakemake's API prints DAGs and gives none away; this is how it makes those it prints.
        workflow = workflow_api._workflow
        config = parse_config(workflow.globals["config"], "the configuration")
        with _explained(targets, workflow, config):
            workflow._prepare_dag(forceall=False, ignore_incomplete=False, lock_warn_only=True)
            workflow._build_dag()
            jobs = tuple(_jobs(workflow.dag))
            shares = max(map(_shares, workflow.dag.jobs), default=1)
    given_gpus = given.resources.get("gpu")
    gpus = given_gpus.value if given_gpus else None
    return Graph(
        config=config,
        jobs=jobs,
        executor=given.executor or "local",
        capacity=Capacity(gpus and gpus / shares, given.cores, given.jobs),
        retries=given.retries,
    )


def _arguments(configfile: Path | str | None, profile: str | None) -> Any:
    """What `snakemake --profile PROFILE --configfile FILE` would be told."""
    from snakemake.cli import get_profile_dir, parse_args

    if profile is not None and get_profile_dir(profile) is None:
        known = [str(path.parent) for path in Path("profiles").glob("*/config.yaml")]
        raise InputError(
            f"profile {profile!r}: no folder with a config.yaml{nearest(profile, known)}"
        )
    given = ["--snakefile", str(SNAKEFILE)]
    given += ["--profile", profile] if profile is not None else []
    given += ["--configfile", str(configfile)] if configfile is not None else []
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return parse_args(given)[1]
    except SystemExit:
        raise InputError(f"profile {profile!r}: {said.getvalue().strip()}") from None


@contextmanager
def _explained(targets: Sequence[str], workflow: Any, config: Config) -> Iterator[None]:
    """Snakemake's errors, as ours."""
    from snakemake.exceptions import MissingRuleException, RuleException, WorkflowError

    try:
        yield
    except MissingRuleException as error:
        unknown = next((name for name in targets if f" {name} " in str(error)), None)
        if unknown is None:
            raise InputError(f"Snakemake: {error}") from None
        known = _targets(workflow, config)
        raise InputError(f"target {unknown!r}: no rule makes it{nearest(unknown, known)}") from None
    except (RuleException, WorkflowError) as error:  # such as an input that nothing makes
        raise InputError(f"Snakemake: {error}") from None


def _targets(workflow: Any, config: Config) -> list[str]:
    """What people ask for: target rules, tables and figures."""
    at = Layout(config)
    rules = [rule.name for rule in workflow.rules if not rule.has_wildcards()]
    return [*rules, *map(at.table, config.tables), *map(at.figure, config.figures)]


def _jobs(dag: Any) -> Iterator[Job]:
    order = TopologicalSorter({job: list(dag.job_dependencies(job)) for job in dag.jobs})
    places: dict[Any, int] = {}
    for place, job in enumerate(order.static_order()):
        places[job] = place
        resources = job.resources
        runtime = resources.get("runtime")
        yield Job(
            rule=job.rule.name,
            wildcards=dict(job.wildcards.items()),
            outputs=tuple(map(str, job.output)),
            timing=str(job.benchmark) if job.benchmark else None,
            after=tuple(sorted(places[one] for one in dag.job_dependencies(job))),
            gpus=_gpus(job),
            cores=_cores(job),
            memory_mb=resources.get("mem_mb"),
            limit_s=60.0 * runtime if runtime is not None else None,
            runs=not job.rule.norun,
            wanted=dag.needrun(job),
        )


def _gpus(job: Any) -> float:
    asked, shares = int(job.resources.get("gpu", 0)), _shares(job)
    return asked / shares if asked % shares else asked // shares


def _shares(job: Any) -> int:
    """What the profile cuts a GPU into."""
    return int(job.resources.get("gpu_shares", 1))


def _cores(job: Any) -> int:
    """What the job takes: the cores beside its GPUs where the profile says how many those are."""
    beside = job.resources.get("cpus_per_gpu")
    gpus = _gpus(job)
    return int(gpus * int(beside)) if gpus and beside else int(job.threads)
