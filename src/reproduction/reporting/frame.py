"""Results in one form: every number of a run is a row, in the columns of the published numbers.

Units are those of the paper: accuracies and their means in percent, throughput in tokens per
second, memory in GiB. `target`, `rft` and `eps` are those of the variant; timings have
`head_k_dim`, and so have cuts to widths of keys and values, which have `head_v_dim`, too.
`training` counts the trainings of a model, from 0 on; `seed` is that of a draw.
A timing of the forward pass has the paper's name (`tokens_per_s`); others say what was timed
(`training_tokens_per_s`, `decoding_tokens_per_s_16` at a batch of 16).
"""

from __future__ import annotations

import csv
import math
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from reproduction.benchmarking.record import from_json
from reproduction.config import (
    BASELINE,
    Config,
    Measurement,
    QualityTable,
    Variant,
    cut_shape,
)
from reproduction.config.evaluation import FRACTIONS
from statecut.errors import InputError
from statecut.files import atomic_write, digest, read_json

LOWER_IS_BETTER = {"word_perplexity", "perplexity", "byte_perplexity", "bits_per_byte"}
SIZES = ("peak_memory_gib", "memory_ratio", "state_mib")
"""Results of benchmarks where less is better."""

PAPERS_GPU = "H100"
RATIOS = {
    "speedup": "tokens_per_s",
    "graph_speedup": "graph_tokens_per_s",
    "memory_ratio": "peak_memory_gib",
}
"""Timings that are another timing divided by that of the unpruned model."""

SEEDS = 3
"""Seeds that are enough to judge a result that depends on them."""

COLUMNS = {
    **dict.fromkeys(("model", "conv_sharing", "method", "target"), "str"),
    "compression": "float64",
    **dict.fromkeys(("head_k_dim", "head_v_dim"), "Int64"),
    **dict.fromkeys(("rft", "eps"), "str"),
    **dict.fromkeys(("seed", "training"), "int64"),
    "metric": "str",
    **dict.fromkeys(("value", "stderr"), "float64"),
    **dict.fromkeys(("protocol", "source", "reason", "draws", "note"), "str"),
}
"""Of a file of results, with their types."""


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
    eps: str = "kept"
    head_v_dim: int | None = None


class Draws(NamedTuple):
    """A number on bootstrap draws of its documents (reproduction.suites.statistics).

    Numbers of the same documents have the same draws, in the same order.
    """

    documents: str  # which ones
    values: tuple[float, ...]

    def to_text(self) -> str:
        """For a file, to about seven digits."""
        return f"{self.documents}:{b64encode(np.array(self.values, '<f4').tobytes()).decode()}"

    @classmethod
    def from_text(cls, text: str) -> Draws | None:
        if not text:
            return None
        documents, _, values = text.rpartition(":")
        return cls(documents, tuple(np.frombuffer(b64decode(values), "<f4").astype(float).tolist()))

    @classmethod
    def mean(cls, draws: Sequence[Draws | None]) -> Draws | None:
        """None if one of them is missing, or they differ in number."""
        known = [part for part in draws if part is not None]
        if len(known) < len(draws) or len({len(part.values) for part in known}) != 1:
            return None
        documents = "+".join(dict.fromkeys(part.documents for part in known))
        return cls(documents, tuple(np.mean([part.values for part in known], axis=0).tolist()))


class Result(NamedTuple):
    """A number, or the reason why there is none."""

    key: Key
    seed: int
    value: float | None = None
    stderr: float | None = None  # None if not known
    protocol: str = ""
    source: str = ""  # the file that it was read from
    reason: str = ""
    draws: str = ""  # `Draws` as text
    note: str = ""  # printed below tables that show the number
    training: int = 0  # which of its model

    @property
    def place(self) -> tuple[Key, int, int]:
        return self.key, self.training, self.seed


def write_results(path: Path | str, results: Iterable[Result]) -> None:
    """A parquet file of results, each once. Two values of one number are an error, and so are a
    number without a source and a gap without a reason."""
    rows = list(dict.fromkeys(results))
    for row in rows:
        right = row.reason and row.value is None
        if row.value is not None:
            right = row.source and not row.reason and math.isfinite(row.value)
        if not right:
            raise InputError(f"{path}: not a number with its source or a gap with a reason: {row}")
    places = Counter(row.place for row in rows)
    if repeated := [place for place, count in places.items() if count > 1]:
        raise InputError(f"{path}: two values of {repeated[0]}")
    frame = pd.DataFrame([row.key._asdict() | row._asdict() for row in rows], columns=[*COLUMNS])
    with atomic_write(path, force=True) as aside:
        frame.astype(COLUMNS).to_parquet(aside, index=False)


