"""Snakemake's DAG of a run, built as its dry run builds it, without running anything."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.config import Config, load_config, parse_config
from reproduction.rules import Inputs
from statecut.errors import InputError, nearest

SNAKEFILE = Path("workflow/Snakefile")


def parse_arguments(profile: str | None = None, configfile: Path | str | None = None) -> Any:
    """The parsed command line `snakemake --profile PROFILE --configfile FILE`."""
    from snakemake.cli import get_profile_dir, parse_args

    if not SNAKEFILE.is_file():
        raise InputError(f"there is no {SNAKEFILE} here: run this in the folder of the checkout")
    if profile is not None and get_profile_dir(profile) is None:
        known = [str(path.parent) for path in Path("profiles").glob("*/config.yaml")]
        raise InputError(
            f"profile {profile!r}: no folder with a config.yaml{nearest(profile, known)}"
        )
    options = {"--snakefile": SNAKEFILE, "--profile": profile, "--configfile": configfile}
    words = [str(word) for option in options.items() if option[1] is not None for word in option]
    try:
        with redirect_stderr(io.StringIO()) as messages:
            return parse_args(words)[1]
    except SystemExit:
        raise InputError(f"profile {profile!r}: {messages.getvalue().strip()}") from None


@dataclass(frozen=True)
class Dag:
    config: Config
    dag: Any  # Snakemake's
    missing: tuple[str, ...]  # files that a user has still to bring


@contextmanager
def build_dag(arguments: Any, targets: Sequence[str] = (), executor: Any = None) -> Iterator[Dag]:
    """The jobs behind these targets (by default, all), under the settings of a command line.

    `executor`: the plugin that would run them; without one, every job is a local one. Files that a
    user has still to bring (text, local models) are taken to exist: the jobs are the same.
    """
    from snakemake.api import SnakemakeApi
    from snakemake.exceptions import RuleException, WorkflowError
    from snakemake.settings import types

    for path in arguments.configfile or ():
        load_config(path)  # says more about a mistake than Snakemake would
    resources = types.ResourceSettings(
        cores=arguments.cores,
        nodes=arguments.jobs,
        max_threads=arguments.max_threads,
        resources=arguments.resources,
        overwrite_threads=arguments.set_threads,
        overwrite_resources=arguments.set_resources,
        default_resources=arguments.default_resources,
        overwrite_resource_scopes=arguments.set_resource_scopes,
    )
    quiet = types.OutputSettings(quiet={types.Quietness.ALL}, enable_file_logging=False)
    configs = types.ConfigSettings(configfiles=arguments.configfile or ())
    with SnakemakeApi(quiet) as api:
        workflow_api = api.workflow(resources, configs, snakefile=SNAKEFILE)
        workflow_api.dag(
            types.DAGSettings(
                targets=set(targets),
                rerun_triggers=arguments.rerun_triggers,
                force_incomplete=True,
            )
        )
        # The API prints DAGs and returns none; this is how it builds those that it prints.
        workflow = workflow_api._workflow
        workflow._executor_plugin = executor
        config = parse_config(workflow.globals["config"], "the configuration")
        try:
            workflow._prepare_dag(forceall=False, ignore_incomplete=False, lock_warn_only=True)
            missing = _take_as_present(workflow, Inputs(config).missing())
            workflow._build_dag()
        except (RuleException, WorkflowError) as error:
            _explain_target(str(error), targets, workflow, config)
            raise InputError(f"Snakemake: {error}") from None
        yield Dag(config, workflow.dag, missing)


def _take_as_present(workflow: Any, files: Sequence[str]) -> tuple[str, ...]:
    from snakemake.io import Mtime

    workflow.iocache.exists_local.update(dict.fromkeys(files, True))
    workflow.iocache.mtime.update(dict.fromkeys(files, Mtime(local=0, local_target=0)))
    return tuple(files)


def _explain_target(message: str, targets: Sequence[str], workflow: Any, config: Config) -> None:
    """An error of ours for a target that no rule makes: what is usually asked for, by name."""
    paths = Inputs(config).paths
    known = [rule.name for rule in workflow.rules if not rule.has_wildcards()]
    known += [*map(paths.table, config.tables), *map(paths.figure, config.figures)]
    for target in targets:
        if f"No rule to produce {target} " in message:
            raise InputError(f"target {target!r}: no rule makes it{nearest(target, known)}")
