"""What the documents show of the run in results/lab/h200, as Markdown.

    python benchmarks/lab.py [gains methods filters draws selections claims readme]

    gains       what fewer keys give: cache, decoding, requests that fit, forward passes
    methods     perplexity by each method, sliced → recovered
    filters     the same methods with one convolution filter per head, and rotations
    draws       what of DRRQR the paper left open
    selections  how far draws agree, swaps, how uneven scores are; from the archive
    claims      the paper's claims, as `reproduction compare lab/h200` answers them
    readme      what exact cuts cost (benchmarks/h200/exact.jsonl) beside what fewer keys give

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
from exact import LABELS, PARTS, Cells
from rows import markdown, read_rows
from safetensors.torch import load_file
from torch import Tensor

from reproduction.config import load_config
from reproduction.reporting.frame import read_frame

ROOT = Path(__file__).parents[1]
RUN = ROOT / "results" / "lab" / "h200"
EXACT = ROOT / "benchmarks" / "h200" / "exact.jsonl"
PERPLEXITY = "wikitext_word_ppl"
METHODS = ("fisher", "drrqr", "grad", "l1", "s_wanda", "rand")
ROTATED = "pca_proper"
RATIOS = (0.3, 0.4, 0.5, 0.75)
SLICED, RECOVERED = "pre", "post"
GAINS = ("state_mib", "graph_tokens_per_s_256", "largest_batch")  # of decoding
FORWARD = "graph_tokens_per_s"


@cache
def names() -> dict[str, str]:
    config = load_config(ROOT / "config" / "lab.yaml")
    return {method: spec.label for method, spec in config.methods.items()}


class Results:
    """The frame of the run, by what was measured."""

    def __init__(self) -> None:
        frame = read_frame(RUN / "results.parquet")
        columns = ["model", "conv_sharing", "method", "target", "compression", "rft", "metric"]
        groups = frame.dropna(subset="value").groupby(columns)["value"]
        self.values = {key: list(values) for key, values in groups}

    def shown(
        self, model: str, method: str, ratio: float, stage: str, target: str = "kq",
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
    """Cache, decoding, requests and forward passes, as cells."""
    for metric in (*(f"decoding_{gain}" for gain in GAINS), FORWARD):
        value, whole = (results.gain(model, part, metric) for part in (ratio, 0.0))
        if value is None or whole is None:
            yield "not timed"
        elif metric.endswith("mib"):
            yield f"{value:.2f} MiB"
        else:
            yield f"{value:,.0f}" + (f" ({value / whole:.2f} times)" if ratio else "")


def gains() -> str:
    results = Results()
    return markdown(
        "model | keys cut | cache per request | decoding, 256 at once, tokens/s "
        "| requests that fit | forward pass, tokens/s",
        (
            (LABELS[model], f"{ratio:.0%}" if ratio else "none", *gains_of(results, model, ratio))
            for model in list(LABELS)[:2]
            for ratio in (0.0, 0.5, 0.75)
        ),
    )


def readme() -> str:
    results, cells = Results(), Cells(read_rows(EXACT))

    def rows() -> Iterator[tuple[str, ...]]:
        for model, label in LABELS.items():
            for parts, cut, ratio in ((1, "none", 0.0), (2, PARTS[2], 0.5), (4, PARTS[4], 0.75)):
                found = cells.keys(model, "fisher", parts)["refitted"] if ratio else None
                value = (found or cells.unpruned[model])["held_out"]
                perplexity = f"{value:.1f}"
                if found:
                    perplexity += f" (+{value / cells.unpruned[model]['held_out'] - 1:.1%})"
                yield (label, cut, perplexity, *list(gains_of(results, model, ratio))[:3])

    return markdown(
        "model | keys cut | perplexity, refitted | cache per request "
        "| decoding, 256 at once, tokens/s | requests that fit",
        rows(),
    )


def methods() -> str:
    results = Results()

    def cell(model: str, method: str, ratio: float) -> str:
        stages = (results.shown(model, method, ratio, stage) for stage in (SLICED, RECOVERED))
        return " → ".join(filter(None, stages))

    return markdown(
        f"model (unpruned → trained as long) | method | {' | '.join(f'{r:.0%}' for r in RATIOS)}",
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
        f"{labels[sharing]} ({results.unpruned(model, sharing=sharing)}), {ratio:.0%}"
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


def draws() -> str:
    results = Results()
    variants = ("drrqr", "qrcp", "drrqr_all", "drrqr_normalised")
    cuts = list(itertools.product(list(LABELS)[:2], (0.5, 0.75)))
    return markdown(
        f"method | {' | '.join(f'{LABELS[model]}, {ratio:.0%}' for model, ratio in cuts)}",
        ((names()[v], *(results.shown(m, v, r, SLICED) for m, r in cuts)) for v in variants),
    )


def claims() -> str:
    with open(RUN / "verdict" / "claims.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["answer"] != "not measured"]
    return markdown(
        "claim | model | comparisons | answer",
        (
            (
                row["says"],
                LABELS.get(row["model"], "both DeltaNets and Gated DeltaNet"),
                ", ".join(
                    part.replace(" comparisons", "")
                    for part in row["numbers"].split(";")[0].split(", ")
                    if part.endswith(("true", "tell"))
                ),
                row["answer"] + (", few draws" if row["few_draws"] else ""),
            )
            for row in rows
        ),
    )


# --- selections ---

Draw = dict[str, Tensor]  # the channels of all heads that one draw of text chose


def selections() -> str:
    """The three models whose channels were kept."""

    def rows(folder: Path) -> Iterator[tuple[str, ...]]:
        for path in sorted(folder.glob("results/lab/selections/*")):
            label = LABELS.get(path.name) or f"{LABELS[path.name[:-5]]}, one filter per head"
            for method in ("fisher", "drrqr", "grad"):
                halves, quarters = (of_draws(path, method, ratio) for ratio in (0.5, 0.75))
                yield (
                    label, names()[method], agreement(halves), agreement(quarters),
                    largest_gain([*halves, *quarters]), unevenness(halves),
                )  # fmt: skip

    with tempfile.TemporaryDirectory() as folder, tarfile.open(RUN / "results.tar.xz") as archive:
        members = [m for m in archive if m.name.startswith("results/lab/selections/")]
        archive.extractall(folder, members, filter="data")
        return markdown(
            "model | method | same channels in two draws, 50% | 75% "
            "| swaps; largest gain left | score in the better half of a head",
            rows(Path(folder)),
        )


def of_draws(folder: Path, method: str, ratio: float) -> list[Draw]:
    return [load_file(path) for path in sorted(folder.glob(f"{method}-kq-{ratio}-*.safetensors"))]


def agreement(draws: list[Draw]) -> str:
    """Which part of their channels two draws share, the mean of pairs."""
    kept = [draw["kept"] for draw in draws]
    shares = [
        float((a[..., :, None] == b[..., None, :]).any(-1).double().mean())
        for a, b in itertools.combinations(kept, 2)
    ]
    return f"{fmean(shares):.0%}"


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
    return f"{share.mean():.0%}"


TABLES = {
    table.__name__: table for table in (gains, methods, filters, draws, selections, claims, readme)
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="(default: all)")
    for table in parser.parse_args().tables or TABLES:
        print(TABLES[table](), end="\n\n")


if __name__ == "__main__":
    main()