def read_frame(path: Path | str) -> pd.DataFrame:
    return pd.read_parquet(path)[[*COLUMNS]]


def read_results(path: Path | str) -> list[Result]:
    frame = read_frame(path).astype(object)
    return [
        Result(
            Key(*(row[field] for field in Key._fields)),
            *(row[field] for field in Result._fields[1:]),
        )
        for row in frame.where(frame.notna(), None).to_dict("records")
    ]


def make_frame(
    config: Config, table: str, sources: Sequence[Path | str | None], out: Path | str
) -> None:
    """The numbers of one table, from what was measured for it (`read_sources`)."""
    write_results(out, table_results(config, table, read_sources(config, table, sources)))


def make_union(frames: Iterable[Path | str], out: Path | str) -> None:
    """The numbers of all tables."""
    write_results(out, chain(*map(read_results, frames)))


# --- which numbers a table shows ---


def published_name(config: Config, model: str) -> tuple[str, str]:
    """A model in the columns of the published numbers: its name there, and its filters."""
    spec = config.models[model]
    return spec.published_as or model, spec.filter_sharing


def variant_key(config: Config, variant: Variant, metric: str) -> Key:
    model, sharing = published_name(config, variant.model)
    chosen, done = (variant.method, variant.target), (variant.rft, metric, variant.eps)
    if isinstance(variant.ratio, str):
        left = cut_shape(config.models[variant.model], variant.ratio)
        return Key(model, sharing, *chosen, None, left.width, *done, left.value_width)
    return Key(model, sharing, *chosen, variant.ratio, None, *done)


def timing_key(config: Config, cell: Measurement, metric: str) -> Key:
    """Timings depend on the width alone, so their method is the baseline or empty."""
    name = metric if cell.mode == "forward" else f"{cell.mode}_{metric}"
    benchmark = config.benchmarks[cell.benchmark]
    if benchmark.kind == "mixer":
        method = BASELINE if cell.width == benchmark.widths[0] else ""
        return Key(cell.subject, "", method, "", None, cell.width, "none", name)
    model, sharing = published_name(config, cell.subject)
    method = "" if cell.ratio else BASELINE
    if isinstance(cell.ratio, str):
        values = cut_shape(config.models[cell.subject], cell.ratio).value_width
        return Key(model, sharing, method, "", None, cell.width, "none", name, "kept", values)
    return Key(model, sharing, method, "", cell.ratio, cell.width, "none", name)


def lower_is_better(config: Config, metric: str) -> bool:
    """Of a column of a suite, or of a timing."""
    for suite in config.evaluation.suites.values():
        if metric in suite.tasks:
            return suite.tasks[metric].metric in LOWER_IS_BETTER
    return metric.endswith(SIZES)


Known = Mapping[tuple[Key, int, int], Result]
"""Results by `Result.place`."""


def table_results(config: Config, table: str, results: Iterable[Result]) -> list[Result]:
    """Every cell of a table and every seed: measured, derived, or missing and why."""
    known = {result.place: result for result in results}
    if isinstance(config.tables[table], QualityTable):
        rows = (_evaluated(config, *cell, known) for cell in config.cells(table))
    else:
        metrics = _timed_metrics(config, table)
        rows = (
            _timed(config, c, metric, known) for c in config.timings(table) for metric in metrics
        )
    return list(dict.fromkeys(rows))


def _timed_metrics(config: Config, table: str) -> tuple[str, ...]:
    spec: Any = config.tables[table]
    benchmark = config.benchmarks[spec.benchmark]
    if benchmark.kind == "decoding":
        return (*benchmark.speeds(), "state_mib", "largest_batch")
    if benchmark.kind == "mixer":
        return ("tokens_per_s", "speedup", "peak_memory_gib", "memory_ratio")
    graphs = ("graph_tokens_per_s", "graph_speedup") if benchmark.graphs(spec.shows) else ()
    return ("tokens_per_s", "speedup", *graphs)


