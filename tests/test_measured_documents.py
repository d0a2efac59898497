"""The documents have the numbers of the published runs."""

import csv
import json
import math
import re
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import cost_and_gain
import exact
import hybrid
import pandas as pd
import published_states
import pytest
import refit
import speed_tables

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "results" / "lab" / "h200" / "tables"
ROWS = ROOT / "benchmarks" / "h200"
NAMES = {"DeltaNet": "delta_net_40M", "Gated DeltaNet": "gated_deltanet_40M"}
GAINS = (
    "decoding_state_mib", "decoding_graph_tokens_per_s_256", "decoding_largest_batch",
    "graph_tokens_per_s",
)  # fmt: skip


def tables(heading, name="lab.md"):
    """The cells of the tables under a heading; a blank in the first two repeats the one above."""
    text = document(name).split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [re.split(r"\s*\|\s*", line)[1:-1] for line in text.splitlines() if line[:1] == "|"]
    for above, row in pairwise(rows):
        row[:2] = [cell or last for cell, last in zip(row[:2], above[:2], strict=True)]
    return [row for row in rows if not set("".join(row)) <= set("-")][1:]


def rows(name):
    return [json.loads(line) for line in (ROWS / name).open()]


def read_table(name):
    return list(csv.DictReader((TABLES / f"{name}.csv").open()))


def perplexities():
    """Of every model, cut and method, all that tables have."""
    known = {}
    for model, short in (("DeltaNet", "dn"), ("Gated DeltaNet", "gdn"), ("Hybrid", "hybrid")):
        kinds = ("zs", "refit") if short == "hybrid" else ("zs", "refit", "draws")
        for row in (row for kind in kinds for row in read_table(f"{kind}-{short}")):
            cut = model, row["Compr."].replace("%", " %"), row["Method"]
            known.setdefault(cut, set()).update(row.values())
    return known


def document(name):
    return (ROOT / "docs" / name).read_text()


def test_the_states_of_published_models():
    assert "\n".join(published_states.table()) in document("prune.md")


def test_the_tables_that_scripts_print():
    """refit.md names models in its own words, in the first three columns."""
    of_hybrids = hybrid.table(rows("hybrid.jsonl"))
    assert len(of_hybrids) == 8
    of_cuts = [line for line in exact.table(rows("exact.jsonl")) if line.startswith("|")]
    assert len(of_cuts) > 60
    assert [line for line in of_hybrids if line not in document("hybrids.md")] == []
    assert [line for line in of_cuts if line not in document("exact.md")] == []
    for name, count in (("refit", 24), ("refit-recovered", 12)):
        _, _, *lines = refit.table(rows(f"{name}.jsonl"))
        assert len(lines) == count
        assert all(line.split(" | ", 3)[3] in document("refit.md") for line in lines)
    record = json.loads((ROWS / "speed.json").read_text())
    assert document("speed.md").endswith("\n\n" + speed_tables.tables(record))
    frame = cost_and_gain.read_frame(TABLES.parent / "results.parquet")
    table = "\n".join(cost_and_gain.table(frame, "fisher", "wikitext_word_ppl"))
    assert f"\n\n{table}\n\n" in document("../README.md")


def test_what_each_side_costs():
    """The growth of the logarithm of the perplexity."""
    costs = {}
    for row in rows("values.jsonl"):
        if row["method"] == "drrqr":
            refitted, whole = (
                row["perplexity"][stage]["wikitext_word_ppl"] for stage in ("refitted", "unpruned")
            )
            shares = tuple(row[side] / row["unpruned"][side] for side in ("d_k", "d_v"))
            costs[row["model"], *shares] = math.log(refitted / whole)
    for label, model in {**NAMES, "Hybrid": "hybrid_40M"}.items():
        keys, values = costs[model, 0.5, 1], costs[model, 1, 0.5]
        cells = [keys, values, keys + values, costs[model, 0.5, 0.5], costs[model, 0.25, 1]]
        line = f"| {label} | {' | '.join(f'{cell:.3f}' for cell in cells)} |"
        assert line in document("values.md")


