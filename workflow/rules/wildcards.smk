# What wildcards may be, and the code behind a rule.


def code(script, *modules):
    # One of a rule's parameters: a change there reruns what it made. Read only for rules that have
    # jobs: inside every Slurm job Snakemake starts twice more, for that job alone.
    return lambda wildcards: code_now(script, *modules)


@cache
def code_now(script, *modules):
    # The path is relative, so that a checkout may move.
    scripts = os.path.relpath(Path(workflow.basedir).parent / "scripts")
    return script_code(f"{scripts}/{script}.py", *modules)


wildcard_constraints:
    **READS.constraints(),