def _evaluated(config: Config, variant: Variant, metric: str, known: Known) -> Result:
    key, training = variant_key(config, variant, metric), config.models[variant.model].training
    result, suite = Result(key, variant.seed, training=training), config.suite_of(metric)
    if reason := suite.left_out(metric):
        return result._replace(reason=f"not attempted: {reason}")
    if result.place in known or metric != suite.mean:
        return _measured(config, result, known)
    tasks = (result._replace(key=key._replace(metric=task)) for task in suite.tasks)
    parts = [_measured(config, task, known) for task in tasks]
    for part in parts:
        if part.value is None:
            return part._replace(key=key, reason=f"{part.key.metric}: {part.reason}")
    errors = [part.stderr for part in parts if part.stderr is not None]
    draws = Draws.mean([Draws.from_text(part.draws) for part in parts])
    return parts[0]._replace(
        key=key,
        draws=draws.to_text() if draws else "",
        note=_join_notes(parts),
        value=fmean(part.value for part in parts if part.value is not None),
        stderr=math.hypot(*errors) / len(parts) if len(errors) == len(parts) else None,
    )


def _timed(config: Config, cell: Measurement, metric: str, known: Known) -> Result:
    key = timing_key(config, cell, metric)
    if (result := Result(key, 0)).place in known or metric not in RATIOS:
        return _measured(config, result, known)
    # Of the unpruned model, or of the mixer's first width.
    first = next(
        other
        for other in config.measurements(cell.benchmark)
        if (other.subject, other.mode) == (cell.subject, cell.mode)
    )
    own, reference = (
        _measured(config, Result(timing_key(config, part, RATIOS[metric]), 0), known)
        for part in (cell, first)
    )
    if own.value is None:
        return own._replace(key=key)
    if reference.value is None:
        return reference._replace(key=key, reason=f"at d_k {first.width}: {reference.reason}")
    if cell == first:
        return own._replace(key=key, value=1.0, stderr=0.0)
    value, stderr = own.value / reference.value, None
    if own.stderr is not None and reference.stderr is not None:
        stderr = value * math.hypot(own.stderr / own.value, reference.stderr / reference.value)
    return own._replace(key=key, value=value, stderr=stderr)


def _measured(config: Config, result: Result, known: Known) -> Result:
    reason = f"not measured: {config.partial}" if config.partial else "not measured"
    return known.get(result.place) or result._replace(reason=reason)


# --- what was measured ---


def read_sources(
    config: Config, table: str, sources: Sequence[Path | str | None]
) -> Iterator[Result]:
    """What was measured for a table, from one file per evaluation or cell of a benchmark.

    The files stand in the order of `config.evaluations(table)` or `config.timings(table)`, with
    None for one that a partial run does not have.
    """
    if isinstance(config.tables[table], QualityTable):
        for (variant, suite), path in zip(config.evaluations(table), sources, strict=True):
            if path is not None:
                yield from read_evaluation(config, variant, suite, path)
    else:
        for cell, path in zip(config.timings(table), sources, strict=True):
            if path is not None:
                yield from read_measurement(config, cell, path)


def read_evaluation(
    config: Config, variant: Variant, suite: str, path: Path | str
) -> Iterator[Result]:
    """The numbers of one variant in the file that `reproduction.suites` wrote for a suite.

    Means are left to `table_results`: they follow from the tasks.
    """
    record, training = read_json(path), config.models[variant.model].training
    for column, task in config.evaluation.suites[suite].tasks.items():
        result, key = record["results"][column], variant_key(config, variant, column)
        if "not_attempted" in result:
            continue
        if not math.isfinite(result["value"]):
            reason = f"the model is broken: {result['value']}"
            yield Result(key, variant.seed, reason=reason, training=training)
            continue
        scale, draws = 100.0 if task.metric in FRACTIONS else 1.0, ""
        if result["draws"] is not None:
            evaluated = record["tasks"][column]
            documents = digest({name: evaluated[name] for name in ("data", "documents")})[:12]
            draws = Draws(documents, tuple(value * scale for value in result["draws"])).to_text()
        yield Result(
            key,
            variant.seed,
            value=result["value"] * scale,
            stderr=None if result["stderr"] is None else result["stderr"] * scale,
            protocol=record["protocol"],
            source=Path(path).as_posix(),
            draws=draws,
            note=result.get("note", ""),
            training=training,
        )


def read_measurement(config: Config, cell: Measurement, path: Path | str) -> Iterator[Result]:
    """The numbers of one cell in the file that `reproduction.benchmarking` wrote for it.

    The protocol `paper` needs the paper's GPU: on another GPU it is that GPU's name.
    """
    record = from_json(read_json(path))
    protocol, source = config.evaluation.protocol, Path(path).as_posix()
    gpu = record.machine.get("gpu") or "CPU"
    if protocol == "paper" and PAPERS_GPU not in gpu:
        protocol = gpu
    for metric, reading in record.results.items():
        key = timing_key(config, cell, metric)
        if reading.value is None:
            yield Result(key, 0, reason=reading.reason)
        else:
            yield Result(key, 0, reading.value, reading.stderr, protocol, source)


