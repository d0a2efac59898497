"""What the documents show of the lab's run (results/lab/exact), as Markdown.

    python benchmarks/lab.py [TABLE ...]
    python benchmarks/lab.py --figure FILE

    models      unpruned
    costs       what exact cuts of keys cost, repaired or not; WikiText-2
    words       the same of the last words of LAMBADA
    eps         the same cuts with eps kept, as the paper's code cuts
    sides       keys, values or both
    quarters    half of the keys and half of the values
    methods     all methods
    selections  how far draws agree, swaps, how uneven scores are; from the archives
    claims      the paper's claims, as `reproduction compare lab/exact` answers them
    readme      the costs in short

Perplexities are per word, in percent above the unpruned model of the same training. `models`,
`costs`, `words` and `readme` have the mean of all trainings ± their standard deviation; the others
the first training, with the mean of its draws ± theirs. Cells of two numbers are WikiText-2 and
LAMBADA.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from matplotlib.lines import Line2D
from rows import markdown, save_for_page
from torch import Tensor

from reproduction.config import Config, cut_shape, load_config
from reproduction.reporting.frame import read_frame
from reproduction.reporting.style import PAGE, drawing, new_figure
from statecut.arguments import width
from statecut.pruning.selection import load_selection

ROOT = Path(__file__).parents[1]
RUN = ROOT / "results" / "lab" / "exact"
WIKITEXT, LAMBADA = "wikitext_word_ppl", "lambada_ppl"
HYBRID = "hybrid_40M"
KEPT, EXACT = "kept", "matched"
SLICED, REFITTED, RECOVERED, BOTH = STAGES = ("pre", "refit", "post", "refit_post")
METHODS = ("fisher", "drrqr", "grad", "l1", "s_wanda", "rand", "pca_proper")
ROTATED = "pca_proper"


class Lab(NamedTuple):
    """A model of the run, as its results name it."""

    name: str
    sharing: str = "none"

    def state_kib(self, cut: float | str = 0.0) -> int:
        return cut_shape(lab_config().models[self.name], cut).state_bytes() // 1024


MODELS = {
    "DeltaNet": Lab("delta_net_40M"),
    "DeltaNet, one filter per head": Lab("delta_net_40M", "head"),
    "Gated DeltaNet": Lab("gated_deltanet_40M"),
    "Hybrid": Lab(HYBRID),
}
KDA = Lab("kda_40M")
CUTS = (0.5, 0.75)  # of the keys
SPLITS = {  # d_k x d_v of a half, a quarter, an eighth of the state: keys alone, values alone, both
    "DeltaNet": (
        ("64x128", "128x64", "96x80"),
        ("32x128", "128x32", "64x64"),
        ("16x128", "128x16", "32x64"),
    ),
    "Gated DeltaNet": (
        ("128x256", "256x128", "176x176"),
        ("64x256", "256x64", "128x128"),
        ("32x256", "256x32", "64x128"),
    ),
    "Hybrid": (
        ("64x128", "128x64", "80x96"),
        ("32x128", "128x32", "64x64"),
        ("16x128", "128x16", "32x64"),
    ),
}


@cache
def lab_config() -> Config:
    return load_config(ROOT / "config" / "lab.yaml")


def label(method: str) -> str:
    return lab_config().methods[method].label


def percent(share: float) -> str:
    return f"{100 * share:g} %"


class Results:
    """Numbers of the run: by training, and in each by draw."""

    def __init__(self, run: Path = RUN) -> None:
        frame = read_frame(run / "results.parquet").dropna(subset="value")
        self.values: dict[tuple[Any, ...], dict[int, list[float]]] = defaultdict(dict)
        widths = frame["head_k_dim"].astype(str) + "x" + frame["head_v_dim"].astype(str)
        frame["cut"] = frame["compression"].astype(object).where(frame["head_v_dim"].isna(), widths)
        columns = ["model", "conv_sharing", "method", "target", "cut", "rft", "eps", "metric"]
        for key, values in frame.groupby([*columns, "training"])["value"]:
            *cell, training = key
            self.values[tuple(cell)][training] = list(values)

    def unpruned(self, model: Lab, metric: str = WIKITEXT, stage: str = "none") -> dict[int, float]:
        """Of each training."""
        key = (*model, "baseline", "", 0.0, stage, KEPT, metric)
        return {training: fmean(values) for training, values in self.values[key].items()}

    def rises(
        self, model: Lab, method: str, cut: float | str, stage: str, metric: str = WIKITEXT,
        eps: str = EXACT,
    ) -> dict[int, list[float]]:  # fmt: skip
        """In percent above unpruned, by training and draw."""
        target = "k" if method == ROTATED else "kq"
        trained = self.values[*model, method, target, cut, stage, eps, metric]
        base = self.unpruned(model, metric)
        return {
            number: [100 * (value / base[number] - 1) for value in values]
            for number, values in trained.items()
        }

    def over_trainings(self, *args: Any) -> str:
        return with_spread([fmean(values) for values in self.rises(*args).values()])

    def over_draws(self, *args: Any) -> str:
        """Of the first training."""
        return with_spread(self.rises(*args).get(0, []))

    def on_both_texts(self, model: Lab, method: str, cut: float | str, stage: str) -> str:
        """Means of all trainings."""
        texts = (self.rises(model, method, cut, stage, text) for text in (WIKITEXT, LAMBADA))
        return " / ".join(f"{fmean(map(fmean, rises.values())):,.1f}" for rises in texts)


@cache
def read_run() -> Results:
    return Results()


def with_spread(values: list[float]) -> str:
    spread = f" ± {stdev(values):,.1f}" if len(values) > 1 else ""
    return f"{fmean(values):,.1f}{spread}" if values else ""


def models() -> str:
    """Unpruned, and what the training changes that others are recovered with."""
    results = read_run()

    def perplexity(model: Lab, text: str) -> str:
        base, longer = (results.unpruned(model, text, stage) for stage in ("none", RECOVERED))
        more = fmean(100 * (longer[training] / base[training] - 1) for training in base)
        return f"{with_spread([*base.values()])} ({more:+.1f} %)"

    return markdown(
        "model | trainings | recurrent state, KiB | WikiText-2 (200 steps more) "
        "| LAMBADA (200 steps more)",
        (
            (
                name,
                len(results.unpruned(model)),
                f"{model.state_kib():,}",
                *(perplexity(model, text) for text in (WIKITEXT, LAMBADA)),
            )
            for name, model in {**MODELS, "KDA": KDA}.items()
        ),
    )


def costs(metric: str = WIKITEXT) -> str:
    results = read_run()
    return markdown(
        "model (trainings), keys cut | method | sliced | refitted | recovered "
        "| refitted, recovered",
        (
            (
                f"{name} ({len(results.unpruned(model))}), {percent(cut)}",
                label(method),
                *(results.over_trainings(model, method, cut, stage, metric) for stage in STAGES),
            )
            for name, model in MODELS.items()
            for cut in CUTS
            for method in ("fisher", "drrqr")
        ),
    )


def words() -> str:
    return costs(LAMBADA)


def eps() -> str:
    """The first training alone was cut in both ways."""
    results = read_run()

    def both(model: Lab, method: str, cut: float, stage: str, metric: str) -> str:
        ways = (KEPT, EXACT)
        return " → ".join(results.over_draws(model, method, cut, stage, metric, w) for w in ways)

    return markdown(
        "model, keys cut | method | WikiText-2, sliced | recovered | LAMBADA, sliced | recovered",
        (
            (
                f"{name}, {percent(cut)}",
                label(method),
                *(
                    both(MODELS[name], method, cut, stage, metric)
                    for metric in (WIKITEXT, LAMBADA)
                    for stage in (SLICED, RECOVERED)
                ),
            )
            for name in SPLITS
            for cut in CUTS
            for method in ("fisher", "drrqr")
        ),
    )


def sides() -> str:
    """Chosen by Fisher and refitted."""
    results = read_run()

    def cell(model: Lab, split: str) -> str:
        rises = results.on_both_texts(model, "fisher", split, REFITTED)
        return f"{rises} ({split.replace('x', ' x ')})"

    return markdown(
        "model | state left | keys alone | values alone | both",
        (
            (name, left, *(cell(MODELS[name], split) for split in splits))
            for name, sizes in SPLITS.items()
            for left, splits in zip(("1/2", "1/4", "1/8"), sizes, strict=True)
        ),
    )


def quarters() -> str:
    results = read_run()
    return markdown(
        "model, what is left | method | sliced | refitted | recovered | refitted, recovered",
        (
            (
                f"{name}, {left.replace('x', ' x ')}",
                label(method),
                *(results.on_both_texts(model, method, left, stage) for stage in STAGES),
            )
            for name, model, left in (
                ("Gated DeltaNet", MODELS["Gated DeltaNet"], "128x128"),
                ("KDA", KDA, "64x64"),
            )
            for method in ("fisher", "drrqr")
        ),
    )


def methods() -> str:
    """Sliced → recovered."""
    results = read_run()

    def cell(model: Lab, method: str, cut: float) -> str:
        stages = (results.over_draws(model, method, cut, stage) for stage in (SLICED, RECOVERED))
        return " → ".join(filter(None, stages))

    return markdown(
        f"keys cut, method | {' | '.join(MODELS)}",
        (
            (
                f"{percent(cut)}, {label(method)}",
                *(cell(model, method, cut) for model in MODELS.values()),
            )
            for cut in CUTS
            for method in METHODS
        ),
    )


def readme() -> str:
    """Chosen by Fisher."""
    results = read_run()
    return markdown(
        "model (trainings), keys cut | recurrent state, KiB | sliced | refitted "
        "| refitted, recovered",
        (
            (
                f"{name} ({len(results.unpruned(model))}), {percent(cut)}",
                f"{model.state_kib():,} → {model.state_kib(cut):,}",
                *(results.on_both_texts(model, "fisher", cut, s) for s in (SLICED, REFITTED, BOTH)),
            )
            for name, model in MODELS.items()
            for cut in CUTS
        ),
    )


def claims() -> str:
    with open(RUN / "verdict" / "claims.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    decided = {row["id"] for row in rows if row["answer"] in ("holds", "fails")}

    def answer(claim: str, model: str) -> str:
        row = next((r for r in rows if (r["id"], r["model"]) == (claim, model)), None)
        if row is None or row["answer"] == "not measured":
            return ""
        parts = row["numbers"].partition(";")[0].split(", ")
        counts = [part for part in parts if part.endswith(("true", "tell"))]
        said = ", ".join(counts).replace(" comparisons", "").replace(" to tell", "")
        return f"{row['answer']}{' (few draws)' if row['few_draws'] else ''}: {said}"

    return markdown(
        "claim | DeltaNet (separate filters, one per head), Gated DeltaNet | hybrid",
        (
            (row["says"], answer(row["id"], ""), answer(row["id"], HYBRID))
            for row in rows
            if not row["model"] and row["id"] in decided
        ),
    )


# --- selections ---

Draw = dict[str, Tensor]  # the channels of all heads that one draw of text chose


def selections() -> str:
    """Of the first training of each model."""

    def rows(folder: Path) -> Iterator[tuple[str, ...]]:
        for name, model in MODELS.items():
            path = folder / (model.name + "_head" * (model.sharing == "head"))
            full = lab_config().models[model.name].head_k_dim
            for method in ("fisher", "drrqr"):
                half, most = (
                    [load_selection(file, keys=width(full, cut), values=0).tensors
                     for file in sorted(path.glob(f"{method}-kq-[0-9].safetensors"))]
                    for cut in CUTS
                )  # fmt: skip
                yield (
                    name, label(method), agreement(half), agreement(most),
                    largest_gain([*half, *most]), unevenness(half),
                )  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        for file in RUN.glob("*.tar.xz"):
            with tarfile.open(file) as archive:
                members = [m for m in archive if m.name.startswith("results/lab/selections/")]
                archive.extractall(folder, members, filter="data")
        return markdown(
            "model | method | same channels in two draws, 50 % | 75 % "
            "| swaps; largest gain left | score in the better half of a head",
            rows(Path(folder) / "results/lab/selections"),
        )


def agreement(draws: list[Draw]) -> str:
    """Which part of their channels two draws share, the mean of pairs."""
    kept = [draw["kept"] for draw in draws]
    shares = [
        float((a[..., :, None] == b[..., None, :]).any(-1).double().mean())
        for a, b in itertools.combinations(kept, 2)
    ]
    return f"{100 * fmean(shares):.0f} %"


def largest_gain(draws: list[Draw]) -> str:
    """Swaps in all heads and draws, and the largest ratio of determinants that is left."""
    if "swaps" not in draws[0]:
        return ""
    swaps = sum(int(draw["swaps"].sum()) for draw in draws)
    return f"{swaps}; {max(float(draw['largest_gain'].max()) for draw in draws):.3f}"


def unevenness(draws: list[Draw]) -> str:
    """The share of a head's score that its better half has, mean over heads and draws."""
    if "scores" not in draws[0]:
        return ""
    scores = torch.cat([draw["scores"].sort(-1, descending=True).values for draw in draws])
    share = scores[..., : scores.shape[-1] // 2].sum(-1) / scores.sum(-1)
    return f"{100 * share.mean():.0f} %"


TABLES = {
    table.__name__: table
    for table in (
        models, costs, words, eps, sides, quarters, methods, selections, claims, readme,
    )
}  # fmt: skip


# --- the figure ---

CURVES = {  # method, eps, stage: name, colour, dash
    ("drrqr", KEPT, SLICED): ("DRRQR, eps kept: the paper's way", "#d1495b", (0, (3, 1.5))),
    ("drrqr", KEPT, RECOVERED): ("… recovered", "#d1495b", "solid"),
    ("fisher", EXACT, SLICED): ("Fisher, exact", "#3d7dd8", (0, (3, 1.5))),
    ("fisher", EXACT, REFITTED): ("… refitted", "#3d7dd8", "solid"),
    ("fisher", EXACT, BOTH): ("… and recovered", "#2c9a5b", "solid"),
}
TICKS = (0, 10, 20, 50, 100)


def draw(out: Path) -> None:
    """WikiText-2 against the bytes of the recurrent state, the first training of each model."""
    results = read_run()
    with drawing():
        figure = new_figure(PAGE, 2.6)
        panels = figure.subplots(1, len(SPLITS), sharey=True)
        for panel, name in zip(panels, SPLITS, strict=True):
            model = MODELS[name]
            for (method, way, stage), (_, colour, dash) in CURVES.items():
                rises = (results.rises(model, method, cut, stage, WIKITEXT, way) for cut in CUTS)
                times = [1 + fmean(rise[0]) / 100 for rise in rises]
                panel.plot(range(3), [1, *times], color=colour, linestyle=dash, marker="o", ms=3)
            panel.set_title(name)
            panel.set_yscale("log")
            panel.set_yticks([1 + tick / 100 for tick in TICKS], map(str, TICKS))
            panel.minorticks_off()
            panel.set_xticks(range(3), [f"{model.state_kib(cut):,}" for cut in (0.0, *CUTS)])
        panels[0].set_ylabel("perplexity, % above unpruned")
        panels[1].set_xlabel("recurrent state of a sequence, KiB")
        lines = [
            Line2D([], [], color=colour, linestyle=dash, marker="o", ms=3, label=name)
            for name, colour, dash in CURVES.values()
        ]
        figure.legend(handles=lines, loc="outside lower center", ncols=5, frameon=False, fontsize=7)
        save_for_page(figure, out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="(default: all)")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw: .svg or .png")
    options = parser.parse_args()
    if options.figure:
        draw(options.figure)
    else:
        for table in options.tables or TABLES:
            print(TABLES[table](), end="\n\n")


if __name__ == "__main__":
    main()
