"""Results in one form: every number of a run is a row, in the columns of the published numbers.

Units are those of the paper: accuracies and their means in percent, throughput in tokens per
second, memory in GiB. `target` and `rft` are those of the variant, `head_k_dim` stands for timings
only. A timing of the forward pass has the paper's name (`tokens_per_s`); others say what was timed
(`training_tokens_per_s`, `decoding_tokens_per_s_16` at a batch of 16).
"""

from __future__ import annotations

import csv
import math
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pandera.pandas as pa
from pandera.errors import SchemaErrors
from pyarrow import ArrowInvalid

from keycut.artefact import atomic_write, digest, read_json
from keycut.config import BASELINE, Config, DecodingTable, Measurement, QualityTable, Variant
from keycut.errors import InputError

PAPER = "arXiv 2602.04852"
"""The source of a published number."""

FRACTIONS = {"acc", "acc_norm", "contains"}
"""What tasks measure from 0 to 1, and results have in percent."""

PAPERS_GPU = "H100"
RATIOS = {
    "speedup": "tokens_per_s",
    "graph_speedup": "graph_tokens_per_s",
    "memory_ratio": "peak_memory_gib",
}
"""Timings that are another one divided by that of the model left whole."""


class Key(NamedTuple):
    """Which number it is, in the columns that results and published numbers share."""

    model: str
    conv_sharing: str
    method: str
    target: str
    compression: float | None
    head_k_dim: int | None
    rft: str
    metric: str


class Draws(NamedTuple):
    """A number on draws of the documents that it was measured on (keycut.evaluation.statistics).

    Two numbers of the same documents have the same draws, one by one.
    """

    of: str  # which documents
    values: tuple[float, ...]

    def text(self) -> str:
        """For a frame, to about seven digits."""
        return f"{self.of}:{b64encode(np.array(self.values, '<f4').tobytes()).decode()}"

    @classmethod
    def from_text(cls, text: str) -> Draws | None:
        if not text:
            return None
        of, _, values = text.rpartition(":")
        return cls(of, tuple(np.frombuffer(b64decode(values), "<f4").astype(float).tolist()))

    @classmethod
    def mean(cls, some: Sequence[Draws | None]) -> Draws | None:
        """Of as many draws each; of what has none there is none."""
        known = [one for one in some if one is not None]
        if not known or len(known) < len(some) or len({len(one.values) for one in known}) > 1:
            return None
        of = "+".join(dict.fromkeys(one.of for one in known))
        return cls(of, tuple(np.mean([one.values for one in known], axis=0).tolist()))


class Result(NamedTuple):
    """One number, or why there is none. `stderr` is its own uncertainty, where it is known,
    `draws` what tells that of a difference, as text, and `note` what is to be said beside it."""

    key: Key
    seed: int
    value: float | None
    stderr: float | None
    protocol: str
    source: str
    reason: str
    draws: str = ""
    note: str = ""


def _text(*checks: pa.Check) -> pa.Column:
    return pa.Column(str, list(checks), nullable=False)


# Value or reason, and never both: a number without a source, or a gap without a reason, is a bug
# of whatever wrote it.
SCHEMA = pa.DataFrameSchema(
    {
        "model": _text(pa.Check.str_length(min_value=1)),
        "conv_sharing": _text(pa.Check.isin(["", "none", "head", "all"])),
        "method": _text(),
        "target": _text(pa.Check.isin(["", "kq", "k", "q"])),
        "compression": pa.Column(float, pa.Check.in_range(0, 1, include_max=False), nullable=True),
        "head_k_dim": pa.Column("Int64", pa.Check.gt(0), nullable=True),
        "rft": _text(pa.Check.isin(["none", "pre", "post"])),
        "seed": pa.Column("int64", pa.Check.ge(0)),
        "metric": _text(pa.Check.str_length(min_value=1)),
        "value": pa.Column(float, pa.Check(lambda v: v.abs() != math.inf), nullable=True),
        "stderr": pa.Column(
            float, pa.Check.in_range(0, math.inf, include_max=False), nullable=True
        ),
        "protocol": _text(),
        "source": _text(),
        "reason": _text(),
        "draws": _text(),
        "note": _text(),
    },
    checks=[
        pa.Check(lambda f: f["value"].isna() == (f["reason"] != ""), name="a value or a reason"),
        pa.Check(lambda f: f["value"].isna() | (f["source"] != ""), name="a value has a source"),
    ],
    unique=[*Key._fields, "seed"],
    strict=True,
    ordered=True,
)
COLUMNS = tuple(SCHEMA.columns)


