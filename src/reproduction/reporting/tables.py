"""The kinds of tables: which rows, columns and headings each of them has.

Rows and columns are the paper's, and one more row where a run has recovered the unpruned model too.
What numbers, marks and notes look like is in `reproduction.reporting.grid`; fonts, rules and
alignment are in the templates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product

from reproduction.config import BASELINE, Config, Cut, Stage, state_bytes
from reproduction.reporting.frame import Result
from reproduction.reporting.grid import (
    Box,
    Form,
    Grid,
    Row,
    Separator,
    TableBuilder,
    fixed,
    percent,
    row,
    scientific_if_large,
    throughput,
)

# Shared by heads, then by the channels of a head.
SHARED = {"none": "× ×", "head": "× ✓", "all": "✓ ✓"}
FILTERS = {"none": "Separate", "head": "Shared in a head", "all": "Shared by all"}
TARGETS = {"kq": "K, Q", "k": "K", "q": "Q"}
WAYS = {
    "pre": "Sliced",
    "refit": "Refitted",
    "post": "Recovered",
    "refit_post": "Refitted and recovered",
}
STAGES = {**WAYS, "pre": "Before recovery", "post": "After recovery"}
RECOVERED = {"none": "", "pre": "×", "refit": "refit, ×", "post": "✓", "refit_post": "refit, ✓"}


def _by_ratio_or_model(t: TableBuilder) -> Grid:
    """Methods down, ratios of one model or models at one ratio across."""
    [stage], ratios = t.stages, t.table.ratios
    columns = t.columns(stage)
    blocks = [(model, ratio) for model in t.table.models for ratio in ratios]

    def baseline(rft: Stage) -> Iterator[Box]:
        for model, ratio in blocks:
            if ratio == ratios[0]:
                yield from t.numbers(t.baseline(model, rft, column) for column in columns)
            else:  # it is the same for all ratios
                yield Box("", len(columns))

    by_ratio = t.table.kind == "by_ratio"
    names = [f"{percent(r)} compression" if by_ratio else t.model(m) for m, r in blocks]
    heads = [
        row([""], (Box(name, len(columns)) for name in names)),
        row(["Method", *(t.title(column) for _ in blocks for column in columns)]),
    ]
    rows = [
        row(
            [t.method(name)],
            t.numbers(t.key(m, name, r, stage, c) for m, r in blocks for c in columns),
        )
        for name in t.table.methods
    ]
    groups = [1, *(len(columns) for _ in blocks)]
    return t.grid(groups, heads, [*rows, *t.baseline_rows([], baseline)])


def _sharing(t: TableBuilder) -> Grid:
    """Unpruned models, by how they share their filters."""
    columns = t.columns("none")
    rows = []
    for model in t.table.models:
        keys = [t.baseline(model, "none", column) for column in columns]
        rows.append(row([SHARED[keys[0].conv_sharing]], t.numbers(keys)))
    heads = t.two_line_heads(["Shared by"], ["heads, channels"], columns)
    return t.grid([1, *t.suite_sizes(columns)], heads, rows)


def _rotation(t: TableBuilder) -> Grid:
    """Ratios and methods down, models across."""
    models, [stage] = t.table.models, t.stages
    columns = t.columns(stage)

    def numbers(method: str, ratio: Cut, rft: Stage) -> list[Box]:
        keys = (t.key(m, method, ratio, rft, column) for m in models for column in columns)
        return t.numbers(keys, scientific_if_large)

    filters = [t.baseline(model, "none", columns[0]).conv_sharing for model in models]
    heads = [
        row(["", ""], (Box(FILTERS[sharing], len(columns)) for sharing in filters)),
        row(["Compr.", "Method", *(t.title(column) for _ in models for column in columns)]),
    ]
    rows: list[Row] = []
    for ratio in t.table.ratios:
        for i, method in enumerate(t.table.methods):
            labels = ["" if i else percent(ratio), t.method(method)]
            rows.append(row(labels, numbers(method, ratio, stage), _rule_between(i, rows)))
    rows += t.baseline_rows([percent(0)], lambda rft: numbers(BASELINE, 0.0, rft))
    return t.grid([2, *(len(columns) for _ in models)], heads, rows)


def _targets(t: TableBuilder) -> Grid:
    """Methods down, models and what was scored across."""
    models, [stage], [ratio] = t.table.models, t.stages, t.table.ratios
    targets, columns = t.table.targets or ("kq",), t.columns(stage)
    size, pairs = len(columns) * len(targets), [(m, c) for m in models for c in columns]

    def baseline(rft: Stage) -> Iterator[Box]:
        for model, column in pairs:  # it is the same for all targets
            yield t.number(t.baseline(model, rft, column), span=len(targets))

    heads = [
        row([""], (Box(t.model(model), size) for model in models)),
        row([""], (Box(t.title(column), len(targets)) for _, column in pairs)),
        row(["Method", *(TARGETS[target] for _ in pairs for target in targets)]),
    ]
    rows = []
    for name in t.table.methods:
        keys = (t.key(m, name, ratio, stage, c, target) for m, c in pairs for target in targets)
        rows.append(row([t.method(name)], t.numbers(keys)))
    groups = [1, *(size for _ in models)]
    return t.grid(groups, heads, [*rows, *t.baseline_rows([], baseline)])


def _summary(t: TableBuilder) -> Grid:
    """Models and methods down, before and after recovery across."""
    [ratio] = t.table.ratios
    columns = {stage: t.columns(stage) for stage in t.stages}
    pairs = [(stage, column) for stage in t.stages for column in columns[stage]]
    heads = [
        row(["", ""], (Box(STAGES[stage], len(columns[stage])) for stage in t.stages)),
        row(["Model", "Method", *(t.title(column) for _, column in pairs)]),
    ]
    rows: list[Row] = []
    for model in t.table.models:
        for i, method in enumerate(t.table.methods):
            numbers = t.numbers(t.key(model, method, ratio, *pair) for pair in pairs)
            labels = ["" if i else t.model(model), t.method(method)]
            rows.append(row(labels, numbers, _rule_between(i, rows)))
        rows += t.baseline_rows([""], partial(_baseline_by_stage, t, model))
    return t.grid([2, *map(len, columns.values())], heads, rows)


def _baseline_by_stage(t: TableBuilder, model: str, rft: Stage) -> Iterator[Box]:
    """The unpruned model below every stage, or below its own once it is recovered."""
    for stage, _ in product(t.stages, t.eps):  # it is the same whatever a cut does to eps
        columns = t.columns(stage)
        if rft in ("none", stage):
            yield from t.numbers(t.baseline(model, rft, column) for column in columns)
        else:
            yield Box("", len(columns))


def _stages(t: TableBuilder) -> Grid:
    """Models, ratios with the size of the state, and methods down; stages across, each with eps
    kept and matched where the table has both."""
    groups = [*product(t.stages, t.eps)]
    sizes = [len(t.columns(stage)) for stage, _ in groups]
    names = [WAYS[stage] + f", eps {eps}" * (len(t.eps) > 1) for stage, eps in groups]
    places = [(stage, column, eps) for stage, eps in groups for column in t.columns(stage)]
    titles = (t.title(column) for _, column, _ in places)
    heads = [
        row([""] * 4, map(Box, names, sizes)),
        row(["Model", "Compr.", "State, KiB", "Method", *titles]),
    ]

    def labels(model: str, ratio: Cut) -> list[str]:
        state = state_bytes(t.config.models[model], ratio) / 1024
        return [t.model(model), percent(ratio), f"{state:,.10g}"]

    rows: list[Row] = []
    for model in t.table.models:
        for ratio in t.table.ratios:
            for i, method in enumerate(t.table.methods):
                numbers = t.numbers(
                    t.key(model, method, ratio, stage, column, eps=eps)
                    for stage, column, eps in places
                )
                names = [*labels(model, ratio), t.method(method)]
                rows.append(row(names, numbers, _rule_between(i, rows)))
        rows += t.baseline_rows(labels(model, 0.0), partial(_baseline_by_stage, t, model))
    return t.grid([4, *sizes], heads, rows)


def _breakdown(t: TableBuilder) -> Grid:
    """Ratios, stages and methods down, every column of the suites across."""
    columns = t.columns("none")
    models, stages = len(t.table.models) > 1, len(t.stages) > 1  # whether they have labels

    def line(model: str, method: str, rft: Stage, ratio: Cut, above: Separator) -> Row:
        name = "Baseline" if method == BASELINE else t.method(method)
        if method == BASELINE and rft == "post" and not stages:
            name = "Baseline, recovered"
        labels = [t.model(model)] * models + [RECOVERED[rft]] * stages + [name, percent(ratio)]
        measured = t.columns(rft)
        numbers = (
            t.number(t.key(model, method, ratio, rft, column)) if column in measured else Box()
            for column in columns
        )
        return row(labels, numbers, above)

    rows: list[Row] = []
    for model in t.table.models:
        for ratio in t.table.ratios:
            for s, stage in enumerate(t.stages):
                for i, method in enumerate(t.table.methods):
                    above: Separator = "space" if s and not i else _rule_between(i, rows)
                    rows.append(line(model, method, stage, ratio, above))
        rows.append(line(model, BASELINE, "none", 0.0, "rule"))
        if t.has_control:
            rows.append(line(model, BASELINE, "post", 0.0, ""))
    labels = ["Model"] * models + ["RFT"] * stages + ["Method", "Compr."]
    heads = t.two_line_heads(labels, [""] * len(labels), columns)
    return t.grid([len(labels), *t.suite_sizes(columns)], heads, rows)


def _mixer_speed(t: TableBuilder) -> Grid:
    """Mixers and widths down."""
    forms = {
        "tokens_per_s": throughput,
        "speedup": fixed(2, unit="×"),
        "peak_memory_gib": fixed(2, unit="GiB"),
        "memory_ratio": fixed(2),
    }
    rows: list[Row] = []
    for mixer, measurements in t.by_subject().items():
        for i, cell in enumerate(measurements):
            labels = ["" if i else t.benchmark.mixers[mixer].label, str(cell.width)]
            numbers = [t.timing(cell, metric, form) for metric, form in forms.items()]
            rows.append(row(labels, numbers, _rule_between(i, rows)))
    heads = [row(["Model", "dₖ", "Tokens/s ↑", "Speedup ↑", "Memory ↓", "Ratio ↓"])]
    return t.grid([2, 2, 2], heads, rows)


def _model_speed(t: TableBuilder) -> Grid:
    """Ratios down, models across, in thousands of tokens per second; as a CUDA graph too where the
    benchmark has it."""
    forms = {"tokens_per_s": fixed(1, scale=1e3), "speedup": fixed(2, unit="×")}
    titles = ["k tok/s ↑", "Speedup ↑"]
    if t.benchmark.graphs(t.table.shows):
        forms |= {f"graph_{metric}": form for metric, form in forms.items()}
        titles += ["CUDA graph ↑", "Speedup ↑"]
    subjects = t.by_subject()
    heads = [
        row([""], (Box(t.model(model), len(forms)) for model in subjects)),
        row(["Compr.", *titles * len(subjects)]),
    ]
    rows = []
    for measurements in zip(*subjects.values(), strict=True):
        numbers = (t.timing(cell, *form) for cell in measurements for form in forms.items())
        rows.append(row([percent(measurements[0].ratio)], numbers))
    return t.grid([1, *(len(forms) for _ in subjects)], heads, rows)


def _decoding_speed(t: TableBuilder) -> Grid:
    """Models and ratios down; throughput at each batch, without and with a CUDA graph; the size of
    the state."""
    batches = [str(batch) for batch in t.benchmark.batches]
    forms: dict[str, Form] = dict.fromkeys(t.benchmark.speeds(), throughput)
    forms |= {"state_mib": fixed(2), "largest_batch": fixed(0)}
    rows: list[Row] = []
    for model, measurements in t.by_subject().items():
        for i, cell in enumerate(measurements):
            labels = ["" if i else t.model(model), percent(cell.ratio)]
            numbers = [t.timing(cell, metric, form) for metric, form in forms.items()]
            rows.append(row(labels, numbers, _rule_between(i, rows)))
    speeds = ("Tokens/s ↑ at a batch of", "The same as one CUDA graph ↑")
    heads = [
        row(
            ["", ""], [*(Box(text, len(batches)) for text in speeds), Box("State"), Box("Largest")]
        ),
        row(["Model", "Compr.", *batches, *batches, "MiB ↓", "batch ↑"]),
    ]
    return t.grid([2, len(batches), len(batches), 2], heads, rows)


def _rule_between(i: int, rows: list[Row]) -> Separator:
    """A rule above the first row of every section but the first."""
    return "rule" if rows and not i else ""


LAYOUTS: dict[str, Callable[[TableBuilder], Grid]] = {
    "by_ratio": _by_ratio_or_model,
    "by_model": _by_ratio_or_model,
    "sharing": _sharing,
    "rotation": _rotation,
    "targets": _targets,
    "summary": _summary,
    "breakdown": _breakdown,
    "stages": _stages,
    "mixer_speed": _mixer_speed,
    "model_speed": _model_speed,
    "decoding_speed": _decoding_speed,
}


def lay_out(config: Config, name: str, results: Iterable[Result]) -> Grid:
    """A table of the configuration, from its results (`frame.table_results`)."""
    return LAYOUTS[config.tables[name].kind](TableBuilder(config, name, results))
