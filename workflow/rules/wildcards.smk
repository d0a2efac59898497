# What wildcards may be, what counts of the files that rules read, and the code behind a rule.


def with_provenance(**artefacts):
    # Named inputs. Artefacts count by their provenance, because Snakemake reruns whatever is older
    # than a folder or than a file of more than 1 MB, even if that was only touched or copied; the
    # content of small files it compares. Files of users count by digests among the parameters. In
    # a partial run a result may have no provenance.
    if run_config.partial is not None:
        return artefacts
    files = chain(
        *([files] if isinstance(files, str) else files for files in artefacts.values())
    )
    untimed = {name: ancient(files) for name, files in artefacts.items()}
    return {**untimed, "provenance": inputs.provenance(files)}


def code(script, *modules):
    # One of a rule's parameters: a change there reruns what it made. Read only for rules that have
    # jobs: inside every Slurm job Snakemake starts twice more, for that job alone.
    return lambda wildcards: known_code(script, *modules)


@cache
def known_code(script, *modules):
    if workflow.is_main_process and RerunTrigger.CODE in workflow.rerun_triggers:
        raise WorkflowError(
            "the rerun trigger `code` compares the times of scripts, and would make models again "
            "that nothing changed of: give `--rerun-triggers input params software-env`, or put "
            "that into your --workflow-profile, which stands in for profiles/default"
        )
    # The path is relative, so that a checkout may move.
    scripts = os.path.relpath(Path(workflow.basedir).parent / "scripts")
    path = f"{scripts}/{script}.py"
    return KnownCode.of(path, *modules, device=run_config.device).to_json()


@cache
def code_of_versions():
    scripts = Path(workflow.basedir).parent / "scripts"
    return digests_now(scripts, device=run_config.device)


wildcard_constraints:
    **inputs.constraints(),
