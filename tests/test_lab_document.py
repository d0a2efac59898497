"""docs/lab.md has the numbers of the published run."""

import csv
import json
import re
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "results" / "lab" / "h200" / "tables"
ROWS = ROOT / "benchmarks" / "h200"


def tables(heading):
    """The cells of the tables under a heading; a blank in the first two repeats the one above."""
    text = (ROOT / "docs" / "lab.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [re.split(r"\s*\|\s*", line)[1:-1] for line in text.splitlines() if line[:1] == "|"]
    for above, row in pairwise(rows):
        row[:2] = [cell or last for cell, last in zip(row[:2], above[:2], strict=True)]
    return [row for row in rows if not set("".join(row)) <= set("-")][1:]


def rows(name):
    return [json.loads(line) for line in (ROWS / name).open()]


def test_what_a_cut_costs():
    known = {}
    for model, short in (("DeltaNet", "dn"), ("Gated DeltaNet", "gdn")):
        for name in (f"zs-{short}", f"refit-{short}", f"draws-{short}"):
            for row in csv.DictReader((TABLES / f"{name}.csv").open()):
                cut = model, row["Compr."].replace("%", " %"), row["Method"]
                known.setdefault(cut, set()).update(row.values())
    cells = tables("What a smaller state costs, and what repairs it")
    assert len(cells) == 24
    for model, cut, method, *numbers in cells:
        assert {n.strip("*") for n in numbers if n} <= known[model, cut, method]


def test_what_fewer_bits_cost():
    names = {"DeltaNet": "delta_net_40M", "Gated DeltaNet": "gated_deltanet_40M"}
    measured = {name: [] for name in names.values()}
    for row in rows("state_precision.jsonl"):
        measured[row["model"]].append((row["bytes"], f"{row['perplexity']:.2f}"))
    cells = tables("Fewer channels or fewer bits?")
    assert len(cells) == 10
    for model, share, *numbers in cells:
        found = measured[names[model]]
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
