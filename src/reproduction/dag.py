"""Snakemake's DAG of a run, built as its dry run builds it, without running anything."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

from reproduction.config import load_config, parse_config
from reproduction.rules import Inputs
from statecut.errors import InputError, nearest

SNAKEFILE = Path("workflow/Snakefile")


def parse_arguments(
    profile: str | None = None,
    configfile: Path | str | None = None,
    *,
    rehearsal: bool = False,
) -> Any:
    """The parsed command line `snakemake --profile PROFILE --configfile FILE`, of a rehearsal with
    `--config rehearsal=true`."""
    from snakemake.cli import get_profile_dir, parse_args

    if not SNAKEFILE.is_file():
        raise InputError(f"there is no {SNAKEFILE} here: run this in the folder of the checkout")
    if profile is not None and get_profile_dir(profile) is None:
        known = [str(path.parent) for path in Path("profiles").glob("*/config.yaml")]
        raise InputError(f"profile {profile!r}: no such folder{nearest(profile, known)}")
    options = {"--snakefile": SNAKEFILE, "--profile": profile, "--configfile": configfile}
    words = [str(word) for option in options.items() if option[1] is not None for word in option]
    words += ["--config", "rehearsal=true"] if rehearsal else []
    try:
        with redirect_stderr(io.StringIO()) as messages:
            return parse_args(words)[1]
    except SystemExit:
        raise InputError(f"profile {profile!r}: {messages.getvalue().strip()}") from None


class Dag(NamedTuple):
    inputs: Inputs
    dag: Any  # Snakemake's
    missing: list[str]  # files that a user has still to bring


@contextmanager
def build_dag(arguments: Any, targets: Sequence[str] = (), executor: Any = None) -> Iterator[Dag]:
    """The jobs behind these targets (by default, all), under the settings of a command line.

    `executor`: the plugin that would run them; without one, every job is a local one. Files that a
    user has still to bring (text, local models) are taken to exist: the jobs are the same.
    """
    from snakemake.api import SnakemakeApi
    from snakemake.cli import parse_config as parse_settings
    from snakemake.exceptions import RuleException, WorkflowError
    from snakemake.io import Mtime
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
    configs = types.ConfigSettings(
        config=parse_settings(arguments.config), configfiles=arguments.configfile or ()
    )
    with SnakemakeApi(quiet) as api:
        workflow_api = api.workflow(resources, configs, snakefile=SNAKEFILE)
        triggers = {"rerun_triggers": arguments.rerun_triggers, "force_incomplete": True}
        workflow_api.dag(types.DAGSettings(targets=set(targets), **triggers))
        # The API prints DAGs and returns none; this is how it builds those that it prints.
        workflow = workflow_api._workflow
        workflow._executor_plugin = executor
        rules = [rule.name for rule in workflow.rules]
        for name in {**arguments.set_resources, **arguments.set_threads}:
            if name not in rules:  # Snakemake ignores it
                hint = nearest(name, rules)
                raise InputError(f"set-resources or set-threads: no rule {name!r}{hint}")
        inputs = Inputs(parse_config(workflow.globals["config"], "the configuration"))
        missing = inputs.missing()
        try:
            workflow._prepare_dag(forceall=False, ignore_incomplete=False, lock_warn_only=True)
            workflow.iocache.exists_local.update(dict.fromkeys(missing, True))
            workflow.iocache.mtime.update(dict.fromkeys(missing, Mtime(local=0, local_target=0)))
            workflow._build_dag()
        except (RuleException, WorkflowError) as error:
            raise InputError(f"Snakemake: {error}") from None
        yield Dag(inputs, workflow.dag, missing)