# --- a number over its trainings and seeds ---


@dataclass(frozen=True)
class Cell:
    """A number over its seeds; over its trainings where it has several, each the mean over its
    seeds."""

    value: float | None  # mean
    spread: float | None  # standard deviation; None where there is one
    stderr: float | None  # of one evaluation: root mean square
    seeds: int  # of each training; the fewest
    protocols: frozenset[str]
    reason: str  # why it, or some of its seeds, are missing
    draws: Draws | None = None  # mean
    note: str = ""
    by_training: Mapping[int, float] = field(default_factory=dict)  # where it has several

    @property
    def trainings(self) -> int:
        return max(1, len(self.by_training))

    @property
    def count(self) -> int:
        """What mean and spread are over."""
        return self.trainings if self.trainings > 1 else self.seeds


def cells(results: Iterable[Result]) -> dict[Key, Cell]:
    by_key: dict[Key, list[Result]] = {}
    for result in results:
        by_key.setdefault(result.key, []).append(result)
    return {key: _cell(own) for key, own in by_key.items()}


def _cell(results: list[Result]) -> Cell:
    known = [result for result in results if result.value is not None]
    trainings: dict[int, list[float]] = {}
    for result in known:
        trainings.setdefault(result.training, []).append(result.value)  # type: ignore[arg-type]
    several = {training: fmean(values) for training, values in trainings.items()}
    values = [*several.values()] if len(several) > 1 else [*chain(*trainings.values())]
    errors = [result.stderr for result in results if result.stderr is not None]
    reasons = [
        f"{draw_name(result)}: {result.reason}" if values else result.reason
        for result in results
        if result.value is None
    ]
    draws = [Draws.from_text(result.draws) for result in known]
    same_documents = len({part.documents for part in draws if part}) == 1
    return Cell(
        value=fmean(values) if values else None,
        spread=stdev(values) if len(values) > 1 else None,
        stderr=math.hypot(*errors) / math.sqrt(len(errors)) if errors else None,
        seeds=min(map(len, trainings.values()), default=0),
        protocols=frozenset(result.protocol for result in known),
        reason="; ".join(dict.fromkeys(reasons)),
        draws=Draws.mean(draws) if same_documents else None,
        note=_join_notes(results),
        by_training=several if len(several) > 1 else {},
    )


def draw_name(result: Result) -> str:
    training = f"training {result.training}, " if result.training else ""
    return f"{training}seed {result.seed}"


def _join_notes(results: Iterable[Result]) -> str:
    return "; ".join(dict.fromkeys(result.note for result in results if result.note))


# --- the paper's numbers ---


class Printed(NamedTuple):
    """A number of the paper."""

    table: str
    key: Key
    value: float
    mark: str
    digit: float  # the unit of the last digit that is printed


def read_published(path: Path | str) -> list[Printed]:
    with open(path, newline="") as file:
        return [
            Printed(
                row["table"], read_key(row), float(row["value"]), row["rank_mark"], _last_digit(row)
            )
            for row in csv.DictReader(file)
        ]


def read_key(row: Mapping[str, str]) -> Key:
    """A key from the fields of a CSV file, where None is an empty field, and eps may be absent."""
    fields: dict[str, Any] = {name: row[name] for name in Key._fields if name in row}
    for name, number in (("compression", float), ("head_k_dim", int), ("head_v_dim", int)):
        fields[name] = number(row[name]) if row.get(name) else None
    return Key(**fields)


def _last_digit(row: Mapping[str, str]) -> float:
    """values.csv drops trailing zeros, so a number has at least the usual number of decimals."""
    value, metric = float(row["value"]), row["metric"]
    if metric == "tokens_per_s":
        return 1e2 if row["compression"] else 1e5  # thousands for models, millions for mixers
    if row["table"] == "adv_vs_non_adv" and value >= 1e4:
        return 10.0 ** (math.floor(math.log10(value)) - 1)
    usual = 2 if metric in {"speedup", "peak_memory_gib", "memory_ratio"} else 1
    return 10.0 ** -max(usual, len(row["value"].partition(".")[2]))
