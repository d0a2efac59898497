"""What benchmarks/speed.py found, as the tables of docs/speed.md.

    python benchmarks/speed_tables.py benchmarks/h200/speed.json
    python benchmarks/speed_tables.py benchmarks/h200/speed.json --into docs/speed.md \\
        --plot docs/widths.svg                                  writes them there, and draws

Where the paper has the same table, its own speedups and memory ratios stand in columns of their
own: they are of an H100 and another version of the kernels.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from arguments import existing

from reproduction.benchmarking.record import CellRecord, Reading, from_json
from reproduction.config import load_config
from reproduction.pretraining import verdicts
from statecut.files import read_json, write_json

ROOT = Path(__file__).parent.parent
LABELS = {
    "delta_net_mixer": "DeltaNet",
    "gated_deltanet_mixer": "Gated DeltaNet",
    "gated_deltanet_mixer_gate": "Gated DeltaNet, output gate",
    "delta_net": "DeltaNet",
    "gated_deltanet": "Gated DeltaNet",
}
AGAIN = "again "
GRAPH = "graph_tokens_per_s"
FIRST = "Which shapes train"
ON_WHITE = 'style="background:#fff;color:#000"'


@dataclass(frozen=True)
class Section:
    """A table of throughputs: the cells of some benchmarks that do one thing."""

    title: str
    benchmarks: tuple[str, ...]
    mode: str
    paper: str = ""  # its table, where it has one
    widths: frozenset[int] = frozenset()  # only these, or all


TRAINING = ("model_training", "model_training_370M")
LAYERS = ("mixer", "gated_mixer", "widths")
HALVED = frozenset({128, 64, 32, 16})
SECTIONS = (
    Section("One layer, forward", LAYERS, "forward", "mixer_scaling", HALVED),
    Section("One layer, forward and backward", LAYERS, "training", widths=HALVED),
    Section("One layer at 4,096 tokens, forward", ("long_mixer",), "forward", "mixer_scaling"),
    Section("Whole models, forward", ("model",), "forward", "speedup_whole_model"),
    Section("Whole models, a training step", TRAINING, "training"),
    Section("Small models, forward", ("small_model",), "forward"),
    Section("Odd widths: one layer, forward", ("mixer", "widths"), "forward"),
    Section("Odd widths: one layer, forward and backward", ("mixer", "widths"), "training"),
)


def tables(record: dict[str, Any]) -> str:
    cells = {key: from_json(one) for key, one in record["cells"].items()}
    once = [cell for key, cell in cells.items() if not key.startswith(AGAIN)]
    parts = [_verdicts(record["preflight"])]
    parts += [_throughput(section, once) for section in SECTIONS]
    parts += [_decoding(once), _twice(cells)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(title: str, columns: str, rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    lines = [f"### {title}", "", f"| {columns} |", "|---" * (columns.count("|") + 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _verdicts(records: list[dict[str, Any]]) -> str:
    found = sorted(map(verdicts.from_json, records), key=lambda one: one.shape, reverse=True)
    rows = [
        (
            LABELS[one.shape.kernel],
            f"{one.shape.heads} x {one.shape.width}",
            f"{one.shape.value_heads} x {one.shape.value_width}",
            one.verdict + (f", padded to {one.padded_to}" if one.padded_to else ""),
            *(f"{max(part.values()):.4f}" if part else "" for part in (one.errors, one.layer)),
        )
        for one in sorted(found, key=lambda one: (one.shape.kernel, one.shape.heads))
    ]
    columns = "rule | keys | values | verdict | error of the rule | of a layer"
    return _table(FIRST, columns, rows)


def _throughput(section: Section, cells: list[CellRecord]) -> str:
    mine = [c for c in cells if c.cell.benchmark in section.benchmarks]
    mine = [c for c in mine if c.cell.mode == section.mode]
    if section.widths:
        mine = [c for c in mine if c.cell.width in section.widths]
    elif "widths" in section.benchmarks:
        odd = {c.cell.subject for c in mine if c.cell.width not in HALVED}
        mine = [c for c in mine if c.cell.subject in odd]
    graph = any(GRAPH in c.results for c in mine)
    paper = _published(section.paper)
    rows = []
    for subject in dict.fromkeys(_order(mine)):
        group = [c for c in mine if c.cell.subject == subject]
        group.sort(key=lambda c: -c.cell.width)
        widest = group[0].results
        label = _label(subject)
        for found in group:
            rows.append((label, *_row(found, widest, paper, graph)))
            label = ""
    columns = " | d_k | tokens/s | ± | faster | "
    columns += "as a graph | ± | faster | " if graph else ""
    columns += "GiB | memory"
    if section.paper:
        columns += " | paper: faster" + (" | GiB | memory" if _has_memory(paper) else "")
    return _table(section.title, columns.strip(), rows)


def _order(cells: list[CellRecord]) -> Iterator[str]:
    rank = ["370M", "1.3B", "2.7B"]
    subjects = {c.cell.subject for c in cells}
    size = {s: next((i for i, name in enumerate(rank) if s.endswith(name)), 0) for s in subjects}
    yield from sorted(subjects, key=lambda s: (s.startswith("gated"), size[s], s))


def _label(subject: str) -> str:
    if subject in LABELS:
        return LABELS[subject]
    family, size = subject.rsplit("_", 1)
    return f"{LABELS[family]} {size}"


def _row(
    found: CellRecord, widest: dict[str, Reading], paper: dict, graph: bool
) -> tuple[str, ...]:
    said = [str(found.cell.width)]
    for metric in ("tokens_per_s", GRAPH) if graph else ("tokens_per_s",):
        speed = found.results[metric]
        said += [speed.reason or f"{speed.value:,.0f}", _spread(speed)]
        said.append(_ratio(speed, widest[metric], " x"))
    memory = found.results["peak_memory_gib"]
    said += ["" if memory.value is None else f"{memory.value:.2f}"]
    said += [_ratio(memory, widest["peak_memory_gib"])]
    if paper:
        key = (found.cell.subject, found.cell.width)
        said.append(_printed(paper.get((*key, "speedup")), " x"))
        if _has_memory(paper):
            said.append(_printed(paper.get((*key, "peak_memory_gib"))))
            said.append(_printed(paper.get((*key, "memory_ratio"))))
    return tuple(said)


def _spread(*found: Reading) -> str:
    """The standard error of the median, the largest of some."""
    known = [one.stderr / one.value for one in found if one.value and one.stderr is not None]
    if not known:
        return ""
    return f"{100 * max(known):.1f} %" if max(known) >= 0.0005 else "< 0.1 %"


def _ratio(one: Reading, other: Reading, unit: str = "") -> str:
    return f"{one.value / other.value:.2f}{unit}" if one.value and other.value else ""


def _printed(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.2f}{unit}"


def _published(table: str) -> dict[tuple[str, int, str], float]:
    with open(ROOT / "config" / "published" / "values.csv", newline="") as file:
        return {
            (row["model"], int(row["head_k_dim"]), row["metric"]): float(row["value"])
            for row in csv.DictReader(file)
            if table and row["table"] == table
        }


def _has_memory(paper: dict) -> bool:
    return any(metric == "memory_ratio" for *_, metric in paper)


def _decoding(cells: list[CellRecord]) -> str:
    mine = [c for c in cells if c.cell.mode == "decoding"]
    if not mine:
        return ""
    batches = mine[0].settings["batches"]
    rows = []
    for subject in _order(mine):
        group = sorted((c for c in mine if c.cell.subject == subject), key=lambda c: -c.cell.width)
        label = _label(subject)
        for found in group:
            python = found.results[f"tokens_per_s_{batches[0]}"]
            speeds = [found.results[f"{GRAPH}_{batch}"] for batch in batches]
            widest = group[0].results[f"{GRAPH}_{batches[-1]}"]
            rest = [found.results["state_mib"], found.results["largest_batch"]]
            rows.append(
                (label, str(found.cell.width), _value(python, ",.0f"),
                 *(_value(one, ",.0f") for one in speeds), _spread(*speeds),
                 _ratio(speeds[-1], widest, " x"), _value(rest[0], ".2f"), _value(rest[1], ",.0f"))
            )  # fmt: skip
            label = ""
    columns = f"from Python, batch {batches[0]} | as a graph, batch {batches[0]} | "
    columns += "".join(f"{batch} | " for batch in batches[1:]) + "± at most | faster"
    return _table("Decoding, tokens/s",
                  f"| d_k | {columns} | MiB a sequence | largest batch", rows)  # fmt: skip


def _value(found: Reading, form: str) -> str:
    return "not measured" if found.value is None else format(found.value, form)


def _twice(cells: dict[str, CellRecord]) -> str:
    rows = []
    for key, second in cells.items():
        cell = key.removeprefix(AGAIN)
        if cell == key or cell not in cells:
            continue
        label, metric = cell, "tokens_per_s"
        if second.cell.mode == "decoding":
            batch = second.settings["batches"][-1]
            label, metric = f"{cell}, batch {batch}", f"{GRAPH}_{batch}"
        a, b = (one.results[metric] for one in (cells[cell], second))
        rows.append((label, _value(a, ",.0f"), _spread(a), _value(b, ",.0f"), _spread(b),
                     _ratio(b, a)))  # fmt: skip
    return _table("The same cell twice", "cell | first, tokens/s | ± | second | ± | ratio", rows)


def plot_widths(record: dict[str, Any], out: Path) -> None:
    """Throughput against head width, of the mixers whose every width was looked at."""
    from reproduction.reporting.figures import draw

    config = load_config(ROOT / "config" / "paper.yaml")
    name, figure = next(
        (name, figure) for name, figure in config.figures.items() if figure.kind == "sweep"
    )
    benchmark = config.benchmarks[figure.benchmark]
    cells = [from_json(one) for key, one in record["cells"].items() if not key.startswith(AGAIN)]
    # The widths of the paper's own table are among those of the sweep, and measured once.
    known = {
        (one.cell.subject, one.cell.width, one.cell.mode): one
        for one in cells
        if one.cell.benchmark in (figure.benchmark, "mixer")
    }
    whole = {
        subject: mixer
        for subject, mixer in benchmark.mixers.items()
        if all((subject, width, mode) in known
               for width in benchmark.widths for mode in benchmark.passes)
    }  # fmt: skip
    if not whole:
        sys.exit("no mixer was measured at all widths")
    swept = benchmark.model_copy(update={"mixers": whole})
    config = config.model_copy(update={"benchmarks": {figure.benchmark: swept}})
    with tempfile.TemporaryDirectory() as folder:
        sources = []
        for number, cell in enumerate(config.measurements(figure.benchmark)):
            sources.append(Path(folder) / f"{number}.json")
            found = known[cell.subject, cell.width, cell.mode]
            write_json(sources[-1], asdict(replace(found, cell=cell)))
        draw(config, name, sources, [out])
    # Figures take the colours of the page they are set in; as a file of its own it has none.
    out.write_text(out.read_text().replace("<svg ", f"<svg {ON_WHITE} ", 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=existing, help="the speed.json of benchmarks/speed.py")
    parser.add_argument("--into", type=existing, metavar="FILE",
                        help="put the tables there, in place of those at its end")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the odd widths there")
    options = parser.parse_args()
    record = read_json(options.file)
    if options.into:
        text, _, _ = options.into.read_text().partition(f"### {FIRST}\n")
        options.into.write_text(text + tables(record))
    else:
        print(tables(record), end="")
    if options.plot:
        plot_widths(record, options.plot)


if __name__ == "__main__":
    main()
