"""The kinds of tables: which rows, columns and headings each of them has.

Rows and columns are the paper's, and one more row where a run has recovered the unpruned model too.
What numbers, marks and notes look like is in `reproduction.reporting.grid`; fonts, rules and
alignment are in the templates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, product
from typing import Any

from reproduction.config import BASELINE, Config, Cut, Stage, cut_shape
from reproduction.reporting.frame import Result
from reproduction.reporting.grid import (
    STAGES,
    Box,
    Form,
    Grid,
    Row,
    Separator,
    TableBuilder,
    fixed,
    one_decimal,
    percent,
    row,
    scientific_if_large,
    throughput,
)

# Shared by heads, then by the channels of a head.
SHARED = {"none": "× ×", "head": "× ✓", "all": "✓ ✓"}
FILTERS = {"none": "Separate", "head": "Shared in a head", "all": "Shared by all"}
TARGETS = {"kq": "K, Q", "k": "K", "q": "Q"}
RECOVERED = {"none": "", "pre": "×", "refit": "refit, ×", "post": "✓", "refit_post": "refit, ✓"}

Place = dict[str, Any]
"""A part of what `TableBuilder.key` takes: of a column, or of a section of rows."""
Group = tuple[str, Sequence[Place]]
"""A heading, and the columns below it."""


def _methods(
    t: TableBuilder,
    labels: Sequence[str],
    groups: Sequence[Group],
    sections: Iterable[tuple[Sequence[str], Place, Sequence[str] | None]],
    *,
    form: Form = one_decimal,
    repeat: bool = False,
    heads: Sequence[Row] = (),
) -> Grid:
    """Methods down, section by section, groups of columns across.

    sections:  labels, the place of their rows, and where the unpruned model follows, its labels
    repeat:    whether the labels of a section stand on all of its rows
    heads:     in place of the line below that of the groups
    """
    places = [place for _, group in groups for place in group]
    titles = row([*labels, "Method", *(t.title(place["metric"]) for place in places)])
    groups_line = row([""] * (len(labels) + 1), (Box(name, len(group)) for name, group in groups))
    rows: list[Row] = []
    for names, place, last in sections:
        for i, method in enumerate(t.table.methods):
            numbers = t.numbers((t.key(method=method, **place, **p) for p in places), form)
            shown = [name if repeat or not i else "" for name in names]
            rows.append(row([*shown, t.method(method)], numbers, _rule_between(i, rows)))
        if last is not None:
            for name, rft in t.baselines():
                boxes = _baseline(t, place, groups, rft, form)
                rows.append(row([*last, name], boxes, "rule" if rft == "none" else ""))
    sizes = [len(group) for _, group in groups]
    return t.grid([len(labels) + 1, *sizes], [groups_line, *(heads or [titles])], rows)


def _baseline(
    t: TableBuilder, section: Place, groups: Iterable[Group], rft: Stage, form: Form
) -> Iterator[Box]:
    """The unpruned model: once for all ratios and targets, and if recovered, at that stage only."""
    for _, places in groups:
        other_ratio = places[0].get("ratio", t.table.ratios[0]) != t.table.ratios[0]
        if other_ratio or (rft != "none" and places[0].get("rft", rft) != rft):
            yield Box("", len(places))
            continue
        keys = (t.baseline((section | p)["model"], rft, p["metric"]) for p in places)
        for key, same in groupby(keys):
            yield t.number(key, form, len(list(same)))


def _by_ratio(t: TableBuilder) -> Grid:
    """Ratios across; models down, where there are several."""
    [stage] = t.stages
    groups = [
        (
            f"{percent(ratio)} compression",
            [{"ratio": ratio, "metric": column} for column in t.columns(stage)],
        )
        for ratio in t.table.ratios
    ]
    several = len(t.table.models) > 1
    sections = [
        ([t.model(model)] * several, {"model": model, "rft": stage}, [""] * several)
        for model in t.table.models
    ]
    return _methods(t, ["Model"] * several, groups, sections)


def _by_model(t: TableBuilder) -> Grid:
    """Models at one ratio across."""
    [stage], [ratio] = t.stages, t.table.ratios
    groups = [
        (t.model(model), [{"model": model, "metric": column} for column in t.columns(stage)])
        for model in t.table.models
    ]
    return _methods(t, [], groups, [([], {"ratio": ratio, "rft": stage}, [])])


def _rotation(t: TableBuilder) -> Grid:
    """Ratios down, models across."""
    [stage] = t.stages
    groups = [
        (
            FILTERS[t.config.models[model].filter_sharing],
            [{"model": model, "metric": column} for column in t.columns(stage)],
        )
        for model in t.table.models
    ]
    sections = [
        ([percent(ratio)], {"ratio": ratio, "rft": stage}, [percent(0)] if last else None)
        for ratio, last in _with_last(t.table.ratios)
    ]
    return _methods(t, ["Compr."], groups, sections, form=scientific_if_large)


def _targets(t: TableBuilder) -> Grid:
    """Models and what was scored across."""
    [stage], [ratio], targets = t.stages, t.table.ratios, t.table.targets
    pairs = [*product(t.columns(stage), targets)]
    groups = [
        (t.model(model), [{"model": model, "metric": c, "target": target} for c, target in pairs])
        for model in t.table.models
    ]
    columns = [*t.columns(stage)] * len(groups)
    heads = [
        row([""], (Box(t.title(column), len(targets)) for column in columns)),
        row(["Method", *(TARGETS[target] for _, target in pairs * len(groups))]),
    ]
    return _methods(t, [], groups, [([], {"ratio": ratio, "rft": stage}, [])], heads=heads)


def _summary(t: TableBuilder) -> Grid:
    """Models down, stages across."""
    [ratio] = t.table.ratios
    groups = [
        (
            STAGES[stage].capitalize(),
            [{"rft": stage, "metric": column} for column in t.columns(stage)],
        )
        for stage in t.stages
    ]
    sections = [([t.model(m)], {"model": m, "ratio": ratio}, [""]) for m in t.table.models]
    return _methods(t, ["Model"], groups, sections)


def _stages(t: TableBuilder) -> Grid:
    """Models and ratios with the size of the state down; stages across, each with eps kept and
    matched where the table has both."""
    groups = [
        (
            STAGES[stage].capitalize() + f", eps {eps}" * (len(t.eps) > 1),
            [{"rft": stage, "metric": column, "eps": eps} for column in t.columns(stage)],
        )
        for stage, eps in product(t.stages, t.eps)
    ]

    def labels(model: str, ratio: Cut) -> list[str]:
        state = cut_shape(t.config.models[model], ratio).state_bytes() / 1024
        return [t.model(model), percent(ratio), f"{state:,.10g}"]

    sections = [
        (labels(m, ratio), {"model": m, "ratio": ratio}, labels(m, 0.0) if last else None)
        for m in t.table.models
        for ratio, last in _with_last(t.table.ratios)
    ]
    return _methods(t, ["Model", "Compr.", "State, KiB"], groups, sections, repeat=True)


def _sharing(t: TableBuilder) -> Grid:
    """Unpruned models, by how they share their filters."""
    columns = t.columns("none")
    rows = []
    for model in t.table.models:
        numbers = t.numbers(t.baseline(model, "none", column) for column in columns)
        rows.append(row([SHARED[t.config.models[model].filter_sharing]], numbers))
    heads = t.two_line_heads(["Shared by"], ["heads, channels"], columns)
    return t.grid([1, *t.suite_sizes(columns)], heads, rows)


def _breakdown(t: TableBuilder) -> Grid:
    """Ratios, stages and methods down, every column of the suites across."""
    columns = t.columns("none")
    models, stages = len(t.table.models) > 1, len(t.stages) > 1  # whether they have labels

    def line(model: str, method: str, rft: Stage, ratio: Cut, above: Separator, name: str) -> Row:
        labels = [t.model(model)] * models + [RECOVERED[rft]] * stages + [name, percent(ratio)]
        measured = t.columns(rft)
        numbers = (
            t.number(t.key(model, method, ratio, rft, column)) if column in measured else Box()
            for column in columns
        )
        return row(labels, numbers, above)

    rows: list[Row] = []
    for model in t.table.models:
        for ratio, (s, stage) in product(t.table.ratios, enumerate(t.stages)):
            for i, method in enumerate(t.table.methods):
                above: Separator = "space" if s and not i else _rule_between(i, rows)
                rows.append(line(model, method, stage, ratio, above, t.method(method)))
        for name, rft in t.baselines():
            above, name = ("rule", name) if rft == "none" else ("", "Baseline" if stages else name)
            rows.append(line(model, BASELINE, rft, 0.0, above, name))
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
    heads = [row(["Model", "dₖ", "Tokens/s ↑", "Speedup ↑", "Memory ↓", "Ratio ↓"])]
    return t.grid([2, 2, 2], heads, _speeds(t, forms))


def _decoding_speed(t: TableBuilder) -> Grid:
    """Models and ratios down; throughput at each batch, without and with a CUDA graph; the size of
    the state."""
    batches = [str(batch) for batch in t.benchmark.batches]
    forms: dict[str, Form] = dict.fromkeys(t.benchmark.speeds(), throughput)
    forms |= {"state_mib": fixed(2), "largest_batch": fixed(0)}
    speeds = ("Tokens/s ↑ at a batch of", "The same as one CUDA graph ↑")
    groups = [*(Box(text, len(batches)) for text in speeds), Box("State"), Box("Largest")]
    titles = row(["Model", "Compr.", *batches, *batches, "MiB ↓", "batch ↑"])
    sizes = [2, len(batches), len(batches), 2]
    return t.grid(sizes, [row(["", ""], groups), titles], _speeds(t, forms))


def _speeds(t: TableBuilder, forms: Mapping[str, Form]) -> list[Row]:
    """A row per mixer and width, or per model and ratio."""
    rows: list[Row] = []
    for subject, measurements in t.by_subject().items():
        mixer = t.benchmark.kind == "mixer"
        label = t.benchmark.mixers[subject].label if mixer else t.model(subject)
        for i, cell in enumerate(measurements):
            labels = ["" if i else label, str(cell.width) if mixer else percent(cell.ratio)]
            numbers = [t.timing(cell, metric, form) for metric, form in forms.items()]
            rows.append(row(labels, numbers, _rule_between(i, rows)))
    return rows


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


def _rule_between(i: int, rows: list[Row]) -> Separator:
    """A rule above the first row of every section but the first."""
    return "rule" if rows and not i else ""


def _with_last(ratios: Sequence[Cut]) -> list[tuple[Cut, bool]]:
    return [(ratio, ratio == ratios[-1]) for ratio in ratios]


LAYOUTS: dict[str, Callable[[TableBuilder], Grid]] = {
    "by_ratio": _by_ratio,
    "by_model": _by_model,
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
