"""What cutting keys costs and what it gives: a run's perplexities and speeds side by side.

    python benchmarks/cost_and_gain.py results/lab/results.parquet [--method fisher] [--eps kept]

Markdown: for each model that is refitted, unpruned and at each ratio, the perplexity (--metric)
after each stage, and of its timings the cache per request, tokens/s of decoding as a CUDA
graph in the largest batch of the configuration, and how many requests fit.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import get_args

import pandas as pd
from arguments import existing

from reproduction.reporting.figures import quality
from reproduction.reporting.frame import read_frame
from statecut.arguments import Eps

STAGES = {**quality.STAGES, "pre": "sliced"}
STATE, MOST, SPEED = (
    f"decoding_{name}" for name in ("state_mib", "largest_batch", "graph_tokens_per_s_")
)
VARIANT = ["model", "conv_sharing", "method", "target", "compression", "rft", "metric"]


def with_eps(frame: pd.DataFrame, eps: str | None) -> pd.DataFrame:
    """What is not cut, and the cuts with this eps: matched if not given, where any is refitted."""
    matched = ((frame["rft"] == "refit") & (frame["eps"] == "matched")).any()
    eps = eps or ("matched" if matched else "kept")
    return frame[(frame["target"] == "") | (frame["eps"] == eps)]


def table(frame: pd.DataFrame, method: str, metric: str) -> Iterator[str]:
    """Means over trainings of the means over seeds."""
    trained = frame.groupby([*VARIANT, "training"])["value"].mean()
    means = trained.groupby(VARIANT).mean().dropna().to_dict()
    batches = {int(name.removeprefix(SPEED)) for name in frame["metric"] if name.startswith(SPEED)}
    batch = max(batches, default=0)
    head = [
        "model", "keys cut", *STAGES.values(), "cache per request, MiB",
        f"tokens/s, {batch} at once", "requests",
    ]  # fmt: skip
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    refitted = frame[(frame["rft"] == "refit") & (frame["method"] == method)]
    for (model, sharing), rows in refitted.groupby(["model", "conv_sharing"], sort=False):
        whole = {
            name: means.get((model, sharing, "baseline", "", 0.0, "none", name))
            for name in (metric, STATE, f"{SPEED}{batch}", MOST)
        }
        costs, *gains = whole.values()
        columns = [shown(costs, 1), *[""] * (len(STAGES) - 1), shown(gains[0], 2)]
        columns += [shown(gain, 0) for gain in gains[1:]]
        yield f"| {model} | none | {' | '.join(columns)} |"
        for ratio in sorted(set(rows["compression"])):
            columns = [
                shown(means.get((model, sharing, method, "kq", ratio, stage, metric)), 1)
                for stage in STAGES
            ]
            cut = [means.get((model, sharing, "", "", ratio, "none", name)) for name in whole][1:]
            columns += [shown(cut[0], 2)]
            columns += [
                f"{now / before:.2f} times" if now and before else "-"
                for now, before in zip(cut[1:], gains[1:], strict=True)
            ]
            yield f"| | {ratio:.0%} | {' | '.join(columns)} |"


def shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=existing, metavar="FILE", help="results.parquet of a run")
    parser.add_argument("--method", default="fisher")
    parser.add_argument("--metric", default="wikitext_word_ppl")
    parser.add_argument("--eps", choices=get_args(Eps), help="matched, if any was refitted so")
    options = parser.parse_args()
    frame = with_eps(read_frame(options.results), options.eps)
    refitted = frame[frame["rft"] == "refit"][["method", "metric"]].drop_duplicates()
    known = sorted(map(tuple, refitted.to_numpy()))
    if (options.method, options.metric) not in known:
        names = ", ".join(map(" ".join, known)) or "none"
        parser.error(
            f"{options.results} has no {options.metric} of models refitted by {options.method}; "
            f"it has: {names}"
        )
    print("\n".join(table(frame, options.method, options.metric)))


if __name__ == "__main__":
    main()
