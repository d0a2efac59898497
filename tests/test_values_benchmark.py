"""docs/values.md: its numbers are those of benchmarks/h200/values.jsonl."""

import json
import math
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_document_says_what_the_costs_of_each_side_are():
    """The growth of the logarithm of the perplexity, by the same rows."""
    rows = map(json.loads, (ROOT / "benchmarks" / "h200" / "values.jsonl").read_text().splitlines())
    costs = {}
    for row in rows:
        if row["method"] == "drrqr":
            refitted, whole = (
                row["perplexity"][stage]["wikitext_word_ppl"] for stage in ("refitted", "unpruned")
            )
            shares = tuple(row[side] / row["unpruned"][side] for side in ("d_k", "d_v"))
            costs[row["model"], *shares] = math.log(refitted / whole)
    document = (ROOT / "docs" / "values.md").read_text()
    models = {"delta_net_40M": "DeltaNet", "gated_deltanet_40M": "Gated DeltaNet",
              "hybrid_40M": "Hybrid"}  # fmt: skip
    for model, label in models.items():
        keys, values = costs[model, 0.5, 1], costs[model, 1, 0.5]
        cells = [keys, values, keys + values, costs[model, 0.5, 0.5], costs[model, 0.25, 1]]
        assert f"| {label} | {' | '.join(f'{cell:.3f}' for cell in cells)} |" in document
