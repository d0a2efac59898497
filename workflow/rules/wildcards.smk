# What wildcards may be, and the code behind a rule.


@cache
def code(script, *modules):
    # One of a rule's parameters: a change there reruns what it made. The path is relative, so
    # that a checkout may move.
    scripts = os.path.relpath(Path(workflow.basedir).parent / "scripts")
    return script_code(f"{scripts}/{script}.py", *modules)


wildcard_constraints:
    **READS.constraints(),