def to_frame(results: Iterable[Result]) -> pd.DataFrame:
    rows = [result.key._asdict() | result._asdict() for result in results]
    frame = pd.DataFrame(rows, columns=list(COLUMNS)).astype(
        {name: str(column.dtype) for name, column in SCHEMA.columns.items()}
    )
    return checked(frame, "results")


def from_frame(frame: pd.DataFrame) -> list[Result]:
    return [
        Result(
            Key(**{field: _plain(row[field]) for field in Key._fields}),
            int(row["seed"]),
            *(_plain(row[field]) for field in Result._fields[2:]),
        )
        for row in frame.to_dict("records")
    ]


def checked(frame: pd.DataFrame, what: str) -> pd.DataFrame:
    """The frame itself, or an error that names the first things wrong with it."""
    try:
        return SCHEMA.validate(frame, lazy=True)
    except SchemaErrors as error:
        failures = error.failure_cases
        shown = [
            f"{case['column'] or 'frame'}: {case['check']} (row {case['index']}: "
            f"{case['failure_case']!r})"
            for case in failures.head(3).to_dict("records")
        ]
        raise InputError(f"{what}: not a frame of results: {'; '.join(shown)}") from None


def write_frame(path: Path | str, frame: pd.DataFrame) -> None:
    with atomic_write(path, force=True) as aside:
        checked(frame, str(path)).to_parquet(aside, index=False)


def read_frame(path: Path | str) -> pd.DataFrame:
    try:
        return checked(pd.read_parquet(path), str(path))
    except ArrowInvalid as error:
        raise InputError(f"{path}: not a parquet file ({error})") from None


