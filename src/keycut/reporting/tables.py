"""Tables: a frame laid out as the paper lays it out. `keycut.reporting.writing` writes them.

A kind of table is a function from the configuration and the results to a `Grid`; what numbers,
marks and notes look like stands in `keycut.reporting.grid`. Rows and columns are the paper's, and
one more row where a run has recovered the unpruned model too. A frame that mixes published and
measured numbers is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pandas as pd

from keycut.config import BASELINE, Config, Stage
from keycut.errors import InputError
from keycut.reporting.frame import PAPER
from keycut.reporting.grid import (
    Above,
    Box,
    Grid,
    Line,
    Timings,
    Variants,
    fixed,
    percent,
    rotated,
    throughput,
)

# Shared by heads, then by the channels of a head.
SHARED = {"none": "× ×", "head": "× ✓", "all": "✓ ✓"}
FILTERS = {"none": "Separate", "head": "Shared in a head", "all": "Shared by all"}
TARGETS = {"kq": "K, Q", "k": "K", "q": "Q"}
RECOVERED = {"pre": "×", "post": "✓"}


def _by_ratio(t: Variants) -> Grid:
    """Methods down, ratios across."""
    [model], [stage], ratios = t.table.models, t.stages, t.table.ratios
    columns = t.columns(stage)
    wide = len(columns)
    heads = [
        Line((Box(), *(Box(f"{percent(ratio)} compression", wide) for ratio in ratios))),
        Line((Box("Method"), *(t.head(column) for _ in ratios for column in columns))),
    ]
    lines = []
    for method in t.table.methods:
        keys = (t.key(model, method, ratio, stage, c) for ratio in ratios for c in columns)
        lines.append(Line((t.label(method), *t.numbers(keys))))
    for name, rft in t.baselines():
        # One baseline for all ratios: under the others it has no place.
        numbers = t.numbers(t.whole(model, rft, column) for column in columns)
        rest = tuple(Box("", wide) for _ in ratios[1:])
        lines.append(Line((Box(name), *numbers, *rest), "rule" if rft == "none" else ""))
    return t.grid([1, *(wide for _ in ratios)], heads, lines)


def _by_model(t: Variants) -> Grid:
    """Methods down, models across."""
    models, [stage], [ratio] = t.table.models, t.stages, t.table.ratios
    columns = t.columns(stage)
    heads = [
        Line((Box(), *(Box(t.config.models[model].label, len(columns)) for model in models))),
        Line((Box("Method"), *(t.head(column) for _ in models for column in columns))),
    ]
    lines = []
    for method in t.table.methods:
        keys = (t.key(model, method, ratio, stage, c) for model in models for c in columns)
        lines.append(Line((t.label(method), *t.numbers(keys))))
    for name, rft in t.baselines():
        numbers = t.numbers(t.whole(model, rft, column) for model in models for column in columns)
        lines.append(Line((Box(name), *numbers), "rule" if rft == "none" else ""))
    return t.grid([1, *(len(columns) for _ in models)], heads, lines)


def _sharing(t: Variants) -> Grid:
    """Models left whole, by how they share their filters."""
    columns = t.columns("none")
    names, measures = t.heads(columns)
    heads = [Line((Box("Shared by"), *names)), Line((Box("heads, channels"), *measures))]
    lines = []
    for model in t.table.models:
        keys = [t.whole(model, "none", column) for column in columns]
        lines.append(Line((Box(SHARED[keys[0].conv_sharing]), *t.numbers(keys))))
    return t.grid([1, *t.by_suite(columns)], heads, lines)


def _rotation(t: Variants) -> Grid:
    """Ratios and methods down, models across, numbers of any size."""
    models, [stage] = t.table.models, t.stages
    columns = t.columns(stage)
    wide = len(columns)

    def numbers(method: str, ratio: float, rft: Stage) -> tuple[Box, ...]:
        keys = (t.key(m, method, ratio, rft, column) for m in models for column in columns)
        return tuple(t.number(key, rotated) for key in keys)

    filters = [t.whole(model, "none", columns[0]).conv_sharing for model in models]
    heads = [
        Line((Box(), Box(), *(Box(FILTERS[sharing], wide) for sharing in filters))),
        Line((Box("Compr."), Box("Method"), *(t.head(c) for _ in models for c in columns))),
    ]
    lines = [
        Line(
            (Box("" if i else percent(ratio)), t.label(method), *numbers(method, ratio, stage)),
            "" if i or not at else "rule",
        )
        for at, ratio in enumerate(t.table.ratios)
        for i, method in enumerate(t.table.methods)
    ]
    for name, rft in t.baselines():
        boxes = (Box(percent(0)), Box(name), *numbers(BASELINE, 0.0, rft))
        lines.append(Line(boxes, "rule" if rft == "none" else ""))
    return t.grid([2, *(wide for _ in models)], heads, lines)


def _targets(t: Variants) -> Grid:
    """Methods down, models and what was scored across."""
    models, [stage], [ratio] = t.table.models, t.stages, t.table.ratios
    targets, columns = t.table.targets or ("kq",), t.columns(stage)
    wide, each = len(columns) * len(targets), [(m, c) for m in models for c in columns]
    heads = [
        Line((Box(), *(Box(t.config.models[model].label, wide) for model in models))),
        Line((Box(), *(replace(t.head(column), span=len(targets)) for _, column in each))),
        Line((Box("Method"), *(Box(TARGETS[target]) for _ in each for target in targets))),
    ]
    lines = []
    for method in t.table.methods:
        keys = (t.key(m, method, ratio, stage, c, target) for m, c in each for target in targets)
        lines.append(Line((t.label(method), *t.numbers(keys))))
    for name, rft in t.baselines():
        # One baseline for all targets.
        numbers = (t.number(t.whole(m, rft, c), span=len(targets)) for m, c in each)
        lines.append(Line((Box(name), *numbers), "rule" if rft == "none" else ""))
    return t.grid([1, *(wide for _ in models)], heads, lines)


def _summary(t: Variants) -> Grid:
    """Models and methods down, before and after recovery across."""
    [ratio] = t.table.ratios
    columns = {stage: t.columns(stage) for stage in t.stages}
    names = {"pre": "Before recovery", "post": "After recovery"}
    heads = [
        Line((Box(), Box(), *(Box(names[stage], len(columns[stage])) for stage in t.stages))),
        Line((Box("Model"), Box("Method"), *(t.head(c) for s in t.stages for c in columns[s]))),
    ]
    lines: list[Line] = []
    for model in t.table.models:
        for i, method in enumerate(t.table.methods):
            keys = (t.key(model, method, ratio, s, c) for s in t.stages for c in columns[s])
            name = Box("" if i else t.config.models[model].label)
            above: Above = "rule" if lines and not i else ""
            lines.append(Line((name, t.label(method), *t.numbers(keys)), above))
        for name_, rft in t.baselines():
            boxes: list[Box] = []
            for stage in t.stages:
                if rft in ("none", stage):
                    boxes += t.numbers(t.whole(model, rft, column) for column in columns[stage])
                else:
                    boxes.append(Box("", len(columns[stage])))
            lines.append(Line((Box(), Box(name_), *boxes), "rule" if rft == "none" else ""))
    return t.grid([2, *(len(columns[stage]) for stage in t.stages)], heads, lines)


def _breakdown(t: Variants) -> Grid:
    """Ratios, stages and methods down, every column of the suites across."""
    columns = t.columns("none")
    several, both = len(t.table.models) > 1, len(t.stages) > 1
    labels = [*(["Model"] if several else []), *(["RFT"] if both else []), "Method", "Compr."]

    def line(model: str, method: str, rft: Stage, ratio: float, above: Above) -> Line:
        if method == BASELINE:
            name, recovered = "Baseline", RECOVERED.get(rft, "")
            if rft == "post" and not both:
                name = "Baseline, recovered"
        else:
            name, recovered = t.config.methods[method].label, RECOVERED[rft]
        shown = [
            *([t.config.models[model].label] if several else []),
            *([recovered] if both else []),
        ]
        here = t.columns(rft)
        numbers = (
            t.number(t.key(model, method, ratio, rft, column)) if column in here else Box()
            for column in columns
        )
        return Line((*map(Box, shown), Box(name), Box(percent(ratio)), *numbers), above)

    lines: list[Line] = []
    for model in t.table.models:
        for ratio in t.table.ratios:
            for s, stage in enumerate(t.stages):
                for i, method in enumerate(t.table.methods):
                    above: Above = ""
                    if not i and lines:
                        above = "space" if s else "rule"
                    lines.append(line(model, method, stage, ratio, above))
        for _, rft in t.baselines():
            lines.append(line(model, BASELINE, rft, 0.0, "rule" if rft == "none" else ""))
    names, measures = t.heads(columns)
    heads = [
        Line((*map(Box, labels), *names)),
        Line((*(Box() for _ in labels), *measures)),
    ]
    return t.grid([len(labels), *t.by_suite(columns)], heads, lines)


def _mixer_speed(t: Timings) -> Grid:
    """Mixers and widths down."""
    mixers = t.config.benchmarks[t.table.benchmark].mixers  # type: ignore[union-attr]
    names = ("Model", "dₖ", "Tokens/s ↑", "Speedup ↑", "Memory ↓", "Ratio ↓")
    lines: list[Line] = []
    for mixer, measured in t.by_subject().items():
        for i, cell in enumerate(measured):
            boxes = (
                Box("" if i else mixers[mixer].label),
                Box(str(cell.width)),
                t.at(cell, "tokens_per_s", throughput),
                t.at(cell, "speedup", fixed(2, unit="×")),
                t.at(cell, "peak_memory_gib", fixed(2, unit="GiB")),
                t.at(cell, "memory_ratio", fixed(2)),
            )
            lines.append(Line(boxes, "" if i or not lines else "rule"))
    return t.grid([2, 2, 2], [Line(tuple(map(Box, names)))], lines)


def _model_speed(t: Timings) -> Grid:
    """Ratios down, models across; throughput in thousands of tokens per second, as a graph too
    where it is timed as one."""
    benchmark = t.config.benchmarks[t.table.benchmark]
    assert benchmark.kind == "model"
    ways = {"": ("k tok/s ↑", "Speedup ↑")}
    if benchmark.graphs(t.does):
        ways["graph_"] = ("CUDA graph ↑", "Speedup ↑")
    subjects = t.by_subject()
    labels = [Box(t.config.models[model].label, 2 * len(ways)) for model in subjects]
    pairs = [Box(name) for _ in subjects for pair in ways.values() for name in pair]
    lines = []
    for row in zip(*subjects.values(), strict=True):
        numbers = [
            box
            for cell in row
            for way in ways
            for box in (
                t.at(cell, f"{way}tokens_per_s", fixed(1, scale=1e3)),
                t.at(cell, f"{way}speedup", fixed(2, unit="×")),
            )
        ]
        lines.append(Line((Box(percent(row[0].ratio)), *numbers)))
    heads = [Line((Box(), *labels)), Line((Box("Compr."), *pairs))]
    return t.grid([1, *(2 * len(ways) for _ in subjects)], heads, lines)


def _decoding_speed(t: Timings) -> Grid:
    """Models and ratios down; throughput at each batch, without Python too; the state's cost."""
    benchmark = t.config.benchmarks[t.table.benchmark]
    assert benchmark.kind == "decoding"
    batches = benchmark.batches
    lines: list[Line] = []
    for model, measured in t.by_subject().items():
        for i, cell in enumerate(measured):
            boxes = (
                Box("" if i else t.config.models[model].label),
                Box(percent(cell.ratio)),
                *(t.at(cell, speed, throughput) for speed in benchmark.speeds()),
                t.at(cell, "state_mib", fixed(2)),
                t.at(cell, "largest_batch", fixed(0)),
            )
            lines.append(Line(boxes, "" if i or not lines else "rule"))
    heads = [
        Line(
            (
                Box(),
                Box(),
                Box("Tokens/s ↑ at a batch of", len(batches)),
                Box("The same as one CUDA graph ↑", len(batches)),
                Box("State"),
                Box("Largest"),
            )
        ),
        Line(
            (
                Box("Model"),
                Box("Compr."),
                *(Box(str(batch)) for batch in (*batches, *batches)),
                Box("MiB ↓"),
                Box("batch ↑"),
            )
        ),
    ]
    return t.grid([2, len(batches), len(batches), 2], heads, lines)


VARIANTS: dict[str, Callable[[Variants], Grid]] = {
    "by_ratio": _by_ratio,
    "by_model": _by_model,
    "sharing": _sharing,
    "rotation": _rotation,
    "targets": _targets,
    "summary": _summary,
    "breakdown": _breakdown,
}
TIMINGS: dict[str, Callable[[Timings], Grid]] = {
    "mixer_speed": _mixer_speed,
    "model_speed": _model_speed,
    "decoding_speed": _decoding_speed,
}


def lay_out(config: Config, name: str, frame: pd.DataFrame) -> Grid:
    """A table of the configuration, from its frame (`keycut.reporting.frame.table_frame`)."""
    sources = frame.loc[frame["value"].notna(), "source"]
    if 0 < sources.str.startswith(PAPER).sum() < len(sources):
        raise InputError(f"table {name}: the paper's numbers and ours may not share a column")
    kind = config.tables[name].kind
    if kind in VARIANTS:
        return VARIANTS[kind](Variants(config, name, frame))
    return TIMINGS[kind](Timings(config, name, frame))
