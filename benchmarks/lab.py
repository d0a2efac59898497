"""What the documents show of the runs in results/lab, as Markdown.

    python benchmarks/lab.py [methods filters selections claims readme quarters]

    methods     perplexity by each method, sliced → recovered
    filters     the same methods with one convolution filter per head, and rotations
    selections  how far draws agree, swaps, how uneven scores are; from the archive
    claims      the paper's claims, as `reproduction compare lab/h200` answers them
    readme      what exact cuts cost (benchmarks/h200/exact.jsonl) beside what fewer keys give
    quarters    half of the keys and half of the values, cut exactly (results/lab/exact)

Perplexities are of WikiText-2's words, the mean of seeds ± their standard deviation.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import tarfile
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

import torch
from exact import LABELS, Cells
from rows import markdown, read_rows
from safetensors.torch import load_file
from torch import Tensor

from reproduction.config import load_config
from reproduction.reporting.frame import read_frame
from statecut.arguments import width
from statecut.pruning.selection import load_selection

ROOT = Path(__file__).parents[1]
RUN = ROOT / "results" / "lab" / "h200"
NEW_RUN = ROOT / "results" / "lab" / "exact"
EXACT = ROOT / "benchmarks" / "h200" / "exact.jsonl"
PERPLEXITY = "wikitext_word_ppl"
METHODS = ("fisher", "drrqr", "grad", "l1", "s_wanda", "rand")
HYBRID = "hybrid_40M"
ROTATED = "pca_proper"
RATIOS = (0.3, 0.4, 0.5, 0.75)
SLICED, RECOVERED = "pre", "post"
TRAINING = 0  # what the page shows of a run that has more
QUARTERS = {  # with the state that is left
    "gated_deltanet_40M": ("Gated DeltaNet", "128x128"),
    "kda_40M": ("KDA", "64x64"),
}
GAINS = ("state_mib", "graph_tokens_per_s_256", "largest_batch")  # of decoding


@cache
def names() -> dict[str, str]:
    config = load_config(ROOT / "config" / "lab.yaml")
    return {method: spec.label for method, spec in config.methods.items()}


def cut(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"


class Results:
    """The frame of a run, by what was measured. Unpruned models have eps kept."""

    def __init__(self, run: Path = RUN, eps: str = "kept") -> None:
        frame = read_frame(run / "results.parquet").dropna(subset="value")
        meant = frame["method"].map(lambda method: "kept" if method == "baseline" else eps)
        frame = frame[frame["eps"].eq(meant) & frame["training"].eq(TRAINING)]
        left = frame["head_k_dim"].astype(str) + "x" + frame["head_v_dim"].astype(str)
        frame["cut"] = frame["compression"].astype(object).where(frame["compression"].notna(), left)
        columns = ["model", "conv_sharing", "method", "target", "cut", "rft", "metric"]
        groups = frame.groupby(columns)["value"]
        self.values = {key: list(values) for key, values in groups}

    def shown(
        self, model: str, method: str, ratio: float | str, stage: str, target: str = "kq",
        sharing: str = "none",
    ) -> str:  # fmt: skip
        values = self.values.get((model, sharing, method, target, ratio, stage, PERPLEXITY))
        if values is None:
            return ""
        spread = f" ± {stdev(values):,.1f}" if len(values) > 1 else ""
        return f"{fmean(values):,.1f}{spread}"

    def unpruned(self, model: str, stage: str = "none", sharing: str = "none") -> str:
        return self.shown(model, "baseline", 0.0, stage, "", sharing)

    def gain(self, model: str, ratio: float, metric: str) -> float | None:
        method = "" if ratio else "baseline"
        found = self.values.get((model, "none", method, "", ratio, "none", metric))
        return found[0] if found else None


def gains_of(results: Results, model: str, ratio: float) -> Iterator[str]:
    """Cache, decoding and requests, as cells."""
    for metric in GAINS:
        value, whole = (results.gain(model, part, f"decoding_{metric}") for part in (ratio, 0.0))
        if value is None or whole is None:
            yield "not timed"
        elif metric.endswith("mib"):
            yield f"{value:.2f} MiB"
        else:
            yield f"{value:,.0f}" + (f" ({value / whole:.2f} times)" if ratio else "")


def readme() -> str:
    results, cells = Results(), Cells(read_rows(EXACT))

    def perplexities(model: str, parts: int) -> Iterator[str]:
        """Of both texts, and how much more than unpruned."""
        whole = cells.unpruned[model]
        found = cells.keys(model, "fisher", parts)["refitted"] if parts > 1 else whole
        for text, value in found.items():
            more = f" (+{100 * (value / whole[text] - 1):.1f} %)" if parts > 1 else ""
            yield f"{value:.1f}{more}"

    return markdown(
        "model, keys cut | perplexity, text held out | WikiText-2 | cache per request "
        "| decoding, tokens/s | requests that fit",
        (
            (f"{label}, {cut(1 - 1 / parts) if parts > 1 else 'none'}",
             *perplexities(model, parts), *gains_of(results, model, 1 - 1 / parts))
            for model, label in LABELS.items()
            for parts in (1, 2, 4)
        ),
    )  # fmt: skip


def methods() -> str:
    results = Results()

    def cell(model: str, method: str, ratio: float) -> str:
        stages = (results.shown(model, method, ratio, stage) for stage in (SLICED, RECOVERED))
        return " → ".join(filter(None, stages))

    return markdown(
        f"model (unpruned → trained as long) | method | {' | '.join(f'{cut(r)}' for r in RATIOS)}",
        (
            (
                f"{label} ({results.unpruned(model)} → {results.unpruned(model, RECOVERED)})",
                names()[method],
                *(cell(model, method, ratio) for ratio in RATIOS),
            )
            for model, label in LABELS.items()
            for method in METHODS
        ),
    )


def filters() -> str:
    results, model = Results(), "delta_net_40M"
    columns = [(sharing, ratio) for sharing in ("none", "head") for ratio in (0.5, 0.75)]
    labels = {"none": "separate", "head": "one per head"}
    heads = (
        f"{labels[sharing]} ({results.unpruned(model, sharing=sharing)}), {cut(ratio)}"
        for sharing, ratio in columns
    )

    def cells(method: str) -> Iterator[str]:
        target = "k" if method == ROTATED else "kq"
        for sharing, ratio in columns:
            yield results.shown(model, method, ratio, SLICED, target, sharing)

    return markdown(
        f"method | {' | '.join(heads)}",
        ((names()[method], *cells(method)) for method in (*METHODS, ROTATED)),
    )


def quarters() -> str:
    results = Results(NEW_RUN, "matched")
    return markdown(
        "model (unpruned → trained as long), what is left of a head's state | method "
        "| sliced | refitted | recovered | refitted, recovered",
        (
            (
                f"{label} ({results.unpruned(model)} → {results.unpruned(model, RECOVERED)}), "
                + left.replace("x", " x "),
                names()[method],
                *(results.shown(model, method, left, stage)
                  for stage in (SLICED, "refit", RECOVERED, "refit_post")),
            )
            for model, (label, left) in QUARTERS.items()
            for method in ("fisher", "drrqr")
        ),
    )  # fmt: skip


def claims() -> str:
    with open(RUN / "verdict" / "claims.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    decided = {row["id"] for row in rows if row["answer"] in ("holds", "fails")}

    def answer(claim: str, model: str) -> str:
        row = next((r for r in rows if (r["id"], r["model"]) == (claim, model)), None)
        if row is None:
            return ""
        parts = row["numbers"].partition(";")[0].split(", ")
        counts = [part for part in parts if part.endswith(("true", "tell"))]
        said = ", ".join(counts).replace(" comparisons", "").replace(" to tell", "")
        return f"{row['answer']}{' (few draws)' if row['few_draws'] else ''}: {said}"

    return markdown(
        "claim | DeltaNet twice, Gated DeltaNet | hybrid",
        (
            (row["says"], answer(row["id"], ""), answer(row["id"], HYBRID))
            for row in rows
            if not row["model"] and row["id"] in decided
        ),
    )


# --- selections ---

Draw = dict[str, Tensor]  # the channels of all heads that one draw of text chose


def selections() -> str:
    """The models whose channels were kept; of those that were trained several times, the first."""

    def rows(folder: Path) -> Iterator[tuple[str, ...]]:
        for path in sorted(folder.glob("results/lab/selections/*")):
            if (model := path.name.removesuffix("_head")) not in LABELS:
                continue
            label = LABELS[model] + ", one filter per head" * (model != path.name)
            for method in ("fisher", "drrqr"):
                halves, quarters = (of_draws(path, method, ratio) for ratio in (0.5, 0.75))
                yield (
                    label, names()[method], agreement(halves), agreement(quarters),
                    largest_gain([*halves, *quarters]), unevenness(halves),
                )  # fmt: skip

    with tempfile.TemporaryDirectory() as folder, tarfile.open(RUN / "results.tar.xz") as archive:
        members = [m for m in archive if m.name.startswith("results/lab/selections/")]
        archive.extractall(folder, members, filter="data")
        return markdown(
            "model | method | same channels in two draws, 50 % | 75 % "
            "| swaps; largest gain left | score in the better half of a head",
            rows(Path(folder)),
        )


def of_draws(folder: Path, method: str, ratio: float) -> list[Draw]:
    """From a file per ratio, as this run has them, or from one of all widths, as newer runs do."""
    if paths := sorted(folder.glob(f"{method}-kq-{ratio}-*.safetensors")):
        return [load_file(path) for path in paths]
    paths = sorted(folder.glob(f"{method}-kq-[0-9].safetensors"))
    left = width(len(load_file(paths[0])["kept"]) + 1, ratio)  # of widths 1 to d_k - 1
    return [load_selection(path, keys=left, values=0).tensors for path in paths]


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


SHOWN = (methods, filters, selections, claims, readme, quarters)
TABLES = {table.__name__: table for table in SHOWN}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="(default: all)")
    for table in parser.parse_args().tables or TABLES:
        print(TABLES[table](), end="\n\n")


if __name__ == "__main__":
    main()
