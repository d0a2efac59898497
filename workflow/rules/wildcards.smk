# What wildcards may be, what counts of the files that rules read, and the code behind a rule.


def with_provenance(**artefacts):
    # What rules made, by name: that it is there counts, and what stands beside it; of files that
    # users bring, digests are parameters. Snakemake reruns whatever is older than a folder or than a
    # file of more than 1 MB, also where one was only touched or copied; a small file it compares.
    # Of a partial run, what is there may be alone.
    if run_config.partial is not None:
        return artefacts
    some = [
        [paths] if isinstance(paths, str) else paths for paths in artefacts.values()
    ]
    known = {name: ancient(paths) for name, paths in artefacts.items()}
    return {**known, "provenance": inputs.provenance(chain(*some))}


def code(script, *modules):
    # One of a rule's parameters: a change there reruns what it made. Read only for rules that have
    # jobs: inside every Slurm job Snakemake starts twice more, for that job alone.
    return lambda wildcards: code_now(script, *modules)


@cache
def code_now(script, *modules):
    if workflow.is_main_process and RerunTrigger.CODE in workflow.rerun_triggers:
        raise WorkflowError(
            "the rerun trigger `code` compares the times of scripts, and would make models again "
            "that nothing changed of: give `--rerun-triggers input params software-env`, or put "
            "that into your --workflow-profile, which stands in for profiles/default"
        )
    # The path is relative, so that a checkout may move.
    scripts = os.path.relpath(Path(workflow.basedir).parent / "scripts")
    return known_code(f"{scripts}/{script}.py", *modules, device=run_config.device)


@cache
def code_with_versions():
    scripts = Path(workflow.basedir).parent / "scripts"
    return digests_now(scripts, device=run_config.device)


wildcard_constraints:
    **inputs.constraints(),
