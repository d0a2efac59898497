"""What a cut costs: exact or with eps kept, as sliced, refitted, recovered; keys or values.

    python benchmarks/exact.py --gpu --models M1 M2 --text T --also W --config config/lab.yaml \\
        --recover 100 --out rows.jsonl
    python benchmarks/exact.py ... --splits 64x64 128x32
    python benchmarks/exact.py ... --ratios 0.75 --ways exact --factors 0.5 1 2
    python benchmarks/exact.py ... --other-norms --factors 8
    python benchmarks/exact.py --rows rows.jsonl --table                           as Markdown
    python benchmarks/exact.py --rows rows.jsonl --figure FILE

Models are folders of unpruned ones. Text is packed (`statecut pack`) with the slices `calibration`
and `held_out`, and with --recover, a number of steps, `recovery`; --also is more packed text, whose
perplexity is computed. Keys are cut by --ratios, or keys and values to --splits, in these --ways:

    kept    the eps of the output norm stays, as in the paper's code
    exact   the cut model is the unpruned one with the cut channels set to zero

--factors multiply the eps that follows. --other-norms: nothing is cut, and the eps of all norms but
the output norms is multiplied, as a cut does where a config has one eps for all. A row per model,
method, widths, way and factor is written as soon as it is known; those in the file already are not
computed again.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rows import (
    Row,
    append_rows,
    device_of,
    existing,
    markdown,
    new_parser,
    read_rows,
    save_for_page,
)
from torch import Tensor

from reproduction.config import Config, load_config
from reproduction.reporting.style import PAGE, drawing, new_figure
from statecut.arguments import width as width_of
from statecut.data.packing import PackedTokens
from statecut.errors import InputError
from statecut.evaluation.perplexity import perplexity
from statecut.files import write_json
from statecut.models.checkpoint import Checkpoint, load
from statecut.pruning.calibration import calibrate_folder, sampled_sequences
from statecut.pruning.methods import METHODS, method_named
from statecut.pruning.refit import refit, write_refitted
from statecut.pruning.select import select
from statecut.pruning.slicing import slice_model
from statecut.pruning.statistics import ModelStatistics
from statecut.recovery.checkpoints import Output
from statecut.recovery.training import recover, scale_eps

Split = tuple[int, int]  # d_k and d_v
KEY = ("model", "method", "d_k", "d_v", "way", "factor", "recover")
OTHER_NORMS = "other norms"  # the method of rows of uncut models
STAGES = ("sliced", "refitted", "sliced, recovered", "refitted, recovered")
RECOVERED = 100  # steps of the rows in benchmarks/h200
TEXTS = ("held_out", "wikitext")
LABELS = {
    "delta_net_40M": "DeltaNet",
    "gated_deltanet_40M": "Gated DeltaNet",
    "hybrid_40M": "Hybrid",
}


def split_named(text: str) -> Split:
    width, _, value_width = text.partition("x")
    if not (width.isdigit() and value_width.isdigit()):
        raise argparse.ArgumentTypeError(f"{text}: d_k and d_v, as in 64x128")
    return int(width), int(value_width)


# --- measuring ---


@dataclass(frozen=True)
class Bench:
    text: Path
    also: list[Path]
    device: str
    sequences: int  # for selection and refit
    seed: int
    config: Config | None  # whose recovery it is
    work: Path

    def texts(self) -> dict[str, Tensor]:
        """What perplexities are computed of, (sequences, length), by name."""
        texts = {"held_out": PackedTokens(self.text, slice_name="held_out")}
        texts |= {path.name: PackedTokens(path) for path in self.also}
        return {name: torch.from_numpy(tokens[:]) for name, tokens in texts.items()}

    def measure(self, folder: Path) -> dict[str, float]:
        """Perplexities by the names of texts."""
        model = Checkpoint(folder)
        texts = self.texts().items()
        return {name: perplexity(model, ids, device=self.device) for name, ids in texts}

    def statistics(self, folder: Path, methods: list[str], values: bool) -> ModelStatistics:
        text = PackedTokens(self.text, slice_name="calibration")
        gradients = any("gradients" in METHODS[method].needs for method in methods)
        calibration = calibrate_folder(
            folder, text, name="calibration", sequences=self.sequences, rows=5000, seed=self.seed,
            device=self.device, gradients=gradients, values=values,
        )  # fmt: skip
        return ModelStatistics(Checkpoint(folder), calibration)

    def cut(self, teacher: Checkpoint, channels: Row, way: str, factor: float) -> Path:
        out = self.work / "sliced"
        slice_model(
            teacher, channels["keys"], out, values=channels["values"], force=True,
            dtype=teacher.compute_dtype(self.device), eps={"exact": "matched"}.get(way, way),
        )  # fmt: skip
        model = Checkpoint(out)
        write_json(out / "config.json", model.architecture.scaled_eps(model.config, factor))
        return out

    def refit(self, student: Path, teacher: Checkpoint) -> Path:
        data = PackedTokens(self.text, slice_name="calibration")
        ids = sampled_sequences(data, self.sequences, self.seed)
        result = refit(Checkpoint(student), teacher, ids, device=self.device)
        out = self.work / "refitted"
        write_refitted(Checkpoint(student), result, out, force=True)
        return out

    def recovered(self, student: Path, teacher: Path, steps: int) -> dict[str, float]:
        assert self.config is not None
        assert self.config.recovery is not None
        short = {"steps": steps, "warmup": math.ceil(steps / 20)}
        settings = self.config.recovery.model_copy(update=short).settings()
        out = self.work / "recovered"
        output = Output(out, checkpoints=self.work / "running", force=True)
        data = PackedTokens(self.text, slice_name="recovery")
        recover(student, teacher, data, settings, output, device=self.device)
        return self.measure(out)


def rows(bench: Bench, options: argparse.Namespace, done: set[tuple[Any, ...]]) -> Iterator[Row]:
    for folder in options.models:
        teacher, unpruned = Checkpoint(folder), bench.measure(folder)
        whole = (teacher.shape.width, teacher.shape.value_width)
        splits = options.splits or [(width_of(whole[0], r), whole[1]) for r in options.ratios]
        values_too = any(split[1] < whole[1] for split in splits)
        statistics = bench.statistics(folder, options.methods, values_too)
        for method, split in itertools.product(options.methods, splits):
            channels = chosen(method, statistics, split, whole, options.seed)
            for way, factor in itertools.product(options.ways, options.factors):
                key = (folder.name, method, *split, way, factor, options.recover)
                if key in done:
                    continue
                sliced = bench.cut(teacher, channels, way, factor)
                eps = teacher.architecture.eps(Checkpoint(sliced).config)
                folders = {"sliced": sliced, "refitted": bench.refit(sliced, teacher)}
                values = {stage: bench.measure(path) for stage, path in folders.items()}
                if options.recover:
                    values |= {
                        f"{stage}, recovered": bench.recovered(path, folder, options.recover)
                        for stage, path in folders.items()
                    }
                yield row(key, {"unpruned": unpruned, **values}, eps=eps)


def chosen(
    method: str, statistics: ModelStatistics, split: Split, whole: Split, seed: int
) -> dict[str, Any]:
    channels: dict[str, Any] = {"keys": None, "values": None}
    if split[0] < whole[0]:
        (keys,) = select(method, statistics, [split[0]], target="kq", seed=seed)
        channels["keys"] = keys.change()
    if split[1] < whole[1]:
        (values,) = select(method, statistics, [split[1]], channels="value", seed=seed)
        channels["values"] = values.value_change()
    return channels


def other_norms(bench: Bench, options: argparse.Namespace, done: set[tuple[Any, ...]]) -> Iterator:
    """In memory: what a larger eps of all norms but the output norms does to an uncut model."""
    for folder, factor in itertools.product(options.models, options.factors):
        shape = Checkpoint(folder).shape
        key = (folder.name, OTHER_NORMS, shape.width, shape.value_width, "exact", factor, 0)
        if key in done:
            continue
        dtype = Checkpoint(folder).compute_dtype(bench.device)
        model = load(folder, device=bench.device, dtype=dtype)
        measured = partial(in_memory, model, bench.texts())
        unpruned = measured()
        for module in model.modules():
            for name in ("eps", "variance_epsilon"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, getattr(module, name) * factor)
        scale_eps(model, 1 / factor)
        yield row(key, {"unpruned": unpruned, "sliced": measured()})


@torch.no_grad()
def in_memory(model: Any, texts: dict[str, Tensor]) -> dict[str, float]:
    def loss(ids: Tensor) -> Tensor:
        ids = ids.to(model.device)
        return model(ids, labels=ids, use_cache=False).loss.double()

    return {
        name: torch.stack([loss(part) for part in ids.split(4)]).mean().exp().item()
        for name, ids in texts.items()
    }


def row(key: tuple[Any, ...], perplexities: Row, **more: float) -> Row:
    return {**dict(zip(KEY, key, strict=True)), **more, "perplexity": perplexities}


def line(row: Row) -> str:
    stages = (f"{name} {shown(values)}" for name, values in row["perplexity"].items())
    return f"{' '.join(str(row[key]) for key in KEY)}: {', '.join(stages)}"


# --- what the documents show ---


def shown(values: dict[str, float]) -> str:
    """Of all texts."""
    return " / ".join(f"{value:.1f}" for value in values.values())


class Cells:
    """Rows by what was measured."""

    def __init__(self, rows: list[Row]):
        self.rows = {tuple(row[key] for key in KEY): row["perplexity"] for row in rows}
        self.unpruned = {row["model"]: row["perplexity"]["unpruned"] for row in rows}
        self.whole = {row["model"]: self._whole(row["model"]) for row in rows}

    def _whole(self, model: str) -> Split:
        splits = [key[2:4] for key in self.rows if key[0] == model]
        return max(d_k for d_k, _ in splits), max(d_v for _, d_v in splits)

    def models(self) -> list[tuple[str, str]]:
        return [(model, f"{LABELS[model]} ({shown(self.unpruned[model])})") for model in LABELS]

    def keys(
        self, model: str, method: str, parts: int, way: str = "exact"
    ) -> dict[str, dict[str, float]]:
        """After each stage, with 1 of so many parts of the keys left."""
        d_k, d_v = self.whole[model]
        return self.rows[model, method, d_k // parts, d_v, way, 1.0, RECOVERED]

    def split(self, model: str, parts: Split, method: str = "fisher") -> str:
        d_k, d_v = (w // part for w, part in zip(self.whole[model], parts, strict=True))
        key = (model, method, d_k, d_v, "exact", 1.0)
        found = self.rows.get((*key, 0)) or self.rows[*key, RECOVERED]
        return shown(found["refitted"])


PARTS = {2: "50 %", 4: "75 %", 8: "87.5 %"}


def costs(rows: list[Row]) -> str:
    """Exact cuts of keys: both texts after each stage, and DRRQR beside Fisher."""
    cells = Cells(rows)
    return markdown(
        "model (unpruned), keys cut | sliced | refitted | refitted, DRRQR | recovered "
        "| refitted, recovered",
        (
            (f"{label}, {cut}", *map(shown, (fisher["sliced"], fisher["refitted"],
             drrqr["refitted"], fisher["sliced, recovered"], fisher["refitted, recovered"])))
            for model, label in cells.models()
            for parts, cut in PARTS.items()
            for fisher, drrqr in [[cells.keys(model, m, parts) for m in ("fisher", "drrqr")]]
        ),
    )  # fmt: skip


def sides(rows: list[Row]) -> str:
    """Keys or values: what is left of the state, refitted."""
    cells = Cells(rows)
    splits = {"1/2": ((2, 1), (1, 2), None), "1/4": ((4, 1), (1, 4), (2, 2))}
    return markdown(
        "model (unpruned) | state | keys alone | values alone | both halved",
        (
            (label, state, *(cells.split(model, parts) if parts else "" for parts in each))
            for model, label in cells.models()
            for state, each in splits.items()
        ),
    )


def papers_way(rows: list[Row]) -> str:
    """Keys cut by Fisher: perplexity with eps kept → exact."""
    cells = Cells(rows)

    def both(model: str, parts: int, stage: str, text: str = "held_out") -> str:
        ways = (cells.keys(model, "fisher", parts, way) for way in ("kept", "exact"))
        return " → ".join(f"{found[stage][text]:.1f}" for found in ways)

    return markdown(
        "model, keys cut | sliced | sliced, WikiText-2 | refitted | recovered "
        "| refitted, recovered",
        (
            (
                f"{label}, {cut}", both(model, parts, "sliced"),
                both(model, parts, "sliced", "wikitext"),
                *(both(model, parts, stage) for stage in STAGES[1:]),
            )
            for model, label in LABELS.items()
            for parts, cut in list(PARTS.items())[:2]
        ),
    )  # fmt: skip


def other_eps(rows: list[Row]) -> str:
    """Keys cut by 75 % (Fisher), with a multiple of the exact eps, sliced / refitted; and uncut
    models with a multiple of all other norms' eps. Text held out."""
    cells = Cells(rows)

    def cut(model: str, factor: float) -> str:
        d_k, d_v = cells.whole[model]
        found = cells.rows[model, "fisher", d_k // 4, d_v, "exact", factor, 0]
        return " / ".join(f"{found[stage]['held_out']:.1f}" for stage in STAGES[:2])

    def uncut(model: str) -> str:
        found = cells.rows[model, OTHER_NORMS, *cells.whole[model], "exact", 8.0, 0]
        return " → ".join(f"{found[stage]['held_out']:.2f}" for stage in ("unpruned", "sliced"))

    return markdown(
        "model | eps x 0.5 | exact | eps x 1.41 | eps x 2 | uncut, eps of other norms x 8",
        (
            (LABELS[model], *(cut(model, f) for f in (0.5, 1.0, 1.41, 2.0)), uncut(model))
            for model in LABELS
        ),
    )


TABLES = (costs, sides, papers_way, other_eps)
CURVES = {
    ("kept", "sliced"): ("eps kept (paper)", "#d1495b", (0, (3, 1.5))),
    ("kept", "sliced, recovered"): ("eps kept, recovered", "#d1495b", "solid"),
    ("exact", "sliced"): ("exact", "#3d7dd8", (0, (3, 1.5))),
    ("exact", "refitted"): ("exact, refitted", "#3d7dd8", "solid"),
    ("exact", "refitted, recovered"): ("… and recovered", "#2c9a5b", "solid"),
}


def draw(rows: list[Row], out: Path) -> None:
    """The perplexity of text held out against the bytes of the state."""
    cells = Cells(rows)
    with drawing():
        figure = new_figure(PAGE, 2.7)
        panels = figure.subplots(1, len(LABELS), sharey=True)
        for panel, (model, label) in zip(panels, LABELS.items(), strict=True):
            for (way, stage), (_, colour, dash) in CURVES.items():
                found = [cells.keys(model, "fisher", parts, way)[stage] for parts in PARTS]
                values = [value["held_out"] for value in (cells.unpruned[model], *found)]
                panel.plot(range(4), values, color=colour, linestyle=dash, marker="o", markersize=3)
            panel.set_title(label)
            panel.set_yscale("log")
            panel.set_yticks([60, 80, 100, 150, 200, 300], [60, 80, 100, 150, 200, 300])
            panel.minorticks_off()
            panel.set_xticks(range(4), ["all", "1/2", "1/4", "1/8"])
        panels[0].set_ylabel("perplexity, text held out")
        panels[1].set_xlabel("bytes of the recurrent state")
        places = dodged([curve.get_ydata()[-1] for curve in panels[-1].lines])
        for (text, colour, _), place in zip(CURVES.values(), places, strict=True):
            panels[-1].annotate(
                text, (3, place), (6, 0), textcoords="offset points", color=colour, fontsize=7,
                va="center", annotation_clip=False,
            )  # fmt: skip
        save_for_page(figure, out)


def dodged(values: list[float], apart: float = 1.085) -> list[float]:
    """Where labels stand that would cover each other at these places of a logarithmic axis."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    places = list(values)
    for below, above in itertools.pairwise(order):
        places[above] = max(places[above], places[below] * apart)
    return places


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--figure", type=Path, help="draw --rows: .svg or .png")
    parser.add_argument("--models", type=existing, nargs="+", default=[], metavar="FOLDER")
    parser.add_argument("--text", type=existing, metavar="FOLDER")
    parser.add_argument("--also", type=existing, nargs="+", default=[], metavar="FOLDER")
    parser.add_argument("--config", type=load_config, help="whose recovery it is")
    parser.add_argument("--recover", type=int, default=0, metavar="STEPS")
    parser.add_argument("--methods", nargs="+", default=["fisher", "drrqr"])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.75, 0.5, 0.875])
    parser.add_argument("--splits", type=split_named, nargs="+", metavar="D_KxD_V")
    parser.add_argument("--ways", nargs="+", choices=["kept", "exact"], default=["kept", "exact"])
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0])
    parser.add_argument("--other-norms", action="store_true")
    parser.add_argument("--sequences", type=int, default=128, help="for selection and refit")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.table:
        print("\n\n".join(table(read_rows(*options.rows)) for table in TABLES))
    if options.figure:
        draw(read_rows(*options.rows), options.figure)
    if options.table or options.figure:
        return
    device = device_of(parser, options, "models", "text")
    if options.recover and not (options.config and options.config.recovery):
        parser.error("--recover: give the --config whose `recovery` it is")
    for method in options.methods:
        method_named(method)
    done = {tuple(row[key] for key in KEY) for row in read_rows(options.out)}
    work = other_norms if options.other_norms else rows
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            options.text, options.also, device, options.sequences, options.seed, options.config,
            Path(folder),
        )  # fmt: skip
        append_rows(options.out, work(bench, options, done), line)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(str(error))
