# What each wildcard may be. Whatever the configuration does not name is no target.


def one_of(names):
    # Without a name, nothing: the empty alternative would match everything.
    return "|".join(re.escape(str(name)) for name in names) or r"(?!)"


@cache
def code(script, *modules):
    # The code behind a rule, as one of its parameters: a change there reruns what it made.
    # Relative, so that a checkout may move.
    scripts = os.path.relpath(Path(workflow.basedir).parent / "scripts")
    return script_code(f"{scripts}/{script}.py", *modules)


VARIANTS = RUN.variants()
CUTS = {v: AT.subject(v).rpartition("/")[2] for v in VARIANTS}


wildcard_constraints:
    tokenizer=one_of(RUN.tokenizers),
    corpus=one_of(RUN.corpora),
    model=one_of(RUN.models),
    method=one_of(RUN.methods),
    target="kq|k|q",
    ratio=one_of({v.ratio for v in VARIANTS}),
    seed=r"\d+",
    cut=one_of({*CUTS.values()}),
    subject=one_of({AT.subject(v) for v in VARIANTS}),
    suite=one_of(RUN.evaluation.suites),
    kernel="delta_net|gated_deltanet",
    width=r"\d+",
    benchmark=one_of(RUN.benchmarks),
    measured=r"[^/]+",
    table=one_of(RUN.tables),
    figure=one_of(RUN.figures),