def union(frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """All rows of all tables, each once. One number with two values is an error."""
    together = pd.concat(list(frames), ignore_index=True)
    return checked(together.drop_duplicates(ignore_index=True), "the union of the tables")


# --- what a table shows ---


def identity(config: Config, model: str) -> tuple[str, str]:
    """A model in the columns of the published numbers: its name there, and its filters."""
    spec = config.models[model]
    return spec.published_as or model, getattr(spec, "conv_sharing", "none")


def variant_key(config: Config, variant: Variant, metric: str) -> Key:
    model, sharing = identity(config, variant.model)
    return Key(
        model, sharing, variant.method, variant.target, variant.ratio, None, variant.rft, metric
    )


def timing_key(config: Config, cell: Measurement, metric: str) -> Key:
    """Timings depend on the width alone, so they have no method beside the baseline."""
    name = metric if cell.does == "forward" else f"{cell.does}_{metric}"
    benchmark = config.benchmarks[cell.benchmark]
    if benchmark.kind == "mixer":
        method = BASELINE if cell.width == benchmark.widths[0] else ""
        return Key(cell.subject, "", method, "", None, cell.width, "none", name)
    model, sharing = identity(config, cell.subject)
    method = "" if cell.ratio else BASELINE
    return Key(model, sharing, method, "", cell.ratio, cell.width, "none", name)


def timed(config: Config, table: str) -> tuple[tuple[Measurement, str], ...]:
    """Every cell of a table of timings: which measurement, and which of its numbers."""
    spec = config.tables[table]
    metrics: tuple[str, ...] = ("tokens_per_s", "speedup")
    assert not isinstance(spec, QualityTable)
    benchmark = config.benchmarks[spec.benchmark]
    if benchmark.kind == "decoding":
        metrics = (*benchmark.speeds(), "state_mib", "largest_batch")
    elif benchmark.kind == "mixer":
        metrics += ("peak_memory_gib", "memory_ratio")
    elif not isinstance(spec, DecodingTable) and benchmark.graphs(spec.shows):
        metrics += ("graph_tokens_per_s", "graph_speedup")
    return tuple((cell, metric) for cell in config.timings(table) for metric in metrics)


def table_frame(config: Config, table: str, results: Iterable[Result]) -> pd.DataFrame:
    """A row for every cell of a table and every seed: measured, derived, or missing and why."""
    there = {(result.key, result.seed): result for result in results}
    if isinstance(config.tables[table], QualityTable):
        rows = (
            _evaluated(config, variant, metric, there) for variant, metric in config.cells(table)
        )
    else:
        rows = (_timed(config, cell, metric, there) for cell, metric in timed(config, table))
    return to_frame(dict.fromkeys(rows))


def read_evaluation(config: Config, variant: Variant, path: Path | str) -> Iterator[Result]:
    """The numbers of one variant in the file that `keycut.evaluation` wrote for a suite.

    Means are left to `table_frame`: they follow from the tasks.
    """
    record = _record(path, "an evaluation", {"suite", "protocol", "results", "tasks"})
    for column, task in config.evaluation.suites[record["suite"]].tasks.items():
        found, key = record["results"][column], variant_key(config, variant, column)
        if "not_attempted" in found:
            continue
        if not math.isfinite(found["value"]):
            reason = f"the model is broken: {found['value']}"
            yield Result(key, variant.seed, None, None, "", "", reason)
            continue
        scale = 100.0 if task.metric in FRACTIONS else 1.0
        stderr = None if found["stderr"] is None else found["stderr"] * scale
        value, protocol = found["value"] * scale, record["protocol"]
        draws = _draws(record["tasks"][column], found["draws"], scale)
        source, note = Path(path).as_posix(), found.get("note", "")
        yield Result(key, variant.seed, value, stderr, protocol, source, "", draws, note)


def _draws(task: dict[str, Any], values: list[float] | None, scale: float) -> str:
    if values is None:
        return ""
    of = digest({"data": task["data"], "documents": task["documents"]})[:12]
    return Draws(of, tuple(value * scale for value in values)).text()


def read_measurement(config: Config, cell: Measurement, path: Path | str) -> Iterator[Result]:
    """The numbers of one cell in the file that `keycut.benchmarking` wrote for it.

    The paper's protocol has the paper's GPU: on another one a timing carries that one's name.
    """
    record = _record(path, "a measurement", {"cell", "results", "machine"})
    if record["cell"] != asdict(cell):
        raise InputError(f"{path}: it measured {record['cell']}, expected {asdict(cell)}")
    protocol, source = config.evaluation.protocol, Path(path).as_posix()
    gpu = record["machine"].get("gpu") or "CPU"
    if protocol == "paper" and PAPERS_GPU not in gpu:
        protocol = gpu
    for metric, found in record["results"].items():
        key = timing_key(config, cell, metric)
        if found["value"] is None:
            yield Result(key, 0, None, None, "", "", found["reason"])
        else:
            yield Result(key, 0, found["value"], found["stderr"], protocol, source, "")


def read_sources(
    config: Config, table: str, sources: Sequence[Path | str | None]
) -> Iterator[Result]:
    """What was measured for a table, from one file per evaluation or cell of a benchmark.

    The files stand in the order of `config.evaluations(table)` or `config.timings(table)`, with
    None for one that a partial run does not have.
    """
    if config.partial is None and None in sources:
        raise InputError(f"table {table}: results are missing, and the run is not `partial`")
    if isinstance(config.tables[table], QualityTable):
        evaluated = config.evaluations(table)
        refuse_count(f"table {table}", "evaluations", len(evaluated), len(sources))
        for (variant, suite), path in zip(evaluated, sources, strict=True):
            if path is None:
                continue
            if (found := read_json(path).get("suite")) != suite:
                raise InputError(f"{path}: an evaluation of suite {found!r}, expected {suite!r}")
            yield from read_evaluation(config, variant, path)
    else:
        cells = config.timings(table)
        refuse_count(f"table {table}", "measurements", len(cells), len(sources))
        for cell, path in zip(cells, sources, strict=True):
            if path is not None:
                yield from read_measurement(config, cell, path)


def refuse_count(what: str, of: str, expected: int, given: int) -> None:
    if expected != given:
        raise InputError(f"{what} is made of {expected} {of}, not of {given}: give each of them")


def _record(path: Path | str, what: str, keys: set[str]) -> dict[str, Any]:
    record = read_json(path)
    if not isinstance(record, dict) or not keys <= record.keys():
        raise InputError(f"{path} is not {what}: it lacks one of {', '.join(sorted(keys))}")
    return record


There = Mapping[tuple[Key, int], Result]


def _evaluated(config: Config, variant: Variant, metric: str, there: There) -> Result:
    key = variant_key(config, variant, metric)
    suite = config.evaluation.suites[config.suite_of(metric)]
    if why := suite.left_out(metric):
        return Result(key, variant.seed, None, None, "", "", f"not attempted: {why}")
    if (key, variant.seed) in there or metric != suite.mean:
        return there.get((key, variant.seed)) or _not_measured(config, key, variant.seed)
    parts = []
    for task in suite.tasks:
        of_task = key._replace(metric=task)
        part = there.get((of_task, variant.seed)) or _not_measured(config, of_task, variant.seed)
        if part.value is None:
            return part._replace(key=key, reason=f"{task}: {part.reason}")
        parts.append(part)
    errors = [part.stderr for part in parts if part.stderr is not None]
    draws = Draws.mean([Draws.from_text(part.draws) for part in parts])
    return parts[0]._replace(
        key=key,
        draws=draws.text() if draws else "",
        note=_notes(parts),
        value=fmean(part.value for part in parts if part.value is not None),
        stderr=math.hypot(*errors) / len(parts) if len(errors) == len(parts) else None,
    )


def _timed(config: Config, cell: Measurement, metric: str, there: There) -> Result:
    key = timing_key(config, cell, metric)
    if (key, 0) in there or metric not in RATIOS:
        return there.get((key, 0)) or _not_measured(config, key, 0)
    first = _reference(config, cell)
    of, reference = (
        there.get((part := timing_key(config, one, RATIOS[metric]), 0))
        or _not_measured(config, part, 0)
        for one in (cell, first)
    )
    if of.value is None:
        return of._replace(key=key)
    if reference.value is None:
        return reference._replace(key=key, reason=f"at d_k {first.width}: {reference.reason}")
    value = of.value / reference.value
    if of is reference:
        return of._replace(key=key, value=1.0, stderr=0.0)
    if of.stderr is None or reference.stderr is None:
        return of._replace(key=key, value=value, stderr=None)
    relative = math.hypot(of.stderr / of.value, reference.stderr / reference.value)
    return of._replace(key=key, value=value, stderr=value * relative)


def _reference(config: Config, cell: Measurement) -> Measurement:
    """The same measurement of the model left whole, or of the mixer's first width."""
    same = (cell.benchmark, cell.subject, cell.does)
    return next(
        other
        for other in config.measurements(cell.benchmark)
        if (other.benchmark, other.subject, other.does) == same
    )


def _not_measured(config: Config, key: Key, seed: int) -> Result:
    why = f": {config.partial}" if config.partial else ""
    return Result(key, seed, None, None, "", "", f"not measured{why}")


# --- one cell over its seeds ---


SEEDS = 3
"""Draws that a word about something drawn needs."""


@dataclass(frozen=True)
class Cell:
    """A number over its seeds: their mean, the spread of one draw, the error of one evaluation."""

    value: float | None
    spread: float | None  # standard deviation over seeds; None for one seed
    stderr: float | None  # root mean square over seeds
    seeds: int
    protocols: frozenset[str]
    reason: str  # why it, or some of its seeds, are missing
    draws: Draws | None = None  # the mean over seeds
    note: str = ""  # what is said beside it

    @property
    def noise(self) -> float:
        """What is known of its uncertainty; unknown parts count as none."""
        return math.hypot(self.spread or 0.0, self.stderr or 0.0)


def cells(frame: pd.DataFrame) -> dict[Key, Cell]:
    by_key: dict[Key, list[Result]] = {}
    for result in from_frame(frame):
        by_key.setdefault(result.key, []).append(result)
    return {key: _cell(results) for key, results in by_key.items()}


def _cell(results: list[Result]) -> Cell:
    values = [result.value for result in results if result.value is not None]
    errors = [result.stderr for result in results if result.stderr is not None]
    missing = [result for result in results if result.value is None]
    reasons = [
        f"seed {result.seed}: {result.reason}" if values else result.reason for result in missing
    ]
    draws = [Draws.from_text(result.draws) for result in results if result.value is not None]
    same = len({one.of for one in draws if one}) == 1
    return Cell(
        draws=Draws.mean(draws) if same else None,
        value=fmean(values) if values else None,
        spread=stdev(values) if len(values) > 1 else None,
        stderr=math.hypot(*errors) / math.sqrt(len(errors)) if errors else None,
        seeds=len(values),
        protocols=frozenset(result.protocol for result in results if result.value is not None),
        reason="; ".join(dict.fromkeys(reasons)),
        note=_notes(results),
    )


def _notes(results: Iterable[Result]) -> str:
    return "; ".join(dict.fromkeys(result.note for result in results if result.note))


# --- the paper's numbers ---


class Printed(NamedTuple):
    """A number of the paper: its table, which it is, its value, its mark, its last digit's unit."""

    table: str
    key: Key
    value: float
    mark: str
    digit: float


def read_published(path: Path | str) -> list[Printed]:
    with open(path, newline="") as file:
        return [_printed(row) for row in csv.DictReader(file)]


def read_key(row: Mapping[str, str]) -> Key:
    """A key from text, where nothing is an empty field."""
    compression, width = row["compression"], row["head_k_dim"]
    return Key(
        row["model"],
        row["conv_sharing"],
        row["method"],
        row["target"],
        float(compression) if compression else None,
        int(width) if width else None,
        row["rft"],
        row["metric"],
    )


def _printed(row: dict[str, str]) -> Printed:
    value, mark = float(row["value"]), row["rank_mark"]
    return Printed(row["table"], read_key(row), value, mark, _last_digit(row))


def _last_digit(row: dict[str, str]) -> float:
    """The unit of the last digit that the paper prints.

    values.csv drops zeros at the end, so the usual number of decimals is the least.
    """
    value, metric = float(row["value"]), row["metric"]
    if metric == "tokens_per_s":
        return 1e2 if row["compression"] else 1e5  # thousands for models, millions for mixers
    if row["table"] == "adv_vs_non_adv" and value >= 1e4:
        return 10.0 ** (math.floor(math.log10(value)) - 1)
    usual = 2 if metric in {"speedup", "peak_memory_gib", "memory_ratio"} else 1
    given = len(row["value"].partition(".")[2])
    return 10.0 ** -max(usual, given)


def as_measured(config: Config, table: str, published: Iterable[Printed]) -> Iterator[Result]:
    """A table's published numbers as if this run had measured them, one per cell and seed."""
    values = {printed.key: printed.value for printed in published if printed.table == table}
    if isinstance(config.tables[table], QualityTable):
        wanted = [(variant_key(config, v, metric), v.seed) for v, metric in config.cells(table)]
    else:
        wanted = [(timing_key(config, cell, metric), 0) for cell, metric in timed(config, table)]
    for key, seed in wanted:
        if key in values:
            source = f"{PAPER}, {table}"
            yield Result(key, seed, values[key], None, config.evaluation.protocol, source, "")


def _plain(value: Any) -> Any:
    return None if pd.isna(value) else value