def test_what_a_cut_costs():
    known = perplexities()
    cells = tables("What a smaller state costs, and what repairs it")
    assert len(cells) == 36
    for model, cut, method, *numbers in cells:
        assert {n.strip("*") for n in numbers if n} <= known[model, cut, method]
    heading = "Perplexity: how much can go when softmax layers remember the rest?"
    cells = tables(heading, "hybrids.md")
    repaired, (head, *sliced) = cells[:6], cells[6:]
    assert len(sliced) == 4
    for cut, method, *numbers in repaired:
        assert set(numbers) <= known["Hybrid", cut, method]
    for cut, *numbers in sliced:
        for method, number in zip(head[1:], numbers, strict=True):
            assert number in known["Hybrid", cut, method]


def test_what_a_cut_gives():
    frame = pd.read_parquet(ROOT / "results" / "lab" / "h200" / "results.parquet")
    frame = frame[frame["conv_sharing"] == "none"]
    rows = zip(*(frame[name] for name in ("model", "compression", "metric", "value")), strict=True)
    found = {row[:3]: row[3] for row in rows}
    cells = tables("What a smaller state gives")
    assert len(cells) == 6
    for model, cut, *numbers in cells:
        part = 0.0 if cut == "none" else float(cut.strip(" %")) / 100
        own, whole = ([found[NAMES[model], p, gain] for gain in GAINS] for p in (part, 0.0))
        state, decoding, most, passes = own
        texts = [f"{round(decoding, -2):,.0f}", f"{most:,.0f}", f"{passes / 1e6:.2f}M"]
        if part:
            times = [now / before for now, before in zip(own[1:], whole[1:], strict=True)]
            texts = [f"{text} ({ratio:.2f})" for text, ratio in zip(texts, times, strict=True)]
        assert numbers == [f"{state:.2f} MiB", *texts]


def test_what_fewer_bits_cost():
    measured = {name: [] for name in NAMES.values()}
    for row in rows("state_precision.jsonl"):
        measured[row["model"]].append((row["bytes"], f"{row['perplexity']:.2f}"))
    cells = tables("Fewer channels or fewer bits?")
    assert len(cells) == 10
    for model, share, *numbers in cells:
        found = measured[NAMES[model]]
        size = max(found)[0] * float(Fraction(share.replace("all", "1")))
        for number in filter(None, numbers):
            assert (size, re.search(r"[\d.]+", number)[0]) in found


def test_what_is_forgotten():
    names = {"DRRQR": "drrqr", "Fisher": "fisher", "L1": "l1", "Rand": "rand"}
    found = {
        (row["model"], row["method"], row["width"], stage): shares
        for row in rows("recall.jsonl")
        for stage, shares in row["accuracy"].items()
    }
    cells = tables("What does a smaller state forget?")
    assert len(cells) == 8
    for width, method, *numbers in cells:
        for place, number in enumerate(numbers):
            model = ("delta_net", "gated_deltanet")[place // 3]
            stage = ("sliced", "refitted", "recovered")[place % 3]
            shares = found[model, names[method], int(width), stage]
            assert number == f"{100 * shares['16']:.0f}, {100 * shares['64']:.0f}"


@pytest.mark.parametrize(("engine", "dense"), [("vLLM", "qwen3_5"), ("SGLang", "qwen3_5_text")])
def test_what_engines_computed(engine, dense):
    measured = {}
    alone = {}
    for row in json.loads((ROWS / "serving.json").read_text()):
        if row["installed"] == engine.lower():
            alone[row["shape"]] = {"right": "runs"}.get(row["outcome"], row["outcome"])
        if row["engine"] == engine.lower() and "medians" in row:
            parts = [
                f"{row['medians'][p]:.3f} ({row['means'][p]:.3f})" for p in ("prefill", "decoding")
            ]
            measured[row["family"], row["shape"]] = parts
    for shape, outcome, *cells in tables(engine, "engines.md"):
        name = shape.replace(" ", "")
        assert outcome == alone[name]
        families = (dense, "qwen3_next")
        assert cells == [c for f in families for c in measured.get((f, name), ["", ""])]
